"""Keys of PEFT, Unsloth and vLLM about a model: honoured, refused, or named."""

from typing import Any

import pytest
from tests.prose import Prose, place_of

from hone.errors import ConfigError, Unprocessable
from hone.server.train.model_args import checked_spec, normalize_spec
from hone.types import ModelSpec


def spec(**fields: Any) -> ModelSpec:
    given: dict[str, Any] = {"name": "agent", "base_model": "tiny"}
    return ModelSpec(**given | fields)


def test_sections_become_fields_of_the_model_and_defaults_of_its_jobs() -> None:
    registered = spec(
        peft_args={"r": 4, "lora_alpha": 32, "random_state": 7, "lora_dropout": 0},
        init_args={"max_seq_length": 2048, "load_in_4bit": False, "gpu_memory_utilization": None},
        engine_args={"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1, "model": "tiny"},
        defaults={"beta": 0.1},
        not_applicable=["sent_before"],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert checked_spec(registered) == spec(
        rank=4,
        alpha=32.0,
        seed=7,
        defaults={"beta": 0.1, "max_seq_length": 2048},
        not_applicable=[
            "engine_args.gpu_memory_utilization",
            "sent_before",
        ],
        chat_template_kwargs={"enable_thinking": False},
    )


def test_a_model_without_sections_stays_as_it_is() -> None:
    assert checked_spec(spec(rank=3)) == spec(rank=3)


def test_two_keys_may_say_the_same_thing_but_not_two_things(prose: Prose) -> None:
    assert normalize_spec(spec(rank=4, peft_args={"r": 4})).rank == 4
    with pytest.raises(Unprocessable) as caught:
        normalize_spec(spec(rank=3, peft_args={"r": 4}))
    prose(caught)
    assert place_of(caught) == "peft_args.r"
    registered = spec(defaults={"max_seq_length": 10}, init_args={"max_seq_length": 20})
    with pytest.raises(Unprocessable) as caught:
        normalize_spec(registered)
    prose(caught)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"engine_args": {"tensor_parallel_size": 2}},
            "engine_args.tensor_parallel_size: 2 is not in this version; leave it out or send 1",
        ),
        (
            {"peft_args": {"lora_dropout": 0.1}},
            "peft_args.lora_dropout: 0.1 is not in this version",
        ),
        (
            {"init_args": {"load_in_4bit": True}},
            "init_args.load_in_4bit: True is not in this version; leave it out or send False. vLLM and "
            "the learner would round the base weights differently, and no step could be proved",
        ),
        (
            {"init_args": {"load_in_8bit": True}},
            "init_args.load_in_8bit: True is not in this version",
        ),
        ({"init_args": {"model_name": "b"}}, "init_args.model_name: 'b' is not in this version"),
        ({"peft_args": {"r": "many"}}, "peft_args.r: Input should be a valid integer"),
        (
            {"peft_args": {"lora_alpha": "inf"}},
            "peft_args.lora_alpha: Input should be a finite number",
        ),
        ({"init_args": {"max_seq_length": 0}}, "init_args.max_seq_length: Input should be greater"),
        ({"engine_args": {"x": "\ud800"}}, "engine_args: it holds half of a surrogate pair"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_spec(spec(**fields))
    assert str(refused.value).startswith(why)
