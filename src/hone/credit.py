"""The values by which trajectories of a group are compared, and whether they are all equal.

In:   a trajectory's reward and the rewards of its calls; `credit` of the training configuration
Out:  one row of values per trajectory; whether values are equal

The learner computes advantages with these functions, and the harness counts the groups without a
signal: with two definitions they would disagree.
"""

from collections.abc import Sequence
from typing import Literal

Credit = Literal["outcome", "per_call", "return_to_go"]
"""The reward of a call: the trajectory's, its own, or the sum of its own and all later ones."""
Baseline = Literal["group", "batch"]
"""What is subtracted from rewards: the mean of their group, or of the whole job."""

FLAT = 1e-6
"""Values within this fraction of the largest magnitude count as equal."""


def call_values(
    reward: float, shaped_rewards: Sequence[float] | None, credit: Credit
) -> list[float]:
    """The values of a trajectory: its reward, or one value per trained call."""
    if credit == "outcome":
        return [reward]
    assert shaped_rewards is not None, f"{credit} without shaped_rewards passed samples.py"
    if credit == "per_call":
        return list(shaped_rewards)
    return [sum(shaped_rewards[i:]) for i in range(len(shaped_rewards))]


def columns(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Column i holds the i-th value of every row that has one."""
    longest = max(map(len, values), default=0)
    return [[row[c] for row in values if len(row) > c] for c in range(longest)]


def is_flat(values: Sequence[float]) -> bool:
    """Whether all values are equal up to rounding."""
    low, high = min(values), max(values)
    return high - low <= FLAT * max(abs(low), abs(high))
