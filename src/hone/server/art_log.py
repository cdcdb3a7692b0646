"""Trajectories that ART's clients log, as files to look at.

In:   trajectory groups as they came over ART's wire
Out:  MODEL/trajectories/SPLIT/STEP.jsonl, one group a line; the same groups as hone's own

A line holds the group as it was sent, log-probabilities, exceptions and unknown keys included:
what a log leaves out is what one will look for in it.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hone.disk import append_lines, storage
from hone.errors import Unprocessable
from hone.trajectory import History, Trajectory, TrajectoryGroup
from hone.types import Failure, FieldError

Number = bool | int | float


class ArtHistory(BaseModel):
    """One conversation; a choice is an item with a `message` in it."""

    model_config = ConfigDict(extra="allow")

    messages_and_choices: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None

    def fields(self) -> dict[str, Any]:
        """As hone's History has it."""
        tools = [
            tool if "type" in tool else {"type": "function", "function": tool}
            for tool in self.tools or ()
        ]
        return {"messages_and_choices": self.messages_and_choices, "tools": tools or None}


class ArtTrajectory(ArtHistory):
    """One conversation with a reward."""

    additional_histories: list[ArtHistory] = []
    reward: float = Field(default=0.0, allow_inf_nan=False)
    metrics: dict[str, Number | None] = {}
    metadata: dict[str, bool | int | float | str | None] = {}
    logs: list[str] = []

    def to_hone(self) -> Trajectory:
        """What a job is made of."""
        return Trajectory(
            **self.fields(),
            additional_histories=[History(**h.fields()) for h in self.additional_histories],
            reward=self.reward,
            metrics={k: v for k, v in self.metrics.items() if v is not None},
            metadata=dict(self.metadata),
            logs=self.logs,
        )


class ArtFailure(BaseModel):
    """A rollout that raised."""

    model_config = ConfigDict(extra="allow")

    type: str = ""
    message: str = ""
    traceback: str = ""


class ArtGroup(BaseModel):
    """Trajectories of one input."""

    model_config = ConfigDict(extra="allow")

    trajectories: list[ArtTrajectory] = []
    exceptions: list[ArtFailure] = []
    metrics: dict[str, Number | None] = {}
    metadata: dict[str, bool | int | float | str | None] = {}
    logs: list[str] = []

    def to_hone(self) -> TrajectoryGroup:
        """What a job is made of."""
        return TrajectoryGroup(
            [trajectory.to_hone() for trajectory in self.trajectories],
            exceptions=[
                Failure(type=e.type, message=e.message, traceback=e.traceback)
                for e in self.exceptions
            ],
            metrics={k: v for k, v in self.metrics.items() if v is not None},
            metadata=dict(self.metadata),
            logs=self.logs,
        )


def write(model_dir: Path, split: str, step: int, groups: Sequence[ArtGroup]) -> Path:
    """Append the groups to the file of this step; what was logged before stays."""
    try:
        lines = "".join(json.dumps(group.model_dump(exclude_unset=True)) + "\n" for group in groups)
    except (RecursionError, ValueError):
        message = "nested too deeply to be read"
        raise Unprocessable([FieldError(("trajectory_groups",), message)]) from None
    path = model_dir / "trajectories" / split / f"{step:04d}.jsonl"
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(path, lines.encode())
    return path


def prune(root: Path, max_bytes: int) -> int:
    """Delete the oldest files of logged trajectories beyond a size; how many were deleted."""
    found = [(path, path.stat()) for path in root.glob("*/models/*/trajectories/*/*.jsonl")]
    found.sort(key=lambda one: one[1].st_mtime, reverse=True)
    kept = itertools.accumulate(stat.st_size for _, stat in found)
    doomed = [path for (path, _), size in zip(found, kept, strict=True) if size > max_bytes]
    for path in doomed:
        path.unlink(missing_ok=True)
    return len(doomed)
