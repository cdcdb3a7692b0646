"""Trajectory groups by tokens and by rollout become calls; what is wrong is refused by its path."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.prose import Prose, place_of
from tests.server.conftest import VOCAB
from tests.server.worlds import USER, World, by_tokens, talk

from hone.errors import Unprocessable
from hone.trajectory import History, Trajectory, TrajectoryGroup
from hone.types import Call, Failure

# ---- by tokens --------------------------------------------------------------------------------


async def test_tokens_are_used_unchanged(world: World):
    one, two = by_tokens(), by_tokens(temperature=0.5, step=2, function="plan", forced=[0])
    resolved = await world.resolve(one, two)
    assert [t.calls for t in resolved.groups[0]] == [one.calls, two.calls]
    assert resolved.counts == {"by_tokens": 2}
    assert resolved.calls == []


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"completion_ids": [4, VOCAB]}, "completion_ids.1"),
        ({"logprobs": [-1.0, float("nan")]}, "logprobs.1"),
        ({"logprobs": [float("-inf"), -1.0]}, "logprobs.0"),
        ({"logprobs": [-1.0, 0.7]}, "logprobs.1"),
    ],
)
async def test_wrong_tokens_are_refused_by_their_path(
    prose: Prose, world: World, changes: dict[str, Any], path: str
):
    refusal = await world.refusal(by_tokens(), by_tokens(**changes))
    prose(refusal)
    assert place_of(refusal) == f"groups.0.trajectories.1.calls.0.{path}"


async def test_ids_of_other_models_are_not_checked(world: World):
    other = Call(prompt_ids=[10**6], completion_ids=[10**6], trained=False)
    trajectory = Trajectory(calls=[other, *by_tokens().calls])
    resolved = await world.resolve(trajectory)
    assert resolved.groups[0].trajectories[0].calls[0] == other


@pytest.mark.parametrize(
    "wrong",
    [
        {"completion_ids": [6, -1]},
        {"prompt_ids": [2**31]},
        {"completion_ids": [10**30, 6]},
        {"temperature": float("inf")},
        {"step": 10**40},
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, Any]):
    fields: dict[str, Any] = {"prompt_ids": [5], "completion_ids": [6, 7]}
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Call(**fields | wrong)


async def test_every_wrong_field_is_named_at_once(world: World):
    wrong = [by_tokens(completion_ids=[600, 1]), by_tokens(), by_tokens(prompt_ids=[700])]
    lines = (await world.refusal(*wrong)).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "groups.0.trajectories.0.calls.0.completion_ids.0",
        "groups.0.trajectories.2.calls.0.prompt_ids.0",
    ]


async def test_a_trajectory_says_what_was_sampled_in_one_way(prose: Prose, world: World):
    both = Trajectory(calls=by_tokens().calls, rollout="r1")
    refusal = await world.refusal(both)
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0"
    both = talk(USER, calls=by_tokens().calls)
    assert "calls and messages_and_choices each say" in await world.refusal(both)
    both = Trajectory(rollout="r1", additional_histories=[History()])
    assert "rollout and additional_histories each say" in await world.refusal(both)


async def test_long_trajectories_are_counted_and_left_to_the_learner(world: World):
    resolved = await world.resolve(by_tokens(), by_tokens(prompt_ids=[1] * 20), max_seq_length=10)
    assert resolved.counts == {"by_tokens": 2, "dropped/too_long": 1}
    assert len(resolved.groups[0]) == 2
    # The model itself reads 512 tokens.
    resolved = await world.resolve(by_tokens(prompt_ids=[1] * 511))
    assert resolved.counts["dropped/too_long"] == 1


# ---- groups ------------------------------------------------------------------------------------


async def test_groups_keep_what_they_are_compared_by(world: World):
    rich = TrajectoryGroup(
        [Trajectory(calls=by_tokens().calls, reward=0.25, shaped_rewards=[2.0], logs=["said"])],
        example="item 7",
        exceptions=[Failure(type="ValueError", message="boom")] * 2,
        metrics={"a": 1, "b": float("nan")},
        metadata={"c": "d"},
    )
    rich.trajectories[0].metrics = {"e": float("inf"), "f": True}
    resolved = await world.resolve_groups([TrajectoryGroup(), rich])
    (group,) = resolved.groups
    assert (group.example, group.metrics, group.metadata) == ("item 7", {"a": 1}, {"c": "d"})
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.shaped_rewards) == (0.25, [2.0])
    assert trajectory.metrics == {"f": True}
    assert resolved.counts == {"by_tokens": 1, "dropped/empty_group": 1, "exceptions": 2}


async def test_trajectories_without_calls_leave_their_group(world: World):
    resolved = await world.resolve(Trajectory(reward=1.0), by_tokens(), talk(USER))
    assert len(resolved.groups[0]) == 1
    assert resolved.counts == {"by_tokens": 1, "dropped/no_calls": 2}


async def test_a_job_with_nothing_to_train_says_what_to_do(prose: Prose, world: World):
    refusal = await world.refusal(talk(USER, {"role": "assistant", "content": "Cold."}))
    prose(refusal)
    assert place_of(refusal) == "groups"
    with pytest.raises(Unprocessable) as caught:
        await world.resolve_groups([])
    prose(caught)


@pytest.mark.parametrize(
    ("shaped", "credit"),
    [
        (None, "per_call"),
        ([1.0, 2.0], "outcome"),
    ],
)
async def test_shaped_rewards_are_one_per_trained_call(
    prose: Prose, world: World, shaped: list[float] | None, credit: str
):
    world.add([4, 5], rollout="r1")
    refusal = await world.refusal(Trajectory(rollout="r1", shaped_rewards=shaped), credit=credit)
    assert refusal.startswith("groups.0.trajectories.0.shaped_rewards")
    prose(refusal)


# ---- by rollout --------------------------------------------------------------------------------


async def test_a_rollout_is_what_was_recorded_of_it(world: World):
    calls = [
        world.add([4, 5], rollout="r1", index=0),
        world.add([6], rollout="r1", index=1, choice=0),
        world.add([8], rollout="r1", index=1, choice=1),
    ]
    world.add([9], rollout="r2")
    resolved = await world.resolve(Trajectory(rollout="r1", reward=1.0))
    (trajectory,) = resolved.groups[0].trajectories
    assert trajectory.calls == [one.call for one in calls]
    assert trajectory.rollout == ""
    assert resolved.calls == [one.id for one in calls]
    assert resolved.counts == {"by_rollout": 3}


async def test_abandoned_calls_are_never_trained(prose: Prose, world: World):
    world.add([4, 5], rollout="r1", abandoned=True)
    recorded = world.add([6], rollout="r1", index=1)
    resolved = await world.resolve(Trajectory(rollout="r1"))
    assert resolved.groups[0].trajectories[0].calls == [recorded.call]
    assert resolved.counts == {"by_rollout": 1, "dropped/abandoned": 1}
    world.add([4, 5], rollout="r2", abandoned=True)
    refusal = await world.refusal(Trajectory(rollout="r2"))
    prose(refusal)


async def test_calls_of_other_models_are_context(world: World):
    judge = world.add([4, 5], rollout="r1", model="default/judge")
    own = world.add([6], rollout="r1", index=1)
    resolved = await world.resolve(Trajectory(rollout="r1", shaped_rewards=[1.0]))
    calls = resolved.groups[0].trajectories[0].calls
    assert calls == [judge.call.model_copy(update={"trained": False}), own.call]
    assert resolved.counts == {"by_rollout": 1, "dropped/other_model": 1}


async def test_calls_to_the_base_weights_are_context_and_never_stale(world: World):
    """A rollout's helper or judge asks for NAME@0 while the policy is steps ahead."""
    ids = world.ids("Yes.")
    policy = world.add(ids, rollout="r", requested_model="agent", step=0)
    helper = world.add(ids, rollout="r", index=1, requested_model="agent@0", step=0)
    resolved = await world.resolve(Trajectory(rollout="r"), max_staleness=0)
    (trajectory,) = resolved.groups[0]
    assert [(c.trained, c.step) for c in trajectory.calls] == [(True, 0), (False, 0)]
    assert resolved.counts == {"by_rollout": 1, "dropped/frozen": 1}
    assert resolved.calls == [policy.id, helper.id]
    # Naming it does not train it either; a choice that a client sends itself is trained as before.
    named = Trajectory(rollout="r", trained_calls=[policy.id, helper.id])
    assert (await world.resolve(named)).counts == {"by_rollout": 1, "dropped/frozen": 1}


