"""What happened in a run, in order: one line of JSON each, never changed afterwards.

In:   what the trainer, the builder and the adapter did
Out:  `events.jsonl` in the run's output_dir; the same events to whoever listens

Every curve and every number of a report comes from here, so a run that was killed and went on has
one history. A line cut off by a kill is dropped when the file is opened again; a bad line anywhere
else is an error, because a history with a hole would still look like one. Where a run was
interrupted an epoch may appear twice: the later event counts.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_json, to_jsonable_python

from hone.errors import StateError

FILE = "events.jsonl"
"""Its name in a run's output_dir."""

FIELDS: dict[str, tuple[str, ...]] = {
    "run_started": ("run_id", "session", "epochs", "step"),
    "preflight": ("checks",),
    "epoch_started": ("epoch", "round", "rounds", "step", "rollouts"),
    "rollout": ("split", "epoch", "example", "generation", "reward", "failure_kind", "tokens"),
    "epoch_collected": ("epoch", "round", "metrics", "dropped", "zero_variance_groups"),
    "job_submitted": ("epoch", "round", "job", "trajectories", "groups"),
    "job_progress": ("phase", "step", "steps"),
    "job_done": ("epoch", "round", "job", "step", "metrics", "seconds"),
    "job_failed": ("epoch", "round", "message"),
    "validation_started": ("epoch", "rollouts"),
    "validation": ("epoch", "step", "avg_reward", "rewards", "failures"),
    "final_validation": ("epoch", "step", "avg_reward", "rewards", "failures"),
    "epoch_done": ("epoch", "status", "phases"),
    "warning": ("message",),
    "run_interrupted": (),
    "run_finished": ("status", "message", "step", "seconds"),
}
"""What an event of each type must carry; types of a plugin's own are free.

They may carry more, and the readers use: run_started `began` (when the command was given), `name`, `project`, `base_model`, `config_file`,
`command`, `again` (the one that goes on), `seed`, `examples`, `generations`, `validation_examples`, `validation_interval`,
`validation_greedy`, `evaluator`, `validation_evaluator` (where it is another one), `learning_rate`,
`output_dir`, `resumed`, `root` (of a server the run owns), `base_url` (of one it
does not); rollout `round`, `rollout`, `failure_reason`, `seconds`, `calls`; epoch_collected
`curriculum_state`; job_progress `row`, `rows`; job_done `counts`, `reason`, `config`; validation
`min_reward`, `max_reward`, `num_examples`, `error`, `seconds`, `policy_failures` (by example) and
`on_policy_failure` (`drop`, or the reward they count as); validation_started `final`; run_finished
`best_step`. A rollout's `reward` is null where it failed; a validation's `avg_reward` where it gave no
number. A final_validation has the fields of a validation.
"""

UNSYNCED = frozenset({"rollout"})
"""Written without waiting for the disk: a rollout is safe in the journal, and there are many."""

Event = dict[str, Any]
Listener = Callable[[Event], None]


class EventLog:
    """Append-only and thread-safe; what is appended is on the disk when the call returns."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; a torn last line is cut off."""
        self.path = path
        self.listeners: list[Listener] = []
        """Called with every event, in order, by whoever appended or told it."""
        self._writing = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        whole = _whole(path.read_bytes())
        if whole < self._file.tell():
            self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, type: str, /, **fields: Any) -> Event:
        """Write it, tell it, return it. A number that is not finite becomes null."""
        event = _event(type, fields)
        line = to_json(event, inf_nan_mode="null") + b"\n"
        with self._writing:
            self._file.write(line)
            self._file.flush()
            if type not in UNSYNCED:
                os.fsync(self._file.fileno())
            self._tell(event)
        return event

    def tell(self, type: str, /, **fields: Any) -> Event:
        """To the listeners only: what nobody needs once it is past."""
        event = _event(type, fields)
        with self._writing:
            self._tell(event)
        return event

    def close(self) -> None:
        self._file.close()

    def _tell(self, event: Event) -> None:
        for listener in tuple(self.listeners):
            listener(event)


def read(path: Path) -> list[Event]:
    """All events of a log, the torn last line left out; none where there is no file yet."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    events: list[Event] = []
    for number, line in enumerate(raw[: _whole(raw)].split(b"\n")[:-1], start=1):
        event = _parsed(line)
        if event is None:
            raise StateError(
                f"{path}:{number}: not an event (expected a JSON object with 'at' and 'type', got "
                f"{line[:60].decode('utf-8', 'replace')!r}). Only a last line can be torn: restore "
                "the file from a backup, or start anew with --fresh."
            )
        events.append(event)
    return events


def _event(type: str, fields: dict[str, Any]) -> Event:
    missing = [name for name in FIELDS.get(type, ()) if name not in fields]
    assert not missing, f"event {type!r} lacks {missing}, has {sorted(fields)}"
    # As a reader of the file would see it: listeners then need no second way to read an event.
    plain = to_jsonable_python(fields, inf_nan_mode="null")
    return {"at": time.time(), "type": type} | plain


def _whole(raw: bytes) -> int:
    """How many bytes hold whole lines; a last line that does not parse is not one."""
    end = raw.rfind(b"\n") + 1
    last = raw.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return last if end and _parsed(raw[last : end - 1]) is None else end


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "at" in event and "type" in event else None
