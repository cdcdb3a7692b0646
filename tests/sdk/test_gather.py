"""gather: order, the budget of failures, what after_each may return, and what is shown."""

import asyncio
import math
from typing import Any

import pytest
from tests.prose import Prose

import hone
from hone import Trajectory, TrajectoryGroup
from hone.errors import AgentFailed, ConfigError
from hone.gather import gather_trajectories, gather_trajectory_groups, trajectory_group_batches
from hone.tasks.progress import Progress


async def rollout(reward: float, delay_s: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay_s)
    return Trajectory(reward=reward)


async def fail(message: str = "broken", delay_s: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay_s)
    raise ValueError(message)


def rewards(groups: list[TrajectoryGroup]) -> list[list[float]]:
    return [[trajectory.reward for trajectory in group] for group in groups]


async def test_a_group_of_coroutines_keeps_order_and_failures():
    # The first finishes last; the order stays the one given.
    group = await TrajectoryGroup([rollout(1, 0.02), fail("the world ended"), rollout(3)])
    assert rewards([group]) == [[1, 3]]
    (failure,) = group.exceptions
    assert (failure.type, failure.message) == ("ValueError", "the world ended")
    assert "in fail" in failure.traceback
    assert group.unfinished == 0
    assert await group is group, "awaiting it again runs nothing"


async def test_a_group_may_mix_what_is_done_with_what_is_not():
    group = TrajectoryGroup([Trajectory(reward=5), rollout(6), RuntimeError("gone")])
    assert (len(group), group.unfinished, len(group.exceptions)) == (1, 1, 1)
    assert rewards([await group]) == [[5, 6]]


async def test_a_rollout_that_returns_something_else_is_a_failure_that_says_so():
    async def forgetful() -> None:
        """Returns nothing."""

    group = await TrajectoryGroup([forgetful()])
    assert group.exceptions[0].message == "a rollout returned NoneType; it must return a Trajectory"


async def test_groups_come_back_in_the_order_given():
    groups = [TrajectoryGroup([rollout(i, 0.03 - i / 100)], metadata={"i": i}) for i in range(3)]
    assert rewards(await gather_trajectory_groups(groups, pbar_desc=None)) == [[0], [1], [2]]


async def test_all_rollouts_run_at_once():
    running = most = 0

    async def counted() -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Trajectory()

    groups = [TrajectoryGroup(counted() for _ in range(4)) for _ in range(3)]
    await gather_trajectory_groups(groups, pbar_desc=None)
    assert most == 12


async def test_no_failure_is_allowed_unless_asked_for():
    with pytest.raises(ValueError, match="broken") as caught:
        await gather_trajectory_groups([TrajectoryGroup([rollout(1), fail()])], pbar_desc=None)
    assert caught.value.__notes__ == [
        "hone: 1 of 2 rollouts failed, and max_exceptions=0 allows fewer. "
        "Raise it to keep failures as data."
    ]


@pytest.mark.parametrize(
    ("allowed", "failures", "total", "passes"),
    [
        (2, 2, 5, True),
        (2, 3, 5, False),
        (0.5, 2, 4, True),  # 2/4 = 0.5: not more than allowed
        (0.5, 3, 4, False),
        (0.24, 1, 4, False),
        (math.inf, 4, 4, True),
        (1.0, 1, 8, True),  # 1 is a number of rollouts, as in ART, and not all of them
        (1.0, 2, 8, False),
    ],
)
async def test_the_budget_counts_over_all_groups(
    allowed: float, failures: int, total: int, passes: bool
):
    makers = [fail] * failures + [lambda: rollout(1.0)] * (total - failures)
    half = total // 2
    groups = [
        TrajectoryGroup(m() for m in makers[:half]),
        TrajectoryGroup(m() for m in makers[half:]),
    ]
    gathering = gather_trajectory_groups(groups, pbar_desc=None, max_exceptions=allowed)
    if not passes:
        with pytest.raises(ValueError, match="broken"):
            await gathering
        return
    ended = await gathering
    assert sum(len(group.exceptions) for group in ended) == failures
    assert sum(len(group) for group in ended) == total - failures


async def test_when_the_budget_is_spent_what_still_runs_is_cancelled_and_awaited():
    ended: list[str] = []

    async def slow() -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # tidying up takes a moment, and is waited for
            ended.append("cancelled")
            raise
        return Trajectory()

    with pytest.raises(ValueError, match="broken"):
        await gather_trajectory_groups(
            [TrajectoryGroup([slow(), slow()]), TrajectoryGroup([fail(delay_s=0.01)])],
            pbar_desc=None,
        )
    assert ended == ["cancelled", "cancelled"]


