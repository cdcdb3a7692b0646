"""RolloutRecord: one finished rollout, as a line of trajectories/*.jsonl.

In:   nothing; data classes
Out:  what the journal writes, and what a resumed run, the loggers and exports read

A rollout that failed, or that its evaluator could not score, has a failure. A failure of the
infrastructure is never a number; a failure of the policy may get a reward when its round closes.
`EpisodeItem` has the fields of NeMo Agent Toolkit.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hone.types import Strict

Split = Literal["train", "val", "final"]
"""Training, a validation during the run, or the validation at its end."""
FailureKind = Literal["infrastructure", "policy"]


def file_name(split: str, epoch: int) -> str:
    """The file of the rollouts in trajectories/."""
    name = {"train": "epoch", "val": "validation", "final": "final"}[split]
    return f"{name}_{epoch:03d}.jsonl"


class EpisodeItemRole(StrEnum):
    """Author of a message."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(BaseModel):
    """One message of an episode."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    """Log-probabilities of a sampled message; an empty dict if the server recorded them."""
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _a_sampled_message_has_logprobs(self) -> Self:
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be provided for assistant role.")
        return self


class _Part(Strict):
    """A part of a record; readers ignore keys that a newer version wrote."""

    model_config = ConfigDict(extra="ignore")


class FailureRecord(_Part):
    """Why a rollout failed, or could not be scored."""

    kind: FailureKind
    """`policy` if the model caused the failure."""
    reason: str
    """Reason under which failures are counted, such as `timeout` or `token_limit`."""
    type: str = ""
    """Class of the exception."""
    message: str = ""
    """Text of the exception."""
    traceback: str = ""
    """Last part of the traceback."""
    place: str = ""
    """`FILE:LINE` where the exception was raised, in the user's code if it is part of the stack."""


class StepRecord(_Part):
    """One call of `hone.step`."""

    name: str
    """Name of the step."""
    value: float | None = None
    """Value of the step, which becomes a shaped reward."""
    calls: int
    """Model calls that the rollout had sent before."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Other arguments of `hone.step`."""


class CallRecord(_Part):
    """One model call of a rollout, for loggers."""

    id: str | None = None
    """Id of the recorded call, or of the answer."""
    function: str
    """Path of the function that made it."""
    model: str
    """Model name of the request."""
    at: float
    """When it was sent, in seconds since 1970."""
    seconds: float
    """Until the last byte of the answer."""
    held_s: float = 0.0
    """How long the server held it, of these seconds: it trained, or loaded an engine or adapter."""
    status: int | None = None
    """HTTP status; null if there was no answer."""
    error: str | None = None
    """Why it failed."""
    prompt_tokens: int | None = None
    """Tokens of the prompt."""
    completion_tokens: int | None = None
    """Tokens that were sampled."""
    finish: str | None = None
    """Why the answer ended, such as `stop` or `length`."""
    policy_step: int | None = None
    """Policy step that answered."""
    temperature: float | None = None
    """Temperature of the request."""
    num_messages: int = 0
    """Number of messages of the request."""
    messages: list[dict[str, Any]] | None = None
    """Messages of the request; null if they begin the rollout's `messages`, and `reply` follows."""
    reply: dict[str, Any] | None = None
    """Message of the answer; null if it is in the rollout's `messages`."""


