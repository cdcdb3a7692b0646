"""Local files of a model: state.json, history.jsonl, logged trajectories.

In:   a directory, PATH/projects/PROJECT/models/NAME; state and metrics of the user's program
Out:  files in the same format as a server writes, so that one reader can read both

A trained model's history is on its server. Only models that no server trains have one here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.errors import ConfigError, StateError
from hone.files.disk import append_lines, storage, write_atomic
from hone.files.redact import redact_json
from hone.tasks.tally import as_float
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import stored_name

Logged = Iterable[Trajectory | TrajectoryGroup | BaseException]


def read_state(directory: Path) -> dict[str, Any] | None:
    """state.json, or None if nothing was written. Raises StateError for a damaged file."""
    path = directory / "state.json"
    try:
        with storage(path):
            state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError(f"expected an object, got {type(state).__name__}")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StateError(
            f"{path}: not a saved state ({error}). Restore the file, or remove it to start without a "
            "state."
        ) from None
    return state


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Replace state.json."""
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / "state.json", json.dumps(state, indent=2) + "\n")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`; dicts in both are merged in turn."""
    both = dict(old)
    for key, value in new.items():
        below = both.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        both[key] = value
    return both


def check_logged(where: str, split: str, step: int | None, items: Logged) -> None:
    """Raise ConfigError for what cannot be a file's name, and for a reward that is no finite number.

    A reward that was assigned has not been validated.
    """
    if stored_name(split) != split:
        raise ConfigError(f"{where} split is {split!r}; use letters, digits, '.', '_' and '-'")
    if step is not None and not (isinstance(step, int) and step >= 0):
        raise ConfigError(f"{where} step is {step!r}; a step is 0, 1, 2, ...")
    for i, item in enumerate(items):
        group = item.trajectories if isinstance(item, TrajectoryGroup) else [item]
        for j, one in enumerate(group):
            if not isinstance(one, Trajectory):
                continue
            reward = as_float(one.reward)
            if reward is None or not math.isfinite(reward):
                at = f"{i}.trajectories.{j}" if isinstance(item, TrajectoryGroup) else f"{i}"
                raise ConfigError(
                    f"{where}: trajectories.{at}.reward is {one.reward!r}; a reward is a finite number. "
                    "Log a rollout that could not be scored as an exception in place of its trajectory."
                )


def log_trajectories(
    directory: Path,
    split: str,
    step: int,
    items: Logged,
) -> None:
    """Append one line per group to trajectories/SPLIT/STEP.jsonl, without secrets in its text."""
    groups = [
        item if isinstance(item, TrajectoryGroup) else TrajectoryGroup([item]) for item in items
    ]
    shown = (redact_json(json.loads(group.model_dump_json())) for group in groups)
    lines = "".join(f"{json.dumps(group)}\n" for group in shown)
    append_lines(directory / "trajectories" / split / f"{step:04d}.jsonl", lines.encode())


def log_metrics(directory: Path, split: str, step: int, metrics: Mapping[str, float]) -> None:
    """Append a line to history.jsonl."""
    line = {"step": step} | {f"{split}/{name}": value for name, value in metrics.items()}
    append_lines(directory / "history.jsonl", json.dumps(line).encode() + b"\n")
