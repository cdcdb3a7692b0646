"""Which groups teach something: the learner's own verdict, reached from the harness's trajectories."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import MemoryAdapter

from hone import trajectory as sdk
from hone.config.schema import CurriculumLearningConfig
from hone.credit import Baseline, Credit
from hone.finetune.adapter import ARTTrainerAdapter, ARTTrainerAdapterConfig
from hone.finetune.base import Comparison, Trajectory, TrajectoryCollection
from hone.finetune.curriculum import Curriculum, num_flat, spreads
from hone.learner.samples import make_samples
from hone.types import Call, TrainConfig

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
    comparison = Comparison(credit, baseline)
    assert num_flat(harness(groups), comparison) == truth.flat_groups
    if baseline == "group":
        assert sum(s == 0 for s in spreads(harness(groups), comparison)) == truth.flat_groups


def test_it_is_read_from_the_adapter_and_has_the_defaults_of_a_job():
    block: dict[str, Any] = {"backend": {}, "training": {"credit": "per_call", "baseline": "batch"}}
    adapter = ARTTrainerAdapter(ARTTrainerAdapterConfig.model_validate(block))
    assert adapter.comparison == Comparison("per_call", "batch")
    job = TrainConfig()
    assert MemoryAdapter().comparison == Comparison(job.credit, job.baseline) == Comparison()


def chosen(comparison: Comparison, *groups: list[Rollout]) -> list[int]:
    """Which of the groups the curriculum trains on."""
    config = CurriculumLearningConfig(enabled=True, initial_percentile=1.0, min_reward_diff=0.1)
    made = harness(list(groups))
    for place, group in enumerate(made):
        for one in group:
            one.metadata = {"id": str(place)}
    collection = TrajectoryCollection(trajectories=made, run_id="r")
    kept = Curriculum(config).select(collection, 0, comparison=comparison).trajectories
    return sorted(int((group[0].metadata or {})["id"]) for group in kept)


def test_the_curriculum_leaves_out_what_teaches_nothing_and_nothing_else():
    same_outcome: list[Rollout] = [(1.0, [0.0, 1.0]), (1.0, [1.0, 1.0])]
    same_values: list[Rollout] = [(0.0, [1.0]), (1.0, [1.0])]
    assert chosen(Comparison("outcome"), same_outcome, same_values) == [1]
    assert chosen(Comparison("per_call"), same_outcome, same_values) == [0]
    # Sums from the end: [1, 1] and [2, 1], and 1 and 1.
    assert chosen(Comparison("return_to_go"), same_outcome, same_values) == [0]
    # Compared with the batch, whose mean is 0.75: 1.0 lies 0.25 above it.
    assert chosen(Comparison(baseline="batch"), same_outcome, same_values) == [0, 1]
    # And a group at the mean of its batch, 0.5, has advantages of 0.
    low: list[Rollout] = [(0.0, [0.0]), (0.0, [0.0])]
    high: list[Rollout] = [(1.0, [0.0]), (1.0, [0.0])]
    middle: list[Rollout] = [(0.5, [0.0]), (0.5, [0.0])]
    assert chosen(Comparison(baseline="batch"), low, middle, high) == [0, 2]
