"""Turn rewards into advantages: how much better a call was than its peers.

In:   one row of values per trajectory, as the chosen credit assigns them
Out:  advantages in the same shape, or None where all rewards are equal

Equality has a relative tolerance: rewards that differ in the seventh digit differ by rounding, and
dividing by their standard deviation would turn that rounding into full-sized advantages.
"""

from collections.abc import Sequence
from math import sqrt

from hone.trajectory import is_flat

EPS = 1e-6
"""Added to the standard deviation; ART's value."""


def advantages(values: Sequence[Sequence[float]], *, scale: bool) -> list[list[float]] | None:
    """Values minus their column's mean, over its population standard deviation if `scale`.

    Column i has the i-th call of every trajectory that is long enough. None if every column is
    flat.
    """
    columns = max((len(row) for row in values), default=0)
    result = [[0.0] * len(row) for row in values]
    flat = True
    for c in range(columns):
        rows = [i for i, row in enumerate(values) if len(row) > c]
        column = [values[i][c] for i in rows]
        if is_flat(column):
            continue
        flat = False
        mean = sum(x / len(column) for x in column)
        spread = _deviation(column, mean) + EPS if scale else 1.0
        for i, x in zip(rows, column, strict=True):
            result[i][c] = (x - mean) / spread
    return None if flat else result


def _deviation(column: Sequence[float], mean: float) -> float:
    """Population standard deviation; scaled first, so that no square overflows."""
    largest = max(abs(x - mean) for x in column)
    return largest * sqrt(sum(((x - mean) / largest) ** 2 for x in column) / len(column))
