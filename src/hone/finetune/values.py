"""What builder, adapter and trainer hand each other, and what the journal keeps of a rollout.

In:   nothing; values only
Out:  Trajectory and TrajectoryCollection, TrainingJobRef and TrainingJobStatus, RolloutRecord

Fields and words are those of NeMo Agent Toolkit. Everything here survives a round through JSON,
because a submission is written down before it is sent, and a rollout when it ends.
"""

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hone.types import Strict


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


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
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] | None = None
    """JSON values only: a trajectory is written down before it is sent."""


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


class FailureRecord(Strict):
    """Why a rollout, or its scoring, came to nothing."""

    kind: Literal["infrastructure", "policy"]
    reason: str
    type: str = ""
    message: str = ""
    traceback: str = ""


class StepRecord(Strict):
    """What `hone.step` was told."""

    name: str
    value: float | None = None
    calls: int
    """How many calls the rollout had sent before it."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class RolloutRecord(Strict):
    """One rollout that ended, as the journal keeps it: enough not to run it again."""

    epoch: int
    round: int = 0
    split: Literal["train", "val", "final"]
    example: str
    generation: int
    rollout: str
    """Its id, under which the server keeps its calls."""
    reward: float | None
    """None: it could not be run, or not be scored."""
    scores: dict[str, float | None] = Field(default_factory=dict)
    failure: FailureRecord | None = None
    output: JsonValue = None
    input: JsonValue = None
    shaped: list[StepRecord] = Field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0
    tokens: int = 0
    """Sampled ones."""
    policy_steps: list[int] = Field(default_factory=list)
    """Of its calls, each once."""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """Its last conversation, for those who read the report."""
    request: dict[str, Any] | None = None
    """The body of its first call to the model, without the model's name. Kept for the first rollout
    of each example, so that a report can show what the agent asks."""
    trajectory: Trajectory | None = None
    """What the builder made of it; None where it makes it anew from what the server recorded."""
