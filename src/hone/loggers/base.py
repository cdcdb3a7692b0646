"""Sink: the destination to which a run is sent. Base class and values only.

In:   metrics, rollouts and adapters of one run, in order
Out:  whatever the service or the file format stores

A sink is used by one process, which may be killed at any time. The next process sends everything
after the last `flush` again, so a sink must recognize items that it already has: by an id, or by
reading them back.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from hone.files.events import RunFinished
from hone.files.redact import redact
from hone.files.rollout_record import CallRecord, RolloutRecord

log = logging.getLogger("hone.loggers")

Message = dict[str, Any]
SentAdapters = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Run:
    """The run that is sent."""

    id: str
    """Id of the run; the same in every session, so that services continue it after a resume."""
    directory: Path
    name: str = ""
    """Model that is trained."""
    project: str = ""
    """Project of the model."""
    base_model: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the run, without secrets."""


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics of one policy step."""

    values: dict[str, float]
    """By name, such as `train/reward` and `learn/loss`."""
    step: int
    """The step that was sampled, or that the job published."""
    at: float
    """Time in Unix seconds."""
    line: int
    """Line of the event in events.jsonl, from 1: the order of the points, and a key of each."""


class LoggedRollout(RolloutRecord):
    """A line of trajectories/*.jsonl, with the time at which the rollout ended."""

    model_config = ConfigDict(extra="ignore")  # the logger may run with an older hone

    ended_at: float = 0.0

    @property
    def step(self) -> int | None:
        """The newest policy step that answered."""
        return max(self.policy_steps, default=None)

    @property
    def failure_text(self) -> str:
        """Kind, reason and message of the failure; empty on success."""
        failure = self.failure
        parts = (failure.kind, failure.reason, failure.message) if failure else ()
        return ": ".join(part for part in parts if part)

    def conversations(self) -> Iterator[tuple[CallRecord, list[Message], Message | None]]:
        """Each call with its request's messages and its reply.

        A call that is part of the last conversation refers to it instead of repeating it.
        """
        for call in self.model_calls:
            if call.messages is None:
                shown = self.messages[: call.num_messages + 1]
                yield call, shown[: call.num_messages], (shown[call.num_messages :] or [None])[0]
            else:
                yield call, call.messages, call.reply


@dataclass(frozen=True, slots=True)
class RoundTable:
    """All rollouts of a round or of a validation."""

    name: str
    """`train/rollouts`, `val/rollouts` or `final/rollouts`."""
    rollouts: list[LoggedRollout]
    step: int
    line: int
    """As in Point."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on disk, in PEFT's format."""

    path: Path
    step: int
    is_best: bool
    """Whether it has the highest held-out reward."""
    is_newest: bool
    """Whether it is the newest step of the run."""


class Sink:
    """Receives a run. A method that is not overridden ignores what it gets."""

    reads_rollouts: bool = False
    """Whether `rollout` is called."""
    reads_tables: bool = False
    """Whether `table` is called."""
    holds: int | None = None
    """Number of lines of events.jsonl that the sink already has; None if only the cursor knows."""
    flush_events: int = 64
    """Maximum number of events between two flushes; each flush saves the cursor."""
    adapters: SentAdapters = "none"
    """Which adapters are sent: none, those of the end of the run, or that of every step. One that
    turns out to be the best is sent again, as such."""
    refused: int = 0
    """Number of items of this session that the service rejected permanently."""

    def refuse(self, error: Exception) -> None:
        """Log and count an item that the service rejected permanently."""
        self.refused += 1
        log.warning("refused and skipped: %s", redact(f"{type(error).__name__}: {error}"))

    def log(self, point: Point) -> None:
        """Send metrics."""

    def rollout(self, rollout: LoggedRollout) -> None:
        """Send a finished rollout."""

    def table(self, table: RoundTable) -> None:
        """Send the rollouts of a round, once it is complete."""

    def adapter(self, adapter: Adapter) -> None:
        """Send an adapter."""

    def finish(self, finished: RunFinished) -> None:
        """The run ended; it may be continued with more epochs."""

    def flush(self) -> None:
        """Return when everything so far has arrived; raise if it has not."""

    def close(self) -> None:
        """Called when the session ends."""


TABLE_COLUMNS = ("rollout", "epoch", "example", "generation", "reward", "input", "output")
TABLE_COLUMNS += ("failure", "conversation", "calls", "tokens", "seconds", "step")
"""Columns of a table of rollouts."""
