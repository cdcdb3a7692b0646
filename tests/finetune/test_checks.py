"""finetune/checks.py: what a file lacks is told all at once; what a document means for a run."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from tests.finetune.rehearsal import document, one

from hone.config.schema import ConfigProblems, read
from hone.finetune.checks import check_document, check_movement, failures, plan
from hone.finetune.documents import read_run

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
        ["5", " eval.general.dataset.file_path"],
        ["7", " trajectory_builders.b.num_generations"],
        ["10", " finetuning.reward_function.name"],
        ["11", " finetuning.target_functions.0"],
        ["11", " finetuning.target_model"],
    ]
    assert "eval.evaluators has no 'scor'. Did you mean 'score'? It has: score." in said[2]
    assert "which is neither a key of `llms` nor the name of a model" in said[4]
    assert "training.baseline: batch in trainer_adapters.a" in said[1]
    assert said[0].endswith(
        "is missing, and a dataset of type 'json' is read from a file; name it, or start the run "
        "with --dataset FILE"
    )
    assert len(refused(file, dataset=Path("rows.json"))) == 4


# ---- what the configuration alone tells -----------------------------------------------------------


def test_a_sound_configuration(tmp_path: Path):
    checks = check_document(document(tmp_path))
    assert failures(checks) == []
    assert [check.name for check in checks] == [
        "reward", "target functions", "target model", "group size",
    ]  # fmt: skip


def test_keys_of_the_originals_say_what_to_set_instead(tmp_path: Path):
    wrong = {"a": {"training": {"gradient_accumulation_steps": 4, "learning_rat": 1}}}
    with pytest.raises(ConfigProblems) as caught:
        document(tmp_path, trainer_adapters=wrong)
    said = str(caught.value)
    assert "not in this version of hone; set groups_per_optimizer_step" in said
    assert "unknown key 'learning_rat'. Did you mean 'learning_rate'?" in said


def test_a_target_function_that_is_not_there(tmp_path: Path):
    doc = document(tmp_path, finetuning={"target_functions": ["<workflow>", "serach"]})
    found = one(check_document(doc), "target functions")
    assert not found.ok
    assert (
        "names 'serach', and `functions` has no such key. Did you mean 'search'?" in found.message
    )
    assert "There are: '<workflow>', 'search'." in found.message
    assert "No trajectories collected for epoch" in found.message


def test_a_target_model_by_key_by_name_and_by_neither(tmp_path: Path):
    for wanted in ("actor", "base"):
        doc = document(tmp_path, finetuning={"target_model": wanted})
        assert one(check_document(doc), "target model").ok
    doc = document(tmp_path, finetuning={"target_model": "acto"})
    found = one(check_document(doc), "target model")
    assert not found.ok
    assert "is 'acto', which is neither a key of `llms` nor the name of a model." in found.message
    assert "Did you mean 'actor'?" in found.message


CRITIC = {"_type": "openai", "model_name": "base", "base_url": "http://127.0.0.1:7623/v1"}


def test_of_two_entries_on_one_base_one_must_be_named(tmp_path: Path):
    doc = document(tmp_path, llms={"critic": CRITIC})
    found = one(check_document(doc), "target model")
    assert not found.ok
    assert found.path == ("finetuning", "target_model")
    assert (
        "llms.actor and llms.critic each name the model in training or its base model 'base'; set "
        "finetuning.target_model" in found.message
    )
    doc = document(tmp_path, llms={"critic": CRITIC}, finetuning={"target_model": "actor"})
    name = doc.trainer_adapters["a"].model_dump()["backend"]["name"]
    found = one(check_document(doc), "target model")
    assert found.ok and not found.warning
    assert found.message == (
        f"llms.actor is trained and sends '{name}'. llms.critic sends '{name}@0': the base weights, "
        "which are not trained. A client of the agent's own that asks for 'base' inside a rollout "
        f"gets '{name}'."
    )


def test_entries_on_two_ports_are_told_apart_when_the_server_is_known(tmp_path: Path):
    """Which port of its host serves inference is the server's to say."""
    doc = document(tmp_path, llms={"critic": {**CRITIC, "base_url": "http://127.0.0.1:9/v1"}})
    assert one(check_document(doc), "target model").ok


