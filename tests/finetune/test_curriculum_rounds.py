"""The numbers of a round."""

from hone.finetune.base import AdvantageSettings, Trajectory, TrajectoryCollection
from hone.finetune.curriculum import num_flat, round_metrics


def collection(*groups: list[float]) -> TrajectoryCollection:
    trajectories = [[Trajectory(episode=[], reward=reward) for reward in group] for group in groups]
    return TrajectoryCollection(trajectories=trajectories, run_id="r")


def test_means_are_over_trajectories_not_over_groups():
    # (0 + 0 + 0 + 1) / 4 = 0.25, though the groups' means are 0 and 1.
    metrics = round_metrics(collection([0, 0, 0], [1]), collection([1]), 0.3)
    assert (metrics["avg_reward"], metrics["filtered_avg_reward"]) == (0.25, 1.0)
    assert (metrics["num_trajectories"], metrics["num_groups"]) == (4, 2)
    assert (metrics["filtered_trajectories"], metrics["filtered_groups"]) == (1, 1)
    assert metrics["curriculum_percentile"] == 0.3


def test_an_empty_collection_has_no_mean():
    metrics = round_metrics(collection(), collection(), 1.0)
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["num_trajectories"]) == (
        None,
        None,
        0,
    )


def test_equal_rewards_are_counted_also_where_rounding_parts_them():
    groups = collection([0.3, 0.1 + 0.2], [0, 0], [5], [0.3, 0.31]).trajectories
    assert num_flat(groups, AdvantageSettings()) == 3
