"""Trajectory and TrajectoryGroup: a conversation with a reward, and a group to compare.

In:   the sampled calls, as tokens, as a rollout's id, or as OpenAI messages and choices; a reward
Out:  the content of a training job

A trajectory names its samples in one of three ways: `calls` holds the tokens; `rollout` refers to
the calls that the server recorded; `messages_and_choices` holds OpenAI messages, of which the
choices with log-probabilities are trained. The server turns the last two into the first by its
records, and refuses to guess. This module needs no torch, so that it loads on a laptop.
"""

import math
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Protocol, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PrivateAttr,
    SerializationInfo,
    field_serializer,
    model_validator,
)

from hone.files.place import place_of
from hone.files.redact import redact
from hone.tasks.tally import run_rollouts
from hone.train_config import Credit
from hone.types import Call, Failure, Messages, MessagesAndChoices, Strict, Tools


def _is_none(value: object) -> bool:
    """Most trajectories have no policy version; the fields are then not written."""
    return value is None


SHORT_LOGPROBS = {"logprobs": "short"}
"""Serialization context of a request: choices with token ids have plain numbers as log-probabilities,
a sixth of the bytes."""


def as_plain_number(value: Any) -> Any:
    """A number of numpy or torch as Python's own; other values as they are."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


Metric = Annotated[
    float | int | bool, PlainSerializer(as_plain_number, return_type=float | int | bool)
]
"""A number. numpy's and torch's become Python's own when the trajectory is written or sent."""


class History(BaseModel):
    """One conversation: its messages, and the sampled answers among them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None

    @field_serializer("messages_and_choices")
    def _serialized(self, items: MessagesAndChoices, info: SerializationInfo) -> list[Any]:
        as_dict = _with_short_logprobs if info.context is SHORT_LOGPROBS else _as_dict
        return [as_dict(item) for item in items]

    def messages(self) -> Messages:
        """The conversation as plain OpenAI messages."""
        return [_message(_as_dict(item)) for item in self.messages_and_choices]


class Trajectory(History):
    """One rollout and its reward, as ART's documents have it: in the SDK and in jobs.

    `finetune.types.Trajectory` is the one of NeMo Agent Toolkit's documents.
    """

    calls: list[Call] = []
    """The sampled calls, as tokens."""
    rollout: str = ""
    """Id of a rollout that the server recorded."""
    trained_calls: list[str] | None = None
    """Ids of the recorded calls of `rollout` to train on; the others are context. None: all."""
    additional_histories: list[History] = []
    """Further conversations of the same rollout, with the same reward."""
    reward: float = Field(default=0.0, allow_inf_nan=False)
    shaped_rewards: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    """One value per trained call, for `credit: per_call` or `return_to_go`."""
    metrics: dict[str, Metric] = {}
    metadata: dict[str, float | int | str | bool | None] = {}
    logs: list[str] = []
    initial_policy_version: int | None = Field(default=None, exclude_if=_is_none)
    """The step at its start, if its author sets it; recorded calls have their own."""
    final_policy_version: int | None = Field(default=None, exclude_if=_is_none)
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)
    _started: float = PrivateAttr(default=0.0)
    """`start_time` by the monotonic clock: the other one may jump before `finish`."""

    @model_validator(mode="after")
    def _a_value_per_trained_call(self) -> Self:
        trained = sum(call.trained for call in self.calls)
        if self.calls and self.shaped_rewards is not None and len(self.shaped_rewards) != trained:
            raise ValueError(
                f"shaped_rewards has {len(self.shaped_rewards)} values for {trained} trained calls"
            )
        return self

    def log(self, message: str) -> None:
        self.logs.append(message)

    def model_post_init(self, context: Any, /) -> None:
        age_s = (datetime.now(self.start_time.tzinfo) - self.start_time).total_seconds()
        self._started = time.monotonic() - age_s

    def finish(self) -> Self:
        """Set `metrics["duration"]` to the seconds since `start_time`."""
        self.metrics["duration"] = time.monotonic() - self._started
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds spent inside to `metrics["NAME_duration"]`."""
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - started

    def for_logging(self) -> dict[str, Any]:
        """The trajectory without tokens; each message says whether it is trained."""
        items = [_as_dict(item) for item in self.messages_and_choices]
        messages = [_message(item) | {"trainable": _is_sampled(item)} for item in items]
        rollout = {"rollout": self.rollout} if self.rollout else {}
        fields = self.model_dump(include={"metrics", "metadata", "tools", "logs"})
        versions = self.model_dump(
            include={"initial_policy_version", "final_policy_version"}, exclude_none=True
        )
        return {"reward": self.reward, **rollout, **versions, **fields, "messages": messages}

    def __str__(self) -> str:
        fields = {"reward": self.reward, "metrics": self.metrics, "metadata": self.metadata}
        return f"Trajectory({', '.join(f'{key}={value!r}' for key, value in fields.items())})"