async def test_turns_are_counted_by_how_their_prompts_were_made(world: World):
    """One call with two choices; the first of them is continued twice, by three tokens + two."""
    first = world.add([4, 5], rollout="r", prompt_ids=[7, 8, 9], reasons=["first call"])
    world.add([6], rollout="r", prompt_ids=[7, 8, 9], choice=1, reasons=["first call"])
    more: dict[str, Any] = {
        "rollout": "r",
        "prompt_ids": [7, 8, 9, 4, 5, 7],
        "outcome": "bridged",
        "continues": first.id,
    }
    world.add([4], index=1, reasons=["exact"], malformed=["never closed"], **more)
    world.add([5], index=2, reasons=["arguments re-serialised", "truncated"], **more)
    world.add([5], rollout="r", index=3, model="default/judge", outcome="branched", reasons=["x"])
    resolved = await world.resolve(Trajectory(rollout="r"))
    assert resolved.counts == {"by_rollout": 4, "dropped/other_model": 1}
    assert resolved.turns == {
        "turns/first": 1,
        "turns/first/first_call": 1,
        "turns/bridged": 2,
        "turns/bridged/exact": 1,
        "turns/bridged/arguments_re-serialised": 1,
        "turns/bridged/truncated": 1,
        "turns/bridged/forked": 1,
        "turns/branches": 1,
        "turns/malformed": 1,
        "turns/prompt_tokens": 3 + 6 + 6,
        "turns/continued_tokens": 5 + 5,
    }


