"""The lines of the reward plot, as numbers.

In:   the History of a run
Out:  Curves: means with 95% intervals, gaps, and what happened to the run

The x value of a reward is the number of epochs that its policy was trained for, so training and
validation rewards at the same place belong to the same policy. What failed has no value; it is not 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hone.events import JobFailed
from hone.report.estimate import Estimate, Rewards, estimate
from hone.report.history import History


@dataclass(frozen=True, slots=True)
class Point:
    """A mean with its interval, or a gap, after `x` epochs of training."""

    x: float
    value: Estimate | None


@dataclass(frozen=True, slots=True)
class Curves:
    """The lines of the reward plot."""

    training: list[Point]
    held_out: list[Point]
    filtered: list[tuple[float, float | None]]
    """Mean reward of what was trained on; empty if that is everything."""
    percentile: list[tuple[float, float]]
    """Share of the groups that the curriculum admits; empty without a curriculum."""
    expansions: list[tuple[float, float]]
    """Where that share grew, and to what."""
    resumed: list[float] = field(default_factory=list)
    job_failures: list[float] = field(default_factory=list)
    best: tuple[float, int] | None = None
    """Place and number of the best step, if it is not the newest."""
    training_bounds: tuple[float, float] | None = None
    """The lowest and the highest reward."""
    held_out_bounds: tuple[float, float] | None = None
    names: tuple[str | None, str | None] = None, None
    """Evaluators of training and of validation."""
    greedy: bool = False
    """Validations run at temperature 0."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest reward of all lines."""
        known = [b for b in (self.training_bounds, self.held_out_bounds) if b is not None]
        return (min(b[0] for b in known), max(b[1] for b in known)) if known else None

    @property
    def last(self) -> float:
        """The largest x value."""
        return max((p.x for p in (*self.training, *self.held_out)), default=0.0)

    @property
    def two_evaluators(self) -> bool:
        """Training and validation have different evaluators."""
        return None not in self.names and self.names[0] != self.names[1]

    @property
    def labels(self) -> tuple[str, str]:
        """Labels of the two lines."""
        how = " at temperature 0" if self.greedy else ""
        if not self.two_evaluators:
            return "training", f"held out{how}"
        return f"training, by {self.names[0]}", f"held out{how}, by {self.names[1]}"

    def by_evaluator(self) -> "list[Curves]":
        """One, or with two evaluators: the held-out line, and the training line."""
        if not (self.two_evaluators and self.training and self.held_out):
            return [self]
        return [
            replace(self, training=[], filtered=[], training_bounds=None),
            replace(
                self,
                held_out=[],
                held_out_bounds=None,
                expansions=[],
                resumed=[],
                job_failures=[],
                best=None,
            ),
        ]


def curves(history: History) -> Curves:
    rounds = history.rounds
    shares = [(r.trained, float(r.metrics.get("curriculum_percentile") or 1.0)) for r in rounds]
    with_curriculum = any(share < 1 for _, share in shares)
    filtered = [(r.trained, r.metrics.get("filtered_avg_reward")) for r in rounds]
    differs = any(
        mean != r.metrics.get("avg_reward") for r, (_, mean) in zip(rounds, filtered, strict=True)
    )
    ends = [r.metrics.get(key) for r in rounds for key in ("min_reward", "max_reward")]
    held_out_ends = [end for v in history.validations for end in (v.min, v.max)]
    return Curves(
        training=[_point(r.trained, r.by_example, r.metrics.get("avg_reward")) for r in rounds],
        held_out=[_point(float(v.epoch), v.rewards, v.mean) for v in history.validations],
        filtered=filtered if differs else [],
        percentile=shares if with_curriculum else [],
        expansions=[here for before, here in pairwise(shares) if here[1] > before[1]],
        resumed=history.resumed_at,
        job_failures=[r.trained for r in rounds if isinstance(r.job, JobFailed)],
        best=_best(history),
        training_bounds=_bounds(ends),
        held_out_bounds=_bounds(held_out_ends),
        names=history.run.evaluators,
        greedy=history.run.validation_greedy,
    )


def _bounds(rewards: Sequence[float | None]) -> tuple[float, float] | None:
    known = [reward for reward in rewards if reward is not None]
    return (min(known), max(known)) if known else None


def _best(history: History) -> tuple[float, int] | None:
    """None if the newest of the validated steps is the best."""
    best = history.best
    if best is None or best is history.scored[-1] or best.step is None:
        return None
    return float(best.epoch), best.step


def _point(x: float, rewards: Rewards, mean: float | None) -> Point:
    """The logged mean, with the interval of its examples."""
    if mean is None:
        return Point(x, None)
    known = [sum(group) / len(group) for group in rewards.values() if group]
    value = estimate(known)
    if value is None or value.low is None or value.high is None:
        return Point(x, Estimate(mean, None, None, len(known)))
    return Point(x, Estimate(mean, min(value.low, mean), max(value.high, mean), value.n))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Moving average of the known values; a gap stays a gap."""
    reach = window // 2
    means = []
    for i, here in enumerate(values):
        known = [v for v in values[max(0, i - reach) : i + reach + 1] if not math.isnan(v)]
        means.append(here if math.isnan(here) else sum(known) / len(known))
    return means
