"""Datasets, functions and base models that are missing or wrong: all at once, each with its line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.config.problems import ConfigProblems
from hone.finetune.documents import check_file, read_run

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
trajectory_builders: {b: {_type: openpipe_art_traj_builder, num_generations: 4}}
trainer_adapters:
  a:
    _type: openpipe_art_trainer_adapter
    backend:
      base_model: smollm2-135m-instruct
trainers: {t: {_type: openpipe_art_trainer}}
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
    """What is said of RUN after replacements; an empty list where nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("def run(question, llm): ...\n")
    Path("tools.py").write_text("def search(query): ...\n")
    Path("reward.py").write_text("def score(output, expected): ...\n")
    Path("train.jsonl").write_text(json.dumps({"question": "?", "answer": "!"}) + "\n")

    def said(*replaced: tuple[str, str]) -> list[str]:
        text = RUN
        for old, new in replaced:
            assert old in text, old
            text = text.replace(old, new)
        Path("a.yml").write_text(text)
        try:
            read_run(Path("a.yml"), resources=True)
        except ConfigProblems as error:
            return [str(problem) for problem in error.problems]
        return []

    return said


def test_nothing_is_wrong(refused: Refused):
    assert refused() == []


def test_everything_that_is_wrong_is_told_at_once_whatever_else_is(refused: Refused):
    Path("tools.py").write_text("import nowhere_to_be_found\n")
    said = refused(
        ("temperature: 1.0", "temperature: hot"),  # a value the schema refuses
        ("agent.py:run", "agent.py:rum"),
        ("reward.py:score", "rewards.py:score"),
        ("train.jsonl", "trian.jsonl"),
        ("smollm2-135m-instruct", "smollm2-135m-instrct"),
        ("num_generations: 4", "num_generations: 1"),
        ("  trainer: t\n", "  trainer: t\n  num_epoch: 3\n"),  # an unknown key
    )
    found = dict(line.split(": ", 1) for line in said)
    assert sorted(found, key=lambda place: int(place.partition(":")[2])) == [
        "a.yml:2", "a.yml:4", "a.yml:7", "a.yml:13", "a.yml:15", "a.yml:21", "a.yml:26",
    ]  # fmt: skip
    assert found["a.yml:2"].startswith("llms.policy.temperature: got 'hot'")
    assert "cannot be imported: No module named 'nowhere_to_be_found'" in found["a.yml:4"]
    assert found["a.yml:7"].endswith("has no 'rum'. Did you mean 'run'?")
    assert "eval.general.dataset.file_path: there is no" in found["a.yml:13"]
    assert "'rewards.py:score': there is no file" in found["a.yml:15"]
    assert "Did you mean 'smollm2-135m-instruct'?" in found["a.yml:21"]
    assert "unknown key 'num_epoch'" in found["a.yml:26"]


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
    (said,) = refused()
    assert said.startswith(message)


def test_a_missing_question_does_not_hide_a_missing_answer(refused: Refused):
    Path("train.jsonl").write_text('{"prompt": "?", "anwser": "!"}')
    question, answer = refused()
    assert question.startswith("a.yml:11: eval.general.dataset.structure.question_key: ")
    assert answer.startswith("a.yml:11: eval.general.dataset.structure.answer_key: ")


def test_columns_that_are_named_must_be_there(refused: Refused):
    structure = "file_path: train.jsonl\n      structure:\n        answer_key: solution"
    (said,) = refused(("file_path: train.jsonl", structure))
    assert said.startswith("a.yml:15: eval.general.dataset.structure.answer_key: no row has a 'sol")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", None),  # the hub may have it: nobody is asked
        ("model", None),
        ("./nowhere", "there is no "),
        ("weights.gguf", "there is no "),
        ("empty", "holds neither config.json nor a .gguf file"),
        ("a/b/c", "is not a model that hone knows"),
    ],
)
def test_base_models(refused: Refused, name: str, said: str | None):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("empty").mkdir()
    found = refused(("smollm2-135m-instruct", name))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    # What a server on another machine has, that server says.
    remote = f"{name}\n      ip: gpu\n      port: 7623"
    assert refused(("smollm2-135m-instruct", remote)) == []


def test_an_empty_file_is_no_configuration(tmp_path: Path):
    (tmp_path / "a.yml").write_text("\n")
    with pytest.raises(ConfigProblems, match="the file is empty"):
        read_run(tmp_path / "a.yml")


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


def test_problems_stand_in_the_order_of_the_lines(refused: Refused):
    said = refused(
        ("agent.py:run", "agent.py:rum"),
        ("smollm2-135m-instruct", "smollm2-135m-instrct"),
        ("train.jsonl", "trian.jsonl"),
        ("  trainer: t\n", "  trainer: t\n  num_epoch: 3\n"),
    )
    assert [line.split(": ")[0] for line in said] == ["a.yml:7", "a.yml:13", "a.yml:21", "a.yml:26"]