async def test_only_the_named_calls_of_a_rollout_are_trained(world: World):
    plan = world.add([4, 5], rollout="r1")
    judge = world.add([6], rollout="r1", index=1, model="default/judge")
    act = world.add([8, 9], rollout="r1", index=2)
    lost = world.add([7], rollout="r1", index=3, abandoned=True)
    trajectory = Trajectory(rollout="r1", trained_calls=[act.id], shaped_rewards=[2.0])
    resolved = await world.resolve(trajectory)
    context = [one.call.model_copy(update={"trained": False}) for one in (plan, judge)]
    assert resolved.groups[0].trajectories[0].calls == [*context, act.call]
    assert resolved.counts == {
        "by_rollout": 1,
        "dropped/abandoned": 1,
        "dropped/not_named": 1,
        "dropped/other_model": 1,
    }
    # What cannot be trained is not made trainable by its name.
    named = Trajectory(rollout="r1", trained_calls=[act.id, plan.id, judge.id, lost.id])
    resolved = await world.resolve(named)
    calls = resolved.groups[0].trajectories[0].calls
    assert [call.trained for call in calls] == [True, False, True]


async def test_calls_that_a_rollout_does_not_have_cannot_be_named(prose: Prose, world: World):
    own = world.add([4, 5], rollout="r1")
    other = world.add([6], rollout="r2")
    refusal = await world.refusal(Trajectory(rollout="r1", trained_calls=[own.id, other.id]))
    prose(refusal, other=other.id, own=own.id)
    refusal = await world.refusal(Trajectory(rollout="r1", trained_calls=[]))
    prose(refusal)
    refusal = await world.refusal(by_tokens().model_copy(update={"trained_calls": [own.id]}))
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0.trained_calls"


async def test_a_rollout_that_called_only_other_models_says_which_to_call(
    prose: Prose, world: World
):
    world.add([4, 5], rollout="r1", model=world.record.spec.base_model)
    refusal = await world.refusal(Trajectory(rollout="r1"))
    prose(refusal)


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_calls_of_other_files_are_refused(prose: Prose, world: World, part: int):
    parts = world.language.fingerprint.split("-")
    parts[part] = "0" * len(parts[part])
    call = world.add([4, 5], rollout="r1", fingerprint="-".join(parts))
    refusal = await world.refusal(Trajectory(rollout="r1"))
    prose(refusal, call=call.id)
    assert place_of(refusal) == "groups.0.trajectories.0.rollout"


async def test_calls_under_other_template_arguments_are_trained_and_counted(world: World):
    own = world.language.fingerprint.split("-")
    made = [
        world.add([4 + part], rollout="r1", index=part, fingerprint="-".join(parts))
        for part, parts in enumerate((own, [*own[:3], "0" * 16, own[4]], [*own[:4], "0" * 16]))
    ]
    resolved = await world.resolve(Trajectory(rollout="r1"))
    assert resolved.groups[0].trajectories[0].calls == [one.call for one in made]
    assert resolved.counts == {"by_rollout": 3, "other_template_args": 2}


@pytest.mark.parametrize(
    "rollout",
    [
        "never",
        "../x",
        "\ud800",
    ],
)
async def test_unknown_rollouts_are_refused(prose: Prose, world: World, rollout: str):
    refusal = await world.refusal(Trajectory(rollout=rollout))
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0.rollout"


async def test_a_rollout_is_trained_once(prose: Prose, world: World):
    world.add([4, 5], rollout="r1")
    refusal = await world.refusal(Trajectory(rollout="r1"), Trajectory(rollout="r1", reward=1.0))
    prose(refusal)
