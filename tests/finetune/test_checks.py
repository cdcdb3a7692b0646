"""A file that is to be trained with: everything a run would be refused for is told at once."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from hone.config.schema import ConfigProblems, read
from hone.finetune.checks import read_run

Write = Callable[[str], Path]

REST = """\
trajectory_builders: {b: {_type: openpipe_art_traj_builder}}
trainer_adapters: {a: {_type: openpipe_art_trainer_adapter, backend: {}}}
trainers: {t: {_type: openpipe_art_trainer}}
"""
RUN = "finetuning: {enabled: true, trainer: t, trajectory_builder: b, trainer_adapter: a"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def file(text: str) -> Path:
        Path("a.yml").write_text(dedent(text))
        return Path("a.yml")

    return file


def refused(file: Path, dataset: Path | None = None) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        read_run(file, dataset=dataset)
    return [str(problem) for problem in caught.value.problems]


def test_a_run_without_workflow_reward_and_dataset(write: Write):
    file = write(f"{REST}{RUN}}}\n")
    read(file)  # it is a valid document, and no run
    nothing = "a.yml:4: workflow: is missing, and finetuning.enabled is true: there is nothing to "
    reward = (
        "a.yml:4: finetuning.reward_function: is missing; name one of eval.evaluators (there is "
        "none yet), as reward_function: {name: ...}"
    )
    workflow, score, dataset = refused(file)
    assert workflow.startswith(nothing + "train. Add `workflow:`")
    assert score == reward
    assert dataset == (
        "a.yml:4: eval.general.dataset: is missing, and finetuning.enabled is true: there is "
        "nothing to run on. Add `dataset: {_type: json, file_path: FILE}`, or start the run with "
        "--dataset FILE"
    )
    assert len(refused(file, dataset=Path("rows.json"))) == 2


def test_a_file_that_trains_nothing_needs_nothing(write: Write):
    file = write("finetuning: {enabled: false}\n")
    assert read_run(file).finetuning.enabled is False


SOUND = """\
llms: {m: {_type: openai, model_name: x, base_url: "http://localhost:8000/v1"}}
functions: {search: {_type: python, target: "agent:search"}}
workflow: {_type: python, target: "agent:run"}
eval:
  general: {dataset: {_type: json, file_path: rows.json}}
  evaluators: {score: {_type: exact_match}}
"""


def test_a_sound_file_is_read(write: Write):
    file = write(f"{SOUND}{REST}{RUN}, reward_function: {{name: score}}, target_model: m}}\n")
    assert read_run(file).finetuning.target_model == "m"


def test_mistakes_of_the_run_are_told_with_those_of_the_file(write: Write):
    sound = SOUND.replace("model_name: x", "model_name: x, temprature: 1")
    sound = sound.replace("http://localhost", "localhost")
    file = write(f"{sound}{REST}{RUN}, target_functions: [<workflow>, serach]}}\n")
    assert [line.partition(";")[0] for line in refused(file)] == [
        "a.yml:1: llms.m.base_url: base_url is 'localhost:8000/v1'",
        "a.yml:1: llms.m.temprature: unknown key 'temprature'. Did you mean 'temperature'?",
        "a.yml:10: finetuning.reward_function: is missing",
        "a.yml:10: finetuning.target_functions.1: functions has no 'serach', so no call can be "
        "trained. Did you mean 'search'? There are: '<workflow>', 'search'.",
    ]


def test_what_only_the_whole_document_tells(write: Write):
    sound = SOUND.replace(", file_path: rows.json", "")
    rest = REST.replace(
        "openpipe_art_traj_builder}", "openpipe_art_traj_builder, num_generations: 1}"
    )
    file = write(
        f"{sound}{rest}{RUN}, reward_function: {{name: scor}},\n"
        "  target_model: llama, target_functions: [ghost]}\n"
    )
    said = refused(file)
    assert [line.split(":")[1:3] for line in said] == [
        ["10", " finetuning.reward_function.name"],
        ["11", " finetuning.target_functions.0"],
        ["11", " finetuning.target_model"],
        ["7", " trajectory_builders.b.num_generations"],
        ["5", " eval.general.dataset.file_path"],
    ]
    assert "eval.evaluators has no 'scor'. Did you mean 'score'? It has: score." in said[0]
    assert "which is neither a key of `llms` nor the name of a model" in said[2]
    assert "training.baseline: batch in trainer_adapters.a" in said[3]
    assert said[4].endswith(
        "is missing, and a dataset of type 'json' is read from a file; name it, or start the run "
        "with --dataset FILE"
    )
    assert len(refused(file, dataset=Path("rows.json"))) == 4
