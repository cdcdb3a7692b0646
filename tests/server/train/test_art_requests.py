"""Requests of ART's clients, translated: model objects, training calls, logged trajectories."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.prose import Prose, place_of
from tests.server.worlds import art_model

from hone.errors import ConfigError, Unprocessable
from hone.server.train import tasks
from hone.server.train.art_requests import (
    ArtGroup,
    ArtModel,
    LogRequest,
    job_config,
    model_spec,
    server_keys,
)
from hone.server.train.tasks import Parsed
from hone.trajectory import means
from hone.types import ModelSpec

MODEL = art_model("run1", "proj1", "tiny", learning_rate=0.001, beta=0.01)


def model_of(**internal: Any) -> ArtModel:
    return ArtModel.model_validate(MODEL | {"_internal_config": internal})


def spec_of(**internal: Any) -> ModelSpec:
    return model_spec(model_of(**internal))


def test_a_model_object_becomes_a_spec() -> None:
    spec = model_spec(ArtModel.model_validate(MODEL))
    assert (spec.project, spec.name, spec.base_model) == ("proj1", "run1", "tiny")
    assert spec.token_ids_as_text
    assert (spec.rank, spec.alpha) == (8, 16.0)
    assert spec.defaults == {"learning_rate": 0.001, "beta": 0.01}
    assert spec.not_applicable == ["engine_args.gpu_memory_utilization"]


@pytest.mark.parametrize("internal", [None, {}, {"init_args": None, "trainer_args": None}])
def test_null_sections_count_as_empty(internal: Any) -> None:
    spec = model_spec(ArtModel.model_validate(MODEL | {"_internal_config": internal}))
    assert (spec.defaults, spec.not_applicable) == ({}, [])


def test_the_model_object_may_come_bare_or_wrapped() -> None:
    assert ArtModel.model_validate({"model": MODEL}) == ArtModel.model_validate(MODEL)


def test_peft_args_shape_the_adapter() -> None:
    spec = spec_of(peft_args={"r": 4, "lora_alpha": 32, "random_state": 7, "lora_dropout": 0})
    assert (spec.rank, spec.alpha, spec.seed) == (4, 32.0, 7)


def test_trainer_args_are_defaults_of_every_job() -> None:
    spec = spec_of(
        trainer_args={"max_grad_norm": 0.1, "weight_decay": 0.1, "num_generations": 8},
        init_args={"max_seq_length": 2048, "load_in_16bit": True},
        chat_template_kwargs={"enable_thinking": False},
    )
    assert spec.defaults == {"max_grad_norm": 0.1, "weight_decay": 0.1, "max_seq_length": 2048}
    assert spec.not_applicable == ["init_args.load_in_16bit", "trainer_args.num_generations"]
    assert spec.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("internal", "where"),
    [
        ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args.tensor_parallel_size"),
        ({"peft_args": {"lora_dropout": 0.1}}, "peft_args.lora_dropout"),
        ({"peft_args": {"target_modules": ["q_proj"]}}, "peft_args.target_modules"),
        ({"init_args": {"full_finetuning": True}}, "init_args.full_finetuning"),
        ({"init_args": {"model_name": "other"}}, "init_args.model_name"),
        ({"trainer_args": {"adam_beta2": 0.95}}, "trainer_args.adam_beta2"),
        ({"torchtune_args": {"model": "qwen3_32b"}}, "torchtune_args"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    prose: Prose, internal: Any, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(**internal)
    prose(caught)
    assert place_of(caught) == f"_internal_config.{where}"


@pytest.mark.parametrize(
    ("internal", "path"),
    [
        ({"peft_args": {"r": "many"}}, ("_internal_config", "peft_args", "r")),
        ({"trainer_args": {"beta": -1}}, ("_internal_config", "trainer_args", "beta")),
        ({"engine_args": 3}, ("_internal_config", "engine_args")),
    ],
)
def test_wrong_values_are_named_where_the_client_wrote_them(internal: Any, path: Any) -> None:
    with pytest.raises(Unprocessable) as caught:
        spec_of(**internal)
    assert [field.path for field in caught.value.fields] == [path]


# ---- training calls ---------------------------------------------------------------------------


def test_the_constant_of_nats_plugin_gives_way_to_what_its_user_wrote() -> None:
    constants = {"learning_rate": 5e-05, "beta": 0.0}
    newer = {"learning_rate": 5e-05, "kl_penalty_coef": 0.0}
    plugin = ArtModel.model_validate(MODEL)
    assert job_config(constants, {}, plugin).config == {}
    assert job_config(newer, {}, plugin).config == {"kl_penalty_coef": 0.0}
    # Any other value was written by somebody.
    config = {"learning_rate": 1e-4, "beta": 0.2}
    assert job_config(config, {}, plugin).config == config
    # Where its user wrote none, the constant is all there is.
    sections = {"init_args": None, "engine_args": None, "trainer_args": None}
    assert job_config(constants, {}, model_of(**sections)).config == constants
    one = model_of(**sections | {"trainer_args": {"beta": 0.1}})
    assert job_config(constants, {}, one).config == {"learning_rate": 5e-05}


def test_what_a_client_other_than_nats_plugin_sends_is_used() -> None:
    sent = {"learning_rate": 5e-05, "beta": 0.0}
    own = {"learning_rate": 1e-3, "beta": 0.1}
    assert job_config(sent, {}, model_of(trainer_args=own)).config == sent
    both = model_of(trainer_args=own, engine_args={}, init_args={}, peft_args={"r": 4})
    assert job_config(sent, {}, both).config == sent


def test_dev_config_is_read() -> None:
    config = job_config(
        {"learning_rate": 1e-5, "kl_penalty_coef": 0.1, "grad_accumulation_sequences": None},
        {
            "epsilon": 0.3,
            "epsilon_high": 0.4,
            "ppo": False,
            "scale_rewards": False,
            "plot_tensors": True,
            "truncated_importance_sampling": None,
            "importance_sampling_level": "token",
            "logprob_calculation_chunk_size": 1024,
            "of_tomorrow": 1,
        },
        model_of(),
    )
    assert config.config == {
        "learning_rate": 1e-5,
        "kl_penalty_coef": 0.1,
        "epsilon": 0.3,
        "epsilon_high": 0.4,
        "loss": "cispo",
        "scale_rewards": False,
        "importance_cap": None,
    }
    assert config.plot_tensors
    assert config.not_applicable == [
        "dev_config.logprob_calculation_chunk_size",
        "dev_config.of_tomorrow",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("importance_sampling_level", "sequence"),
        ("allow_training_without_logprobs", True),
        ("advantage_balance", 0.5),
        ("kimi_k2_tau", 1.0),
    ],
)
def test_dev_config_that_cannot_be_honoured_is_refused(prose: Prose, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        job_config({}, {key: value}, model_of())
    prose(caught)
    assert place_of(caught) == f"dev_config.{key}"


def test_a_wrong_learning_rate_is_named() -> None:
    with pytest.raises(Unprocessable) as caught:
        job_config({"learning_rate": "fast"}, None, model_of())
    assert caught.value.fields[0].path == ("config", "learning_rate")


def test_options_of_arts_openai_server_are_named_and_have_no_effect(prose: Prose) -> None:
    request = {"log_file": "x", "server_args": {"port": 9, "api_key": "k"}, "engine_args": None}
    assert server_keys(request) == ["log_file", "server_args.port"]
    with pytest.raises(ConfigError) as caught:
        server_keys({"engine_args": {"tensor_parallel_size": 4}})
    prose(caught)
    assert place_of(caught) == "config.engine_args.tensor_parallel_size"
    with pytest.raises(ConfigError) as caught:
        server_keys({"engine_args": {"quantization": "fp8"}})
    prose(caught)
    assert place_of(caught) == "config.engine_args.quantization"


# ---- logs -------------------------------------------------------------------------------------

CHOICE: dict[str, Any] = {
    "finish_reason": "stop",
    "index": 0,
    "logprobs": {"content": [{"token": "token_id:5", "bytes": [104], "logprob": -0.5}]},
    "message": {"content": "hi", "role": "assistant", "tool_calls": None},
    "token_ids": [5],
}


def group(*rewards: float, **rest: Any) -> dict[str, Any]:
    trajectories = [
        {
            "messages_and_choices": [{"role": "user", "content": "u"}, CHOICE],
            "tools": None,
            "additional_histories": [],
            "reward": reward,
            "metrics": {"ok": reward > 0, "turns": 2},
            "auto_metrics": {},
            "metadata": {"scenario_id": "s1"},
            "logs": [],
        }
        for reward in rewards
    ]
    return {"trajectories": trajectories, "exceptions": [], **rest}


def log_groups(model_dir: Path, step: int, groups: list[dict[str, Any]]) -> None:
    body = {"model": {"name": "agent"}, "trajectory_groups": groups, "split": "val"}
    tasks.log(Parsed(LogRequest.model_validate(body)), model_dir, "val", step)


def test_a_logged_group_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    sent = [
        group(0.0, 1.0, of_tomorrow={"a": [1]}),
        group(
            2.0,
            exceptions=[{"type": "<class 'ValueError'>", "message": "boom", "traceback": "..."}],
        ),
    ]
    log_groups(tmp_path, 3, sent)
    log_groups(tmp_path, 3, sent[:1])
    path = tmp_path / "trajectories" / "val" / "0003.jsonl"
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*sent, sent[0]]


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    log_groups(tmp_path, 0, [])
    path = tmp_path / "trajectories" / "val" / "0000.jsonl"
    path.write_text('{"trajectories": [')
    log_groups(tmp_path, 0, [group(1.0)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [group(1.0)]


def test_means_are_those_of_arts_server() -> None:
    groups = [group(0.0, 1.0, metrics={"tries": 3}), group(2.0, exceptions=[{"type": "E"}])]
    values = means([ArtGroup.model_validate(one) for one in groups])
    # 3 trajectories and 1 exception; the only group of two has rewards 0 and 1, so sigma 0.5.
    assert values == {
        "reward": 1.0,
        "exception_rate": 0.25,
        "reward_std_dev": 0.5,
        "ok": pytest.approx(2 / 3),
        "turns": 2.0,
        "group_tries": 3.0,
    }
    assert means([]) == {}


def test_means_that_no_float_can_hold_are_left_out() -> None:
    one = group(1e308, 1e308)
    one["trajectories"][0]["metrics"] = {"huge": 10**400, "nan": math.nan}
    values = means([ArtGroup.model_validate(one)])
    assert "huge" not in values
    assert "nan" not in values
    assert all(math.isfinite(value) for value in values.values())


def test_groups_become_hones_own() -> None:
    one = group(1.0, exceptions=[{"type": "ValueError", "message": "boom", "traceback": "t"}])
    one["trajectories"][0]["tools"] = [{"name": "bare"}, {"type": "function", "function": {}}]
    one["trajectories"][0]["additional_histories"] = [{"messages_and_choices": [CHOICE]}]
    ours = ArtGroup.model_validate(one).to_hone()
    assert ours.exceptions[0].message == "boom"
    (trajectory,) = ours.trajectories
    assert trajectory.messages_and_choices[1] == CHOICE
    assert trajectory.tools == [
        {"type": "function", "function": {"name": "bare"}},
        {"type": "function", "function": {}},
    ]
    assert trajectory.additional_histories[0].messages_and_choices == [CHOICE]
    assert trajectory.metadata == {"scenario_id": "s1"}
