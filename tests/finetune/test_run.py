"""`hone finetune` from the command's options to its exit status, over parts that need no server."""

import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes import MemoryAdapter, ScriptedBuilder

from hone.config.registry import (
    TrainerAdapterConfig,
    TrajectoryBuilderConfig,
    register_trainer_adapter,
    register_trajectory_builder,
)
from hone.errors import ConfigError, Conflict
from hone.events import read as read_events
from hone.finetune.run import FinetuneOptions, finetune


class ScriptedBuilderConfig(TrajectoryBuilderConfig, name="scripted_builder"):
    """Of this file's tests."""


class MemoryAdapterConfig(TrainerAdapterConfig, name="memory_adapter"):
    """Of this file's tests."""

    api_key: str = ""


class Parts:
    """What the factories give; a test puts its own there."""

    builder: ScriptedBuilder
    adapter: MemoryAdapter
    closed: list[str]


@register_trajectory_builder(config_type=ScriptedBuilderConfig)
async def scripted_builder(config: Any, builder: Any) -> AsyncIterator[ScriptedBuilder]:
    yield Parts.builder
    Parts.closed.append("builder")


@register_trainer_adapter(config_type=MemoryAdapterConfig)
async def memory_adapter(config: Any, builder: Any) -> AsyncIterator[MemoryAdapter]:
    yield Parts.adapter
    Parts.closed.append("adapter")


AGENT = """
def run(input: str) -> str:
    if "broken" in input:
        raise ConnectionError("no tool")
    return "0.5"

def score(item):
    return float(item.output_obj)
"""

DOCUMENT: dict[str, Any] = {
    "workflow": {"_type": "python", "target": "agent.py:run"},
    "eval": {
        "general": {"dataset": {"_type": "json", "file_path": "train.json"}},
        "evaluators": {"score": {"_type": "python", "target": "agent.py:score"}},
    },
    "trajectory_builders": {"b": {"_type": "scripted_builder"}},
    "trainer_adapters": {"a": {"_type": "memory_adapter", "api_key": "sesame"}},
    "trainers": {"t": {"_type": "openpipe_art_trainer"}},
    "finetuning": {
        "enabled": True,
        "trainer": "t",
        "trajectory_builder": "b",
        "trainer_adapter": "a",
        "reward_function": {"name": "score"},
        "num_epochs": 2,
        "output_dir": "out",
    },
}


def rising(epoch: int, example: str, generation: int) -> float:
    return 0.1 + 0.2 * generation + 0.1 * epoch


