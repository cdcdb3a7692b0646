"""Run many rollouts at once, with progress and a limit on failures.

In:   awaitables of trajectories, or groups of them
Out:  trajectories and groups in the order given; a failed rollout is in its group's `exceptions`

A failure is data, never a reward: it is counted and recorded with its traceback. Above
`max_exceptions` it is raised, after everything that still runs was cancelled (tally.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from hone.errors import ConfigError
from hone.tasks.progress import Progress
from hone.tasks.tally import (
    Share,
    Tally,
    cancel_all,
    check_budget,
    current_share,
    discard,
    run_all,
    uncancelled,
)
from hone.trajectory import TrajectoryGroup

R = TypeVar("R")
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
        groups: groups of coroutines, or coroutines that return a group.
        pbar_desc: label of the progress bar; None shows no bar.
        pbar_total_completion_tokens: show the number of completion tokens.
        max_exceptions: number of rollouts that may fail; below 1, a share. One more is raised.
        max_metrics: number of the trajectories' metrics to show.
        after_each: awaited with each finished group; returns what replaces the group: a group,
            several, or None to drop it.
    """
    waiting = list(groups)
    with Progress(pbar_desc) as bar:
        tally = Tally(
            max_exceptions,
            bar,
            show_tokens=pbar_total_completion_tokens,
            max_metrics=max_metrics,
        )
        tally.expect(len(waiting))
        ended = await run_all(waiting, lambda group: _finish(group, tally, after_each))
    return [group for groups_of_one in ended for group in groups_of_one]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[R]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
) -> list[R | Exception]:
    """Run rollouts at once; a failed one is replaced by its exception.

    Args:
        trajectories: awaitables of a Trajectory, or of several.
        pbar_desc: label of the progress bar; None shows no bar.
        max_exceptions: number of rollouts that may fail; below 1, a share. One more is raised.
    """
    waiting = list(trajectories)
    with Progress(pbar_desc) as bar:
        tally = Tally(max_exceptions, bar)
        tally.expect(len(waiting))
        return await run_all(waiting, tally.watch)


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
        groups: consumed one by one, so it may be an endless generator.
        batch_size: groups per batch; the last batch may be smaller.
        max_batch_exceptions: limit on failures in one batch, as in gather_trajectory_groups.
        max_concurrent_batches: number of batches whose groups run at once.
        skip_batches: number of batches to skip, to resume an interrupted run.
        pbar_desc: label of the progress bar; None shows no bar.
    """
    least = {"batch_size": (batch_size, 1), "max_concurrent_batches": (max_concurrent_batches, 1)}
    for name, (value, minimum) in (least | {"skip_batches": (skip_batches, 0)}).items():
        if not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name} is {value!r}: a whole number, at least {minimum}")
    source = iter(groups)
    for skipped in islice(source, skip_batches * batch_size):
        discard(skipped)
    running: dict[asyncio.Task[_Ended], Awaitable[TrajectoryGroup]] = {}
    ended: list[_Ended] = []
    with Progress(pbar_desc) as bar:
        try:
            while True:
                count = batch_size * max_concurrent_batches - len(running)
                running |= {asyncio.create_task(_run_alone(g)): g for g in islice(source, count)}
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
            await cancel_all(running)
            for group in running.values():
                discard(group)


async def _finish(
    group: Awaitable[TrajectoryGroup], tally: Tally, after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    """One entry of a gather call, finished; what `after_each` returned for it."""
    ended = await _run(group, tally)
    result = ended if ended is None or after_each is None else await after_each(ended)
    if result is None or isinstance(result, TrajectoryGroup):
        return [] if result is None else [result]
    return list(result)


async def _run(group: Awaitable[TrajectoryGroup], tally: Tally) -> TrajectoryGroup | None:
    """A group of coroutines, or a coroutine of a group; None if the latter failed."""
    share = Share(tally)
    token = current_share.set(share)
    try:
        result = await uncancelled(group)
        if not isinstance(result, TrajectoryGroup):
            raise TypeError(f"{type(result).__name__} was returned in place of a TrajectoryGroup")
    except Exception as error:
        if any(error is counted for counted in tally.errors):
            raise  # too many of its rollouts failed
        tally.fail(error)
        return None
    finally:
        current_share.reset(token)
    if not share.revealed:
        tally.advance()
    return result


@dataclass(frozen=True)
class _Ended:
    """A group that ran with its own tally."""

    group: TrajectoryGroup | None
    tally: Tally


async def _run_alone(group: Awaitable[TrajectoryGroup]) -> _Ended:
    tally = Tally()
    tally.expect(1)
    return _Ended(await _run(group, tally), tally)


def _check(batch: Sequence[_Ended], allowed: float) -> None:
    errors = [error for one in batch for error in one.tally.errors]
    check_budget(errors, sum(one.tally.total for one in batch), allowed)
