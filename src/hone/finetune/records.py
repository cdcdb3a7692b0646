"""Data classes of the harness: trajectories, jobs, and one record per rollout.

In:   an ItemResult: what the workflow returned, the calls that were seen, the scores
Out:  a RolloutRecord, as the journal stores it, its event and its trajectory

Trajectories and jobs have the fields of NeMo Agent Toolkit. Everything survives a round trip
through JSON. A rollout that failed, or that its evaluator failed to score, has no reward: it has a
failure, of one of two kinds. A failure of the evaluator is never counted against the model.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hone.credit import Baseline, Credit
from hone.disk import append_lines
from hone.errors import ConfigError
from hone.types import Strict
from hone.workflow.jsonable import dumps

if TYPE_CHECKING:
    from hone.capture.base import SeenCall
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.run import ItemResult

Split = Literal["train", "val", "final"]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the trajectories of a job are compared: `credit` and `baseline` of a job's keys."""

    credit: Credit = "outcome"
    baseline: Baseline = "group"


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


class EpisodeItemRole(StrEnum):
    """Author of a message."""

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
    """Log-probabilities of a sampled message; an empty dict if the server recorded them."""
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
    """One rollout: its messages and its reward."""

    episode: list[EpisodeItem] | list[DPOItem]
    """Not set in a trajectory that refers to recorded calls; `load_episodes` of the trajectory
    builder fetches it."""
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] | None = None
    """JSON values only: a trajectory is written to disk before it is sent."""

    def __getattr__(self, name: str) -> Any:
        """Only called for missing attributes, such as an episode that was not fetched."""
        if name != "episode":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue] - pydantic hides it from type checkers
        raise ConfigError(
            f"the text of rollout {(self.metadata or {}).get('rollout')} was not fetched from the "
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


class FailureRecord(Strict):
    """Why a rollout failed, or could not be scored."""

    kind: Literal["infrastructure", "policy"]
    """`policy` if the model caused the failure."""
    reason: str
    """Reason under which failures are counted, such as `timeout` or `token_limit`."""
    type: str = ""
    """Class of the exception."""
    message: str = ""
    """Text of the exception."""
    traceback: str = ""
    """Last part of the traceback."""


class StepRecord(Strict):
    """One call of `hone.step`."""

    name: str
    """Name of the step."""
    value: float | None = None
    """Value of the step, which becomes a shaped reward."""
    calls: int
    """Model calls that the rollout had sent before."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Other arguments of `hone.step`."""


class CallRecord(Strict):
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
    """Number of the round in the epoch."""
    split: Split
    """`train`, `val`, or `final` for the validation at the end of the run."""
    example: str
    """Id of the example."""
    generation: int
    """Number of the rollout among those of its example."""
    rollout: str
    """Id under which the server records the calls of the rollout."""
    reward: float | None
    """None if the rollout failed or could not be scored."""
    scores: dict[str, float | None] = Field(default_factory=dict)
    """Score of each evaluator."""
    failure: FailureRecord | None = None
    """Why the rollout failed; None on success."""
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

    @model_validator(mode="before")
    @classmethod
    def _without_trajectory(cls, fields: Any) -> Any:
        """Read a record of an earlier version, which embeds its trajectory."""
        if not isinstance(fields, dict) or "trajectory" not in fields:
            return fields
        record = dict(fields)
        trajectory = record.pop("trajectory")
        if trajectory is None:
            return record
        metadata = dict(trajectory.get("metadata") or {})
        calls = metadata.pop("calls", None)
        record |= {"reward": trajectory["reward"], "trained_calls": calls}
        record |= {"episode": trajectory["episode"]} if calls is None else {}
        record |= {"shaped_rewards": trajectory.get("shaped_rewards")}
        return record | {"metadata": {k: v for k, v in metadata.items() if k not in _OF_RECORD}}

    @property
    def is_trained(self) -> bool:
        """Whether any of it is trained."""
        return self.trained_calls is not None or self.episode is not None

    @property
    def num_trained_calls(self) -> int:
        if self.trained_calls is not None:
            return len(self.trained_calls)
        return sum("call" in (item.metadata or {}) for item in self.episode or ())

    def trajectory(self) -> Trajectory:
        """The trajectory; without its text if a server recorded the calls."""
        text: dict[str, Any] = {} if self.episode is None else {"episode": self.episode}
        return Trajectory.model_construct(
            **text,
            reward=self.reward,
            shaped_rewards=self.shaped_rewards,
            metadata={
                "id": self.example,
                "run_id": self.rollout.rpartition(":")[0],
                "epoch": self.epoch,
                "round": self.round,
                "generation": self.generation,
                "rollout": self.rollout,
                "calls": self.trained_calls,
                **self.metadata,
            },
        )


_OF_RECORD = ("id", "run_id", "epoch", "round", "generation", "rollout")
"""Metadata of a trajectory that are fields of its record."""


def record_of(
    result: "ItemResult",
    *,
    rollout: str,
    split: Split,
    epoch: int,
    round: int = 0,
    generation: int = 0,
    reward_name: str | None,
    with_calls: bool = False,
) -> RolloutRecord:
    """The record of a finished rollout; a failed one has no reward."""
    item, ran = result.item, result.rollout
    calls: tuple[SeenCall, ...] = () if ran is None else ran.calls
    failure = _failure(result, reward_name)
    score = result.scores.get(reward_name) if reward_name is not None else None
    return RolloutRecord(
        epoch=epoch,
        round=round,
        split=split,
        example=item.id,
        generation=generation,
        rollout=rollout,
        reward=None if failure is not None or score is None else score.value,
        scores={name: one.value for name, one in result.scores.items()},
        failure=failure,
        output=plain(item.output_obj),
        input=plain(item.input_obj),
        shaped=[
            StepRecord(
                name=step.name, value=step.value, calls=step.calls, metadata=plain(step.metadata)
            )
            for step in (() if ran is None else ran.steps)
        ],
        seconds=0.0 if ran is None else ran.seconds,
        calls=len(calls),
        tokens=sum((call.usage or {}).get("completion_tokens", 0) for call in calls),
        policy_steps=sorted({c.policy_step for c in calls if c.policy_step is not None}),
        messages=plain(_last_conversation(calls)),
        model_calls=_call_records(calls) if with_calls else [],
        request=_first_request(calls) if generation == 0 else None,
    )


def event_fields(record: RolloutRecord) -> dict[str, Any]:
    """Fields of the event `rollout`."""
    failure = record.failure
    return {
        **record.model_dump(
            include={"split", "epoch", "round", "example", "generation", "rollout", "reward"}
            | {"seconds", "calls", "tokens"}
        ),
        "failure_kind": failure and failure.kind,
        "failure_reason": failure and failure.reason,
    }


def reward_or_substitute(record: RolloutRecord, config: "FinetuneConfig") -> float | None:
    """Its reward, or the one of `on_policy_failure`; None if it is dropped."""
    failure, instead = record.failure, config.on_policy_failure
    if failure is None:
        return record.reward
    if failure.kind == "policy" and instead != "drop":
        return instead.reward
    return None


def append_line(directory: str | Path, name: str, fields: dict[str, Any]) -> None:
    """Append a line of JSON, with the time, to a component's own log."""
    line = {"timestamp": datetime.now(UTC).isoformat(), **plain(fields)}
    append_lines(Path(directory) / name, json.dumps(line).encode() + b"\n")


def plain(value: Any) -> Any:
    """The value as JSON; what JSON and UTF-8 cannot hold becomes text."""
    # Half a surrogate pair, as `json.loads` makes of a lone \\ud800, becomes a question mark.
    return json.loads(dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _failure(result: "ItemResult", reward_name: str | None) -> FailureRecord | None:
    failed = None if result.rollout is None else result.rollout.failure
    if failed is not None:
        named = {"kind": failed.kind, "reason": failed.reason}
        return FailureRecord.model_validate(named | plain(failed.failure.model_dump()))
    if reward_name is None:
        return None
    score = result.scores.get(reward_name)
    if score is not None and score.value is not None:
        return None
    fields: dict[str, JsonValue] = (
        plain(score.failure.model_dump())
        if score is not None and score.failure is not None
        else {"type": "NoScore", "message": f"evaluator {reward_name!r} gave no score"}
    )
    return FailureRecord.model_validate({"kind": "infrastructure", "reason": "evaluator", **fields})


def _first_request(calls: "tuple[SeenCall, ...]") -> dict[str, Any] | None:
    """The first request to the policy; calls that name a step are for a frozen model."""
    for call in calls:
        chat = call.messages is not None and "input" not in call.parameters  # of /v1/responses
        if chat and call.reply is not None and "@" not in call.model:
            tools = {"tools": call.tools} if call.tools else {}
            return plain({"messages": call.messages, **tools, **call.parameters})
    return None


def _call_records(calls: "tuple[SeenCall, ...]") -> list[CallRecord]:
    """The calls; their text only where it is not part of the last conversation."""
    conversation = _last_conversation(calls)
    return [_call_record(call, conversation) for call in calls]


def _call_record(call: "SeenCall", conversation: list[dict[str, Any]]) -> CallRecord:
    usage, messages, reply = call.usage or {}, call.messages or [], call.reply
    held = reply is not None and [*messages, reply] == conversation[: len(messages) + 1]
    return CallRecord(
        id=call.id,
        function=call.function,
        model=call.model,
        at=call.started_at,
        seconds=call.seconds,
        status=call.status,
        error=plain(call.error),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        finish=call.finish,
        policy_step=call.policy_step,
        temperature=call.temperature,
        num_messages=len(messages),
        messages=None if held else plain(messages),
        reply=None if held else plain(reply),
    )


def _last_conversation(calls: "tuple[SeenCall, ...]") -> list[dict[str, Any]]:
    for call in reversed(calls):
        if call.messages is not None and call.reply is not None:
            return [*call.messages, call.reply]
    return []
