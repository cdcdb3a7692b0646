"""Turn the events of a run into calls of a sink, starting where the sink stopped.

In:   events.jsonl and trajectories/*.jsonl of a run directory; the number of lines already sent
Out:  Deliveries: calls of a Sink's methods, in the order of the events

The whole log is read at every start: lines before the cursor are not sent, but show what was sent.
A resumed run logs some events again (events.py); each metric of a step is sent once.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from hone.config.secrets import Secrets
from hone.files.event_log import FILE, EventReader, read
from hone.files.events import (
    EpochCollected,
    EpochDone,
    Event,
    FinalValidationDone,
    JobDone,
    MetricsLogged,
    RolloutDone,
    RunFinished,
    RunStarted,
    ValidationResult,
)
from hone.files.rollout_record import file_name
from hone.loggers.base import Adapter, LoggedRollout, Point, RoundTable, Run, Sink
from hone.report.history import RunHistory, Validation
from hone.types import model_directory

ROOT = ".hone"
"""Default root of a server that a run starts itself."""
OF_SESSION = {"at", "type", "began", "session", "resumed", "step", "command", "again", "program"}
"""Fields of `run_started` that are not settings of the run."""
RENAMED = {"avg_reward": "reward"}

Delivery = Callable[[Sink], None]


class Feed:
    """Reads a run directory."""

    def __init__(self, directory: Path, sent: int, sink: Sink) -> None:
        """`sent`: number of log lines that were sent; `sink` declares what it needs."""
        self.line, self.sent = 0, sent
        """Numbers of lines read, and of lines sent before."""
        self.history = RunHistory()
        self._sink = sink
        self._reader = EventReader(directory / FILE)
        self._rollouts = RolloutFiles(directory / "trajectories")
        self._queue: deque[Event] = deque()
        self._keys: set[Hashable] = set()
        """Keys of what was sent."""

    def read(self, *, ending: bool = False) -> Iterator[list[Delivery]]:
        """What to send for each event that was appended; empty for one without anything to send.

        A rollout is appended to its file after its event. If the file lacks it, and no other event
        came later, it waits for the next call; with `ending` nothing waits.
        """
        self._queue.extend(self._reader.read())
        while self._queue:
            event = self._queue[0]
            last = len(self._queue) == 1
            record = self._rollouts.take(event) if self._needs_record(event) else None
            if record is None and last and not ending and self._needs_record(event):
                return
            self._queue.popleft()
            self.line += 1
            self.history.add(event)
            deliveries = [d for key, d in self._deliveries(event, record) if self._is_new(key)]
            yield [] if self.line <= self.sent else deliveries

    def _is_new(self, key: Hashable) -> bool:
        new = key not in self._keys
        self._keys.add(key)
        return new

    def _needs_record(self, event: Event) -> TypeGuard[RolloutDone]:
        wanted = self._sink.reads_rollouts and self.line >= self.sent
        return wanted and isinstance(event, RolloutDone)

    def _deliveries(
        self, event: Event, record: LoggedRollout | None
    ) -> Iterator[tuple[Hashable, Delivery]]:
        """Deliveries, each with a key that ensures it is sent once."""
        match event:
            case RolloutDone() if record is not None:
                yield event.rollout, lambda sink: sink.rollout(record)
            case EpochCollected():
                key, step = (event.type, event.epoch, event.round), _step(event.step, event.epoch)
                yield key, self._point(_collected(event), step, event)
                yield from self._table("train", event.epoch, event.round, step, key)
            case JobDone():
                step, numbers = _step(event.step, event.epoch), _numbers(event.metrics or {})
                yield (event.type, event.epoch, event.round), self._point(numbers, step, event)
                if self._sink.adapters == "all":
                    yield from self._adapter(event.step, newest=event.step)
            case ValidationResult() if event.error is None:
                split = "final" if isinstance(event, FinalValidationDone) else "val"
                round = event.round if isinstance(event, FinalValidationDone) else 0
                key = event.type, event.epoch, event.step, round
                step = _step(event.step, event.epoch)
                measured = Validation.of(event, self.history.failure_reward)
                yield key, self._point(_validated(measured, split), step, event)
                yield from self._table(split, event.epoch, round, step, key)
            case EpochDone():
                times = {f"time/{name}": seconds for name, seconds in event.phases.items()}
                step = _step(self._newest_step(), event.epoch)
                if event.status == "completed":
                    yield (event.type, event.epoch), self._point(times, step, event)
            case MetricsLogged():
                yield ("line", self.line), self._point(_numbers(event.metrics), event.step, event)
            case RunFinished():
                if self._sink.adapters != "none":
                    for step in dict.fromkeys((event.best_step, event.step)):  # the newest last
                        yield from self._adapter(step, newest=event.step)
                yield ("line", self.line), lambda sink: sink.finish(event)
            case _:
                pass

    def _newest_step(self) -> int | None:
        jobs = self.history.jobs
        return jobs[-1].step if jobs else self.history.run.step

    def _point(self, values: dict[str, float], step: int, event: Event) -> Delivery:
        point = Point(values, step, event.at, self.line)
        return lambda sink: sink.log(point)

    def _table(
        self, split: str, epoch: int, round: int, step: int, key: Hashable
    ) -> Iterator[tuple[Hashable, Delivery]]:
        if self._sink.reads_tables and self.line > self.sent:
            line = self.line

            def send(sink: Sink) -> None:
                rollouts = self._rollouts.of_round(split, epoch, round)
                sink.table(RoundTable(f"{split}/rollouts", rollouts, step, line))

            yield ("table", key), send

    def _adapter(self, step: int | None, newest: int | None) -> Iterator[tuple[Hashable, Delivery]]:
        """The adapter, if the server's root is on this machine."""
        run = self.history.run
        if not step or run.base_url is not None or not run.name or not run.project:
            return  # the base model, or a server that may be on another machine
        steps = model_directory(run.root or ROOT, run.project, run.name) / "checkpoints"
        best = self.history.best
        is_best = best is not None and best.step == step

        def send(sink: Sink) -> None:
            path = steps / f"{step:04d}"
            if path.is_dir():  # otherwise it was pruned
                sink.adapter(Adapter(path, step, is_best, is_newest=step == newest))

        yield ("adapter", step, is_best), send


