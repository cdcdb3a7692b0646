"""`hone finetune` with loggers, over parts that need no server; rollouts with model calls."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.environments import ROOT, NotInstalled, environment
from tests.fakes import MemoryAdapter, ScriptedBuilder
from tests.finetune.command import DOCUMENT, Command, Parts, rising

from hone.files.rollout_record import CallRecord, RolloutRecord
from hone.types import model_directory

ALL = "HONE_ALL_SINKS"
ASKED = {"role": "user", "content": "How many?"}
ANSWERED = {"role": "assistant", "content": "Seven."}
AGAIN = {"role": "user", "content": "Sure?"}
SURE = {"role": "assistant", "content": "Yes."}
ASIDE = [{"role": "system", "content": "Check."}, {"role": "user", "content": "7?"}]
CHECKED = {"role": "assistant", "content": "Right."}


class TalkingBuilder(ScriptedBuilder):
    """Each rollout has three calls: two of one conversation, and one beside it."""

    async def _rollout(
        self, epoch: int, round: int, example: str, generation: int, id: str
    ) -> RolloutRecord:
        record = await super()._rollout(epoch, round, example, generation, id)
        call: dict[str, Any] = {"function": "<workflow>", "model": "agent", "status": 200}
        call |= {"seconds": 0.5, "prompt_tokens": 11, "completion_tokens": 3, "finish": "stop"}
        call |= {"policy_step": record.epoch, "temperature": 1.0}
        calls = [
            CallRecord(id="c0", at=100.0, num_messages=1, **call),
            CallRecord(id="c1", at=101.0, num_messages=2, messages=ASIDE, reply=CHECKED, **call),
            CallRecord(id="c2", at=102.0, num_messages=3, **call),
        ]
        return record.model_copy(
            update={
                "messages": [ASKED, ANSWERED, AGAIN, SURE],
                "model_calls": calls,
                "policy_steps": [record.epoch],
                "input": "How many?",
                "output": "7",
                "scores": {"score": record.reward},
                "seconds": 2.5,
                "calls": 3,
                "tokens": 9,
            }
        )


class NamedAdapter(MemoryAdapter):
    """Has a model, and writes a checkpoint at every step."""

    root: Path

    def describe(self) -> dict[str, Any]:
        for step in range(4):
            path = model_directory(self.root, "suite", "agent") / "checkpoints" / f"{step:04d}"
            path.mkdir(parents=True, exist_ok=True)
            (path / "adapter_model.safetensors").write_text(f"weights {step}")
            (path / "adapter_config.json").write_text("{}")
        return {
            "name": "agent",
            "project": "suite",
            "base_model": "tiny",
            "root": str(self.root),
        }


class LoggedCommand(Command):
    """`hone finetune` with these loggers."""

    def log_to(self, *loggers: Any) -> None:
        self.file.write_text(yaml.safe_dump(DOCUMENT | {"loggers": list(loggers)}))


def prepared(directory: Path) -> LoggedCommand:
    Parts.builder, Parts.adapter, Parts.closed = TalkingBuilder(rising), NamedAdapter(), []
    Parts.adapter.root = directory / "server"
    return LoggedCommand(directory)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> LoggedCommand:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")  # of the loggers' processes
    caplog.set_level(logging.INFO, logger="hone")
    return prepared(tmp_path)


@pytest.fixture(scope="session")
def packages() -> Path:
    """The interpreter of an environment with the packages of all services."""
    if os.environ.get(ALL) != "1":
        pytest.skip("`make test-sinks` runs this")
    try:
        return environment("sinks", Path(__file__).parent / "constraints.txt")
    except NotInstalled as error:
        pytest.fail(f"the environment of the services' packages cannot be made: {error}")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As a program starts; pytest's workers do not listen to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
