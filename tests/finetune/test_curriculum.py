"""Which groups are trained in which epoch: the exact schedule, ranking, sampling, skipped examples.

These expectations of upstream's tests hold here too; their tests are marked (upstream):
disabled returns an equal collection; 0.5 of 4 groups is 2, total_groups 4, 2 included; an expansion
at epoch 2 with interval 2 from 0.25 by 0.25 gives 0.5, last_expansion_epoch 2, 2 groups; of one
group, a random_subsample of 0.5 keeps 5 of 10 trajectories; a group without variance is dropped;
a fresh state has last_expansion_epoch -1, total_groups 0 and nothing included.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import MemoryAdapter

from hone import trajectory as sdk
from hone.config.schema import CurriculumLearningConfig
from hone.finetune.adapter import HoneServerAdapter, HoneServerAdapterConfig
from hone.finetune.base import (
    AdvantageSettings,
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryCollection,
)
from hone.finetune.curriculum import (
    Curriculum,
    example_of,
    expansions,
    num_flat,
    percentile,
    share,
    spreads,
)
from hone.learner.samples import make_samples
from hone.train_config import Baseline, Credit
from hone.types import Call, TrainConfig


def trajectory(reward: float, **metadata: object) -> Trajectory:
    item = EpisodeItem(role=EpisodeItemRole.USER, content="hi")
    return Trajectory(episode=[item], reward=reward, metadata=dict(metadata) or None)


def collection(**rewards: tuple[float, ...]) -> TrajectoryCollection:
    """Groups by example id."""
    groups = [[trajectory(r, id=example) for r in rs] for example, rs in rewards.items()]
    return TrajectoryCollection(trajectories=groups, run_id="run")


def around(**averages: float) -> TrajectoryCollection:
    """Groups of these averages, each with a spread of 0.2."""
    return collection(**{k: (a - 0.1, a + 0.1) for k, a in averages.items()})


def config(**changes: object) -> CurriculumLearningConfig:
    return CurriculumLearningConfig.model_validate({"enabled": True, **changes})


def ids(chosen: TrajectoryCollection) -> list[str]:
    return [example_of(group, 0) for group in chosen.trajectories]


# ---- the schedule -------------------------------------------------------------------------------


def test_the_seeds_schedule_epoch_by_epoch():
    # 0.3, +0.2 every 5 epochs: epochs 1-5 at 0.3, 6-10 at 0.5, 11-15 at 0.7, 16-20 at 0.9, then 1.0.
    expected = [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 5
    assert [percentile(config(), epoch) for epoch in range(25)] == expected
    assert [expansions(config(), epoch) for epoch in (0, 4, 5, 19, 20, 24, 999)] == [
        0, 0, 1, 3, 4, 4, 4,
    ]  # fmt: skip


def test_the_last_expansion_includes_all():
    # 0.5 + 0.4 = 0.9, + 0.4 = 1.3, which is all.
    steps = config(initial_percentile=0.5, increment_percentile=0.4, expansion_interval=2)
    assert [percentile(steps, epoch) for epoch in range(6)] == [0.5, 0.5, 0.9, 0.9, 1.0, 1.0]
    everything = config(initial_percentile=1.0)
    assert [percentile(everything, epoch) for epoch in (0, 5)] == [1.0, 1.0]
    assert expansions(everything, 50) == 0


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(10, 0.7, 7), (10, 0.3, 3), (11, 0.3, 4), (3, 1.0, 3), (100, 0.07, 7), (4, 0.26, 2)],
)
def test_a_share_is_rounded_up_but_not_for_rounding(count: int, fraction: float, expected: int):
    # 10 x 0.7 is 7.000000000000001 in floating point, and 7 is meant.
    assert share(count, fraction) == expected


def test_a_fresh_state():
    """(upstream)"""
    assert Curriculum(config()).state == {
        "current_percentile": 0.3,
        "last_expansion_epoch": -1,
        "total_groups": 0,
        "included_groups": set(),
    }


# ---- ranking ------------------------------------------------------------------------------------


def test_disabled_returns_the_same_collection():
    """(upstream)"""
    groups = around(a=0.5, b=0.1)
    assert Curriculum(CurriculumLearningConfig()).select(groups, 0) == groups


def test_the_easiest_half_first():
    """(upstream)"""
    curriculum = Curriculum(config(initial_percentile=0.5))
    chosen = curriculum.select(around(a=0.2, b=0.8, c=0.4, d=0.6), 0)
    assert ids(chosen) == ["b", "d"]
    assert curriculum.state["total_groups"] == 4
    assert curriculum.state["included_groups"] == {"b", "d"}
    assert curriculum.state["last_expansion_epoch"] == -1


def test_the_hardest_first_if_asked():
    curriculum = Curriculum(config(initial_percentile=0.5, sort_ascending=True))
    assert ids(curriculum.select(around(a=0.2, b=0.8, c=0.4, d=0.6), 0)) == ["a", "c"]


def test_an_expansion():
    """(upstream)"""
    steps = config(initial_percentile=0.25, increment_percentile=0.25, expansion_interval=2)
    curriculum = Curriculum(steps)
    groups = around(a=0.2, b=0.8, c=0.4, d=0.6)
    assert [len(curriculum.select(groups, epoch).trajectories) for epoch in (0, 1)] == [1, 1]
    chosen = curriculum.select(groups, 2)
    assert len(chosen.trajectories) == 2
    assert curriculum.state["current_percentile"] == 0.5
    assert curriculum.state["last_expansion_epoch"] == 2


def test_groups_of_ten_over_the_seeds_schedule():
    # Ten groups: 3, 5, 7, 9, 10 of them in the five phases.
    groups = around(**{f"e{i}": i / 10 for i in range(10)})
    curriculum = Curriculum(config())
    counts = [len(curriculum.select(groups, epoch).trajectories) for epoch in range(22)]
    assert counts == [3] * 5 + [5] * 5 + [7] * 5 + [9] * 5 + [10] * 2


def test_groups_without_variance_are_dropped_before_the_share_is_taken():
    """(upstream, for the drop)"""
    groups = collection(
        flat=(0.9, 0.9),
        near=(0.5, 0.55),  # 0.05 apart, under min_reward_diff 0.1
        edge=(0.4, 0.5),  # 0.5 - 0.4 is 0.09999999999999998, and 0.1 is meant
        wide=(0.0, 0.6),  # average 0.3
    )
    curriculum = Curriculum(config(initial_percentile=0.5))
    # Two tell something; half of two is one: the easier, edge at 0.45.
    assert ids(curriculum.select(groups, 0)) == ["edge"]
    assert curriculum.state["total_groups"] == 2


def test_no_group_is_left_if_all_have_equal_rewards():
    curriculum = Curriculum(config())
    chosen = curriculum.select(collection(a=(1.0, 1.0), b=(0.0, 0.0)), 0)
    assert chosen.trajectories == []
    assert curriculum.state["included_groups"] == set()


def test_equal_averages_keep_their_order():
    curriculum = Curriculum(config(initial_percentile=0.5))
    assert ids(curriculum.select(around(x=0.5, y=0.5, z=0.5, w=0.5), 0)) == ["x", "y"]


def test_examples_are_known_by_their_ids_wherever_they_stand():
    curriculum = Curriculum(config(initial_percentile=0.5))
    curriculum.select(around(a=0.2, b=0.8), 0)
    assert curriculum.state["included_groups"] == {"b"}
    curriculum.select(around(b=0.8, a=0.2), 1)
    assert curriculum.state["included_groups"] == {"b"}
    assert curriculum.excluded == {"a": 1}


def test_rounds_of_one_epoch_add_up():
    curriculum = Curriculum(config(initial_percentile=0.5))
    curriculum.select(around(a=0.2, b=0.8), 0, 0)
    curriculum.select(around(c=0.3, d=0.6), 0, 1)
    assert curriculum.state["included_groups"] == {"b", "d"}
    curriculum.select(around(a=0.9, b=0.8), 1, 0)
    assert curriculum.state["included_groups"] == {"a"}


def by_round(curriculum: Curriculum, size: int, epoch: int = 0, count: int = 10) -> list[list[str]]:
    """What each round of an epoch of `count` examples selects; e0 is the easiest."""
    examples = [f"e{i}" for i in range(count)]
    averages = {example: 1 - i / count for i, example in enumerate(examples)}
    chosen = []
    for round, begin in enumerate(range(0, count, size)):
        groups = around(**{e: averages[e] for e in examples[begin : begin + size]})
        chosen.append(
            ids(curriculum.select(groups, epoch, round, examples, rounds=-(-count // size)))
        )
        # As the trainer does: every round starts from what the round before left in the events.
        snapshot = json.loads(json.dumps(curriculum.snapshot()))
        curriculum = Curriculum.restore(curriculum.config, curriculum.seed, snapshot)
    return chosen


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # 0.3 of the groups so far, rounded up, less those that earlier rounds selected.
        (10, [3]),
        (5, [2, 1]),  # 1.5 -> 2; 3 - 2
        (3, [1, 1, 1, 0]),  # 0.9 -> 1; 1.8 -> 2, - 1; 2.7 -> 3, - 2; 3 - 3
        (2, [1, 1, 0, 1, 0]),  # 0.6 -> 1; 1.2 -> 2; 1.8 -> 2; 2.4 -> 3; 3
        (1, [1, 0, 0, 1, 0, 0, 1, 0, 0, 0]),  # a new one at 0.3, 1.2 and 2.1
    ],
)
def test_the_share_holds_over_the_epoch_whatever_the_size_of_a_round(
    size: int, expected: list[int]
):
    curriculum = Curriculum(config())
    assert [len(chosen) for chosen in by_round(curriculum, size)] == expected
    assert sum(expected) == 3
    # The next epoch starts to count again.
    assert [len(chosen) for chosen in by_round(curriculum, size, epoch=1)] == expected


@pytest.mark.parametrize(("size", "expected"), [(10, 5), (5, 5), (3, 5), (2, 5), (1, 5)])
def test_a_random_share_holds_over_the_epoch_too(size: int, expected: int):
    half = config(initial_percentile=1.0, random_subsample=0.5)
    assert sum(map(len, by_round(Curriculum(half), size))) == expected


def test_groups_that_tell_nothing_use_up_no_share():
    # e0 tells nothing. 0.3 x 1 -> 1, so the second round trains e1; 0.3 x 2 -> 1: e2 is left out.
    curriculum = Curriculum(config())
    rewards = {"e0": (1.0, 1.0), "e1": (0.5, 0.9), "e2": (0.0, 0.5)}
    chosen = [
        ids(curriculum.select(collection(**{e: r}), 0, round, rounds=3))
        for round, (e, r) in enumerate(rewards.items())
    ]
    assert chosen == [[], ["e1"], []]


def test_a_repeated_round_gives_the_same_groups():
    curriculum = Curriculum(config())
    first = around(a=0.5, b=0.4)
    once = curriculum.select(first, 0, 0, rounds=2)
    curriculum.select(around(c=0.5, d=0.4), 0, 1, rounds=2)
    assert curriculum.select(first, 0, 0, rounds=2) == once


@pytest.mark.parametrize("size", [10, 5, 3, 2, 1])
def test_what_skip_excluded_leaves_is_trained_whatever_the_size_of_a_round(size: int):
    """The skipped examples count in the share, also those of rounds that are not run at all."""
    examples = [f"e{i}" for i in range(10)]
    curriculum = Curriculum(config(skip_excluded=True))
    curriculum.select(around(**{e: 1 - i / 10 for i, e in enumerate(examples)}), 0)
    assert curriculum.plan(examples, 1) == ["e0", "e1", "e2"]
    chosen = []
    for round, begin in enumerate(range(0, 3, size)):
        some = {f"e{i}": 1 - i / 10 for i in range(begin, min(begin + size, 3))}
        chosen += ids(curriculum.select(around(**some), 1, round, examples, rounds=10))
    assert chosen == ["e0", "e1", "e2"]


# ---- sampling -----------------------------------------------------------------------------------


def test_of_one_group_trajectories_are_drawn():
    """(upstream)"""
    group = collection(only=tuple(float(i) for i in range(10)))
    chosen = Curriculum(config(random_subsample=0.5), seed=3).select(group, 0)
    rewards = [t.reward for t in chosen.trajectories[0]]
    assert len(rewards) == 5
    assert rewards == sorted(rewards), "their order is kept"
    assert Curriculum(config()).select(group, 0) == group


def test_a_lone_group_that_tells_nothing_is_left_out():
    # 0.05 apart, under min_reward_diff 0.1; with 0, equal rewards are accepted as asked for.
    near = collection(only=(0.5, 0.55))
    curriculum = Curriculum(config())
    assert curriculum.select(near, 0).trajectories == []
    assert curriculum.state["included_groups"] == set()
    flat = collection(only=(0.5, 0.5))
    assert Curriculum(config()).select(flat, 0).trajectories == []
    assert Curriculum(config(min_reward_diff=0.0)).select(flat, 0) == flat


def test_of_several_groups_groups_are_drawn_seeded_by_epoch_and_round():
    groups = around(**{f"e{i}": i / 20 for i in range(20)})
    whole = config(initial_percentile=1.0, random_subsample=0.5)

    def drawn(seed: int, epoch: int, round: int = 0) -> list[str]:
        return ids(Curriculum(whole, seed=seed).select(groups, epoch, round))

    assert len(drawn(1, 0)) == 10
    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(*at)) for at in ((1, 0), (2, 0), (1, 1), (1, 0, 1))}) == 4
    # Order of rank: e19 is the easiest.
    assert drawn(1, 0) == sorted(drawn(1, 0), key=lambda e: -int(e[1:]))


def test_a_sample_larger_than_the_share_leaves_it_alone():
    # 3 of 10 are chosen; 0.5 x 10 = 5 are wanted.
    groups = around(**{f"e{i}": i / 10 for i in range(10)})
    assert len(Curriculum(config(random_subsample=0.5)).select(groups, 0).trajectories) == 3


# ---- what is not run ------------------------------------------------------------------------------


def test_skip_excluded_saves_the_rollouts_of_what_would_be_left_out():
    examples = [f"e{i}" for i in range(10)]
    averages = {example: i / 10 for i, example in enumerate(examples)}
    runs: list[int] = []
    chosen: list[list[str]] = []
    curriculum = Curriculum(config(skip_excluded=True, expansion_interval=3))
    for epoch in range(9):
        planned = curriculum.plan(examples, epoch)
        runs.append(len(planned))
        chosen.append(ids(curriculum.select(around(**{e: averages[e] for e in planned}), epoch)))
    # All ten at the start of each phase, to measure; then only the 3, 5 and 7 that are trained.
    assert runs == [10, 3, 3, 10, 5, 5, 10, 7, 7]
    # And what is trained is what would be trained without skipping, with 60 examples run, not 90.
    plain = Curriculum(config(expansion_interval=3))
    assert chosen == [ids(plain.select(around(**averages), epoch)) for epoch in range(9)]
    assert sum(runs) == 60


def test_nothing_is_skipped_unless_it_is_asked_for():
    examples = ["a", "b", "c", "d"]
    curriculum = Curriculum(config(initial_percentile=0.25))
    curriculum.select(around(a=0.1, b=0.2, c=0.3, d=0.4), 0)
    assert curriculum.plan(examples, 1) == examples
    disabled = Curriculum(CurriculumLearningConfig(skip_excluded=True))
    disabled.select(around(a=0.1, b=0.2), 0)
    assert disabled.plan(examples, 1) == examples


def test_an_example_without_a_signal_is_run_again():
    curriculum = Curriculum(config(initial_percentile=0.5, skip_excluded=True))
    curriculum.select(collection(a=(0.0, 0.0), b=(0.2, 0.6), c=(0.6, 1.0), new=(1.0, 1.0)), 0)
    # b is ranked behind c and left out; a and `new` told nothing and may only have been unlucky.
    assert curriculum.plan(["a", "b", "c", "new", "unseen"], 1) == ["a", "c", "new", "unseen"]


def test_the_whole_share_skips_nothing():
    steps = config(initial_percentile=0.5, increment_percentile=0.5, skip_excluded=True)
    curriculum = Curriculum(steps)
    curriculum.select(around(a=0.2, b=0.8), 0)
    assert curriculum.plan(["a", "b"], 4) == ["b"]
    assert curriculum.plan(["a", "b"], 5) == ["a", "b"]


def test_what_was_skipped_in_another_epoch_does_not_count_in_this_one():
    curriculum = Curriculum(config(initial_percentile=0.5, skip_excluded=True))
    curriculum.select(around(a=0.1, b=0.2, c=0.3, d=0.4), 0)  # a and b are left out
    groups = around(c=0.3, d=0.4)
    # Of this epoch's c, d and the skipped a: 3 x 0.5 = 1.5, so 2; without a: 1.
    assert ids(curriculum.select(groups, 1, 0, ["a", "c", "d"])) == ["d", "c"]
    assert ids(curriculum.select(groups, 2, 0, ["c", "d"])) == ["d"]


# ---- going on -------------------------------------------------------------------------------------


def test_a_snapshot_goes_through_json_and_back():
    steps = config(initial_percentile=0.5, skip_excluded=True, random_subsample=0.9)
    curriculum = Curriculum(steps, seed=4)
    curriculum.select(around(a=0.1, b=0.2, c=0.3, d=0.4), 0)
    again = Curriculum.restore(steps, 4, json.loads(json.dumps(curriculum.snapshot())))
    assert again == curriculum
    groups = around(c=0.3, d=0.4)
    assert (
        again.plan(["a", "b", "c", "d"], 1)
        == curriculum.plan(["a", "b", "c", "d"], 1)
        == ["c", "d"]
    )
    assert again.select(groups, 1) == curriculum.select(groups, 1)
    assert Curriculum.restore(steps, 4, {}) == Curriculum(steps, seed=4)


def test_the_same_epoch_again_gives_the_same_groups():
    """A run that was killed between choosing and sending chooses again."""
    curriculum = Curriculum(config(initial_percentile=0.5, skip_excluded=True))
    curriculum.select(around(a=0.1, b=0.2, c=0.3, d=0.4), 0)
    groups = around(c=0.3, d=0.4)
    once = curriculum.select(groups, 1)
    assert curriculum.select(groups, 1) == once
    assert curriculum.plan(["a", "b", "c", "d"], 1) == ["c", "d"]


def test_a_skipped_epoch_does_not_shift_the_schedule():
    curriculum = Curriculum(config())
    groups = around(**{f"e{i}": i / 10 for i in range(10)})
    assert len(curriculum.select(groups, 12).trajectories) == 7
    assert curriculum.state["last_expansion_epoch"] == 10


def test_a_group_whose_builder_names_no_example_is_called_by_its_place():
    assert example_of([trajectory(0.5)], 7) == "#7"
    assert example_of([trajectory(0.5), trajectory(0.5, id=3)], 7) == "3"


# ---- which groups teach anything -----------------------------------------------------------------


VALUES = st.sampled_from([0.0, 0.5, 0.1 + 0.2, 0.3, 1.0])
ROLLOUTS = st.tuples(VALUES, st.lists(VALUES, min_size=1, max_size=3))
GROUPS = st.lists(st.lists(ROLLOUTS, min_size=1, max_size=3), min_size=1, max_size=3)
Rollout = tuple[float, list[float]]


def harness(groups: list[list[Rollout]]) -> list[list[Trajectory]]:
    return [[Trajectory(episode=[], reward=r, shaped_rewards=s) for r, s in g] for g in groups]


def learner(groups: list[list[Rollout]]) -> list[sdk.TrajectoryGroup]:
    def calls(shaped: list[float]) -> list[Call]:
        return [Call(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0]) for _ in shaped]

    return [
        sdk.TrajectoryGroup(
            trajectories=[
                sdk.Trajectory(calls=calls(s), reward=r, shaped_rewards=s) for r, s in group
            ]
        )
        for group in groups
    ]


@pytest.mark.parametrize("baseline", ["group", "batch"])
@pytest.mark.parametrize("credit", ["outcome", "per_call", "return_to_go"])
@given(groups=GROUPS)
def test_as_many_groups_are_flat_as_the_learner_says(
    credit: Credit, baseline: Baseline, groups: list[list[Rollout]]
):
    config = TrainConfig(credit=credit, baseline=baseline)
    truth = make_samples(learner(groups), config, vocab=10, max_positions=100)
    comparison = AdvantageSettings(credit, baseline)
    assert num_flat(harness(groups), comparison) == truth.flat_groups
    if baseline == "group":
        assert sum(s == 0 for s in spreads(harness(groups), comparison)) == truth.flat_groups


def test_it_is_read_from_the_adapter_and_has_the_defaults_of_a_job():
    block: dict[str, Any] = {"backend": {}, "training": {"credit": "per_call", "baseline": "batch"}}
    adapter = HoneServerAdapter(HoneServerAdapterConfig.model_validate(block))
    assert adapter.comparison == AdvantageSettings("per_call", "batch")
    job = TrainConfig()
    assert (
        MemoryAdapter().comparison
        == AdvantageSettings(job.credit, job.baseline)
        == AdvantageSettings()
    )


def chosen(comparison: AdvantageSettings, *groups: list[Rollout]) -> list[int]:
    """Which of the groups the curriculum trains on."""
    config = CurriculumLearningConfig(enabled=True, initial_percentile=1.0, min_reward_diff=0.1)
    scored = harness(list(groups))
    for place, group in enumerate(scored):
        for one in group:
            one.metadata = {"id": str(place)}
    collection = TrajectoryCollection(trajectories=scored, run_id="r")
    selected = Curriculum(config).select(collection, 0, comparison=comparison).trajectories
    return sorted(int((group[0].metadata or {})["id"]) for group in selected)


def test_the_curriculum_leaves_out_what_teaches_nothing_and_nothing_else():
    same_outcome: list[Rollout] = [(1.0, [0.0, 1.0]), (1.0, [1.0, 1.0])]
    same_values: list[Rollout] = [(0.0, [1.0]), (1.0, [1.0])]
    assert chosen(AdvantageSettings("outcome"), same_outcome, same_values) == [1]
    assert chosen(AdvantageSettings("per_call"), same_outcome, same_values) == [0]
    # Sums from the end: [1, 1] and [2, 1], and 1 and 1.
    assert chosen(AdvantageSettings("return_to_go"), same_outcome, same_values) == [0]
    # Compared with the batch, whose mean is 0.75: 1.0 lies 0.25 above it.
    assert chosen(AdvantageSettings(baseline="batch"), same_outcome, same_values) == [0, 1]
    # And a group at the mean of its batch, 0.5, has advantages of 0.
    low: list[Rollout] = [(0.0, [0.0]), (0.0, [0.0])]
    high: list[Rollout] = [(1.0, [0.0]), (1.0, [0.0])]
    middle: list[Rollout] = [(0.5, [0.0]), (0.5, [0.0])]
    assert chosen(AdvantageSettings(baseline="batch"), low, middle, high) == [0, 2]
