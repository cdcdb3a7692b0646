"""Which groups to train on this epoch, easy ones first; and which groups teach anything.

In:   the epoch's groups, the curriculum's configuration, how trajectories are compared, a seed
Out:  the groups that are trained; before that, which examples need to be run at all

How easy an example is, is the mean reward of its group, and examples are known by their ids, never
by their place in a list: a missing group would move all places behind it. The share that is trained
depends on the epoch alone, so a resumed run is at the same point of the schedule. What is learned
is decided by the learner (learner/samples.py), and followed here: with `credit: per_call` a group
of equal outcomes can teach much, and with `baseline: batch` a group of equal rollouts is compared
with those of the other examples.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from hone.credit import call_values, columns, is_flat
from hone.finetune.values import Comparison, Trajectory, TrajectoryCollection

if TYPE_CHECKING:
    from hone.config.schema import CurriculumLearningConfig

Groups = Sequence[Sequence[Trajectory]]
ROUNDING = 1e-9
"""0.5 - 0.4 is less than 0.1 and 0.7 x 10 more than 7; neither is meant."""


def expansions(config: "CurriculumLearningConfig", epoch: int) -> int:
    """How often the share has grown by this epoch (0-based); it stops growing at 1."""
    needed = math.ceil((1 - config.initial_percentile) / config.increment_percentile - ROUNDING)
    return min(epoch // config.expansion_interval, needed)


def percentile(config: "CurriculumLearningConfig", epoch: int) -> float:
    """The share of the groups that is trained in this epoch (0-based)."""
    grown = config.initial_percentile + config.increment_percentile * expansions(config, epoch)
    return min(1.0, round(grown, 9))


def share(count: int, fraction: float) -> int:
    """So many of `count`, rounded up."""
    return math.ceil(count * fraction - ROUNDING)


@dataclass
class Curriculum:
    """The schedule, and what earlier epochs told of each example."""

    config: "CurriculumLearningConfig"
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """current_percentile, last_expansion_epoch (-1: not yet), total_groups (of the first epoch that
    had any), included_groups (ids of the examples that are trained)."""
    excluded: dict[str, int] = field(default_factory=dict)
    """Examples that had a signal and were too hard (or too easy) for the schedule when they were
    last run, by id, each with that epoch."""

    def __post_init__(self) -> None:
        fresh = {
            "current_percentile": self.config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        for key, value in fresh.items():
            self.state.setdefault(key, value)

    def plan(self, examples: Sequence[str], epoch: int) -> list[str]:
        """The examples to run this epoch: all of them, unless `skip_excluded` saves some."""
        skipped = self._skipped(epoch)
        return [example for example in examples if example not in skipped]

    def select(
        self,
        collection: TrajectoryCollection,
        epoch: int,
        round: int = 0,
        examples: Collection[str] | None = None,
        comparison: Comparison | None = None,
    ) -> TrajectoryCollection:
        """The groups to train on. The same collection in the same epoch gives the same groups.

        `examples` are those of this round before `plan`; all that were ever seen, if left out.
        `comparison` says which groups can teach something; by outcome within a group, if left out.
        """
        config, groups = self.config, collection.trajectories
        if not config.enabled:
            return collection
        draw = random.Random(f"{self.seed}:{epoch}:{round}")
        self._advance(epoch)
        if len(groups) == 1:
            # One group cannot be ranked; of its trajectories a share may still be drawn.
            self.state["included_groups"] = {example_of(groups[0], 0)}
            return _with(collection, [_drawn(groups[0], config.random_subsample, draw)])
        ids = [example_of(group, place) for place, group in enumerate(groups)]
        rewards = [[trajectory.reward for trajectory in group] for group in groups]
        apart = spreads(groups, comparison or Comparison())
        telling = [
            i for i, spread in enumerate(apart) if spread >= config.min_reward_diff - ROUNDING
        ]
        telling = [i for i in telling if rewards[i]]
        telling.sort(key=lambda i: fmean(rewards[i]), reverse=not config.sort_ascending)
        # Those that were not run for being out of reach count as if they stood at the end.
        skipped = self._skipped(epoch) - set(ids)
        ranked = len(telling) + len(skipped if examples is None else skipped & set(examples))
        chosen = telling[: max(1, share(ranked, self.state["current_percentile"]))]
        for i, example in enumerate(ids):
            self.excluded.pop(example, None)
            if i in telling and i not in chosen:
                self.excluded[example] = epoch
        if telling and not self.state["total_groups"]:
            self.state["total_groups"] = ranked
        if config.random_subsample is not None:
            wanted = share(ranked, config.random_subsample)
            if len(chosen) > wanted:
                chosen = [
                    chosen[place] for place in sorted(draw.sample(range(len(chosen)), wanted))
                ]
        before = self.state["included_groups"] if round else set()
        self.state["included_groups"] = before | {ids[i] for i in chosen}
        return _with(collection, [groups[i] for i in chosen])

    def snapshot(self) -> dict[str, Any]:
        """Everything it remembers, as JSON values."""
        return {
            "state": {**self.state, "included_groups": sorted(self.state["included_groups"])},
            "history": {
                example: {"epoch": epoch, "excluded": True}
                for example, epoch in self.excluded.items()
            },
        }

    @classmethod
    def restore(
        cls, config: "CurriculumLearningConfig", seed: int, snapshot: Mapping[str, Any]
    ) -> Self:
        """As it was when `snapshot` was taken; an empty one gives a fresh curriculum."""
        state = dict(snapshot.get("state", {}))
        if "included_groups" in state:
            state["included_groups"] = set(state["included_groups"])
        history = snapshot.get("history", {})
        excluded = {name: one["epoch"] for name, one in history.items() if one["excluded"]}
        return cls(config, seed, state, excluded)

    def _advance(self, epoch: int) -> None:
        grown = expansions(self.config, epoch)
        self.state["current_percentile"] = percentile(self.config, epoch)
        if grown:
            self.state["last_expansion_epoch"] = grown * self.config.expansion_interval

    def _skipped(self, epoch: int) -> set[str]:
        """Examples that this epoch need not run: left out since the share last grew.

        Every expansion measures all examples anew, and one without a signal is always run: with
        few generations it may only have been bad luck.
        """
        config = self.config
        if not (config.enabled and config.skip_excluded) or percentile(config, epoch) >= 1:
            return set()
        since = expansions(config, epoch) * config.expansion_interval
        return {name for name, last in self.excluded.items() if since <= last < epoch}


def example_of(group: Sequence[Trajectory], place: int) -> str:
    """The id of the example a group is of; its place where a builder names none."""
    for trajectory in group:
        if (example := (trajectory.metadata or {}).get("id")) is not None:
            return str(example)
    return f"#{place}"


def _drawn(
    group: list[Trajectory], fraction: float | None, draw: random.Random
) -> list[Trajectory]:
    wanted = len(group) if fraction is None else share(len(group), fraction)
    if wanted >= len(group):
        return group
    return [group[place] for place in sorted(draw.sample(range(len(group)), wanted))]


def _with(collection: TrajectoryCollection, groups: list[list[Trajectory]]) -> TrajectoryCollection:
    return collection.model_copy(update={"trajectories": groups})


# ---- which groups teach anything ----------------------------------------------------------------


def num_flat(groups: Groups, comparison: Comparison) -> int:
    """How many groups nothing can be learned from."""
    rows = [_rows(group, comparison) for group in groups]
    if comparison.baseline == "group":
        return sum(all(map(is_flat, columns(one))) for one in rows)
    together = [row for one in rows for row in one]
    return len(groups) if all(map(is_flat, columns(together))) else 0


def spreads(groups: Groups, comparison: Comparison) -> list[float]:
    """How far apart the values of each group lie; from the batch's mean, too, if that counts."""
    rows = [_rows(group, comparison) for group in groups]
    means: list[float] = []
    if comparison.baseline == "batch":
        means = [fmean(column) for column in columns([row for one in rows for row in one])]
    return [
        max((_spread([*column, *means[c : c + 1]]) for c, column in enumerate(columns(one))))
        if any(one)
        else 0.0
        for one in rows
    ]


def _rows(group: Sequence[Trajectory], comparison: Comparison) -> list[list[float]]:
    """A row of values per trajectory; empty where it has none of the kind that counts."""
    if comparison.credit == "outcome":
        return [[one.reward] for one in group]
    return [call_values(one.reward, one.shaped_rewards or [], comparison.credit) for one in group]


def _spread(values: Sequence[float]) -> float:
    return 0.0 if is_flat(values) else max(values) - min(values)
