"""Run many rollouts at once: a budget of failures, progress, results in the order given.

In:   awaitables of trajectories, or groups made of them
Out:  trajectories and groups; a rollout that failed is an entry of its group's `exceptions`

A failure is data, never a reward: it is counted, kept with its traceback, and when there are more
than `max_exceptions` the first one too many is raised and everything still running is cancelled
and waited for, so that nothing goes on sampling behind the caller's back.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from hone.progress import Progress
from hone.tally import Share, Tally, check_budget, current_share, discard, end_all, run_all
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
    """Run rollouts at once; a failure that `max_exceptions` allows stands in its rollout's place.

    Args:
        trajectories: awaitables of a Trajectory, or of several.
        pbar_desc: in front of the progress bar; None shows none.
        max_exceptions: rollouts that may fail; below 1 a share of all of them. One more is raised.
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
        groups: taken one by one as there is room, so it may be a generator without an end.
        batch_size: groups in a batch; the last one may be smaller.
        max_batch_exceptions: rollouts of one batch that may fail, as in gather_trajectory_groups.
        max_concurrent_batches: groups of so many batches run at once.
        skip_batches: leave out so many at the start, to go on where a run was interrupted.
        pbar_desc: in front of the progress bar; None shows none.
    """
    source = iter(groups)
    for skipped in islice(source, skip_batches * batch_size):
        discard(skipped)
    running: dict[asyncio.Task[_Ended], Awaitable[TrajectoryGroup]] = {}
    ended: list[_Ended] = []
    with Progress(pbar_desc) as bar:
        try:
            while True:
                room = batch_size * max_concurrent_batches - len(running)
                running |= {asyncio.create_task(_run_alone(g)): g for g in islice(source, room)}
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
            await end_all(running)


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
        result = await group
        if not isinstance(result, TrajectoryGroup):
            raise TypeError(f"{type(result).__name__} was returned in place of a TrajectoryGroup")
    except Exception as error:
        if any(error is counted for counted in tally.errors):
            raise  # one of its rollouts failed, and was one too many
        tally.fail(error)
        return None
    finally:
        current_share.reset(token)
    if not share.revealed:
        tally.advance()
    return result


@dataclass(frozen=True)
class _Ended:
    """A group that ran with a tally of its own."""

    group: TrajectoryGroup | None
    tally: Tally


async def _run_alone(group: Awaitable[TrajectoryGroup]) -> _Ended:
    tally = Tally()
    tally.expect(1)
    return _Ended(await _run(group, tally), tally)


def _check(batch: Sequence[_Ended], allowed: float) -> None:
    errors = [error for one in batch for error in one.tally.errors]
    check_budget(errors, sum(one.tally.total for one in batch), allowed)
