"""Which groups a job can learn from: what their trajectories are compared by, and with what.

In:   `credit` and `baseline` of the trainer adapter's `training:` block; groups of trajectories
Out:  how far apart the values of each group lie; how many groups teach nothing

The learner decides what is learned (learner/samples.py). The curriculum, the counts of a round and
preflight follow it here: with `credit: per_call` a group of equal outcomes can teach much, and with
`baseline: batch` a group of equal rollouts is compared with those of the other examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hone.credit import Baseline, Credit, call_values, columns, is_flat
from hone.finetune.base import Trajectory

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the trajectories of a job are compared."""

    credit: Credit = "outcome"
    baseline: Baseline = "group"

    @classmethod
    def of(cls, adapter_config: Any) -> "Comparison":
        """Of a trainer adapter's configuration; the defaults where it is a plugin's own."""
        training = getattr(adapter_config, "training", None)
        default = cls()
        return cls(
            credit=getattr(training, "credit", default.credit),
            baseline=getattr(training, "baseline", default.baseline),
        )

    def num_flat(self, groups: Groups) -> int:
        """Groups that nothing can be learned from."""
        rows = [self._rows(group) for group in groups]
        if self.baseline == "group":
            return sum(all(map(is_flat, columns(one))) for one in rows)
        together = [row for one in rows for row in one]
        return len(groups) if all(map(is_flat, columns(together))) else 0

    def spreads(self, groups: Groups) -> list[float]:
        """Of each group, how far its values lie apart; from the batch's mean, too, if that counts."""
        rows = [self._rows(group) for group in groups]
        means: list[float] = []
        if self.baseline == "batch":
            means = [fmean(column) for column in columns([row for one in rows for row in one])]
        return [
            max((_spread([*column, *means[c : c + 1]]) for c, column in enumerate(columns(one))))
            if any(one)
            else 0.0
            for one in rows
        ]

    def _rows(self, group: Sequence[Trajectory]) -> list[list[float]]:
        """A row of values per trajectory; empty where it has none of the kind that counts."""
        if self.credit == "outcome":
            return [[one.reward] for one in group]
        return [call_values(one.reward, one.shaped_rewards or [], self.credit) for one in group]


def _spread(values: Sequence[float]) -> float:
    return 0.0 if is_flat(values) else max(values) - min(values)
