"""override.py: text from `-o` and the environment gets the type that the schema has there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import SecretStr
from tests.prose import Prose, place_of

from hone.config.override import typed
from hone.config.schema import ConfigProblems, Document, read

Write = Callable[..., Path]

YAML = """
llms:
  m: {_type: openai, model_name: x, base_url: "http://localhost:8000/v1"}
  my.model: {_type: openai, model_name: y, base_url: "http://localhost:8000/v1"}
eval:
  general:
    dataset: {_type: json, file_path: a.json}
trainer_adapters:
  art:
    _type: hone_server
    backend: {ip: localhost, port: 7623}
    training: {learning_rate: 1e-6}
finetuning:
  target_functions: [a, b]
"""


def changed(write: Write, *overrides: tuple[str, str]) -> Document:
    return read(write(YAML), overrides)


def problems(write: Write, *overrides: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigProblems) as error:
        changed(write, *overrides)
    return [str(problem) for problem in error.value.problems]


def test_numbers_flags_paths_and_text(write: Write):
    document = changed(
        write,
        ("finetuning.num_epochs", "50"),
        ("finetuning.curriculum_learning.enabled", "true"),
        ("finetuning.curriculum_learning.initial_percentile", "5e-1"),
        ("finetuning.output_dir", "2024"),
        ("llms.m.model_name", "7"),
        ("llms.m.temperature", "0"),
    )
    assert document.finetuning.num_epochs == 50
    assert document.finetuning.curriculum_learning.enabled is True
    assert document.finetuning.curriculum_learning.initial_percentile == 0.5
    assert document.finetuning.output_dir == Path("2024")
    assert document.llms["m"].model_dump()["model_name"] == "7"
    assert document.llms["m"].model_dump()["temperature"] == 0.0


def test_the_configuration_of_a_component_is_typed_to_its_depth(write: Write):
    document = changed(
        write,
        ("trainer_adapters.art.backend.port", "7999"),
        ("trainer_adapters.art.backend.engine_args.tensor_parallel_size", "1"),
        ("trainer_adapters.art.training.learning_rate", "1e-5"),
        ("eval.general.dataset.structure.question_key", "1"),
    )
    adapter: Any = document.trainer_adapters["art"]
    assert adapter.backend.port == 7999
    assert adapter.backend.engine_args["tensor_parallel_size"] == 1
    assert adapter.training.learning_rate == 1e-05
    dataset = document.eval.general.dataset
    assert dataset is not None and dataset.structure.question_key == "1"


def test_lists_whole_by_comma_and_by_element(write: Write):
    assert changed(write, ("finetuning.target_functions", "[c, 'd, e', 007]")).finetuning.target_functions == ["c", "d, e", "007"]  # fmt: skip
    assert changed(write, ("finetuning.target_functions", "c, d")).finetuning.target_functions == ["c", "d"]  # fmt: skip
    assert changed(write, ("finetuning.target_functions.1", "z")).finetuning.target_functions == ["a", "z"]  # fmt: skip
    assert changed(write, ("finetuning.target_functions.2", "z")).finetuning.target_functions == ["a", "b", "z"]  # fmt: skip


def test_a_list_that_is_not_in_the_file_can_be_created(write: Write):
    document = read(write("finetuning: {seed: 1}"), [("finetuning.target_functions.0", "x")])
    assert document.finetuning.target_functions == ["x"]


def test_an_element_beyond_the_end(write: Write):
    assert problems(write, ("finetuning.target_functions.5", "z")) == [
        "-o finetuning.target_functions.5: 'finetuning.target_functions' has 2 elements; "
        "expected a number from 0 to 2, got '5'"
    ]


def test_a_list_that_cannot_be_created_is_one_problem(prose: Prose, write: Write):
    with pytest.raises(ConfigProblems) as error:
        read(write("finetuning: {seed: 1}"), [("finetuning.target_functions.3", "x")])
    prose(error)


def test_no_path(prose: Prose, write: Write):
    with pytest.raises(ConfigProblems) as caught:
        read(write("finetuning: {output_dir: }"))
    prose(caught)
    assert place_of(caught) == "a.yml:1"


def test_an_empty_path_is_not_the_current_directory(write: Write):
    yaml = """
        eval:
          general: {output: {dir: ""}}
          evaluators: {judge: {_type: llm_judge, llm: m, cache_dir: ""}}
        llms: {m: {_type: openai, model_name: x, base_url: "http://localhost:8000/v1"}}
        trainer_adapters: {t: {_type: hone_server, backend: {root: ""}}}
        loggers: [{_type: tensorboard, log_dir: ""}]
        """
    with pytest.raises(ConfigProblems) as error:
        read(write(yaml), [("finetuning.output_dir", ""), ("eval.general.output_dir", "")])
    says = "is empty; name a path (. is the current directory)"
    assert sorted(str(error.value).splitlines()) == [
        f"-o eval.general.output_dir: {says}",
        f"-o finetuning.output_dir: {says}",
        f"a.yml:3: eval.general.output.dir: {says}",
        f"a.yml:4: eval.evaluators.judge.cache_dir: {says}",
        f"a.yml:6: trainer_adapters.t.backend.root: {says}",
        f"a.yml:7: loggers.0.log_dir: {says}",
    ]


def test_a_key_with_a_dot_is_quoted(write: Write):
    document = changed(write, ('llms."my.model".model_name', "z"), ("llms.'my.model'.seed", "3"))
    assert document.llms["my.model"].model_dump()["model_name"] == "z"
    assert document.llms["my.model"].model_dump()["seed"] == 3


def test_blocks_of_the_schema_are_created(write: Write):
    document = changed(
        write,
        ("finetuning.early_stopping.patience", "3"),
        ("finetuning.on_policy_failure", "{reward: -1}"),
        ("eval.evaluators.right._type", "exact_match"),
        ("eval.evaluators.right.ignore_case", "yes"),
    )
    assert document.finetuning.early_stopping is not None
    assert document.finetuning.early_stopping.patience == 3
    assert document.finetuning.on_policy_failure.model_dump() == {"reward": -1.0}  # pyright: ignore[reportAttributeAccessIssue]  # it is a block now
    assert document.eval.evaluators["right"].model_dump()["ignore_case"] is True


def test_another_type_has_its_own_keys(write: Write):
    document = changed(
        write,
        ("eval.general.dataset._type", "custom"),
        ("eval.general.dataset.function", "json.loads"),
    )
    dataset = document.eval.general.dataset
    assert dataset is not None and dataset.type_name == "custom"
    assert dataset.model_dump()["function"] == "json.loads"


def test_null_where_nothing_is_allowed(write: Write):
    document = changed(write, ("finetuning.target_model", "m"), ("finetuning.target_model", "null"))
    assert document.finetuning.target_model is None


def test_an_empty_value_is_empty_text_and_not_null(write: Write):
    document = changed(write, ("llms.m.api_key", ""), ("llms.m.stop", ""))
    key: Any = document.llms["m"].model_dump()["api_key"]
    assert key.get_secret_value() == ""
    assert document.llms["m"].model_extra == {"stop": ""}
    assert problems(write, ("llms.m.temperature", ""), ("finetuning.early_stopping", "")) == [
        "-o finetuning.early_stopping: got ''; expected a block of keys",
        "-o llms.m.temperature: got ''; expected a valid number",
    ]


def test_keys_of_requests_are_read_as_yaml(write: Write):
    document = changed(write, ("llms.m.logprobs", "true"), ("llms.m.stop", "[a, '1']"))
    assert document.llms["m"].model_extra == {"logprobs": True, "stop": ["a", "1"]}


def test_the_error_for_a_wrong_value_names_the_option(write: Write):
    assert problems(
        write,
        ("finetuning.num_epochs", "2.5"),
        ("finetuning.num_epoch", "2"),
        ("finetuning.num_epochs.x", "2"),
        ("nonsense.key", "2"),
        ("a..b", "2"),
        ("", "2"),
    ) == [
        "-o finetuning.num_epochs.x: 'finetuning.num_epochs' is 2.5, which has no keys",
        "-o a..b: expected a key such as a.b.c",
        "-o : expected a key such as a.b.c",
        "-o finetuning.num_epoch: unknown key 'num_epoch'. Did you mean 'num_epochs'? Known: "
        + ", ".join(k for k in known())
        + ".",
        "-o finetuning.num_epochs: got 2.5; expected a valid integer, got a number with a "
        "fractional part",
        "-o nonsense.key: nonsense: unknown key 'nonsense'. Known: llms, functions, workflow, "
        "eval, trajectory_builders, trainer_adapters, trainers, finetuning, loggers, general, "
        "function_groups, middleware, embedders, retrievers, memory, object_stores, "
        "authentication, ttc_strategies, optimizer.",
    ]


def known() -> list[str]:
    from hone.config.schema import FinetuneConfig

    return [name for name, field in FinetuneConfig.model_fields.items() if not field.exclude]


def test_an_override_replaces_a_variable_that_is_not_set(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NOT_SET", raising=False)
    file = write("finetuning: {num_epochs: '${NOT_SET}'}")
    assert read(file, [("finetuning.num_epochs", "3")]).finetuning.num_epochs == 3


def test_variables_take_the_type_of_their_key(write: Write, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PORT", "7999")
    monkeypatch.setenv("KEY", "0123")
    monkeypatch.setenv("FUNCTIONS", "a,b")
    monkeypatch.setenv("ON", "true")
    file = write("""
        llms:
          m: {_type: openai, model_name: x, base_url: "http://localhost:1/v1", api_key: "${KEY}", logprobs: ${ON}}
        trainer_adapters:
          art:
            _type: hone_server
            backend: {ip: localhost, port: ${PORT}, api_key: ${KEY}}
        finetuning:
          target_functions: ${FUNCTIONS}
        """)
    document = read(file)
    adapter: Any = document.trainer_adapters["art"]
    key = adapter.backend.api_key
    assert adapter.backend.port == 7999
    assert (key.get_secret_value() if isinstance(key, SecretStr) else key) == "0123"
    assert document.llms["m"].model_extra == {"logprobs": True}
    assert document.finetuning.target_functions == ["a", "b"]


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int | str, "7", 7),
        (int | str, "seven", "seven"),
        (Literal["auto", "never"], "never", "never"),
        (list[int], "1,2", [1, 2]),
        (list[int], "", []),
        (dict[str, float], "{a: 1e-3}", {"a": 0.001}),
        (dict[str, list[str]], "{a: [1, 2]}", {"a": ["1", "2"]}),
        (Any, "{a: [1, '2']}", {"a": [1, "2"]}),
        (Any, "[unclosed", "[unclosed"),
        (Any, "[&a [*a]]", "[&a [*a]]"),
        (float | None, "None", None),
        (bool, "maybe", "maybe"),
    ],
)
def test_typed(annotation: Any, text: str, value: object):
    assert typed(annotation, text) == value
