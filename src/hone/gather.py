"""Run many rollouts at once: a budget of failures, progress, results in the order given.

In:   awaitables of trajectories, or groups made of them
Out:  trajectories and groups; a rollout that failed is an entry of its group's `exceptions`

A failure is data, never a reward: it is counted, kept with its traceback, and when there are more
than `max_exceptions` the first one too many is raised and everything still running is cancelled
and waited for, so that nothing goes on sampling behind the caller's back.
"""

import asyncio
import inspect
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from hone.errors import ConfigError
from hone.progress import Progress
from hone.trajectory import Trajectory, TrajectoryGroup, failure_of

R = TypeVar("R")
T = TypeVar("T")
AfterEach = Callable[
    [TrajectoryGroup], Awaitable[TrajectoryGroup | Iterable[TrajectoryGroup] | None]
]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Run every rollout of every group at once.

    Args:
        groups: groups made of coroutines, or coroutines that return a group.
        pbar_desc: in front of the progress bar; None shows none.
        pbar_total_completion_tokens: show how many tokens the choices hold.
        max_exceptions: rollouts that may fail; below 1 a share of all of them. One more is raised.
        max_metrics: of the trajectories' metrics, how many are shown.
        after_each: awaited with each finished group; what it returns takes the group's place: a
            group, several, or None to drop it.
    """
    waiting = list(groups)
    with Progress(pbar_desc) as bar:
        tally = _Tally(
            max_exceptions,
            bar,
            show_tokens=pbar_total_completion_tokens,
            max_metrics=max_metrics,
        )
        tally.expect(sum(_size(group) for group in waiting))
        ended = await _all(waiting, lambda group: _finish(group, tally, after_each))
    return [group for groups_of_one in ended for group in groups_of_one]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[R]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
) -> list[R | Exception]:
    """Run rollouts at once; a failure that `max_exceptions` allows stands in its rollout's place.

    Args:
        trajectories: awaitables of a Trajectory, or of several.
        pbar_desc: in front of the progress bar; None shows none.
        max_exceptions: rollouts that may fail; below 1 a share of all of them. One more is raised.
    """
    waiting = list(trajectories)
    with Progress(pbar_desc) as bar:
        tally = _Tally(max_exceptions, bar)
        tally.expect(len(waiting))
        return await _all(waiting, tally.watch)


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
) -> AsyncGenerator[list[TrajectoryGroup], None]:
    """Batches of groups in the order in which they finish, while the next ones run.

    Args:
        groups: taken one by one as there is room, so it may be a generator without an end.
        batch_size: groups in a batch; the last one may be smaller.
        max_batch_exceptions: rollouts of one batch that may fail, as in gather_trajectory_groups.
        max_concurrent_batches: groups of so many batches run at once.
        skip_batches: leave out so many at the start, to go on where a run was interrupted.
        pbar_desc: in front of the progress bar; None shows none.
    """
    source = iter(groups)
    for skipped in islice(source, skip_batches * batch_size):
        _discard(skipped)
    running: dict[asyncio.Task[_Apart], Any] = {}
    ended: list[_Apart] = []
    with Progress(pbar_desc) as bar:
        try:
            while True:
                room = batch_size * max_concurrent_batches - len(running)
                running |= {asyncio.create_task(_apart(g)): g for g in islice(source, room)}
                bar.update(total=bar.done + len(ended) + len(running))
                if len(ended) >= batch_size or not running:
                    batch, ended = ended[:batch_size], ended[batch_size:]
                    if not batch:
                        return
                    _check(batch, max_batch_exceptions)
                    bar.update(done=bar.done + len(batch))
                    yield [one.group for one in batch if one.group is not None]
                else:
                    done, _ = await asyncio.wait(running, return_when="FIRST_COMPLETED")
                    ended += [task.result() for task in running if task in done]
                    running = {task: g for task, g in running.items() if task not in done}
        finally:
            await _end(running)


async def finish_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """Run the rollouts the group is made of.

    On its own it keeps every failure as data; inside a gather call that call's budget counts.
    """
    share = _share.get()
    if share is None:
        return await _run(group, _Tally(math.inf, Progress(None)))
    share.reveal(group.unfinished)
    return await _run(group, share.tally)


# ---- one gather call --------------------------------------------------------------------------


class _Tally:
    """What a gather call has seen so far, and how many failures it may still see."""

    def __init__(
        self,
        max_exceptions: float,
        bar: Progress,
        *,
        show_tokens: bool = False,
        max_metrics: int | None = None,
    ) -> None:
        if not max_exceptions >= 0:
            raise ConfigError(
                f"max_exceptions is {max_exceptions!r}: a number of rollouts, or a share of them "
                "between 0 and 1"
            )
        self.allowed, self.bar = max_exceptions, bar
        self.errors: list[Exception] = []
        self.total = self.ended = self.tokens = 0
        self._show_tokens, self._max_metrics = show_tokens, max_metrics
        self._sums: dict[str, tuple[float, int]] = {}

    def expect(self, count: int) -> None:
        """So many more rollouts belong to the whole."""
        self.total += count
        self.bar.update(total=self.total)

    async def watch(self, rollout: Awaitable[Any], *, kind: type | None = None) -> Any:
        """The rollout's result, or the exception it raised if the budget allows that."""
        try:
            result = await rollout
            if kind is not None and not isinstance(result, kind):
                raise TypeError(
                    f"a rollout returned {type(result).__name__}; it must return a {kind.__name__}"
                )
        except Exception as error:  # noqa: BLE001  # user code: whatever it raises is data
            self.fail(error)
            return error
        found = [result] if isinstance(result, Trajectory) else result
        for trajectory in found if isinstance(found, Iterable) else ():
            if isinstance(trajectory, Trajectory):
                self._add(trajectory)
        self.advance()
        return result

    def fail(self, error: Exception) -> None:
        """Count a failure; raise it if it is one too many."""
        self.errors.append(error)
        self.advance()
        _check_budget(self.errors, self.total, self.allowed)

    def advance(self, count: int = 1) -> None:
        self.ended += count
        self.bar.update(done=self.ended, note=self._note())

    def _add(self, trajectory: Trajectory) -> None:
        counts = [_tokens(item) for item in trajectory.messages_and_choices]
        counts = [count for count in counts if count is not None]
        if counts:
            trajectory.metrics["completion_tokens"] = sum(counts) / len(counts)
            self.tokens += sum(counts)
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)

    def _note(self) -> str:
        means = [f"{name}={total / count:.3g}" for name, (total, count) in self._sums.items()]
        shown = means if self._max_metrics is None else means[: 1 + self._max_metrics]
        shown += [f"tokens={self.tokens}"] if self._show_tokens else []
        shown += [f"exceptions={len(self.errors)}"] if self.errors else []
        return " ".join(shown)


