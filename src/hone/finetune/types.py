"""Data classes that the three parts of the harness exchange: trajectories and jobs.

In:   nothing; data classes, which hone.finetune.base exports
Out:  TrajectoryCollection from builder to adapter, TrainingJobRef and TrainingJobStatus back

The fields are those of NeMo Agent Toolkit; `rollout` and `trained_calls` of a trajectory are hone's.
Everything survives a round trip through JSON.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hone.errors import ConfigError
from hone.files.rollout_record import EpisodeItem
from hone.train_config import Baseline, Credit, TrainConfig

_DEFAULTS = TrainConfig()


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How the trajectories of a job are compared: `credit` and `baseline` of a job's keys."""

    credit: Credit = _DEFAULTS.credit
    baseline: Baseline = _DEFAULTS.baseline


class TrainingStatusEnum(StrEnum):
    """Status of a training job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobRef(_Value):
    """A job that was submitted to a backend."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingJobStatus(_Value):
    """Status and result of a job."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0, le=100)
    """Percent."""
    message: str | None = None
    metadata: dict[str, Any] | None = None
    """For a job that ended, if known: `job` (id), `step` (served now), `metrics`, `counts`,
    `reason` (why nothing was learned), `config` (the settings that were used), `seconds`."""


class OpenAIMessage(_Value):
    """A message of a preference pair's prompt."""

    role: str
    content: str


class DPOItem(_Value):
    """A preference pair."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


class Trajectory(_Value):
    """One rollout and its reward, as NeMo Agent Toolkit's documents have it: in the harness's parts.

    `hone.Trajectory` is the one of ART's documents; trainer adapters translate (rerender.py).
    """

    episode: list[EpisodeItem] | list[DPOItem]
    """Not set in a trajectory that refers to recorded calls; `load_episodes` of the trajectory
    builder fetches it."""
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    rollout: str = ""
    """Id of the rollout; empty for a trajectory that no rollout gave."""
    trained_calls: list[str] | None = None
    """Ids of the calls of `rollout` that a hone server recorded and that are trained; None if none
    recorded them, so that `episode` is trained."""
    metadata: dict[str, Any] | None = None
    """JSON values only: a trajectory is written to disk before it is sent."""

    def __getattr__(self, name: str) -> Any:
        """Only called for missing attributes, such as an episode that was not fetched."""
        if name != "episode":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - pydantic hides it from type checkers
        raise ConfigError(
            f"the text of rollout {self.rollout} was not fetched from the "
            "server; set reads_episodes of the trainer adapter, or await load_episodes() of the "
            "trajectory builder"
        )


class TrajectoryCollection(_Value):
    """Groups that are trained together; each inner list holds the trajectories of one example."""

    trajectories: list[list[Trajectory]]
    run_id: str
    metadata: dict[str, Any] | None = None
    """Set by the trainer for `submit`: `epoch`, `round`, `rounds` (of this epoch), `epochs`,
    `training` (keys of TrainConfig that override the adapter's), and `key`, the idempotency key: the
    same key is the same job."""

    @property
    def count(self) -> int:
        """Trajectories in all groups."""
        return sum(map(len, self.trajectories))
