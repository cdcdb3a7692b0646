"""Select what a round trains on: groups by example, easy ones first, and their metrics.

In:   the records of a round; the curriculum's configuration, how trajectories are compared, a seed
Out:  the examples to run, the groups to train on, metrics

A group has the rollouts of one example: comparing answers to different questions would reward the
easier question. The mean reward of its group says how easy an example is. Examples are identified
by id, not by position, which changes when a group is missing. The share of groups that is trained
depends on the epoch alone, so a resumed run is at the same point of the schedule. It holds over the
whole epoch, whatever the size of its rounds: each round continues the count of those before it.

Which groups teach something follows the learner (learner/samples.py): with `credit: per_call`, a
group with equal outcomes can have different call values, and with `baseline: batch`, a group with
equal rewards is compared with the other groups.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Self, TypeVar

from hone.config.schema import CurriculumLearningConfig
from hone.files.rollout_record import RolloutRecord
from hone.finetune.records import trajectory_of
from hone.finetune.types import AdvantageSettings, Trajectory, TrajectoryCollection
from hone.trajectory import call_values, columns, is_flat

Groups = Sequence[Sequence[Trajectory]]
T = TypeVar("T")
ROUNDING = 1e-9
"""Tolerance for rounding errors: 0.5 - 0.4 < 0.1, and 0.7 x 10 > 7."""


def expansions(config: CurriculumLearningConfig, epoch: int) -> int:
    """Number of expansions up to this epoch (0-based); none after the share is 1."""
    needed = math.ceil((1 - config.initial_percentile) / config.increment_percentile - ROUNDING)
    return min(epoch // config.expansion_interval, needed)


def percentile(config: CurriculumLearningConfig, epoch: int) -> float:
    """The share of the groups that is trained in this epoch (0-based)."""
    grown = config.initial_percentile + config.increment_percentile * expansions(config, epoch)
    return min(1.0, round(grown, 9))


def share(count: int, fraction: float) -> int:
    """`fraction` of `count`, rounded up."""
    return math.ceil(count * fraction - ROUNDING)


class Counts(NamedTuple):
    """Number of groups of one round."""

    ranked: int
    """Those whose rewards differ enough."""
    selected: int
    """Those within the share of the schedule."""
    trained: int
    """Those that `random_subsample` left."""


@dataclass
class Curriculum:
    """The schedule, and the examples that it excludes."""

    config: CurriculumLearningConfig
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """current_percentile, last_expansion_epoch (-1: not yet), total_groups (in the first epoch with
    any), included_groups (ids of the examples that are trained)."""
    excluded: dict[str, int] = field(default_factory=dict)
    """Examples with different rewards that were too hard (or too easy) for the schedule when they
    were last run: id and epoch."""
    counts: dict[int, Counts] = field(default_factory=dict)
    """The rounds of `counted_epoch` so far, by their number."""
    counted_epoch: int = -1

    def __post_init__(self) -> None:
        self.state = {
            "current_percentile": self.config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            **self.state,
            "included_groups": set(self.state.get("included_groups", ())),
        }

    def plan(self, examples: Sequence[str], epoch: int) -> list[str]:
        """The examples to run in this epoch: all, or without the excluded ones (`skip_excluded`).

        If all of them are excluded, which `examples_per_epoch` can cause, all are run.
        """
        skipped = self._skipped(epoch)
        return [example for example in examples if example not in skipped] or list(examples)

    def select(
        self,
        collection: TrajectoryCollection,
        epoch: int,
        round: int = 0,
        examples: Collection[str] | None = None,
        comparison: AdvantageSettings | None = None,
        *,
        rounds: int = 1,
    ) -> TrajectoryCollection:
        """The groups to train on. The same collection in the same round gives the same groups.

        Args:
            collection: the groups of the round.
            epoch: number of the epoch, from 0.
            round: number of the round in the epoch, from 0.
            examples: ids of the epoch before `plan`; by default all that were ever seen.
            comparison: how trajectories are compared; by default by outcome, within a group.
            rounds: number of rounds of the epoch.
        """
        config, groups = self.config, collection.trajectories
        if not config.enabled:
            return collection
        draw = random.Random(f"{self.seed}:{epoch}:{round}")
        self._advance(epoch)
        ids = [example_of(group, place) for place, group in enumerate(groups)]
        rewards = [[trajectory.reward for trajectory in group] for group in groups]
        ranges = spreads(groups, comparison or AdvantageSettings())
        smallest = config.min_reward_diff - ROUNDING
        telling = [i for i, spread in enumerate(ranges) if spread >= smallest and rewards[i]]
        telling.sort(key=lambda i: fmean(rewards[i]), reverse=not config.sort_ascending)
        # Excluded examples, which were not run, are ranked last.
        skipped = self._skipped(epoch) - set(ids)
        skipped = skipped if examples is None else skipped & set(examples)
        before = self._before(epoch, round)
        ranked = before.ranked + len(telling) + len(skipped)
        wanted = share(ranked, self.state["current_percentile"]) - before.selected
        selected = telling[: max(0, wanted)]
        for i, example in enumerate(ids):
            self.excluded.pop(example, None)
            if i in telling and i not in selected:
                self.excluded[example] = epoch
        if telling and not self.state["total_groups"]:
            self.state["total_groups"] = ranked
        if rounds == len(groups) == 1:
            # Groups cannot be drawn from one; `random_subsample` applies to its trajectories.
            chosen = selected
            trained = [self._subsample(groups[i], len(groups[i]), draw) for i in selected]
        else:
            chosen = self._subsample(selected, ranked, draw, before.trained)
            trained = [groups[i] for i in chosen]
        self.counts[round] = Counts(len(telling), len(selected), len(chosen))
        included = self.state["included_groups"] if round else set()
        self.state["included_groups"] = included | {ids[i] for i in chosen}
        return collection.model_copy(update={"trajectories": trained})

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON values, for `restore`."""
        return {
            "state": {**self.state, "included_groups": sorted(self.state["included_groups"])},
            "history": {
                example: {"epoch": epoch, "excluded": True}
                for example, epoch in self.excluded.items()
            },
            "counts": {
                "epoch": self.counted_epoch,
                "rounds": [[round, *counts] for round, counts in self.counts.items()],
            },
        }

    @classmethod
    def restore(
        cls, config: CurriculumLearningConfig, seed: int, snapshot: Mapping[str, Any]
    ) -> Self:
        """The curriculum at the time of the snapshot; a new one for an empty snapshot."""
        history = snapshot.get("history", {})
        excluded = {name: one["epoch"] for name, one in history.items() if one["excluded"]}
        counted = snapshot.get("counts", {"epoch": -1, "rounds": []})
        counts = {round: Counts(*numbers) for round, *numbers in counted["rounds"]}
        state = snapshot.get("state", {})
        return cls(config, seed, state, excluded, counts, counted["epoch"])

    def _before(self, epoch: int, round: int) -> Counts:
        """The sums over the rounds of this epoch before this one."""
        if epoch != self.counted_epoch:
            self.counted_epoch, self.counts = epoch, {}
        earlier = [counts for number, counts in self.counts.items() if number < round]
        return Counts(*map(sum, zip(*earlier, strict=True))) if earlier else Counts(0, 0, 0)

    def _subsample(
        self, chosen: list[T], count: int, draw: random.Random, before: int = 0
    ) -> list[T]:
        """A random subset of `chosen`, in order: the share `random_subsample` of `count`.

        `before`: how many of the `count` were drawn already.
        """
        fraction = self.config.random_subsample
        if fraction is None or (wanted := share(count, fraction) - before) >= len(chosen):
            return chosen
        return [chosen[place] for place in sorted(draw.sample(range(len(chosen)), max(0, wanted)))]

    def _advance(self, epoch: int) -> None:
        grown = expansions(self.config, epoch)
        self.state["current_percentile"] = percentile(self.config, epoch)
        if grown:
            self.state["last_expansion_epoch"] = grown * self.config.expansion_interval

    def _skipped(self, epoch: int) -> set[str]:
        """Examples that were excluded since the last expansion.

        Every expansion measures all examples again. An example with equal rewards is always run:
        with few generations that may be chance.
        """
        config = self.config
        if not (config.enabled and config.skip_excluded) or percentile(config, epoch) >= 1:
            return set()
        since = expansions(config, epoch) * config.expansion_interval
        return {name for name, last in self.excluded.items() if since <= last < epoch}