def _check_budget(errors: Sequence[Exception], total: int, allowed: float) -> None:
    """Raise the last of the errors if they are more than allowed: a number, or a share below 1."""
    bound = allowed * total if 0 < allowed < 1 else allowed
    if len(errors) > bound:
        error = errors[-1]
        error.add_note(
            f"hone: {len(errors)} of {total} rollouts failed, and max_exceptions={allowed:g} "
            "allows fewer. Raise it to keep failures as data."
        )
        raise error


@dataclass
class _Share:
    """One awaitable's part of a tally: one rollout, until it shows that it is made of several."""

    tally: _Tally
    revealed: bool = False

    def reveal(self, count: int) -> None:
        self.tally.expect(count if self.revealed else count - 1)
        self.revealed = True


_share: ContextVar[_Share | None] = ContextVar("hone_gather_share", default=None)


async def _finish(
    group: Awaitable[TrajectoryGroup], tally: _Tally, after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    """One entry of a gather call, finished; what `after_each` made of it."""
    ended = await _run_any(group, tally)
    if ended is None or after_each is None:
        return [] if ended is None else [ended]
    kept = await after_each(ended)
    if kept is None or isinstance(kept, TrajectoryGroup):
        return [] if kept is None else [kept]
    return list(kept)


async def _run_any(group: Awaitable[TrajectoryGroup], tally: _Tally) -> TrajectoryGroup | None:
    """A group of coroutines, or a coroutine of a group; None if the latter failed."""
    known = isinstance(group, TrajectoryGroup)
    share = _Share(tally, revealed=known)
    token = _share.set(share)
    try:
        if known:
            return await _run(group, tally)
        result = await group
        if not isinstance(result, TrajectoryGroup):
            raise TypeError(f"{type(result).__name__} was returned in place of a TrajectoryGroup")
    except Exception as error:
        if any(error is counted for counted in tally.errors):
            raise  # one of its rollouts failed, and was one too many
        tally.fail(error)
        return None
    finally:
        _share.reset(token)
    if not share.revealed:
        tally.advance()
    return result


async def _run(group: TrajectoryGroup, tally: _Tally) -> TrajectoryGroup:
    rollouts = group.take_unfinished()
    for result in await _all(rollouts, lambda rollout: tally.watch(rollout, kind=Trajectory)):
        if isinstance(result, Exception):
            group.exceptions.append(failure_of(result))
        else:
            group.trajectories.append(result)
    return group


@dataclass(frozen=True)
class _Apart:
    """A group that ran with a tally of its own."""

    group: TrajectoryGroup | None
    tally: _Tally


async def _apart(group: Awaitable[TrajectoryGroup]) -> _Apart:
    tally = _Tally(math.inf, Progress(None))
    tally.expect(_size(group))
    return _Apart(await _run_any(group, tally), tally)


def _check(batch: Sequence[_Apart], allowed: float) -> None:
    errors = [error for one in batch for error in one.tally.errors]
    _check_budget(errors, sum(one.tally.total for one in batch), allowed)


async def _all(items: Sequence[T], run: Callable[[T], Coroutine[Any, Any, R]]) -> list[R]:
    """Run all at once, results in order; when one raises, the others are ended first."""
    tasks = {asyncio.create_task(run(item)): item for item in items}
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def _end(tasks: Mapping[asyncio.Task[Any], Any]) -> None:
    """Cancel what runs and wait for it; a task that had not begun leaves its item unawaited."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for item in tasks.values():
        _discard(item)


def _size(group: Awaitable[TrajectoryGroup]) -> int:
    return group.unfinished if isinstance(group, TrajectoryGroup) else 1


def _discard(group: Any) -> None:
    """Close coroutines that will never be awaited, so that nobody is warned of them."""
    rollouts = group.take_unfinished() if isinstance(group, TrajectoryGroup) else [group]
    for rollout in rollouts:
        if inspect.iscoroutine(rollout):
            rollout.close()


def _tokens(item: Any) -> int | None:
    """Sampled tokens of a choice; None for a message, and where the choice does not tell."""

    def of(value: Any, name: str) -> Any:
        return value.get(name) if isinstance(value, dict) else getattr(value, name, None)

    sampled = of(of(item, "logprobs"), "content") or of(item, "token_ids")
    return None if sampled is None else len(sampled)