class TrajectoryGroup(BaseModel):
    """Trajectories of the same input, compared with each other.

    It may hold coroutines: awaiting the group runs them. A rollout that raised becomes an entry of
    `exceptions`, and never a reward.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    trajectories: list[Trajectory] = []
    example: str = ""
    """Id of the input they share."""
    exceptions: list[Failure] = []
    """Rollouts that failed."""
    metrics: dict[str, Metric] = {}
    metadata: dict[str, float | int | str | bool | None] = {}
    logs: list[str] = []
    _pending: list[Any] = PrivateAttr(default_factory=list)

    def __init__(self, trajectories: Iterable[Any] = (), **fields: Any) -> None:
        """`trajectories`: Trajectory, an exception in place of one, or an awaitable of one."""
        failed, pending, finished = [], [], trajectories
        if isinstance(trajectories, Iterable) and not isinstance(trajectories, str | bytes | dict):
            finished = []
            for item in trajectories:
                if isinstance(item, BaseException):
                    failed.append(failure_of(item))
                else:
                    (pending if hasattr(item, "__await__") else finished).append(item)
        if failed:
            fields["exceptions"] = [*fields.get("exceptions", ()), *failed]
        super().__init__(trajectories=finished, **fields)
        self._pending = pending

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # of trajectories, not of fields
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __await__(self) -> Generator[Any, None, "TrajectoryGroup"]:
        return self._finish().__await__()

    async def _finish(self) -> "TrajectoryGroup":
        for result in await run_rollouts(self.take_unfinished(), Trajectory):
            if isinstance(result, Exception):
                self.exceptions.append(failure_of(result))
            else:
                self.trajectories.append(result)
        return self

    @property
    def unfinished(self) -> int:
        """Number of its rollouts that have not been run."""
        return len(self._pending)

    def take_unfinished(self) -> list[Any]:
        """Remove and return the rollouts that have not been run."""
        pending, self._pending = self._pending, []
        return pending

    def log(self, message: str) -> None:
        self.logs.append(message)


class JobRequest(Strict):
    """A request for a training job."""

    model: str
    """NAME or PROJECT/NAME of a registered model."""
    groups: list[TrajectoryGroup]
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of TrainConfig; missing keys come from the model's defaults, then from hone's."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=200)
    """Requests with the same key and content give the same job."""
    plot_tensors: bool = False
    """Plot the trained tokens, beside the checkpoint."""
    advance_when_flat: bool = False
    """Publish the next step, with the same adapter, even if there was nothing to learn."""


def get_messages(messages_and_choices: MessagesAndChoices) -> Messages:
    """Messages and choices as plain OpenAI messages."""
    return History(messages_and_choices=messages_and_choices).messages()


def failure_of(error: BaseException) -> Failure:
    """An exception as data, without the secrets in its text."""
    return Failure(
        type=type(error).__name__,
        message=redact(_message_of(error)),
        traceback=redact(_traceback_of(error)),
        place=place_of(error),
    )


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # it reads attributes, and a user's exception may raise anything
        return "".join(traceback.format_tb(error.__traceback__))


def _message_of(error: BaseException) -> str:
    try:
        if isinstance(error, BaseExceptionGroup):  # its own text names none of its errors
            first = error.exceptions[0]
            return f"{error}: {type(first).__name__}: {_message_of(first)}"
        return str(error)
    except Exception as broken:  # noqa: BLE001  # a user's exception may raise anything
        return f"<no text: {type(broken).__name__}>"


class _Scored(Protocol):
    """A trajectory, ours or as ART's clients send it."""

    @property
    def reward(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float | None]: ...


class _Group(Protocol):
    """A group, ours or as ART's clients send it."""

    @property
    def trajectories(self) -> Sequence[_Scored]: ...
    @property
    def exceptions(self) -> Sequence[object]: ...
    @property
    def metrics(self) -> Mapping[str, float | None]: ...


