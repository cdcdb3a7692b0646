"""All mistakes in the files of a run are reported at once, each with its line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.rehearsal import document
from tests.prose import Prose

from hone.config.problems import ConfigProblems
from hone.config.schema import read
from hone.finetune.checks.dataset import check_file
from hone.finetune.checks.documents import read_run

RUN = """\
llms:
  policy: {_type: trainable, temperature: 1.0}
functions:
  search: {_type: python, target: "tools.py:search"}
workflow:
  _type: python
  target: agent.py:run
  llm: policy
eval:
  general:
    dataset:
      _type: jsonl
      file_path: train.jsonl
  evaluators:
    reward: {_type: python, target: "reward.py:score"}
trajectory_builders: {b: {_type: rollouts, num_generations: 4}}
trainer_adapters:
  a:
    _type: hone_server
    backend:
      base_model: smollm2-135m-instruct
trainers: {t: {_type: rl}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {name: reward}
"""
Refused = Callable[..., list[str]]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The problems of RUN after replacements; an empty list where nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("def run(question, llm): ...\n")
    Path("tools.py").write_text("def search(query): ...\n")
    Path("reward.py").write_text("def score(output, expected): ...\n")
    Path("train.jsonl").write_text(json.dumps({"question": "?", "answer": "!"}) + "\n")

    def problems(*replaced: tuple[str, str]) -> list[str]:
        text = RUN
        for old, new in replaced:
            assert old in text, old
            text = text.replace(old, new)
        Path("a.yml").write_text(text)
        try:
            read_run(Path("a.yml"))
        except ConfigProblems as error:
            return [str(problem) for problem in error.problems]
        return []

    return problems


def test_a_valid_file_has_no_problems(refused: Refused):
    assert refused() == []


def test_all_problems_are_reported_at_once(refused: Refused):
    Path("tools.py").write_text("import nowhere_to_be_found\n")
    lines = refused(
        ("temperature: 1.0", "temperature: hot"),  # a value the schema refuses
        ("agent.py:run", "agent.py:rum"),
        ("reward.py:score", "rewards.py:score"),
        ("train.jsonl", "trian.jsonl"),
        ("smollm2-135m-instruct", "smollm2-135m-instrct"),
        ("num_generations: 4", "num_generations: 1"),
        ("  trainer: t\n", "  trainer: t\n  num_epoch: 3\n"),  # an unknown key
    )
    by_place = dict(line.split(": ", 1) for line in lines)
    assert list(by_place) == [
        "a.yml:2", "a.yml:4", "a.yml:7", "a.yml:13", "a.yml:15", "a.yml:16", "a.yml:21", "a.yml:26",
    ]  # fmt: skip
    assert by_place["a.yml:2"].startswith("llms.policy.temperature: got 'hot'")
    assert "cannot be imported: No module named 'nowhere_to_be_found'" in by_place["a.yml:4"]
    assert by_place["a.yml:7"].endswith("has no 'rum'. Did you mean 'run'?")
    assert "eval.general.dataset.file_path: there is no" in by_place["a.yml:13"]
    assert "'rewards.py:score': there is no file" in by_place["a.yml:15"]
    assert "Did you mean 'smollm2-135m-instruct'?" in by_place["a.yml:21"]
    assert "unknown key 'num_epoch'" in by_place["a.yml:26"]


def test_checks_of_whole_sections_run_where_another_section_is_broken(refused: Refused):
    first, second = refused(
        ("temperature: 1.0", "temperature: hot"), ("num_generations: 4", "num_generations: 1")
    )
    assert first.startswith("a.yml:2: llms.policy.temperature")
    assert second.startswith("a.yml:16: trajectory_builders.b.num_generations: ")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "a.yml:13: eval.general.dataset.file_path: train.jsonl: no row is left to run"),
        ('{"prompt": "?", "answer": "!"}', "a.yml:11: eval.general.dataset.structure.question_key: train.jsonl: no"),
        ('{"question": "?", "anwser": "!"}', "a.yml:11: eval.general.dataset.structure.answer_key: "
         "reward.py:score takes `expected`, and no row has a 'answer'. Did you mean 'anwser'?"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(refused: Refused, rows: str, message: str):
    Path("train.jsonl").write_text(rows)
    (line,) = refused()
    assert line.startswith(message)


ROWS = """{"question": "?", "answer": "!"}
{"question": "two", "id": "q2"}
{"question": "three", "answer": null}
{"question": "four", "answer": 0}
"""


def test_rows_without_an_answer_are_named(refused: Refused):
    Path("train.jsonl").write_text(ROWS)
    (line,) = refused()
    # 0 is an answer. A row without an id has its number.
    assert line == (
        "a.yml:13: eval.general.dataset.file_path: train.jsonl: no 'answer' in 2 of 4 rows, and "
        "reward.py:score takes `expected`: row 2 (id 'q2'), row 3 (id '3'). Fill the column or "
        "remove these rows, or give `expected` a default."
    )
    Path("lenient.py").write_text("def score(output, expected=None): ...\n")
    assert refused(("reward.py", "lenient.py")) == []
    target = '{_type: python, target: "reward.py:score"}'
    (line,) = refused((target, "{_type: exact_match}"))
    assert "no 'answer' in 2 of 4 rows, and _type: exact_match: row 2" in line
    assert refused((target, "{_type: contains, substrings: [a]}")) == []
    assert refused((target, "{_type: regex, pattern: a}")) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(output, expectd): ...", "takes (output, expectd). Did you mean 'expected'? It may"),
        ("def score(): ...", "takes (). It may take item, id, input, output, expected, row, calls"),
        ("def score(output, /, expected): ...", "takes (output, expected). Did you mean 'output'?"),
    ],
)  # fmt: skip
def test_a_reward_with_a_wrong_signature_is_refused(refused: Refused, source: str, message: str):
    Path("reward.py").write_text(f"{source}\n")
    (line,) = refused()
    assert line.startswith("a.yml:15: eval.evaluators.reward.target: 'reward.py:score' ")
    assert message in line


def test_arguments_of_a_reward_that_it_does_not_take(refused: Refused):
    args = 'target: "reward.py:score", args: {weight: 2}}'
    (line,) = refused(('target: "reward.py:score"}', args))
    assert "has no parameter 'weight', but args.weight is set" in line
    Path("weighted.py").write_text("def score(output, weight, expected): ...\n")
    args = args.replace("reward.py", "weighted.py")
    assert refused(('target: "reward.py:score"}', args)) == []


def test_a_missing_question_does_not_hide_a_missing_answer(refused: Refused):
    Path("train.jsonl").write_text('{"prompt": "?", "anwser": "!"}')
    question, answer = refused()
    assert question.startswith("a.yml:11: eval.general.dataset.structure.question_key: ")
    assert answer.startswith("a.yml:11: eval.general.dataset.structure.answer_key: ")


def test_columns_that_are_named_must_be_there(refused: Refused):
    structure = "file_path: train.jsonl\n      structure:\n        answer_key: solution"
    (line,) = refused(("file_path: train.jsonl", structure))
    assert line.startswith("a.yml:15: eval.general.dataset.structure.answer_key: no row has a 'sol")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", None),  # the hub may have it: nobody is asked
        ("model", None),
        ("./nowhere", "there is no "),
        ("weights.gguf", "there is no "),
        ("empty", "holds neither config.json nor a .gguf file"),
        ("a/b/c", "is not a model that hone knows"),
    ],
)
def test_base_models(refused: Refused, name: str, line: str | None):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("empty").mkdir()
    lines = refused(("smollm2-135m-instruct", name))
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]
    # What a server on another machine has, that server says.
    remote = f"{name}\n      ip: gpu\n      port: 7623"
    assert refused(("smollm2-135m-instruct", remote)) == []


def test_an_empty_file_is_not_a_configuration(prose: Prose, tmp_path: Path):
    (tmp_path / "a.yml").write_text("\n")
    with pytest.raises(ConfigProblems) as caught:
        read_run(tmp_path / "a.yml")
    prose(caught)


def test_files_that_the_command_names(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    (problem,) = check_file("--validation_dataset", tmp_path / "empty.jsonl", None)
    assert str(problem).startswith(
        f"--validation_dataset {tmp_path / 'empty.jsonl'}: no row is left"
    )
    (problem,) = check_file("--dataset", tmp_path / "none.jsonl", None)
    assert str(problem) == f"--dataset {tmp_path / 'none.jsonl'}: no such file"
    assert check_file("--dataset", None, None) == []
    (tmp_path / "torn.jsonl").write_text('{"question": "?"}\n{"question"')
    (problem,) = check_file("--dataset", tmp_path / "torn.jsonl", None)
    assert str(problem).startswith(f"--dataset {tmp_path / 'torn.jsonl'}:2: not JSON: Expecting")


def test_files_that_the_command_names_have_the_reward_s_columns(refused: Refused):
    assert refused() == []
    document = read_run(Path("a.yml"))
    Path("held_out.jsonl").write_text('{"question": "?", "anwser": "!"}')
    (problem,) = check_file("--validation_dataset", Path("held_out.jsonl"), document, "reward")
    assert str(problem).startswith(
        "--validation_dataset held_out.jsonl: reward.py:score takes `expected`, and no row has a "
        "'answer'. Did you mean 'anwser'?"
    )


def test_problems_are_in_the_order_of_the_lines(refused: Refused):
    lines = refused(
        ("agent.py:run", "agent.py:rum"),
        ("smollm2-135m-instruct", "smollm2-135m-instrct"),
        ("train.jsonl", "trian.jsonl"),
        ("  trainer: t\n", "  trainer: t\n  num_epoch: 3\n"),
    )
    assert [line.split(": ")[0] for line in lines] == [
        "a.yml:7",
        "a.yml:13",
        "a.yml:21",
        "a.yml:26",
    ]


# ---- what a run needs ---------------------------------------------------------------------------

REST = """\
trajectory_builders: {b: {_type: rollouts}}
trainer_adapters: {a: {_type: hone_server, backend: {}}}
trainers: {t: {_type: rl}}
finetuning: {enabled: true, trainer: t, trajectory_builder: b, trainer_adapter: a}
"""


def lines_of(file: Path, **options: Any) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        read_run(file, **options)
    return [str(problem) for problem in caught.value.problems]


def test_a_run_without_workflow_reward_and_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = Path("a.yml")
    file.write_text(REST)
    read(file)  # it is a valid document, and no run
    workflow, dataset, reward = lines_of(file)
    assert workflow.startswith(
        "a.yml:1: workflow: is missing, so there is nothing to run. Add `workflow:`"
    )
    assert reward == (
        "a.yml:4: finetuning.reward_function: is missing; name one of eval.evaluators (there is "
        "none yet), as reward_function: {name: ...}"
    )
    assert dataset == (
        "a.yml:1: eval.general.dataset: is missing, so there is nothing to run on. Add "
        "`dataset: {_type: json, file_path: FILE}`, or name the examples with --dataset FILE"
    )
    assert len(lines_of(file, dataset=Path("rows.json"))) == 2


def test_a_file_that_trains_nothing_needs_nothing(tmp_path: Path):
    (tmp_path / "a.yml").write_text("finetuning: {enabled: false}\n")
    assert read_run(tmp_path / "a.yml").finetuning.enabled is False


def test_mistakes_of_the_run_are_reported_with_those_of_the_file(refused: Refused):
    lines = refused(
        ("temperature: 1.0", "temperature: 1.0, temprature: 1"),
        ("  reward_function: {name: reward}\n", "  target_functions: [<workflow>, serach]\n"),
    )
    assert [line.partition(";")[0] for line in lines] == [
        "a.yml:2: llms.policy.temprature: unknown key 'temprature'. Did you mean 'temperature'?",
        "a.yml:23: finetuning.reward_function: is missing",
        "a.yml:28: finetuning.target_functions.1: functions has no 'serach', so no call can be "
        "trained. Did you mean 'search'? There are: '<workflow>', 'search'.",
    ]


def test_nodes_of_a_framework_may_be_targets(tmp_path: Path):
    targets = {"finetuning": {"target_functions": ["research.model"]}}
    assert any(
        "functions has no 'research.model'" in line for line in mistakes(tmp_path, **targets)
    )
    graph = {"_type": "langgraph", "target": "agent.py:graph"}
    assert mistakes(tmp_path, workflow=graph, **targets) == []


def test_problems_that_only_the_whole_document_shows(refused: Refused):
    lines = refused(
        ("      file_path: train.jsonl\n", ""),
        ("num_generations: 4", "num_generations: 1"),
        ("{name: reward}", "{name: rewrd}\n  target_model: llama\n  target_functions: [ghost]"),
    )
    assert [line.split(":")[1:3] for line in lines] == [
        ["11", " eval.general.dataset.file_path"],
        ["15", " trajectory_builders.b.num_generations"],
        ["27", " finetuning.reward_function.name"],
        ["28", " finetuning.target_model"],
        ["29", " finetuning.target_functions.0"],
    ]
    assert lines[0].endswith(
        "is missing, and a dataset of type 'jsonl' is read from a file; name it, or name the "
        "examples with --dataset FILE"
    )
    assert "training.baseline: batch in trainer_adapters.a" in lines[1]
    assert "eval.evaluators has no 'rewrd'. Did you mean 'reward'? It has: reward." in lines[2]
    assert "which is neither a key of `llms` nor the name of a model" in lines[3]
    assert len(lines_of(Path("a.yml"), dataset=Path("rows.json"))) == 4


def test_the_error_for_a_key_of_the_originals_names_the_replacement(refused: Refused):
    training = "training: {gradient_accumulation_steps: 4, learning_rat: 1}\n    backend:"
    first, second = refused(("backend:", training))
    assert "not in this version of hone; set groups_per_optimizer_step" in first
    assert "unknown key 'learning_rat'. Did you mean 'learning_rate'?" in second


# ---- targets and group sizes ----------------------------------------------------------------------


def test_names_that_the_code_sets_may_be_targets(tmp_path: Path):
    code = (
        'import hone\n\n\ndef agent(text, llm):\n    with hone.function("planner"):\n        ...\n'
    )
    (tmp_path / "named.py").write_text(code)
    python = {"_type": "python", "target": "named.py:agent", "llm": "actor"}
    targets = {"finetuning": {"target_functions": ["planner"]}}
    assert mistakes(tmp_path, workflow=python, **targets) == []
    targets = {"finetuning": {"target_functions": ["planer"]}}
    (line,) = mistakes(tmp_path, workflow=python, **targets)
    assert "Did you mean 'planner'? There are: '<workflow>', " in line


def mistakes(directory: Path, **changes: Any) -> list[str]:
    """Of the seed's basic configuration with changes."""
    document(directory, **changes)
    try:
        read_run(directory / "config.yml")
    except ConfigProblems as error:
        return [str(problem).partition("config.yml:")[2] for problem in error.problems]
    return []


def test_a_target_model_by_key_by_name_and_by_neither(tmp_path: Path):
    for name in ("actor", "base"):
        assert mistakes(tmp_path, finetuning={"target_model": name}) == []
    (line,) = mistakes(tmp_path, finetuning={"target_model": "acto"})
    assert "finetuning.target_model: is 'acto', which is neither a key of `llms` nor the" in line
    assert "Did you mean 'actor'?" in line


CRITIC = {"_type": "openai", "model_name": "base", "base_url": "http://127.0.0.1:7623/v1"}


def test_of_two_entries_on_one_base_one_must_be_named(tmp_path: Path):
    (line,) = mistakes(tmp_path, llms={"critic": CRITIC})
    assert (
        "finetuning.target_model: llms.actor and llms.critic each name the model in training or "
        "its base model 'base'; set finetuning.target_model" in line
    )
    named = {"target_model": "actor"}
    assert mistakes(tmp_path, llms={"critic": CRITIC}, finetuning=named) == []


def test_entries_on_two_ports_are_distinguished_when_the_server_is_known(tmp_path: Path):
    """Which port of its host serves inference is the server's to say."""
    assert (
        mistakes(tmp_path, llms={"critic": {**CRITIC, "base_url": "http://127.0.0.1:9/v1"}}) == []
    )


def test_a_policy_of_one_fixed_step_is_refused(tmp_path: Path):
    fixed = {"actor": {"model_name": "base@0"}}
    (line,) = mistakes(tmp_path, llms=fixed, finetuning={"target_model": "actor"})
    assert "its model_name 'base@0' requests one fixed step; leave out '@0'" in line
    assert line.endswith("in a file for `hone eval` only, set finetuning.enabled: false")


def test_one_generation_needs_the_batch(tmp_path: Path):
    single = {"b": {"num_generations": 1}}
    (line,) = mistakes(tmp_path, trajectory_builders=single)
    assert "trajectory_builders.b.num_generations: is 1, so a group has nothing to compare" in line
    assert "training.baseline: batch in trainer_adapters.a" in line
    batch = {"a": {"training": {"baseline": "batch"}}}
    assert mistakes(tmp_path, trajectory_builders=single, trainer_adapters=batch) == []


def test_groups_smaller_than_the_smallest(tmp_path: Path):
    (line,) = mistakes(tmp_path, finetuning={"min_group_size": 4})
    assert "num_generations: is 2 but finetuning.min_group_size is 4" in line
