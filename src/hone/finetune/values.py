"""Data classes that builder, adapter and trainer pass to each other.

In:   nothing; values only
Out:  Trajectory and TrajectoryCollection, TrainingJobRef and TrainingJobStatus

Fields and words are those of NeMo Agent Toolkit. Everything here survives a round trip through
JSON, because a submission is on disk before it is sent.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.credit import Baseline, Credit
from hone.errors import ConfigError


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the trajectories of a job are compared: `credit` and `baseline` of a job's keys."""

    credit: Credit = "outcome"
    baseline: Baseline = "group"


class TrainingStatusEnum(StrEnum):
    """Where a training job stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobRef(_Value):
    """A job that was handed to a backend."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingJobStatus(_Value):
    """Where a job stands, and what came of it."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0, le=100)
    """Percent."""
    message: str | None = None
    metadata: dict[str, Any] | None = None
    """Of a job that ended, as far as its backend knows them: `job` (id), `step` (served now),
    `metrics`, `counts`, `reason` (why nothing was learned), `config` (what was really used),
    `seconds`."""


class EpisodeItemRole(StrEnum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(_Value):
    """One message of an episode."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    """Of a sampled message; an empty dict where the server recorded them."""
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _a_sampled_message_has_logprobs(self) -> Self:
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be provided for assistant role.")
        return self


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
    """One rollout as the harness sees it: what was said, and what it was worth."""

    episode: list[EpisodeItem] | list[DPOItem]
    """Left out of a trajectory that refers to recorded calls, until somebody reads it: see
    `load_episodes` of the trajectory builder."""
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] | None = None
    """JSON values only: a trajectory is written down before it is sent."""

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there, such as an episode that was left out."""
        if name != "episode":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - pydantic hides it from type checkers
        raise ConfigError(
            f"the text of rollout {(self.metadata or {}).get('rollout')} was not fetched from the "
            "server; set reads_episodes of the trainer adapter, or await load_episodes() of the "
            "trajectory builder"
        )


class TrajectoryCollection(_Value):
    """What is trained on together; each inner list holds the trajectories of one example."""

    trajectories: list[list[Trajectory]]
    run_id: str
    metadata: dict[str, Any] | None = None
    """The trainer's, for `submit`: `epoch`, `round`, `rounds` (of this epoch), `epochs`, and `key`,
    which names this submission: sent again under the same key it is the same job."""

    @property
    def count(self) -> int:
        """Trajectories in all groups."""
        return sum(map(len, self.trajectories))
