"""Trajectory and TrajectoryGroup: one conversation with a reward, and those compared with it.

In:   what the user's code sampled, as recorded calls, a rollout's id, or OpenAI messages and
      choices; and the reward it gave
Out:  what a training job is made of

A trajectory says what was sampled in one of three ways. `calls` carry the tokens themselves;
`rollout` refers to the calls the server recorded; `messages_and_choices` holds OpenAI messages,
of which the choices with log-probabilities are trained. The server turns the last two into the
first, by what it recorded, and refuses to guess. This module knows nothing of tensors, so that
it loads on a laptop without torch.
"""

import math
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    field_serializer,
    model_validator,
)

from hone.tally import run_rollouts
from hone.types import Call, Failure, Strict

Messages = list[dict[str, Any]]
"""Messages of the OpenAI API."""
MessagesAndChoices = list[Any]
"""Messages as dicts; choices as the OpenAI client returned them, or as dicts of the same keys."""
Tools = list[dict[str, Any]]
"""Tools of the OpenAI API."""


class History(BaseModel):
    """One conversation: what was said, and which answers were sampled."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None

    @field_serializer("messages_and_choices")
    def _plain(self, items: MessagesAndChoices) -> list[Any]:
        return [_as_dict(item) for item in items]

    def messages(self) -> Messages:
        """The conversation as plain OpenAI messages."""
        return [_message(item) for item in self._plain(self.messages_and_choices)]


class Trajectory(History):
    """One rollout and what it was worth."""

    calls: list[Call] = []
    """What was sampled, to the token."""
    rollout: str = ""
    """Id of the rollout whose recorded calls these are."""
    trained_calls: list[str] | None = None
    """Ids of the recorded calls of `rollout` to be trained; the others are context. None: all."""
    additional_histories: list[History] = []
    """Further conversations of the same rollout, worth the same."""
    reward: float = Field(default=0.0, allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call, for `credit: per_call` or `return_to_go`."""
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, float | int | str | bool | None] = {}
    logs: list[str] = []
    _started: float = PrivateAttr(default_factory=time.monotonic)

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

    def finish(self) -> Self:
        """Note how long it took, in `metrics["duration"]`."""
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
        """What a reader of logs wants: no tokens; each message says whether it is trained."""
        items = self._plain(self.messages_and_choices)
        said = [_message(item) | {"trainable": _is_sampled(item)} for item in items]
        kept = {"metrics", "metadata", "tools", "logs"}
        rollout = {"rollout": self.rollout} if self.rollout else {}
        return {"reward": self.reward, **rollout, **self.model_dump(include=kept), "messages": said}

    def __str__(self) -> str:
        fields = {"reward": self.reward, "metrics": self.metrics, "metadata": self.metadata}
        return f"Trajectory({', '.join(f'{key}={value!r}' for key, value in fields.items())})"


class TrajectoryGroup(BaseModel):
    """Trajectories of the same input, compared with each other.

    May be made of coroutines: awaiting the group runs them. A rollout that raised becomes an
    entry of `exceptions` and never a reward.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    trajectories: list[Trajectory] = []
    example: str = ""
    """Id of the input they share."""
    exceptions: list[Failure] = []
    """Rollouts that failed."""
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, float | int | str | bool | None] = {}
    logs: list[str] = []
    _pending: list[Any] = PrivateAttr(default_factory=list)

    def __init__(self, trajectories: Iterable[Any] = (), **fields: Any) -> None:
        """`trajectories`: Trajectory, an exception that stands for one, or an awaitable of one."""
        failed, pending, kept = [], [], trajectories
        if isinstance(trajectories, Iterable) and not isinstance(trajectories, str | bytes | dict):
            kept = []
            for item in trajectories:
                if isinstance(item, BaseException):
                    failed.append(failure_of(item))
                else:
                    (pending if hasattr(item, "__await__") else kept).append(item)
        if failed:
            fields["exceptions"] = [*fields.get("exceptions", ()), *failed]
        super().__init__(trajectories=kept, **fields)
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
        """How many of its rollouts have not been run."""
        return len(self._pending)

    def take_unfinished(self) -> list[Any]:
        """Hand over the rollouts that have not been run, to be run by the caller."""
        pending, self._pending = self._pending, []
        return pending

    def log(self, message: str) -> None:
        self.logs.append(message)


class JobRequest(Strict):
    """A training job as a client asks for it."""

    model: str
    """NAME or PROJECT/NAME of a registered model."""
    groups: list[TrajectoryGroup]
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of TrainConfig; what is left out comes from the model's defaults, then from hone's."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=200)
    """The same key and the same request give the same job, however often it is sent."""
    seed: int = Field(default=0, ge=0)
    plot_tensors: bool = False
    """Draw what was trained, beside the checkpoint."""
    advance_when_flat: bool = False
    """Publish the next step even where nothing could be learned, with the same adapter."""


def failure_of(error: BaseException) -> Failure:
    """An exception as data."""
    return Failure(
        type=type(error).__name__,
        message=_said(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # an exception of the user's own may raise anything
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
    """Mean reward and metrics of all trajectories, and how many rollouts failed.

    `reward_std_dev` is the mean over groups of the standard deviation inside each; metrics of a
    group are called `group_NAME`. What no number can be said of is left out.
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
    """NaN of no values, and where the sum is beyond all floats."""
    known = [value for value in values if not math.isnan(value)]
    try:
        return math.fsum(known) / len(known) if known else math.nan
    except (OverflowError, ValueError):  # too large, or infinities of both signs
        return math.nan


def _deviation(values: Sequence[float]) -> float:
    """Of the population."""
    centre = _mean(values)
    return math.sqrt(_mean([min(abs(value - centre), 1e150) ** 2 for value in values]))


def _as_dict(item: Any) -> Any:
    """An object of the OpenAI client as a dict, the fields it does not know (token_ids) included."""
    if not hasattr(item, "model_dump"):
        return item
    # The client builds its objects unchecked, and would warn of every field a server fills freely.
    return item.model_dump(mode="json", warnings=False)


def _is_sampled(item: Mapping[str, Any]) -> bool:
    """Whether an item is a choice with log-probabilities, or one that a hone server recorded."""
    return bool(item.get("logprobs") or ("message" in item and item.get("call_id")))


def _message(item: Any) -> dict[str, Any]:
    """A message, or the message of a choice, in the form a client would send it."""
    said = dict(item["message"]) if "message" in item else dict(item)
    plain = {"role": said["role"], "content": said.get("content") or ""}
    kept = ("tool_calls", "tool_call_id", "name", "reasoning_content")
    more = {key: said[key] for key in kept if said.get(key)}
    if "tool_calls" in more:
        more["tool_calls"] = [_as_dict(call) for call in more["tool_calls"]]
    return plain | more
