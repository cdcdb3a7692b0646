"""Means with their intervals, and the p value of a change.

In:   rewards by example, of one policy or of two
Out:  Estimates: a mean with its 95% t interval; for a change also the p value of a permutation test

An example counts once, no matter how often it was run: generations of one example are alike, and
counting each would make every interval too narrow and every p value too small. The p value decides
whether a change is significant, and the interval says how large it may be. The test is a paired
sign-flip test: if two policies are equally good, each example's change is as likely to be its
negative. Its level holds for any number of examples and any rewards; tests/report simulates it.
Where a step was chosen among several, `others` has the rest and the p value allows for the choice.
Random draws are seeded, so a report that is written again says the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

RESAMPLES = 1999
"""Random sign flips; up to 10 examples all flips are tried instead, which is exact."""
LEVEL = 0.95
ALPHA = 1 - LEVEL
MIN_PAIRS = 6
"""With fewer examples no change is significant: 5 changes of one sign have p = 2 / 2**5 = 0.0625."""
ROUNDING = 1e-12
"""Relative error of a sum of changes: sums that differ by less are equal."""
BATCH = 500_000
"""Number of values that a test keeps in memory at a time."""

Rewards = Mapping[str, Sequence[float]]
"""Rewards by example."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples, or the change of one."""

    mean: float
    low: float | None
    """None with fewer than two examples, or without any spread: neither says anything about others."""
    high: float | None
    n: int
    """Number of examples."""
    p: float | None = None
    """For a change: the probability of one at least this large by chance, in either direction."""

    @property
    def certain(self) -> bool:
        """For a change: it is significant at the 5% level."""
        return self.p is not None and self.p <= ALPHA

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of rewards with its t interval; None without values.

    The interval of rewards between 0 and 1 is cut to that range.
    """
    return _interval(values, 0.0, 1.0) if _are_shares(values) else _interval(values)


def around(mean: float | None, rewards: Rewards) -> Estimate | None:
    """A logged mean with the interval of its examples; None without a mean."""
    if mean is None:
        return None
    value = estimate(list(by_example(rewards).values()))
    if value is None or value.low is None or value.high is None:
        return Estimate(mean, None, None, len(rewards))
    return replace(value, mean=mean, low=min(value.low, mean), high=max(value.high, mean))


def _are_shares(rewards: Iterable[float]) -> bool:
    return all(0 <= reward <= 1 for reward in rewards)


def _all(*sides: Rewards) -> Iterable[float]:
    return (reward for side in sides for known in side.values() for reward in known)


def _interval(
    values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf
) -> Estimate | None:
    if not values:
        return None
    n, mean = len(values), fmean(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    if min(values) == max(values):  # exact: sums would round
        return Estimate(values[0], None, None, n)
    low, high = _t_interval(mean, stdev(values) / n**0.5, n - 1)
    return Estimate(mean, max(low, lowest), min(high, highest), n)


def _t_interval(mean: float, error: float, degrees: float) -> tuple[float, float]:
    from scipy import stats  # imported here: it takes a second

    low, high = stats.t.interval(LEVEL, degrees, loc=mean, scale=error)
    return float(low), float(high)


def by_example(rewards: Rewards) -> dict[str, float]:
    """Each example's mean."""
    return {example: fmean(known) for example, known in rewards.items() if known}


def changes(before: Rewards, after: Rewards) -> dict[str, float]:
    """Each example's change, for the examples that both have."""
    first, last = by_example(before), by_example(after)
    return {example: last[example] - first[example] for example in first if example in last}


def gain(
    before: Rewards, after: Rewards, *, others: Sequence[Mapping[str, float]] = ()
) -> Estimate | None:
    """The mean change of the examples that both have, paired by example.

    `others`: changes by example of the other policies that could have been chosen instead of
    `after`. The p value is then that of a change as large as this one among all of them. The
    interval is that of `after` alone and does not allow for the choice. Rewards between 0 and 1
    change by at most 1.
    """
    shares = _are_shares(_all(before, after))
    deltas = list(changes(before, after).values())
    change = _interval(deltas, -1.0, 1.0) if shares else _interval(deltas)
    if change is None or change.n < 2:
        return change
    import numpy as np

    policies = [changes(before, after), *others]
    columns = list(dict.fromkeys(example for known in policies for example in known))
    rows = []
    for known in policies:
        # An unknown change counts as 0, which no flip alters.
        row = np.array([known.get(example, 0.0) for example in columns])
        rows.append(row / max(len(known), 1))
    return replace(change, p=float(sign_flip_p(np.array(rows), chosen=0)))


def sign_flip_p(changes: "ndarray", *, chosen: int | None = None) -> "ndarray":
    """p values of the mean change of one among K policies, over n examples.

    `changes` is [..., K, n]; leading dimensions are separate tests. With K = 1 it is the paired
    two-sided sign-flip test. With more it is the maxT method: how often the largest change of all K
    reaches that of the `chosen` policy, by default that of the largest. An example's changes are
    flipped together, as the policies share the answers of `before`, and the one-sided p value is
    doubled.
    """
    import numpy as np
    from scipy import stats

    policies, n = changes.shape[-2:]
    signs = np.ones((*changes.shape[:-2], n))

    def largest(signs: "ndarray", axis: int) -> "ndarray":
        assert axis == -1, axis
        return np.einsum("...n,...kn->...k", signs, changes).max(-1)

    result = stats.permutation_test(
        (signs,),
        largest,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH // changes.size),
        alternative="two-sided" if policies == 1 else "greater",
        axis=-1,
        rng=np.random.default_rng(0),
    )
    if policies == 1:
        return np.asarray(result.pvalue)
    means, null = changes.sum(-1), result.null_distribution
    observed = means.max(-1) if chosen is None else means[..., chosen]
    reached = (null >= observed - ROUNDING * np.abs(observed)).sum(0)
    # Of random flips the one that was observed counts as well; all flips include it.
    extra = 0 if 2**n <= RESAMPLES else 1
    return np.minimum(2 * (reached + extra) / (len(null) + extra), 1.0)


def unpaired_gain(before: Rewards, after: Rewards) -> Estimate | None:
    """The change of the mean between different examples: Welch's interval and a permutation test.

    Rewards between 0 and 1 change by at most 1.
    """
    first, last = (list(by_example(rewards).values()) for rewards in (before, after))
    if not first or not last:
        return None
    mean, n = fmean(last) - fmean(first), min(len(first), len(last))
    if n < 2:
        return Estimate(mean, None, None, n)
    import numpy as np
    from scipy import stats

    squares = [stdev(values) ** 2 / len(values) for values in (first, last)]
    error, ends = sum(squares) ** 0.5, (None, None)
    if error:
        spread = squares[0] ** 2 / (len(first) - 1) + squares[1] ** 2 / (len(last) - 1)
        ends = low, high = _t_interval(mean, error, error**4 / spread)
        if _are_shares(_all(before, after)):
            ends = max(low, -1.0), min(high, 1.0)
    result = stats.permutation_test(
        (np.array(last), np.array(first)),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        vectorized=True,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return Estimate(mean, *ends, n, float(result.pvalue))