class RolloutRecord(Strict):
    """One finished rollout; a resumed run does not repeat it."""

    epoch: int
    """Number of the epoch; in a validation, the epochs that the policy was trained for."""
    round: int = 0
    """Number of the round in the epoch; of `final`, epochs that the later policy was trained for."""
    split: Split
    """`train`, `val`, or `final` for the validation at the end of the run."""
    example: str
    """Id of the example."""
    generation: int
    """Number of the rollout among those of its example."""
    rollout: str
    """Id under which the server records the calls of the rollout."""
    reward: float | None
    """None if the rollout failed or could not be scored. Under `on_policy_failure: lowest`, a failure
    of the policy that is trained gets its reward when its round closes."""
    scores: dict[str, float | None] = Field(default_factory=dict)
    """Score of each evaluator."""
    failure: FailureRecord | None = None
    """Why the rollout failed; None on success."""
    retries: list[FailureRecord] = Field(default_factory=list)
    """Failures of the attempts before this one, which were retried."""
    answered: bool = False
    """Whether the trained policy answered a call of the rollout."""
    output: JsonValue = None
    """What the workflow returned."""
    input: JsonValue = None
    """What the workflow was called with."""
    shaped: list[StepRecord] = Field(default_factory=list)
    """Calls of `hone.step`."""
    seconds: float = 0.0
    """Duration of the rollout."""
    calls: int = 0
    """Number of model calls."""
    tokens: int = 0
    """Number of sampled tokens."""
    policy_steps: list[int] = Field(default_factory=list)
    """Policy steps that answered the calls, each once."""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """The last conversation, for the report."""
    model_calls: list[CallRecord] = Field(default_factory=list)
    """The model calls; recorded if a logger of the run sends them."""
    request: dict[str, Any] | None = None
    """Body of the first model call, without the model's name. Recorded for the first rollout of each
    example, so that a report can show what the agent sends."""
    trained_calls: list[str] | None = None
    """Ids of the recorded calls that are trained; None if none is, or if no server records calls."""
    episode: list[EpisodeItem] | None = None
    """The text that is trained, if no server recorded the calls."""
    not_trained: str | None = None
    """Why nothing of a rollout with a reward is trained, for instance `no_calls`."""
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Other metadata of the trajectory, such as the evaluator's `reasoning`."""

    @property
    def failure_kind(self) -> str | None:
        """`policy` or `infrastructure`; None on success."""
        return None if self.failure is None else self.failure.kind

    @property
    def is_trained(self) -> bool:
        """Whether any of it is trained."""
        return self.trained_calls is not None or self.episode is not None

    @property
    def num_trained_calls(self) -> int:
        if self.trained_calls is not None:
            return len(self.trained_calls)
        return sum("call" in (item.metadata or {}) for item in self.episode or ())


# ---- when a round closes --------------------------------------------------------------------------

EVALUATOR = "evaluator"
"""Reason of a rollout that its evaluator could not score."""


def kinds_at_close(
    outcomes: Iterable[tuple[str | None, str | None]], *, scored_before: bool = False
) -> list[str | None]:
    """The kinds of failure of a round's rollouts, after all of them ended; None on success.

    `outcomes`: kind and reason of each failure, as they were recorded when the rollout ended.
    `scored_before`: the evaluator scored a rollout of an earlier round of the run. An evaluator that
    raises on an output of the model although it scores others fails because of that output. One that
    scores nothing is broken, and its failures are the infrastructure's.
    """
    recorded = list(outcomes)
    scores_others = scored_before or any(kind is None for kind, _ in recorded)
    return [
        "infrastructure" if reason == EVALUATOR and not scores_others else kind
        for kind, reason in recorded
    ]


def at_close(
    records: Sequence[RolloutRecord], *, scored_before: bool = False
) -> list[RolloutRecord]:
    """The records of a round after it closed; what the infrastructure failed is not trained."""
    recorded = [(r.failure_kind, r.failure and r.failure.reason) for r in records]
    kinds = kinds_at_close(recorded, scored_before=scored_before)
    return [
        record if kind == record.failure_kind else not_by_policy(record)
        for record, kind in zip(records, kinds, strict=True)
    ]


def not_by_policy(record: RolloutRecord) -> RolloutRecord:
    """The record of a failed rollout that says nothing about the policy: it is run again."""
    assert record.failure is not None, record.rollout
    failure = record.failure.model_copy(update={"kind": "infrastructure"})
    untrained = {"reward": None, "trained_calls": None, "episode": None, "shaped_rewards": None}
    return record.model_copy(update={"failure": failure, **untrained})
