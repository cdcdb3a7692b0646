"""`hone finetune` from the command's options to its exit status, over parts that need no server."""

import errno
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes import SickAdapter
from tests.finetune.command import AGENT, DOCUMENT, Command, Parts
from tests.prose import Prose, place_of

from hone.config.problems import ConfigProblems, dotted
from hone.errors import ConfigError, Conflict, DiskFull
from hone.finetune.journal import Journal


def test_a_run_ends_with_0_a_report_and_everything_closed(
    command: Command, caplog: pytest.LogCaptureFixture, plots: list[Path]
):
    assert command(validation_dataset=Path("val.json")) == 0
    last = caplog.records[-1]
    assert last.levelname == "INFO"
    assert last.message == f"Finetuning completed successfully: 2 epochs, run {command.run_id}"
    assert Parts.closed == ["builder", "adapter"]
    (started,) = command.events("run_started")
    assert (started["examples"], started["validation_examples"], started["epochs"]) == (2, 2, 2)
    assert (started["session"], started["resumed"], started["generations"]) == (1, False, 2)
    (finished,) = command.events("run_finished")
    assert (finished["status"], finished["step"], finished["best_step"]) == ("completed", 2, 0)
    report = json.loads((command.out / "report.json").read_text())
    assert report["epochs"] == 2
    assert (command.out / "report.html").exists()
    assert len(plots) == 1 and plots[0].stat().st_size > 1000


