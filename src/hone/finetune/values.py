"""Data classes that builder, adapter and trainer pass to each other.

In:   nothing; values only
Out:  Trajectory and TrajectoryCollection, TrainingJobRef and TrainingJobStatus

Fields and words are those of NeMo Agent Toolkit. Everything here survives a round trip through
JSON, because a submission is on disk before it is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

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


EpisodeSource = Callable[[], list[EpisodeItem]]


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
    """Of a trajectory that refers to a journaled rollout it is made when somebody reads it."""
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] | None = None
    """JSON values only: a trajectory is written down before it is sent."""
    _read_episode: EpisodeSource | None = PrivateAttr(default=None)
    _episode: list[EpisodeItem] | None = PrivateAttr(default=None)

    @classmethod
    def referring(cls, read_episode: EpisodeSource | None, **fields: Any) -> Self:
        """A trajectory that refers to a journaled rollout; `read_episode` makes its text."""
        trajectory = cls(episode=[], **fields)
        del vars(trajectory)["episode"]
        trajectory._read_episode = read_episode
        return trajectory

    @property
    def refers(self) -> bool:
        """Whether its text is that of a journaled rollout."""
        return "episode" not in self.__dict__

    @property
    def is_readable(self) -> bool:
        """Whether its episode is there, or can be made."""
        return not self.refers or self._read_episode is not None

    def read_from(self, source: EpisodeSource) -> None:
        """Make the episode with this function when it is read."""
        self._read_episode = source

    def __getattr__(self, name: str) -> Any:
        """The episode of a trajectory that refers to a rollout; fields in use never come here."""
        if name != "episode":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - pydantic hides it from type checkers
        if self._read_episode is None:
            raise ConfigError(
                f"the text of rollout {(self.metadata or {}).get('rollout')} was not fetched from "
                "the server; set reads_episodes of the trainer adapter, or await load_episodes() "
                "of the trajectory builder"
            )
        if self._episode is None:
            self._episode = self._read_episode()
        return self._episode

    @model_serializer(mode="wrap")
    def _with_episode(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return serialize(Trajectory.model_construct(**self._fields()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and self._fields() == other._fields()

    def _fields(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in Trajectory.model_fields}


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