async def test_cancelling_a_gather_cancels_its_rollouts():
    started = asyncio.Event()
    ended: list[str] = []

    async def slow() -> Trajectory:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("ended")
        return Trajectory()

    task = asyncio.create_task(
        gather_trajectory_groups([TrajectoryGroup([slow()])], pbar_desc=None)
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"]


@pytest.mark.parametrize("wrong", [-1, math.nan])
async def test_a_budget_that_means_nothing_is_refused(prose: Prose, wrong: float):
    with pytest.raises(ConfigError) as caught:
        await gather_trajectory_groups([], pbar_desc=None, max_exceptions=wrong)
    prose(caught)


async def test_after_each_replaces_drops_and_flattens():
    async def split(group: TrajectoryGroup) -> TrajectoryGroup | list[TrajectoryGroup] | None:
        await asyncio.sleep(0)
        match group.trajectories[0].reward:
            case 0:
                return None
            case 1:
                return [TrajectoryGroup([Trajectory(reward=r)]) for r in (10, 11)]
        return group

    groups = [TrajectoryGroup([rollout(reward)]) for reward in (0, 1, 2)]
    groups_left = await gather_trajectory_groups(groups, pbar_desc=None, after_each=split)
    assert rewards(groups_left) == [[10], [11], [2]]


async def test_what_after_each_raises_is_raised_whatever_the_budget():
    async def broken(group: TrajectoryGroup) -> TrajectoryGroup:
        raise KeyError("judge")

    with pytest.raises(KeyError, match="judge"):
        await gather_trajectory_groups(
            [TrajectoryGroup([rollout(1)])], pbar_desc=None, max_exceptions=9, after_each=broken
        )


async def test_coroutines_of_groups_share_the_budget_and_drop_out_when_they_fail():
    async def made(*rollouts: object) -> TrajectoryGroup:
        return await TrajectoryGroup(rollouts)

    async def unmade() -> TrajectoryGroup:
        raise OSError("no scenario")

    ended = await gather_trajectory_groups(
        [made(rollout(1), fail()), unmade(), made(rollout(2))], pbar_desc=None, max_exceptions=2
    )
    assert rewards(ended) == [[1], [2]]
    with pytest.raises(ValueError, match="broken"):
        await gather_trajectory_groups([made(fail(), fail())], pbar_desc=None, max_exceptions=1)


async def test_gather_trajectories_returns_tolerated_failures_in_place():
    results = await gather_trajectories(
        [rollout(1, 0.01), fail(), rollout(2)], pbar_desc=None, max_exceptions=1
    )
    assert isinstance(results[0], Trajectory)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[2], Trajectory)
    assert (results[0].reward, str(results[1]), results[2].reward) == (1, "broken", 2)


async def test_a_rollout_that_is_cancelled_by_its_own_code_is_a_failure_like_any_other(
    prose: Prose,
):
    async def cancels() -> Trajectory:
        tool = asyncio.create_task(asyncio.sleep(10))
        tool.cancel()
        await tool
        raise AssertionError("not reached")

    async def group_that_cancels() -> TrajectoryGroup:
        return await TrajectoryGroup([await cancels()])

    gone = asyncio.create_task(rollout(3))
    gone.cancel()
    group, other = await gather_trajectory_groups(
        [
            TrajectoryGroup([rollout(1), cancels(), gone]),
            group_that_cancels(),
            TrajectoryGroup([rollout(2)]),
        ],
        max_exceptions=3,
        pbar_desc=None,
    )
    assert rewards([group, other]) == [[1], [2]]
    assert [failure.type for failure in group.exceptions] == ["AgentCrashed"] * 2
    with pytest.raises(AgentFailed) as caught:
        await gather_trajectories([cancels()], pbar_desc=None)
    prose(caught)


@pytest.mark.parametrize("value", [None, "high", pytest.param(10**400, id="huge"), [1.0]])
async def test_a_metric_that_is_not_a_number_loses_no_rollout(value: object):
    async def odd() -> Trajectory:
        trajectory = Trajectory(reward=2)
        trajectory.metrics["quality"] = value  # type: ignore[assignment]  # nothing checks it here
        return trajectory

    groups = [TrajectoryGroup([rollout(1), odd()])]
    assert rewards(await gather_trajectory_groups(groups, pbar_desc=None)) == [[1, 2]]
    (result,) = await gather_trajectories([odd()], pbar_desc=None)
    assert isinstance(result, Trajectory)


async def test_completion_tokens_is_the_mean_over_the_sampled_choices():
    def choice(tokens: int) -> dict[str, object]:
        content = [{"token": "x", "logprob": -1.0}] * tokens
        message = {"role": "assistant", "content": "x"}
        return {"message": message, "finish_reason": "stop", "logprobs": {"content": content}}

    async def talk() -> Trajectory:
        user = {"role": "user", "content": "go"}
        # A choice without log-probabilities has the ids that a hone server puts beside it.
        recorded = choice(0) | {"logprobs": None, "token_ids": [5] * 6}
        return Trajectory(messages_and_choices=[user, choice(3), user, recorded])

    (group,) = await gather_trajectory_groups([TrajectoryGroup([talk()])], pbar_desc=None)
    assert group.trajectories[0].metrics == {"completion_tokens": 4.5}


# ---- what is shown ----------------------------------------------------------------------------


