"""The lines of the reward plot, as numbers.

In:   the History of a run
Out:  Curves: means with 95% intervals, where there are none, and what happened to the run

A reward stands above the number of epochs that the policy which earned it had been trained for, so
training and validation at one place are of one policy. What failed has no value; it is not 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hone.events import JobFailed
from hone.report.estimate import Estimate, estimate
from hone.report.history import History, Round


@dataclass(frozen=True, slots=True)
class Point:
    """A mean with its interval, at so many epochs of training; no mean where there is none."""

    x: float
    value: Estimate | None


@dataclass(frozen=True, slots=True)
class Curves:
    """The lines of the reward plot."""

    training: list[Point]
    held_out: list[Point]
    filtered: list[tuple[float, float | None]]
    """Mean reward of what was trained on; empty where that is everything."""
    percentile: list[tuple[float, float]]
    """Share of the groups that the curriculum admits; empty without one."""
    expansions: list[tuple[float, float]]
    """Where that share grew, and to what."""
    resumed: list[float] = field(default_factory=list)
    job_failures: list[float] = field(default_factory=list)
    best: tuple[float, int] | None = None
    """Where the best step was validated, and which it is."""
    training_bounds: tuple[float, float] | None = None
    """The lowest and the highest reward of a rollout."""
    held_out_bounds: tuple[float, float] | None = None
    names: tuple[str | None, str | None] = None, None
    """The evaluators of training and of validation."""
    greedy: bool = False
    """Validations ran at temperature 0."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Of all that is drawn."""
        known = [b for b in (self.training_bounds, self.held_out_bounds) if b is not None]
        return (min(b[0] for b in known), max(b[1] for b in known)) if known else None

    @property
    def last(self) -> float:
        """The most epochs of training behind anything drawn."""
        return max((p.x for p in (*self.training, *self.held_out)), default=0.0)

    @property
    def apart(self) -> bool:
        """Training and validation were measured by different evaluators."""
        first, second = self.names
        return None not in self.names and first != second

    @property
    def labels(self) -> tuple[str, str]:
        """What the two lines are called."""
        how = " at temperature 0" if self.greedy else ""
        if not self.apart:
            return "training", f"held out{how}"
        return f"training, by {self.names[0]}", f"held out{how}, by {self.names[1]}"

    def by_evaluator(self) -> "list[Curves]":
        """One, or where two evaluators measured: the held-out line, and the training line."""
        if not (self.apart and self.training and self.held_out):
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
    """What is to be drawn."""
    rounds = history.rounds
    shares = [(r.trained, float(r.metrics.get("curriculum_percentile") or 1.0)) for r in rounds]
    with_curriculum = any(share < 1 for _, share in shares)
    filtered = [(r.trained, r.metrics.get("filtered_avg_reward")) for r in rounds]
    differs = any(r.metrics.get("filtered_avg_reward") != _mean(r) for r in rounds)
    ends = [r.metrics.get(key) for r in rounds for key in ("min_reward", "max_reward")]
    held_out_ends = [end for v in history.validations for end in (v.min, v.max)]
    return Curves(
        training=[Point(r.trained, _training(r)) for r in rounds],
        held_out=[
            Point(float(v.epoch), None if v.mean is None else _estimated(v.rewards, v.mean))
            for v in history.validations
        ],
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
    """Of the steps that were validated; None where the newest one is the best."""
    best = history.best
    if best is None or best is history.scored[-1] or best.step is None:
        return None
    return float(best.epoch), best.step


def _mean(r: Round) -> float | None:
    return r.metrics.get("avg_reward")


def _training(r: Round) -> Estimate | None:
    """The mean that was logged, in the interval of its examples."""
    mean = _mean(r)
    if mean is None:
        return None
    return _estimated(r.by_example, mean)


def _estimated(rewards: dict[str, list[float]], mean: float) -> Estimate:
    known = [sum(group) / len(group) for group in rewards.values() if group]
    found = estimate(known)
    if found is None or found.low is None or found.high is None:
        return Estimate(mean, None, None, len(known))
    return Estimate(mean, min(found.low, mean), max(found.high, mean), found.n)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of what is known around each place; a gap stays a gap."""
    reach = window // 2
    means = []
    for i, here in enumerate(values):
        known = [v for v in values[max(0, i - reach) : i + reach + 1] if not math.isnan(v)]
        means.append(here if math.isnan(here) else sum(known) / len(known))
    return means