def example_of(group: Sequence[Trajectory], place: int) -> str:
    """The id of a group's example; its position if the builder sets none."""
    for trajectory in group:
        if (example := (trajectory.metadata or {}).get("id")) is not None:
            return str(example)
    return f"#{place}"


# ---- which groups teach anything ----------------------------------------------------------------


def num_flat(groups: Groups, comparison: AdvantageSettings) -> int:
    """Number of groups that teach nothing."""
    rows = [_rows(group, comparison) for group in groups]
    if comparison.baseline == "group":
        return sum(all(map(is_flat, columns(one))) for one in rows)
    together = [row for one in rows for row in one]
    return len(groups) if all(map(is_flat, columns(together))) else 0


def spreads(groups: Groups, comparison: AdvantageSettings) -> list[float]:
    """Range of each group's values, with `baseline: batch` including the mean of the batch."""
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


def _rows(group: Sequence[Trajectory], comparison: AdvantageSettings) -> list[list[float]]:
    """One row of values per trajectory; empty for calls without values."""
    if comparison.credit == "outcome":
        return [[one.reward] for one in group]
    return [call_values(one.reward, one.shaped_rewards or [], comparison.credit) for one in group]


def _spread(values: Sequence[float]) -> float:
    return 0.0 if is_flat(values) else max(values) - min(values)