def test_two_entries_that_name_the_model_in_training(tmp_path: Path):
    named = {"a": {"backend": {"name": "mine"}}}
    doc = document(
        tmp_path,
        llms={"critic": {**CRITIC, "model_name": "suite/mine"}},
        trainer_adapters=named,
        finetuning={"target_model": "actor"},
    )
    found = one(check_document(doc), "target model")
    assert found.ok and found.warning
    assert "llms.actor and 'critic' ask for the model in training, so calls of all" in found.message


def test_a_policy_of_one_fixed_step_is_refused(tmp_path: Path):
    doc = document(
        tmp_path, llms={"actor": {"model_name": "base@0"}}, finetuning={"target_model": "actor"}
    )
    found = one(check_document(doc), "target model")
    assert not found.ok
    assert "its model_name 'base@0' asks for one fixed step; leave out '@0'" in found.message


def test_one_generation_needs_the_batch(tmp_path: Path):
    single = {"b": {"num_generations": 1}}
    found = one(check_document(document(tmp_path, trajectory_builders=single)), "group size")
    assert not found.ok
    assert "trajectory_builders.b.num_generations is 1" in found.message
    assert "training.baseline: batch in trainer_adapters.a" in found.message
    batch = {"a": {"training": {"baseline": "batch"}}}
    doc = document(tmp_path, trajectory_builders=single, trainer_adapters=batch)
    assert one(check_document(doc), "group size").ok


def test_groups_smaller_than_the_smallest(tmp_path: Path):
    found = one(check_document(document(tmp_path, finetuning={"min_group_size": 4})), "group size")
    assert not found.ok
    assert "num_generations is 2 but finetuning.min_group_size is 4" in found.message


# ---- how much there is to do ------------------------------------------------------------------------


def test_the_seed_s_own_learning_rate_can_hardly_move_the_model(tmp_path: Path):
    slow = {"a": {"training": {"learning_rate": "1e-6"}}}
    planned = plan(document(tmp_path, trainer_adapters=slow), 50)
    # 50 examples x 2 generations x 20 epochs; 50 groups in steps of 8 are 7 steps an epoch.
    assert (planned.rollouts, planned.jobs, planned.optimizer_steps) == (2000, 20, 140)
    found = check_movement(planned)
    assert found.ok and found.warning
    # 140 x 1e-6 = 1.4e-4
    assert "140 optimizer steps at learning_rate 1e-06: each weight moves by about 1.4e-04" in (
        found.message
    )
    assert "can hardly move the model. Raise training.learning_rate" in found.message


def test_a_faster_one_can(tmp_path: Path):
    found = check_movement(plan(document(tmp_path), 50))
    # 140 x 5e-5 = 7e-3; falling to 0 it is half of that.
    assert not found.warning
    assert "7.0e-03" in found.message
    falling = {"a": {"training": {"schedule": "linear"}}}
    planned = plan(document(tmp_path, trainer_adapters=falling), 50)
    assert "3.5e-03" in check_movement(planned).message
    still = {"a": {"training": {"learning_rate": 0}}}
    assert not check_movement(plan(document(tmp_path, trainer_adapters=still), 50)).warning


def test_rounds_and_partial_epochs(tmp_path: Path):
    parts = {"groups_per_step": 12, "examples_per_epoch": 30, "num_epochs": 2}
    planned = plan(document(tmp_path, finetuning=parts), 50)
    # 30 of 50 examples: rounds of 12, 12 and 6, which are 2 + 2 + 1 optimizer steps.
    assert (planned.examples, planned.rounds, planned.jobs) == (30, 3, 6)
    assert (planned.rollouts, planned.optimizer_steps) == (120, 10)
    nothing = plan(document(tmp_path), 0)
    assert (nothing.rollouts, nothing.jobs, nothing.optimizer_steps) == (0, 0, 0)