class Command:
    """`hone finetune` in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "out"
        (directory / "agent.py").write_text(AGENT)
        for name, questions in {"train": "ab", "val": "xy", "empty": ""}.items():
            rows = [{"id": q, "question": q} for q in questions]
            (directory / f"{name}.json").write_text(json.dumps(rows))
        self.file = directory / "train.yml"
        self.file.write_text(yaml.safe_dump(DOCUMENT))

    def __call__(self, *override: tuple[str, str], **options: Any) -> int:
        return finetune(FinetuneOptions(config_file=self.file, override=override, **options))

    def events(self, type: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.out / "events.jsonl") if e["type"] == type]

    @property
    def run_id(self) -> str:
        return json.loads((self.out / "run.json").read_text())["run_id"]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Command:
    monkeypatch.chdir(tmp_path)
    Parts.builder, Parts.adapter, Parts.closed = ScriptedBuilder(rising), MemoryAdapter(), []
    caplog.set_level(logging.INFO, logger="hone")
    return Command(tmp_path)


def test_a_run_ends_with_0_a_report_and_everything_closed(
    command: Command, caplog: pytest.LogCaptureFixture
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


def test_no_file_holds_a_secret(command: Command):
    command()
    effective = yaml.safe_load((command.out / "config_effective.yml").read_text())
    assert effective["trainer_adapters"]["a"] == {"_type": "memory_adapter", "api_key": "<hidden>"}
    assert effective["finetuning"]["num_epochs"] == 2
    for path in command.out.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


def test_a_finished_run_has_nothing_to_do_and_more_epochs_go_on(
    command: Command, caplog: pytest.LogCaptureFixture
):
    assert command() == 0
    caplog.clear()
    assert command() == 0
    said = caplog.records[-1].message
    assert said.startswith(f"Run {command.run_id} is finished, nothing to do. Finetuning completed")
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
    told: dict[str, Any] = {"validation_dataset": Path("val.json"), "validation_interval": 1}
    assert command(*stop, **told) == 0
    assert caplog.records[-1].message.startswith("Stopped early after 1 epoch: val/reward has not")
    assert len(Parts.adapter.jobs) == 1
    assert command(*stop, **told) == 0
    assert "nothing to do" in caplog.records[-1].message
    assert len(Parts.adapter.jobs) == 1


def test_another_configuration_is_refused_unless_fresh(command: Command):
    assert command() == 0
    old = command.run_id
    with pytest.raises(Conflict, match=r"finetuning\.seed: None then, 7 now"):
        command(("finetuning.seed", "7"))
    assert command(("finetuning.seed", "7"), fresh=True) == 0
    assert command.run_id != old
    assert Parts.adapter.anew == [old]
    assert (command.directory / f"out.{old}" / "report.json").exists()
    assert command(("finetuning.seed", "7"), ("finetuning.resume", "never")) == 0
    assert len(Parts.adapter.anew) == 2


def test_what_preflight_refuses_is_not_started(command: Command, caplog: pytest.LogCaptureFixture):
    assert command(("finetuning.target_functions.0", "serch")) == 1
    assert Parts.builder.ran == []
    assert "the run was not started; 1 check failed" in caplog.records[-1].message
    assert "'serch'" in caplog.records[-1].message
    assert command.events("preflight")[0]["checks"][0]["ok"] is True
    assert Parts.closed == ["builder", "adapter"]


def test_what_a_run_cannot_do_without_is_said_before_anything_is_opened(command: Command):
    with pytest.raises(ConfigError, match="Finetuning is not enabled in the provided config"):
        command(("finetuning.enabled", "false"))
    document = {**DOCUMENT, "finetuning": {**DOCUMENT["finetuning"], "reward_function": None}}
    command.file.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"reward_function: missing; name one of .*\(score\)"):
        command()
    assert not command.out.exists()


def test_an_empty_dataset_is_named(command: Command, caplog: pytest.LogCaptureFixture):
    assert command(dataset=Path("empty.json")) == 1
    assert "empty.json" in caplog.records[-1].message


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


def test_another_evaluator_of_the_validation_is_told(command: Command):
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
    assert "heights cannot be compared" in (command.out / "report.md").read_text()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As a program starts; pytest's workers do not listen to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_a_report_and_the_command_that_goes_on(
    command: Command, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def interrupting(epoch: int, example: str, generation: int) -> float:
        if (epoch, example, generation) == (1, "b", 1):
            Parts.adapter.hangs = True  # so that it is in the middle of something
            signal.raise_signal(signal.SIGINT)
        return rising(epoch, example, generation)

    monkeypatch.setattr("sys.argv", ["hone", "finetune", "--config_file=train.yml", "--fresh"])
    Parts.builder.reward = interrupting
    assert command(validation_dataset=Path("val.json")) == 130
    assert caplog.records[-1].levelname == "ERROR"
    goes_on = f"Interrupted. The same command goes on with run {command.run_id}."
    assert caplog.records[-1].message == goes_on
    assert Parts.closed == ["builder", "adapter"]
    assert command.events("run_finished") == [] and len(command.events("run_interrupted")) == 1
    report = json.loads((command.out / "report.json").read_text())
    assert (report["status"], report["epochs"], report["epochs_planned"]) == ("unfinished", 1, 2)
    text = (command.out / "report.md").read_text()
    assert text.startswith("# The run was interrupted after 1 of 2 epochs\n\nIt is not finished;")
    assert "\nhone finetune --config_file=train.yml\n" in text.split("## Go on")[1]
    Parts.builder.reward, Parts.adapter.hangs = rising, False
    assert command(validation_dataset=Path("val.json")) == 0
    assert json.loads((command.out / "report.json").read_text())["status"] == "completed"
    assert "## Go on" not in (command.out / "report.md").read_text()


@pytest.mark.usefixtures("ctrl_c")
def test_a_report_that_cannot_be_written_does_not_hide_ctrl_c(
    command: Command, caplog: pytest.LogCaptureFixture
):
    def interrupting(epoch: int, example: str, generation: int) -> float:
        (command.out / "report.json").mkdir(exist_ok=True)  # a file cannot take its place
        signal.raise_signal(signal.SIGINT)
        return 0.5

    Parts.builder.reward = interrupting
    assert command(fresh=True) == 130
    warned, last = caplog.records[-2:]
    assert warned.message.startswith("The report could not be written: IsADirectoryError: ")
    assert last.message == (
        "Interrupted. Without --fresh and finetuning.resume: never the same command goes on with "
        f"run {command.run_id}."
    )


def test_the_time_counts_from_the_command(command: Command):
    assert command() == 0
    (started,), (finished,) = command.events("run_started"), command.events("run_finished")
    assert started["began"] < started["at"]
    report = json.loads((command.out / "report.json").read_text())
    assert report["seconds"] == pytest.approx(finished["at"] - started["began"])
    assert report["phases"]["start_s"] >= started["at"] - started["began"]


def test_a_dry_run_says_how_much_there_is_to_do(
    command: Command, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    assert command(dry_run=True, validation_dataset=Path("val.json")) == 0
    said = capsys.readouterr().out
    assert "backend       memory_adapter" in said
    # Held out: two examples before and after the two epochs.
    assert "validation    2 examples x 1 after 0, 2 epochs: 4 rollouts" in said
    assert "run           a new one" in said
    assert not command.out.exists()
    assert Parts.closed == []
    command()
    assert command(("finetuning.num_epochs", "3"), dry_run=True) == 0
    assert f"goes on with {command.run_id}, of which 2 epochs are done" in capsys.readouterr().out
    assert command(("finetuning.target_functions.0", "serch"), dry_run=True) == 1
    assert "'serch'" in caplog.records[-1].message
    assert command(("workflow.target", "agent.py:rum"), dry_run=True) == 1
    said = caplog.records[-1].message
    assert said.startswith("workflow: target: 'agent.py:rum': ")
    assert said.endswith("has no 'rum'. Did you mean 'run'?")
    assert command(("eval.evaluators.score.target", "agnt.py:score"), dry_run=True) == 1
    assert "eval.evaluators.score: target: 'agnt.py:score': there is" in caplog.records[-1].message