# ---- groups and numbers of a round ---------------------------------------------------------------


def group_by_example(
    records: Sequence[RolloutRecord],
    examples: Sequence[str],
    smallest: int,
    failure_reward: float = 0.0,
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """One group per example, in order; and counts of what is dropped, by reason.

    Groups of fewer than `smallest` trajectories are dropped. A failure of the policy that is trained
    and has no reward yet gets `failure_reward`.
    """
    dropped = Counter[str]()
    by_example: dict[str, list[RolloutRecord]] = {example: [] for example in examples}
    for record in records:
        if record.is_trained:
            by_example[record.example].append(record)
        elif record.failure is not None:
            dropped[f"{record.failure.kind}/{record.failure.reason}"] += 1
        else:
            no_reward = "no_reward" if record.reward is None else "no_calls"
            dropped[record.not_trained or no_reward] += 1
    large = [group for group in by_example.values() if len(group) >= max(smallest, 1)]
    dropped["small_group"] = sum(map(len, by_example.values())) - sum(map(len, large))
    shaped = any(record.shaped_rewards is not None for group in large for record in group)
    groups = [
        [
            trajectory_of(record, reward_that_counts(record, failure_reward), shaped=shaped)
            for record in group
        ]
        for group in large
    ]
    return groups, +dropped


def reward_that_counts(record: RolloutRecord, failure_reward: float) -> float | None:
    """The reward, or `failure_reward` if the policy failed; None if it says nothing of the policy."""
    return (
        failure_reward
        if record.failure_kind == "policy" and record.reward is None
        else record.reward
    )


def round_metrics(
    collected: TrajectoryCollection,
    chosen: TrajectoryCollection,
    percentile: float,
    records: Sequence[RolloutRecord] = (),
    failure_reward: float = 0.0,
) -> dict[str, Any]:
    """Metrics of a round; a mean without rollouts is None.

    Rewards of what was collected are those of all `records` of the round that have one, also of
    rollouts that are not trained; policy failures without a reward count with `failure_reward`.
    """
    sent = {trajectory.rollout for group in collected.trajectories for trajectory in group}
    others = [reward_that_counts(r, failure_reward) for r in records if r.rollout not in sent]
    return {
        **_rewards(collected, "", [reward for reward in others if reward is not None]),
        "num_trajectories": collected.count,
        "num_groups": len(collected.trajectories),
        "filtered_trajectories": chosen.count,
        "filtered_groups": len(chosen.trajectories),
        **_rewards(chosen, "filtered_"),
        "curriculum_percentile": percentile,
    }


def _rewards(
    collection: TrajectoryCollection, prefix: str, others: Sequence[float] = ()
) -> dict[str, float | None]:
    rewards = [
        trajectory.reward
        for group in collection.trajectories
        for trajectory in group
        if not (trajectory.metadata or {}).get("from_dataset")
    ]
    rewards += others
    return {
        f"{prefix}avg_reward": fmean(rewards) if rewards else None,
        f"{prefix}min_reward": min(rewards, default=None),
        f"{prefix}max_reward": max(rewards, default=None),
    }