def test_a_run_that_trained_nothing_says_so_last(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.adapter.reason = "every group has equal rewards"
    assert command() == 0
    last = caplog.records[-1]
    assert (last.levelname, last.message) == (
        "WARNING",
        f"Nothing was trained in 2 epochs of run {command.run_id}: every group has equal rewards.",
    )
    assert "completed successfully" not in caplog.text
    (finished,) = command.events("run_finished")
    assert finished["message"] == last.message


def test_a_run_with_equal_rewards_says_last_what_to_change(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.builder.reward = lambda *at: 0.5
    Parts.adapter.reason = "no gradient step: 2 of 2 groups have equal rewards"
    assert command() == 0
    assert caplog.records[-1].message == (
        f"Nothing was trained in 2 epochs of run {command.run_id}: no gradient step: 2 of 2 groups have "
        "equal rewards. Groups of equal rewards teach nothing: raise num_generations or `temperature`, "
        "or let the reward tell better answers from worse ones."
    )
    assert "Result: " not in caplog.text


def test_the_result_is_logged_before_the_last_line(
    command: Command, caplog: pytest.LogCaptureFixture
):
    assert command(validation_dataset=Path("val.json")) == 0
    result, report, _ = (record.message for record in caplog.records[-3:])
    numbers = json.loads((command.out / "report.json").read_text())
    assert result == f"Result: {numbers['headline']}"
    assert "held-out reward" in result.lower()
    assert report.startswith("Report: ")


def test_a_curriculum_that_leaves_nothing_says_so_last(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.builder.reward = lambda *at: 0.5
    assert command(("finetuning.curriculum_learning.enabled", "true")) == 0
    assert caplog.records[-1].message == (
        f"Nothing was trained in 2 epochs of run {command.run_id}: the curriculum left no group to "
        "train on."
    )


def test_an_error_without_words_is_named_by_its_class(
    command: Command, caplog: pytest.LogCaptureFixture
):
    def reward(*at: object) -> float:
        return {}["reward"]

    Parts.builder.reward = reward
    assert command() == 1
    last = caplog.records[-1].message
    assert last == f"epoch 1 of run {command.run_id}: KeyError: 'reward'"


COLLAPSES = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def run(input: str) -> str:
    with SEEN.open("a") as file:
        file.write("x")
    return input if SEEN.stat().st_size <= 6 else "no"

def score(item):
    return float(item.output_obj == "no" and item.id in "abcd")
"""


def test_the_console_names_a_model_that_answers_everything_alike(
    command: Command, caplog: pytest.LogCaptureFixture
):
    """The first validation answers six questions in six ways, the last one all of them with `no`."""
    (command.directory / "agent.py").write_text(COLLAPSES)
    rows = [{"id": name, "question": f"Is {name} odd?"} for name in "abcdef"]
    (command.directory / "val.json").write_text(json.dumps(rows))
    assert command(validation_dataset=Path("val.json")) == 0
    warnings = [r.message for r in caplog.records if "the same answer" in r.message]
    # `no` is right for four of six.
    assert [message.split(". ")[0] for message in warnings] == [
        "The trained model gives every example the same answer, 'no', and 2 of these 6 answers have "
        "a low reward"
    ]
    answers = json.loads((command.out / "report.json").read_text())["answers"]
    assert (answers["before"], answers["after"], answers["warning"]) == (6, 1, warnings[0])


def test_no_file_holds_a_secret(command: Command):
    command()
    effective = yaml.safe_load((command.out / "config_effective.yml").read_text())
    assert effective["trainer_adapters"]["a"] == {"_type": "memory_adapter", "api_key": "<hidden>"}
    assert effective["finetuning"]["num_epochs"] == 2
    for path in command.out.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


def test_no_file_holds_a_secret_of_the_command_line_or_the_environment(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_TOKEN", "open-sesame-env")
    option = ("trainer_adapters.a.api_key", "open-sesame-opt")
    options = ["hone", "finetune", "--config_file=train.yml", "-o", *option, "--x=open-sesame-env"]
    monkeypatch.setattr(sys, "argv", options)
    command(option)
    (started,) = command.events("run_started")
    assert "-o trainer_adapters.a.api_key '<hidden>'" in started["command"]
    assert "<hidden>" in started["again"]
    # It resumes the run wherever it is pasted.
    place, hone = shlex.quote(str(Path.cwd())), shlex.join(shlex.split(started["program"]))
    assert started["again"].startswith(f"cd {place} && {hone} finetune --config_file=train.yml ")
    assert Path(shlex.split(hone)[0]).is_absolute()
    for path in command.out.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


def test_a_finished_run_has_nothing_to_do_and_more_epochs_go_on(
    command: Command, caplog: pytest.LogCaptureFixture
):
    assert command() == 0
    caplog.clear()
    assert command() == 0
    output = caplog.records[-1].message
    assert output.startswith(
        f"Run {command.run_id} is finished, nothing to do. Finetuning completed"
    )
    assert command(("finetuning.num_epochs", "3"), ("eval.general.max_concurrency", "1")) == 0
    assert len(Parts.adapter.jobs) == 3
    assert [e["resumed"] for e in command.events("run_started")] == [False, True]
    assert len(command.events("preflight")) == 1


def test_a_failed_epoch_exits_with_1_and_the_last_line_says_why(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.adapter.fail = lambda key: "CUDA out of memory"
    assert command() == 1
    last = caplog.records[-1]
    assert last.levelname == "ERROR"
    assert last.message == f"epoch 1 of run {command.run_id}: CUDA out of memory"
    assert command.events("run_finished")[-1]["status"] == "failed"
    assert json.loads((command.out / "report.json").read_text())["epochs"] == 0
    text = (command.out / "report.md").read_text()
    assert text.startswith("# The run failed after 0 of 2 epochs\n")
    assert "| epochs | 0 of 2 |" in text
    Parts.adapter.fail = lambda key: None
    assert command() == 0
    assert len(Parts.builder.ran) == 8


def test_an_epoch_without_trajectories_is_no_success(command: Command):
    Parts.builder.reward = lambda *at: "token_limit"
    assert command() == 1
    assert "No trajectories collected for epoch 1" in command.events("run_finished")[0]["message"]


def test_stopping_early_is_a_success_and_stays_one(
    command: Command, caplog: pytest.LogCaptureFixture
):
    stop = ("finetuning.early_stopping.patience", "1"), ("finetuning.num_epochs", "9")
    options: dict[str, Any] = {"validation_dataset": Path("val.json"), "validation_interval": 1}
    assert command(*stop, **options) == 0
    assert caplog.records[-1].message.startswith("Stopped early after 1 epoch: val/reward has not")
    assert len(Parts.adapter.jobs) == 1
    assert command(*stop, **options) == 0
    assert "nothing to do" in caplog.records[-1].message
    assert len(Parts.adapter.jobs) == 1


@pytest.mark.parametrize("dry_run", [False, True])
def test_early_stopping_without_a_validation_set_is_refused(
    prose: Prose, command: Command, dry_run: bool
):
    config = command.file
    text = config.read_text().replace(
        "finetuning:\n", "finetuning:\n  early_stopping: {patience: 1}\n"
    )
    config.write_text(text)
    with pytest.raises(ConfigProblems) as refused:
        command(dry_run=dry_run)
    prose(refused)
    line = text.splitlines().index("  early_stopping: {patience: 1}") + 1
    assert place_of(refused) == f"{config}:{line}"
    assert not (command.directory / "out").exists()
    assert Parts.builder.ran == []


def test_another_configuration_is_refused_unless_fresh(prose: Prose, command: Command):
    assert command() == 0
    old = command.run_id
    with pytest.raises(Conflict) as caught:
        command(("finetuning.seed", "7"))
    prose(caught)
    assert "finetuning.seed: None then, 7 now" in str(caught.value)
    assert command(("finetuning.seed", "7"), fresh=True) == 0
    assert command.run_id != old
    assert Parts.adapter.anew == [old]
    assert (command.directory / f"out.{old}" / "report.json").exists()
    assert command(("finetuning.seed", "7"), ("finetuning.resume", "never")) == 0
    assert len(Parts.adapter.anew) == 2


@pytest.mark.parametrize(
    ("trainer", "prefix"), [("openpipe_art_trainer", "art_run_"), ("rl", "run_")]
)
def test_the_id_of_a_run_follows_the_name_of_its_trainer(
    command: Command, trainer: str, prefix: str
):
    assert command(("trainers.t._type", trainer)) == 0
    assert command.run_id.startswith(prefix)


def test_without_output_dir_two_files_of_one_name_share_no_run(prose: Prose, command: Command):
    config = command.file.read_text().replace("  output_dir: out\n", "")
    assert "output_dir" not in config
    command.file.write_text(config)
    assert command() == 0
    run = command.directory / ".hone/runs/train/run.json"
    before = run.read_text()
    (command.directory / "other").mkdir()
    command.file = command.file.rename(command.directory / "other/train.yml")
    command.file.write_text(config.replace("agent.py", "../agent.py") + "\nllms: {}\n")
    with pytest.raises(Conflict) as caught:
        command()
    prose(caught)
    assert run.read_text() == before


def test_what_preflight_refuses_is_not_started(command: Command, caplog: pytest.LogCaptureFixture):
    Parts.adapter = SickAdapter()
    assert command() == 1
    assert Parts.builder.ran == []
    output = caplog.records[-1].message
    assert output.startswith("the run was not started; 1 check failed:\nserver: ")
    assert "is_healthy() of SickAdapter returned False" in output
    checks = command.events("preflight")[0]["checks"]
    assert [check["name"] for check in checks if not check["ok"]] == ["server"]
    assert Parts.closed == ["builder", "adapter"]


def test_missing_parts_of_a_run_are_reported_before_anything_is_opened(
    prose: Prose, command: Command
):
    with pytest.raises(ConfigError) as caught:
        command(("finetuning.enabled", "false"))
    prose(caught)
    document = {**DOCUMENT, "finetuning": {**DOCUMENT["finetuning"], "reward_function": None}}
    command.file.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        command()
    prose(caught)
    assert not command.out.exists() and Parts.closed == []


def test_all_missing_parts_of_a_run_are_reported_at_once(command: Command):
    finetuning = {**DOCUMENT["finetuning"], "reward_function": None, "target_functions": ["serch"]}
    document = {**DOCUMENT, "finetuning": {**finetuning, "num_epoch": 3}}
    del document["workflow"]
    command.file.write_text(yaml.safe_dump(document))
    (command.directory / "val.yml").write_text("eval: {general: {max_concurency: 1}}\n")
    with pytest.raises(ConfigProblems) as caught:
        command(validation_config_file=Path("val.yml"))
    output = [(p.place.file, dotted(p.path)) for p in caught.value.problems]
    assert output == [
        (str(command.file), "workflow"),
        (str(command.file), "finetuning.num_epoch"),
        (str(command.file), "finetuning.reward_function"),
        (str(command.file), "finetuning.target_functions.0"),
        ("val.yml", "eval.general.max_concurency"),
        ("val.yml", "workflow"),
        ("val.yml", "eval.general.dataset"),
    ]
    assert not command.out.exists() and Parts.closed == []


def test_a_dataset_of_the_command_is_one(prose: Prose, command: Command):
    document = {**DOCUMENT, "eval": {"evaluators": DOCUMENT["eval"]["evaluators"]}}
    command.file.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigProblems) as caught:
        command()
    prose(caught)
    assert place_of(caught) == f"{command.file}:1"
    assert command(dataset=Path("train.json")) == 0


def test_an_empty_dataset_is_named(prose: Prose, command: Command):
    with pytest.raises(ConfigProblems) as caught:
        command(dataset=Path("empty.json"))
    prose(caught)
    assert place_of(caught).endswith("--dataset empty.json")


def test_validation_may_have_a_configuration_of_its_own(command: Command):
    other = {**DOCUMENT, "finetuning": {"enabled": False}}
    other["eval"] = {
        **DOCUMENT["eval"],
        "general": {"dataset": {"_type": "json", "file_path": "val.json"}},
    }
    (command.directory / "val.yml").write_text(yaml.safe_dump(other))
    assert command(validation_config_file=Path("val.yml")) == 0
    assert command.events("validation")[0]["rewards"] == {"x": [0.5], "y": [0.5]}
    assert "validation_evaluator" not in command.events("run_started")[0]


def test_another_evaluator_of_the_validation_is_reported(command: Command):
    other = {**DOCUMENT, "finetuning": {"enabled": False}}
    general = {"dataset": {"_type": "json", "file_path": "val.json"}}
    half = {"_type": "python", "target": "agent.py:half"}
    other["eval"] = {"general": general, "evaluators": {"score": half}}
    (command.directory / "val.yml").write_text(yaml.safe_dump(other))
    (command.directory / "agent.py").write_text(AGENT + "\ndef half(item):\n    return 0.25\n")
    assert command(validation_config_file=Path("val.yml")) == 0
    (started,) = command.events("run_started")
    assert started["evaluator"] == "score (agent.py:score)"
    assert started["validation_evaluator"] == "score (agent.py:half)"
    report = (command.out / "report.md").read_text()
    assert "score (agent.py:score); held out score (agent.py:half)" in report
    assert "heights cannot be compared" in report


def test_the_time_counts_from_the_command(command: Command):
    assert command() == 0
    (started,), (finished,) = command.events("run_started"), command.events("run_finished")
    assert started["began"] < started["at"]
    report = json.loads((command.out / "report.json").read_text())
    assert report["seconds"] == pytest.approx(finished["at"] - started["began"])
    assert report["phases"]["start_s"] >= started["at"] - started["began"]


def test_a_dry_run_says_how_much_there_is_to_do(
    prose: Prose,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    assert command(dry_run=True, validation_dataset=Path("val.json")) == 0
    output = capsys.readouterr().out
    assert "backend       memory_adapter" in output
    # Held out: two examples before and after the two epochs.
    assert "validation    2 examples x 1 after 0, 2 epochs: 4 rollouts" in output
    assert "run           a new one" in output
    assert not command.out.exists()
    assert Parts.closed == []
    command()
    capsys.readouterr()
    assert command(("finetuning.num_epochs", "3"), dry_run=True) == 0
    output = capsys.readouterr().out
    assert f"resumes {command.run_id}, of which 2 epochs are done" in output
    assert "left          1 epoch: at most 2 rollouts, 1 job\n" in output
    assert command(dry_run=True) == 0
    assert f"run           {command.run_id} is finished, nothing to do" in capsys.readouterr().out
    assert command(fresh=True, dry_run=True) == 0
    aside = f"a new one; the one before is moved to {command.out}.{command.run_id}"
    assert aside in capsys.readouterr().out
    with pytest.raises(ConfigProblems) as caught:
        command(("finetuning.target_functions.0", "serch"), dry_run=True)
    prose(caught)
    with pytest.raises(ConfigProblems) as wrong:
        command(
            ("workflow.target", "agent.py:rum"),
            ("eval.evaluators.score.target", "agnt.py:score"),
            dry_run=True,
            validation_dataset=Path("empty.json"),
        )
    first, second, third = map(str, wrong.value.problems)
    assert first.startswith("-o workflow.target: 'agent.py:rum': ")
    assert first.endswith("has no 'rum'. Did you mean 'run'?")
    assert second.startswith("-o eval.evaluators.score.target: 'agnt.py:score': there is no file")
    assert third.startswith("--validation_dataset empty.json: no row is left to run")


def test_a_dry_run_says_what_is_left_to_validate(
    command: Command, capsys: pytest.CaptureFixture[str]
):
    held_out = {"validation_dataset": Path("val.json"), "validation_interval": 1}
    assert command(("finetuning.num_epochs", "1"), **held_out) == 0
    capsys.readouterr()
    assert command(("finetuning.num_epochs", "3"), **held_out, dry_run=True) == 0
    output = capsys.readouterr().out
    # After 0 epochs and after 1 the reward is known.
    assert "of which 1 epoch is done" in output
    assert (
        "left          2 epochs: at most 4 rollouts, 2 jobs; validation after 2, 3 epochs: "
        "4 rollouts\n"
    ) in output
    assert command(("finetuning.num_epochs", "3"), **held_out) == 0
    assert [event["epoch"] for event in command.events("validation")] == [0, 1, 2, 3]


def test_one_broken_file_hides_nothing_of_the_others(prose: Prose, command: Command):
    broken = command.directory / "broken.yml"
    broken.write_text("llms:\n  policy: {_type: trainable\nworkflow: x\n")
    with pytest.raises(ConfigProblems) as wrong:
        command(
            ("workflow.target", "agent.py:rum"),
            dry_run=True,
            dataset=Path("nowhere.json"),
            validation_config_file=broken,
            validation_dataset=Path("empty.json"),
        )
    first, second, third, fourth = map(str, wrong.value.problems)
    assert first.startswith("-o workflow.target: 'agent.py:rum': ")
    assert second.startswith(f"{broken}:3: not YAML: ")
    assert third == "--dataset nowhere.json: no such file"
    assert fourth.startswith("--validation_dataset empty.json: no row is left to run")
    sound, command.file = command.file, broken
    sound.write_text(sound.read_text().replace("agent.py:score", "agent.py:scroe"))
    with pytest.raises(ConfigProblems) as wrong:
        command(dry_run=True, validation_config_file=sound)
    first, second = map(str, wrong.value.problems)
    assert first.startswith(f"{broken}:3: not YAML: ")
    assert second.endswith("has no 'scroe'. Did you mean 'score'?")
    command.file = command.directory / "nowhere.yml"
    with pytest.raises(ConfigProblems) as caught:
        command(dry_run=True, validation_config_file=sound)
    prose(caught)
    assert place_of(caught).endswith("nowhere.yml")


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_the_validations_file_refers_to_is_checked(command: Command, dry_run: bool):
    other = command.directory / "validation.yml"
    document = yaml.safe_load(command.file.read_text())
    document["workflow"]["target"] = "agent.py:rum"
    document["eval"]["general"]["dataset"]["file_path"] = "vla.json"
    document["eval"]["evaluators"] = {"length": {"_type": "exact_match"}}
    document["finetuning"] = {"enabled": False}
    other.write_text(yaml.safe_dump(document, sort_keys=False))
    lines = other.read_text().splitlines()

    def line(text: str) -> int:
        return 1 + next(i for i, one in enumerate(lines) if text in one)

    with pytest.raises(ConfigProblems) as wrong:
        command(dry_run=dry_run, validation_config_file=other)
    output = [str(problem) for problem in wrong.value.problems]
    assert len(output) == 3
    for place, words in {
        f"{other}:{line('agent.py:rum')}: workflow.target: ": "has no 'rum'. Did you mean 'run'?",
        f"{other}:{line('vla.json')}: eval.general.dataset.file_path: ": "there is no ",
        f"{other}:{line('evaluators:')}: eval.evaluators: ": "has no 'score', the reward",
    }.items():
        assert any(one.startswith(place) and words in one for one in output), (place, output)
    assert not command.out.exists()
    other.write_text("llms: {}\n")
    with pytest.raises(ConfigProblems) as wrong:
        command(dry_run=dry_run, validation_config_file=other)
    missing = {problem.path: problem.message for problem in wrong.value.problems}
    assert set(missing) == {("workflow",), ("eval", "evaluators"), ("eval", "general", "dataset")}


def test_a_file_of_examples_is_read_as_a_broken_configuration_says(command: Command):
    document = yaml.safe_load(command.file.read_text())
    document["eval"]["general"]["dataset"]["structure"] = {"question_key": "q"}
    document["finetuning"]["num_epoch"] = 3
    command.file.write_text(yaml.safe_dump(document))
    (command.directory / "train.json").write_text('[{"q": "a"}]')
    (command.directory / "val.json").write_text('[{"q": "x"}]')
    with pytest.raises(ConfigProblems) as wrong:
        command(dry_run=True, validation_dataset=Path("val.json"))
    (problem,) = wrong.value.problems  # and nothing of a column 'question'
    assert problem.path == ("finetuning", "num_epoch")


def test_a_run_does_not_go_on_with_other_code_and_the_dry_run_says_so(
    command: Command, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    agent = command.directory / "agent.py"
    source = agent.read_text()
    agent.write_text(f"import wording\n{source}")
    (command.directory / "wording.py").write_text("TONE = 'dry'\n")
    longer = ("finetuning.num_epochs", "3")
    assert command(validation_dataset=Path("val.json")) == 0
    (command.directory / "wording.py").write_text("TONE = 'warm'\n")
    (command.directory / "val.json").write_text('[{"id": "z", "question": "z"}]')
    with pytest.raises(Conflict) as refused:
        command(longer, validation_dataset=Path("val.json"))
    lines = str(refused.value).splitlines()
    assert lines[1:3] == [
        "  wording.py: the code has changed",
        "  command.validation_dataset: the content of val.json has changed",
    ]
    assert "Undo the change" in lines[3] and "--fresh" in lines[3]
    caplog.clear()
    assert command(longer, dry_run=True, validation_dataset=Path("val.json")) == 1
    assert "refuses to start" in capsys.readouterr().out
    assert caplog.messages[-1] == f"run: {refused.value}"
    # Put back, it goes on.
    (command.directory / "wording.py").write_text("TONE = 'dry'\n")
    rows = [{"id": q, "question": q} for q in "xy"]
    (command.directory / "val.json").write_text(json.dumps(rows))
    assert command(longer, dry_run=True, validation_dataset=Path("val.json")) == 0
    assert command(longer, validation_dataset=Path("val.json")) == 0


def test_a_dry_run_sees_that_another_process_holds_the_run(
    command: Command, caplog: pytest.LogCaptureFixture
):
    with Journal.open(command.out, {}):
        assert command(dry_run=True) == 1
    assert "is in use by another `hone finetune`" in caplog.messages[-1]
    assert command(dry_run=True) == 0


@pytest.mark.parametrize("writes", [1, 12, 20])
def test_a_full_disk_ends_a_run_with_its_name(
    prose: Prose, command: Command, monkeypatch: pytest.MonkeyPatch, writes: int
):
    """After so many durable writes, whatever file is next."""
    left, sync = [writes], os.fsync

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with (
        monkeypatch.context() as full,
        pytest.raises(DiskFull) as caught,
    ):
        full.setattr(os, "fsync", fsync)
        command()
    prose(caught)
    assert command() == 0
    assert len(Parts.builder.ran) == len(set(Parts.builder.ran)) == 8


def test_a_validation_by_comparison_is_warned_of(command: Command):
    document = yaml.safe_load(command.file.read_text())
    judge = {"_type": "openai", "base_url": "http://127.0.0.1:9/v1", "model_name": "m"}
    document["llms"] = {"judge": judge | {"max_retries": 0}}
    document["eval"]["evaluators"] = {"score": {"_type": "ruler", "llm": "judge"}}
    command.file.write_text(yaml.safe_dump(document))
    command(validation_dataset=Path("val.json"))
    warnings = [event["message"] for event in command.events("warning")]
    assert warnings[0].startswith("the evaluator 'score' compares the rollouts of one policy")