async def test_elsewhere_than_on_a_terminal_the_last_line_has_the_totals(
    capsys: pytest.CaptureFixture[str],
):
    groups = [TrajectoryGroup([rollout(1), rollout(0)]), TrajectoryGroup([rollout(0.5), fail()])]
    await gather_trajectory_groups(groups, pbar_desc="play", max_exceptions=1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "play: 4/4 reward=0.5 exceptions=1\n"


async def test_a_coroutine_of_a_group_counts_as_its_rollouts(capsys: pytest.CaptureFixture[str]):
    async def inner() -> TrajectoryGroup:
        return await TrajectoryGroup([rollout(1), rollout(1), rollout(1)])

    async def plain() -> TrajectoryGroup:
        return TrajectoryGroup([Trajectory(reward=1)])

    await gather_trajectory_groups([inner(), plain(), TrajectoryGroup([rollout(1)])])
    assert capsys.readouterr().err.startswith("gather: 5/5 ")  # 3 + 1 + 1


async def test_max_metrics_and_tokens_choose_what_is_shown(capsys: pytest.CaptureFixture[str]):
    async def measured() -> Trajectory:
        return Trajectory(reward=1, metrics={"turns": 3, "won": True})

    await gather_trajectory_groups([TrajectoryGroup([measured()])], max_metrics=1)
    await gather_trajectory_groups([TrajectoryGroup([measured()])])
    await gather_trajectory_groups(
        [TrajectoryGroup([measured()])], max_metrics=0, pbar_total_completion_tokens=True
    )
    assert capsys.readouterr().err.splitlines() == [
        "gather: 1/1 reward=1 turns=3",
        "gather: 1/1 reward=1 turns=3 won=1",
        "gather: 1/1 reward=1 tokens=0",
    ]


async def test_on_a_terminal_two_bars_at_a_time_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    await asyncio.gather(
        *(
            gather_trajectory_groups([TrajectoryGroup([rollout(1, 0.05)])], pbar_desc=name)
            for name in ("train [x]", "val")
        )
    )
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\x1b[" in shown.err, "no bar was drawn"
    assert "train [x]" in shown.err and "val" in shown.err and "1/1" in shown.err


def test_a_bar_without_a_name_shows_nothing(capsys: pytest.CaptureFixture[str]):
    with Progress(None) as bar:
        bar.update(done=1, total=1)
    assert capsys.readouterr().err == ""


# ---- batches ----------------------------------------------------------------------------------


async def test_batches_come_as_they_finish_and_the_last_may_be_small():
    groups = [TrajectoryGroup([rollout(i, 0.03 if i == 0 else 0.0)]) for i in range(5)]
    batches = [
        rewards(batch)
        async for batch in trajectory_group_batches(groups, batch_size=2, pbar_desc=None)
    ]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert batches[-1] == [[0]], "the slow one holds nobody up"
    assert sorted(reward for batch in batches for (reward,) in batch) == [0, 1, 2, 3, 4]


async def test_batches_take_no_more_from_an_endless_source_than_may_run():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield TrajectoryGroup([rollout(taken)])

    batches = trajectory_group_batches(
        endless(), batch_size=2, max_concurrent_batches=2, pbar_desc=None
    )
    async for batch in batches:
        assert len(batch) == 2
        break
    await batches.aclose()
    assert taken <= 8  # 4 at once; those that finished while the first batch was made leave room


async def test_skipped_batches_are_not_run():
    run: list[int] = []

    async def noted(i: int) -> Trajectory:
        run.append(i)
        return Trajectory(reward=i)

    groups = [TrajectoryGroup([noted(i)]) for i in range(6)]
    batches = trajectory_group_batches(groups, batch_size=2, skip_batches=2, pbar_desc=None)
    assert [rewards(batch) async for batch in batches] == [[[4], [5]]]
    assert run == [4, 5]


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("batch_size", 1.5), ("max_concurrent_batches", 0), ("skip_batches", -1)],
)
async def test_sizes_with_which_no_batch_would_come_are_refused(
    prose: Prose, name: str, value: float
):
    sizes: Any = {"batch_size": 2, name: value}
    batches = trajectory_group_batches([TrajectoryGroup()], **sizes, pbar_desc=None)
    with pytest.raises(ConfigError) as caught:
        await anext(aiter(batches))
    prose(caught)


async def test_the_budget_of_batches_is_per_batch():
    groups = [TrajectoryGroup([rollout(i), fail(f"of {i}")]) for i in range(2)]
    batches = trajectory_group_batches(groups, batch_size=1, max_batch_exceptions=1, pbar_desc=None)
    assert [len(batch[0].exceptions) async for batch in batches] == [1, 1]
    groups = [TrajectoryGroup([rollout(i), fail(f"of {i}")]) for i in range(2)]
    batches = trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=1, pbar_desc=None)
    with pytest.raises(ValueError, match="of 1"):
        await anext(aiter(batches))


def test_they_are_the_public_names():
    assert hone.gather_trajectory_groups is gather_trajectory_groups
    assert hone.gather_trajectories is gather_trajectories
