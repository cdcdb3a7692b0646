"""`hone finetune` after Ctrl-C, or without its server: its messages, its files, and that it resumes."""

import asyncio
import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import MemoryAdapter, ScriptedBuilder
from tests.finetune.command import Command, Parts, rising

from hone.errors import HoneError, ServerError

pytestmark = pytest.mark.usefixtures("ctrl_c")


def in_its_second_epoch(epoch: int, example: str, generation: int) -> float:
    """Ctrl-C before its last rollout ends, in the middle of something."""
    if (epoch, example, generation) == (1, "b", 1):
        Parts.adapter.hangs = True
        signal.raise_signal(signal.SIGINT)
    return rising(epoch, example, generation)


def test_ctrl_c_leaves_a_report_and_the_command_that_goes_on(
    command: Command,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    plots: list[Path],
):
    monkeypatch.setattr("sys.argv", ["hone", "finetune", "--config_file=train.yml", "--fresh"])
    Parts.builder.reward = in_its_second_epoch
    assert command(validation_dataset=Path("val.json")) == 130
    assert caplog.records[-1].levelname == "ERROR"
    goes_on = f"Interrupted. The same command resumes run {command.run_id}."
    assert caplog.records[-1].message == goes_on
    assert Parts.closed == ["builder", "adapter"]
    assert command.events("run_finished") == [] and len(command.events("run_interrupted")) == 1
    report = json.loads((command.out / "report.json").read_text())
    assert (report["status"], report["epochs"], report["epochs_planned"]) == ("unfinished", 1, 2)
    text = (command.out / "report.md").read_text()
    assert text.startswith("# The run was interrupted after 1 of 2 epochs\n\nIt is not finished;")
    assert "](reward_plot.png)" in text and len(plots) == 1
    # In the run's own directory, and without --fresh.
    resume = text.split("## Resume the run")[1].splitlines()[4]
    assert resume.startswith(f"cd {shlex.quote(str(Path.cwd()))} && ")
    assert resume.endswith("hone finetune --config_file=train.yml")
    Parts.builder.reward, Parts.adapter.hangs = rising, False
    assert command(validation_dataset=Path("val.json")) == 0
    assert json.loads((command.out / "report.json").read_text())["status"] == "completed"
    assert "## Resume the run" not in (command.out / "report.md").read_text()
    assert len(plots) == 2


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
    failed = "The report could not be written: StorageError: out/report.json: the file cannot be"
    assert warned.message.startswith(failed) and "Is a directory" in warned.message
    assert last.message == (
        f"Interrupted. The same command resumes run {command.run_id}. Leave out --fresh and "
        "finetuning.resume: never."
    )


class Starting(MemoryAdapter):
    """Is interrupted while it starts its server."""

    async def initialize(self, run_config: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()


def test_ctrl_c_before_anything_has_begun_says_so_in_a_line(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.adapter = Starting()
    assert command() == 130
    begins = f"Interrupted. The same command resumes run {command.run_id}."
    assert [r.message for r in caplog.records if r.levelname != "DEBUG"] == [begins]
    assert not (command.out / "report.json").exists()
    assert (command.out / "events.jsonl").read_bytes() == b""
    Parts.adapter = MemoryAdapter()
    assert command() == 0


def test_ctrl_c_while_a_run_resumes_leaves_a_report_of_the_run_so_far(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.builder.reward = in_its_second_epoch
    assert command() == 130
    before = json.loads((command.out / "report.json").read_text())
    events = (command.out / "events.jsonl").read_bytes()
    (command.out / "report.json").unlink()  # as if it had been killed
    Parts.builder.reward, Parts.adapter = rising, Starting()
    assert command() == 130
    goes_on = f"Interrupted. The same command resumes run {command.run_id}."
    assert caplog.records[-1].message == goes_on
    # The time in between was not the run's: nothing was added to it.
    assert (command.out / "events.jsonl").read_bytes() == events
    assert json.loads((command.out / "report.json").read_text()) == before
    assert before["status"] == "unfinished" and before["epochs"] == 1


def test_ctrl_c_while_a_failed_run_resumes_keeps_its_report(command: Command):
    Parts.adapter.fail = lambda key: "CUDA out of memory"
    assert command() == 1
    before = (command.out / "report.html").read_bytes()
    Parts.adapter = Starting()
    assert command() == 130
    assert (command.out / "report.html").read_bytes() == before


class Lost(MemoryAdapter):
    """Its server ends by itself while the rollouts of the second epoch run."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = asyncio.Event()

    async def ended(self) -> HoneError:
        await self.dead.wait()
        return ServerError("the server ended with exit status -9")


class Calling(ScriptedBuilder):
    """Clients of its agents retry for minutes once the server is gone."""

    cancelled = False

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        assert meta is not None
        await super().start_run(run_id, meta)
        if meta["epoch"] == 1 and isinstance(Parts.adapter, Lost):
            Parts.adapter.dead.set()
            try:
                await asyncio.Event().wait()
            finally:
                Calling.cancelled = True


def test_a_server_that_ends_by_itself_ends_the_run_at_once(
    command: Command, caplog: pytest.LogCaptureFixture
):
    Parts.builder, Parts.adapter = Calling(rising), Lost()
    assert command() == 1
    assert Calling.cancelled
    assert caplog.records[-1].message == (
        f"the server ended with exit status -9\nThe same command resumes run {command.run_id}."
    )
    ran, Parts.adapter = list(Parts.builder.ran), MemoryAdapter()
    assert command() == 0
    assert Parts.builder.ran == ran, "no rollout is repeated"
    assert [event["epoch"] for event in command.events("job_done")] == [0, 1]