def run_of(directory: Path) -> Run | None:
    """The run, as its newest `run_started` describes it; None before the first."""
    started = [e for e in read(directory / FILE) if isinstance(e, RunStarted)]
    if not started:
        return None
    config, newest = directory / "config_effective.yml", started[-1]
    document = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    known = newest.model_dump(mode="json", exclude_none=True, exclude=OF_SESSION)
    return Run(
        id=newest.run_id,
        directory=directory,
        name=newest.name or "",
        project=newest.project or "",
        base_model=newest.base_model or "",
        config={"run": Secrets().hide(known), **document},
    )


class RolloutFiles:
    """The rollouts of a run, read as they are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[Path, int] = {}
        self._waiting: dict[str, LoggedRollout] = {}
        """Rollouts that were read and not sent yet, by id."""

    def take(self, event: RolloutDone) -> LoggedRollout | None:
        """The rollout of an event; None if it is not in its file."""
        path, id = self._path(event.split, event.epoch), event.rollout or ""
        if id not in self._waiting:
            self._read(path)
        rollout = self._waiting.pop(id, None)
        return rollout and rollout.model_copy(update={"ended_at": event.at})

    def of_round(self, split: str, epoch: int, round: int) -> list[LoggedRollout]:
        """The rollouts of a round; for one that was run again, the last record."""
        path, rollouts = self._path(split, epoch), dict[tuple[str, int], LoggedRollout]()
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            rollout = LoggedRollout.model_validate_json(line)
            if rollout.round == round:
                rollouts[rollout.example, rollout.generation] = rollout
        return list(rollouts.values())

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        for line in whole.split(b"\n") if whole else ():
            rollout = LoggedRollout.model_validate_json(line)
            self._waiting[rollout.rollout] = rollout

    def _path(self, split: str, epoch: int) -> Path:
        return self.folder / file_name(split, epoch)


def _step(step: int | None, epoch: int) -> int:
    """The policy step; the epoch, for a backend without steps."""
    return epoch if step is None else step


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The values that are numbers; what was not finite is null in the log."""
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float)}


def _collected(event: EpochCollected) -> dict[str, float]:
    values = {
        "train/epoch": event.epoch,
        **{f"train/{RENAMED.get(name, name)}": value for name, value in event.metrics.items()},
        "train/zero_variance_groups": event.zero_variance_groups,
        **{f"train/dropped/{reason}": n for reason, n in (event.dropped or {}).items()},
    }
    return _numbers(values)


def _validated(validation: Validation, split: str) -> dict[str, float]:
    values = {
        "epoch": validation.epoch,
        "reward": validation.mean,
        "min_reward": validation.min,
        "max_reward": validation.max,
        "failures": validation.failures,
        "failure_rate": validation.failure_rate,
    }
    return _numbers({f"{split}/{name}": value for name, value in values.items()})
