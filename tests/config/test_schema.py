"""schema.py and check.py: every problem of a file at once, each with its line and what to do."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from hone.config import registry
from hone.config.schema import ConfigProblems, Document, FinetuneConfig, read
from hone.errors import ConfigError

Write = Callable[..., Path]

LLM = "{_type: openai, model_name: x, base_url: 'http://localhost:8000/v1'}"


def named(kind: str) -> str:
    return ", ".join(component.name for component in registry.known(kind))


def problems(file: Path) -> list[str]:
    with pytest.raises(ConfigProblems) as error:
        read(file)
    assert str(error.value) == "\n".join(map(str, error.value.problems))
    assert isinstance(error.value, ConfigError)
    return [str(problem) for problem in error.value.problems]


def test_all_problems_of_a_file_are_reported_at_once(write: Write, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    file = write("""\
        llms:
          m: {_type: opnai}
          n: {_type: openai, model_name: x, temprature: 1, base_url: "http://localhost:8000/v1"}
        wrkflow: {}
        eval:
          general:
            max_concurrency: 0
            dataset: {file_path: x.json}
            output_dir: ${NOT_SET}
        trainers:
          t: hello
        finetuning:
          enabled: true
          trainer: tt
          num_epochs: many
          seed: 1
          seed: 2
        """)
    assert problems(file) == [
        "a.yml:2: llms.m._type: no llm_provider is called 'opnai'. Did you mean 'openai'? "
        f"Known: {named('llm_provider')}.",
        "a.yml:3: llms.n.temprature: unknown key 'temprature'. Did you mean 'temperature'?",
        "a.yml:4: wrkflow: unknown key 'wrkflow'. Did you mean 'workflow'? Known: llms, functions, "
        "workflow, eval, trajectory_builders, trainer_adapters, trainers, finetuning, loggers, "
        "general, function_groups, middleware, embedders, retrievers, memory, object_stores, "
        "authentication, ttc_strategies, optimizer.",
        "a.yml:7: eval.general.max_concurrency: got 0; expected greater than or equal to 1",
        f"a.yml:8: eval.general.dataset: `_type` is missing; known: {named('dataset_loader')}",
        "a.yml:9: eval.general.output_dir: ${NOT_SET} is not set in the environment; set it, or "
        "write ${NOT_SET:-DEFAULT}",
        "a.yml:11: trainers.t: got 'hello'; expected a block with `_type`",
        "a.yml:12: finetuning: enabled is true, but trajectory_builder, trainer_adapter are not "
        "set; name a key of `trajectory_builders`, `trainer_adapters`",
        "a.yml:14: finetuning.trainer: trainers has no 'tt'. Did you mean 't'? It has: t.",
        "a.yml:15: finetuning.num_epochs: got 'many'; expected a valid integer",
        "a.yml:17: finetuning.seed: written twice, on lines 16 and 17; keep one of them",
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("authentication", "embedders", "function_groups", "general", "memory", "middleware"),
        *("object_stores", "optimizer", "retrievers", "ttc_strategies"),
    ],
)
def test_sections_of_the_toolkit_say_that_it_is_not_installed(write: Write, key: str):
    [problem] = problems(write(f"{key}:\n  x: {{_type: y}}\n"))
    start = f"a.yml:1: {key}: belongs to NeMo Agent Toolkit, which is not installed in this "
    assert problem.startswith(start + "environment: pip install 'hone-rl[nat]', or remove it")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{profiler: {base_metrics: true}}", "profiler"),
        ("{output: {s3: {bucket: x}}}", "output.s3"),
        ("{output: {custom_scripts: {a: {script: b.py}}}}", "output.custom_scripts"),
        ("{output: {remote_dir: x}}", "output.remote_dir"),
        ("{dataset: {_type: json, s3: {bucket: x}}}", "dataset.s3"),
        ("{dataset: {_type: json, remote_file_path: x}}", "dataset.remote_file_path"),
        ("{per_input_user_id: true}", "per_input_user_id"),
        ("{validate_llm_endpoints: true}", "validate_llm_endpoints"),
    ],
)
def test_unsupported_keys_are_refused_by_name(write: Write, text: str, key: str):
    [problem] = problems(write(f"eval:\n  general: {text}\n"))
    assert problem.startswith(f"a.yml:2: eval.general.{key}: not in this version of hone; ")


@pytest.mark.parametrize(
    ("section", "kind", "name"),
    [("functions", "function", "react_agent"), ("llms", "llm_provider", "nim")],
)
def test_types_of_the_toolkit_say_that_it_is_not_installed(
    write: Write, section: str, kind: str, name: str
):
    [problem] = problems(write(f"{section}:\n  x:\n    _type: {name}\n"))
    start = f"a.yml:3: {section}.x._type: {kind} {name!r} belongs to NeMo Agent Toolkit, which is "
    assert problem.startswith(
        f"{start}not installed in this environment: pip install 'hone-rl[nat]'"
    )


@pytest.mark.parametrize(
    ("section", "kind", "name"),
    [
        ("trajectory_builders", "trajectory_builder", "dpo_traj_builder"),
        ("trainer_adapters", "trainer_adapter", "nemo_customizer_trainer_adapter"),
        ("trainers", "trainer", "nemo_customizer_trainer"),
    ],
)
def test_the_customizer_is_refused_with_what_to_use_instead(
    write: Write, section: str, kind: str, name: str
):
    [problem] = problems(write(f"{section}:\n  x:\n    _type: {name}\n    entity_host: h\n"))
    start = (
        f"a.yml:3: {section}.x._type: {kind} {name!r} trains with the NeMo Customizer, a hosted "
    )
    assert problem.startswith(f"{start}product that hone does not call. Train on preference pairs ")
    assert "`_type: dpo` instead" in problem


def test_middleware_is_refused_by_name(write: Write):
    [problem] = problems(write("workflow: {_type: python, target: 'json:loads', middleware: [a]}"))
    assert problem == (
        "a.yml:1: workflow.middleware: not in this version of hone; wrap the function in your own "
        "code"
    )


def test_what_hone_fills_in_itself_is_refused(write: Write):
    file = write("""\
        trainers: {t: {_type: rl, reward: {name: x}}}
        finetuning: {run_configuration: {dataset: x}}
        eval: {evaluators: {x: {_type: exact_match}}}
        """)
    assert problems(file) == [
        "a.yml:1: trainers.t.reward: is filled in by hone; remove it",
        "a.yml:2: finetuning.run_configuration: is filled in by hone; remove it",
    ]


def test_names_of_components_are_checked_at_every_place(write: Write):
    file = write(f"""\
        llms: {{model: {LLM}}}
        functions:
          search: {{_type: python, target: "json:loads"}}
        workflow:
          _type: python
          target: json:loads
          llm: modell
          functions: [search, serch]
        eval:
          evaluators:
            judge: {{_type: llm_judge, llm: nobody}}
        finetuning:
          reward_function: {{name: juge}}
        """)
    messages = problems(file)
    assert messages[:2] == [
        "a.yml:7: workflow.llm: llms has no 'modell'. Did you mean 'model'? It has: model.",
        "a.yml:8: workflow.functions.1: functions has no 'serch'. Did you mean 'search'? It has: "
        "search.",
    ]
    assert "eval.evaluators.judge.llm: llms has no 'nobody'. It has: model." in messages[2]
    assert messages[-1] == (
        "a.yml:13: finetuning.reward_function.name: eval.evaluators has no 'juge'. Did you mean "
        "'judge'? It has: judge."
    )


def test_functions_that_need_each_other_are_reported(write: Write):
    file = write("""\
        functions:
          a: {_type: python, target: "json:loads", functions: [b]}
          b: {_type: python, target: "json:loads", functions: [a]}
        """)
    assert problems(file) == [
        "a.yml:2: functions.a: functions need each other in a circle: a -> b -> a"
    ]


@pytest.mark.parametrize("name", ["a.b", "a b", "caf\u00e9", "<workflow>"])
def test_names_of_functions_travel_in_a_header(write: Write, name: str):
    file = write(f"functions:\n  '{name}': {{_type: python, target: 'json:loads'}}\n")
    [problem] = problems(file)
    assert f"a function cannot be called {name!r}: its name travels with every model" in problem
    assert problem.startswith("a.yml:2: functions.")


def test_numbers_are_finite_and_not_booleans(write: Write):
    file = write("""\
        llms:
          m: {_type: openai, model_name: x, temperature: yes, request_timeout: .inf, thinking: yes}
          n: {_type: openai, model_name: x, temperature: null, seed: "7", logprobs: yes}
        loggers: [{_type: tensorboard, timeout_s: .nan}]
        trainer_adapters:
          t:
            _type: hone_server
            backend: {engine_args: {enforce_eager: yes}}
            training: {learning_rates: [1e-6, on], max_staleness: off, importance_cap: no}
        finetuning: {on_policy_failure: {reward: -.inf}}
        """)
    boolean = "expected a number (YAML reads yes, no, on and off as true and false)"
    training = "a.yml:9: trainer_adapters.t.training"
    assert problems(file) == [
        "a.yml:2: llms.m.request_timeout: got inf; expected a finite number",
        f"a.yml:2: llms.m.temperature: got True; {boolean}",
        "a.yml:4: loggers.0.timeout_s: got nan; expected a finite number",
        f"{training}.learning_rates.1: got True; {boolean}",
        f"{training}.max_staleness: got False; {boolean}",
        f"{training}.importance_cap: got False; {boolean}",
        "a.yml:10: finetuning.on_policy_failure.reward: got -inf; expected a finite number",
    ]


def test_a_union_is_one_problem(write: Write):
    assert problems(write("finetuning:\n  on_policy_failure: drp\n")) == [
        "a.yml:2: finetuning.on_policy_failure: got 'drp'; expected 'lowest' or 'drop' or a "
        "block of keys"
    ]
    assert problems(write("finetuning:\n  on_policy_failure: {rewrd: 1}\n")) == [
        "a.yml:2: finetuning.on_policy_failure.reward: is missing",
        "a.yml:2: finetuning.on_policy_failure.rewrd: unknown key 'rewrd'. Did you mean 'reward'? "
        "Known: reward.",
    ]


def test_a_secret_is_not_shown(write: Write):
    [problem] = problems(write(f"llms:\n  m: {LLM.replace('}', ', api_key: [s3cret]}')}\n"))
    assert problem == "a.yml:2: llms.m.api_key: got something else; expected a valid string"


def test_the_type_may_be_spelt_as_the_originals_do(write: Write):
    document = read(
        write(f"""
        eval: {{general: {{dataset: {{type: json, file_path: a.json}}}}}}
        llms: {{m: {LLM.replace("openai", "hone/openai")}}}
        """)
    )
    dataset = document.eval.general.dataset
    assert dataset is not None and dataset.type_name == "json"
    assert document.llms["m"].type_name == "openai"
    [problem] = problems(write(f"llms: {{m: {LLM.replace('openai', 'other/openai')}}}"))
    assert "no llm_provider is called 'other/openai'" in problem


# ---- the models -------------------------------------------------------------------------------


def test_defaults_are_those_of_the_seed_documents():
    document = Document()
    run, general = document.finetuning, document.eval.general
    assert (run.enabled, run.num_epochs, run.target_functions) == (False, 1, ["<workflow>"])
    assert (run.target_model, run.reward_function) == (None, None)
    assert run.output_dir == Path(".hone/runs/default")
    assert run.curriculum_learning.model_dump() == {
        "enabled": False,
        "initial_percentile": 0.3,
        "increment_percentile": 0.2,
        "expansion_interval": 5,
        "min_reward_diff": 0.1,
        "sort_ascending": False,
        "random_subsample": None,
        "skip_excluded": False,
    }
    assert general.max_concurrency is None, "it follows the engine"
    assert general.output_dir == Path(".hone/evals/default")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.yml", "train"),
        ("agent/train.v2.yaml", "train.v2"),
        ("agent/config.yml", "agent"),
        ("agent/configs/config.yml", "agent"),
        ("agent/runs/../config.yaml", "agent"),
    ],
)
def test_output_goes_to_the_name_of_the_file(tmp_path: Path, file: str, name: str):
    path = tmp_path / file
    for folder in (path.parent, Path(os.path.abspath(path)).parent):
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text("finetuning: {num_epochs: 2}")
    document = read(path)
    assert document.finetuning.output_dir == Path(".hone/runs", name)
    assert document.eval.general.output_dir == Path(".hone/evals", name)
    path.write_text("finetuning: {output_dir: out}\neval: {general: {output: {dir: scores}}}")
    document = read(path, [("finetuning.output_dir", "other")])
    assert document.finetuning.output_dir == Path("other")
    assert document.eval.general.output_dir == Path("scores")


def test_defaults_of_what_hone_adds():
    run = FinetuneConfig()
    assert (run.seed, run.resume, run.keep_checkpoints) == (0, "auto", None)
    assert (run.min_group_size, run.on_policy_failure) == (2, "lowest")
    assert (run.max_infrastructure_failures, run.rollout_retries) == (0.2, 1)
    assert (run.rollout_timeout_s, run.job_timeout_s) == (600.0, 86400.0)
    assert run.validation.model_dump() == {
        "greedy": False,
        "reps": 1,
        "allow_training_examples": False,
    }
    assert run.allow_foreign_endpoint is False


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"curriculum_learning": {"initial_percentile": 0}}, "greater than 0"),
        ({"curriculum_learning": {"initial_percentile": 1.1}}, "less than or equal to 1"),
        ({"curriculum_learning": {"increment_percentile": 0}}, "greater than 0"),
        ({"curriculum_learning": {"expansion_interval": 0}}, "greater than or equal to 1"),
        ({"curriculum_learning": {"random_subsample": 2}}, "less than or equal to 1"),
        ({"num_epochs": 0}, "greater than or equal to 1"),
        ({"target_functions": []}, "at least 1 item"),
        ({"early_stopping": {"patience": 0}}, "greater than or equal to 1"),
        ({"early_stopping": {}}, "Field required"),
        ({"max_infrastructure_failures": 1.5}, "less than or equal to 1"),
        ({"enabled": True}, "trainer, trajectory_builder, trainer_adapter are not set"),
        (
            {"enabled": True, "trainer": "a", "trainer_adapter": "b"},
            "trajectory_builder is not set",
        ),
    ],
)
def test_bounds(block: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        FinetuneConfig.model_validate(block)


def test_output_dir_may_stand_in_either_place(write: Write):
    document = read(write("eval: {general: {output_dir: a, output: {dir: b}}}"))
    assert document.eval.general.output_dir == Path("b")


def test_the_structure_of_a_dataset_has_two_spellings(write: Write):
    file = write("""
        eval:
          general:
            dataset:
              _type: json
              file_path: a.json
              structure: {id: nr, question: q, answer_key: a, pass_full_entry: true}
              filter: {allowlist: {field: {nr: ["1*"]}}}
        """)
    dataset = read(file).eval.general.dataset
    assert dataset is not None
    assert (dataset.id_key, dataset.structure.question_key) == ("nr", "q")
    assert (dataset.structure.answer_key, dataset.structure.disable) == ("a", False)
    assert dataset.filter.allowlist is not None
    assert dataset.filter.allowlist.field == {"nr": ["1*"]}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("{question: a, question_key: b}", "has both 'question' and 'question_key'; keep one of"),
        ("{pass_full_entry: false}", "pass_full_entry is false, but hone always passes the row"),
        ("{id: x}, id_key: y", "id_key is 'y' but structure's id is 'x'; keep one of them"),
    ],
)
def test_spellings_that_disagree(write: Write, structure: str, message: str):
    text = f"eval: {{general: {{dataset: {{_type: json, structure: {structure}}}}}}}"
    [problem] = problems(write(text))
    assert message in problem


def test_the_effective_configuration_survives_a_round_trip(write: Write):
    file = write(f"llms: {{m: {LLM}}}\nfinetuning: {{seed: 3}}\n")
    document = read(file, [("finetuning.num_epochs", "7")])
    assert document.file == Path("a.yml")
    assert document.loaded.data["finetuning"] == {"seed": 3, "num_epochs": 7}
    effective = document.model_dump(mode="json", exclude_none=True)
    assert effective["llms"]["m"]["_type"] == "openai"
    assert effective["finetuning"]["num_epochs"] == 7
    assert "run_configuration" not in effective["finetuning"]
    assert Document.model_validate(effective).finetuning == document.finetuning


def test_exceptions_of_the_infrastructure_are_class_names(write: Write):
    file = write("""\
        finetuning:
          infrastructure_exceptions: [SearchDown, my_tools.errors.SearchDown, "no name", Exception]
        """)
    assert problems(file) == [
        "a.yml:2: finetuning.infrastructure_exceptions.2: 'no name' is not the name of a class; "
        "write Name or package.module.Name",
        "a.yml:2: finetuning.infrastructure_exceptions.3: Exception is every exception, so no "
        "failure would be the model's; name the classes that are not its fault",
    ]
