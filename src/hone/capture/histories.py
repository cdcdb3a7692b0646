"""Automatic trajectories: the conversations of a rollout, assembled from its calls.

In:   model calls inside `capture_auto_trajectory`, in any dialect and from any client that is captured
Out:  a Trajectory whose messages and choices are those calls, and more histories where they branch

A call that continues a conversation is appended to it; any other one begins a new history. A choice
keeps its `call_id`, by which the server finds the sampled tokens.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, overload

from hone.capture.base import Recorder, SeenCall, WatchedCall, current
from hone.capture.scope import recorded
from hone.errors import ConfigError
from hone.tasks.tally import discard
from hone.trajectory import History, Trajectory, get_messages
from hone.wire.conversation import continued, meaning


class TrajectoryRecorder(Recorder):
    """Adds each call to a trajectory as soon as its response is complete."""

    def __init__(self, only: Callable[[SeenCall], bool] | None) -> None:
        """`only`: the calls to put into the trajectory; None for all."""
        super().__init__(on_end=self._add)
        self.trajectory = Trajectory()
        self._only = only
        self._adding = threading.Lock()

    def _add(self, ended: WatchedCall) -> None:
        call = ended.read()
        if call.messages is None or call.reply is None or call.error is not None:
            return
        if self._only is None or self._only(call):
            with self._adding:
                add_call(self.trajectory, call.messages, call.tools, call.choices[0])


def add_call(
    trajectory: Trajectory,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    choice: Mapping[str, Any],
) -> None:
    """Append a call to the history that it continues, or to a new one."""
    from openai.types.chat.chat_completion import Choice  # imported here: it takes a second

    # A history has one list of tools, so that a call with others cannot be part of it.
    histories = [
        history
        for history in (trajectory, *trajectory.additional_histories)
        if history.tools == tools or not history.messages_and_choices
    ]
    earlier = [[*map(meaning, get_messages(h.messages_and_choices))] for h in histories]
    number = continued([*map(meaning, messages)], earlier)
    if number is None:
        history = History()
        trajectory.additional_histories.append(history)
    else:
        history = histories[number]
    history.messages_and_choices += messages[len(history.messages_and_choices) :]
    history.messages_and_choices.append(Choice.construct(**choice))
    history.tools = tools


# ---- art.auto_trajectory -----------------------------------------------------------------------


@contextmanager
def capturing(only: Callable[[SeenCall], bool] | None = None) -> Iterator[Trajectory]:
    """A scope whose calls become the trajectory that it yields."""
    outer = current()
    if outer is not None and outer.recorder is not None and not _of(outer.recorder):
        raise ConfigError(
            f"rollout {outer.rollout!r} of `hone finetune` is recorded already: return its output "
            "without capture_auto_trajectory or wrap_rollout"
        )
    recorder = TrajectoryRecorder(only)
    rollout, _ = recorded(recorder=recorder)
    with rollout:
        yield recorder.trajectory
    recorder.trajectory.finish()


async def capture_auto_trajectory(coroutine: Awaitable[Any]) -> Trajectory:
    """Run the coroutine; returns the trajectory of all model calls that it made.

    The coroutine sets the reward: `hone.auto_trajectory(required=True).reward = 1.0`.
    """
    try:
        with capturing() as trajectory:
            await coroutine
    except ConfigError:
        discard(coroutine)  # refused before it started
        raise
    return trajectory


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The trajectory of the innermost `capture_auto_trajectory`; outside, None or an error."""
    scope = current()
    trajectory = None if scope is None else _of(scope.recorder)
    if trajectory is None and required:
        raise RuntimeError("auto_trajectory(required=True) outside capture_auto_trajectory(...)")
    return trajectory


def _of(recorder: Recorder | None) -> Trajectory | None:
    return recorder.trajectory if isinstance(recorder, TrajectoryRecorder) else None


# ---- art.yield_trajectory ----------------------------------------------------------------------


_yielded: ContextVar[list[Trajectory] | None] = ContextVar("hone_yielded", default=None)


def yield_trajectory(trajectory: Trajectory) -> None:
    """Pass a trajectory to the enclosing `capture_yielded_trajectory`; the last one counts."""
    trajectories = _yielded.get()
    if trajectories is not None:  # outside, nothing waits for it
        trajectories.append(trajectory)


async def capture_yielded_trajectory(coroutine: Awaitable[Any]) -> Trajectory:
    """Run the coroutine; returns the trajectory that it passed to `yield_trajectory`."""
    trajectories: list[Trajectory] = []
    token = _yielded.set(trajectories)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not trajectories:
        raise RuntimeError("the coroutine did not call yield_trajectory(...)")
    return trajectories[-1]