def means(items: Iterable[_Group | Trajectory | BaseException]) -> dict[str, float]:
    """Mean reward and metrics of all trajectories, and the share of failed rollouts.

    `reward_std_dev` is the mean over groups of the standard deviation within each; metrics of a
    group are called `group_NAME`. Metrics without a finite mean are omitted.
    """
    own: dict[str, list[float]] = defaultdict(list)
    custom: dict[str, list[float]] = defaultdict(list)
    for item in items:
        alone = isinstance(item, Trajectory | BaseException)
        group: _Group = TrajectoryGroup([item]) if alone else item
        rewards = [trajectory.reward for trajectory in group.trajectories]
        own["reward"] += rewards
        own["exception_rate"] += [0.0] * len(rewards) + [1.0] * len(group.exceptions)
        if len(rewards) > 1:
            own["reward_std_dev"].append(_deviation(rewards))
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                custom[name].append(_number(value))
        for name, value in group.metrics.items():
            custom[f"group_{name}"].append(_number(value))
    averages = {name: _mean(values) for name, values in (custom | own).items()}
    return {name: value for name, value in averages.items() if math.isfinite(value)}


def _number(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # an integer that no float can hold
        return math.nan


def _mean(values: Sequence[float]) -> float:
    """NaN without values, and if the sum is no finite float."""
    known = [value for value in values if not math.isnan(value)]
    try:
        return math.fsum(known) / len(known) if known else math.nan
    except (OverflowError, ValueError):  # too large, or infinities of both signs
        return math.nan


def _deviation(values: Sequence[float]) -> float:
    """Population standard deviation."""
    centre = _mean(values)
    return math.sqrt(_mean([min(abs(value - centre), 1e150) ** 2 for value in values]))


def _as_dict(item: Any) -> Any:
    """An object of the OpenAI client as a dict, with unknown fields such as token_ids."""
    if not hasattr(item, "model_dump"):
        return item
    # The client does not validate its objects, and would warn about every unexpected value.
    return item.model_dump(mode="json", warnings=False)


def _with_short_logprobs(item: Any) -> Any:
    """A choice of a hone server without what its token ids tell: the tokens' texts and bytes."""
    ids, logprobs = getattr(item, "token_ids", None), getattr(item, "logprobs", None)
    tokens = getattr(logprobs, "content", None)
    if not (ids and tokens and len(ids) == len(tokens) and getattr(item, "call_id", None)):
        return _as_dict(item)
    values = [getattr(token, "logprob", None) for token in tokens]
    plain = item.model_dump(mode="json", warnings=False, exclude={"logprobs"})
    return plain | {"logprobs": {"token_logprobs": values}}


def _is_sampled(item: Mapping[str, Any]) -> bool:
    """Whether an item is a choice with log-probabilities, or one that a hone server recorded."""
    return bool(item.get("logprobs") or ("message" in item and item.get("call_id")))


def _message(item: Any) -> dict[str, Any]:
    """A message, or the message of a choice, as a client sends it."""
    message = dict(item["message"]) if "message" in item else dict(item)
    plain = {"role": message["role"], "content": message.get("content") or ""}
    optional = ("tool_calls", "tool_call_id", "name", "reasoning_content")
    more = {key: message[key] for key in optional if message.get(key)}
    if "tool_calls" in more:
        more["tool_calls"] = [_as_dict(call) for call in more["tool_calls"]]
    return plain | more


# ---- values that are compared -----------------------------------------------------------------

FLAT = 1e-6
"""Values within this fraction of the largest magnitude count as equal."""


def call_values(
    reward: float, shaped_rewards: Sequence[float] | None, credit: Credit
) -> list[float]:
    """The values of a trajectory: its reward, or one value per trained call."""
    if credit == "outcome":
        return [reward]
    assert shaped_rewards is not None, f"{credit} without shaped_rewards passed samples.py"
    if credit == "per_call":
        return list(shaped_rewards)
    return [sum(shaped_rewards[i:]) for i in range(len(shaped_rewards))]


def columns(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Column i holds the i-th value of every row that has one."""
    longest = max(map(len, values), default=0)
    return [[row[c] for row in values if len(row) > c] for c in range(longest)]


def is_flat(values: Sequence[float]) -> bool:
    """Whether all values are equal up to rounding."""
    low, high = min(values), max(values)
    return high - low <= FLAT * max(abs(low), abs(high))
