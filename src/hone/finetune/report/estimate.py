"""How good a mean is: the interval in which it would lie on other examples of the same kind.

In:   rewards by example
Out:  Estimates: a mean with its 95% bootstrap interval; the change of a mean, paired by example
Used: plots.py for bands, report.py for the answer, metrics.py

An example counts once, however often it was run: generations of one example are alike, and counting
them singly would make every interval too narrow. Draws are seeded, so that a report can be written
again and says the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

RESAMPLES = 10_000
LEVEL = 0.95
MIN_PAIRS = 6
"""A gain is called certain on so many examples or more: 5 coins show the same side in 1 of 16
throws, 6 in 1 of 32, which is under 5%."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples, and where it would lie on other examples of the same kind."""

    mean: float
    low: float | None
    """None with fewer than two examples: one says nothing about others."""
    high: float | None
    n: int
    """Examples."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def certain(self) -> bool:
        """For a difference: it is not 0, at 95%."""
        if self.low is None or self.high is None or self.n < MIN_PAIRS:
            return False
        return self.low > 0 or self.high < 0


def estimate(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Mean with its 95% percentile bootstrap interval; None of nothing."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    if min(values) == max(values):  # exactly, where sums would round
        return Estimate(values[0], values[0], values[0], len(values))
    import numpy as np  # here, because the trainer needs it only once an epoch is over

    array = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed)
    at_once = max(1, 1_000_000 // len(array))
    means = np.concatenate(
        [
            array[draw.integers(len(array), size=(min(at_once, resamples - i), len(array)))].mean(1)
            for i in range(0, resamples, at_once)
        ]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), len(array))


def by_example(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each example's mean."""
    return {example: fmean(known) for example, known in rewards.items() if known}


def gain(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], *, seed: int = 0
) -> Estimate | None:
    """The mean change of the examples that both have, paired: what they differ in cancels out."""
    return estimate(list(changes(before, after).values()), seed=seed)


def changes(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Each example's change, for the examples that both have."""
    first, last = by_example(before), by_example(after)
    return {example: last[example] - first[example] for example in first if example in last}
