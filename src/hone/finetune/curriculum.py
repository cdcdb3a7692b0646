"""What of a round is trained: groups by example, easy ones first, and their numbers.

In:   the records of a round; the curriculum's configuration, how trajectories are compared, a seed
Out:  the groups that are trained; before that, which examples need to be run at all; means, counts,
      and refusals where too many rollouts failed

Groups are always of one example: comparing answers to different questions would reward the easier
question.

How easy an example is, is the mean reward of its group, and examples are known by their ids, never
by their place in a list: a missing group would move all places behind it. The share that is trained
depends on the epoch alone, so a resumed run is at the same point of the schedule. What is learned
is decided by the learner (learner/samples.py), and followed here: with `credit: per_call` a group
of equal outcomes can teach much, and with `baseline: batch` a group of equal rollouts is compared
with those of the other examples.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from hone.credit import call_values, columns, is_flat
from hone.errors import RolloutError
from hone.finetune.records import Comparison, RolloutRecord, Trajectory, TrajectoryCollection

if TYPE_CHECKING:
    from hone.config.schema import CurriculumLearningConfig

Groups = Sequence[Sequence[Trajectory]]
POLICY_FAILURES_WARNED = 0.05
"""Share of policy failures above which dropping them is worth a warning: it rewards them."""
MESSAGES_SHOWN = 3
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
        """The examples to run this epoch: all of them, unless `skip_excluded` saves some.

        Where it would save all of them (`examples_per_epoch` drew no other), all are run.
        """
        skipped = self._skipped(epoch)
        return [example for example in examples if example not in skipped] or list(examples)

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
            only = [_drawn(groups[0], config.random_subsample, draw)]
            return collection.model_copy(update={"trajectories": only})
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
        return collection.model_copy(update={"trajectories": [groups[i] for i in chosen]})

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


# ---- groups, numbers and warnings of a round ------------------------------------------------------


def group_by_example(
    records: Sequence[RolloutRecord], examples: Sequence[str], smallest: int
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """One group per example, in their order; and what is left out, by reason.

    Groups of fewer than `smallest` trajectories are left out.
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
    groups = [[_trajectory(record, shaped) for record in group] for group in large]
    return groups, +dropped


def _trajectory(record: RolloutRecord, shaped: bool) -> Trajectory:
    """Where other rollouts noted values, one that noted none earned 0 at each of its calls."""
    trajectory = record.trajectory()
    if shaped and trajectory.shaped_rewards is None:
        trajectory.shaped_rewards = [0.0] * record.num_trained_calls
    return trajectory


def round_metrics(
    collected: TrajectoryCollection, chosen: TrajectoryCollection, percentile: float
) -> dict[str, Any]:
    """Means over trajectories; None where there is none."""
    return {
        **_rewards(collected, ""),
        "num_trajectories": collected.count,
        "num_groups": len(collected.trajectories),
        "filtered_trajectories": chosen.count,
        "filtered_groups": len(chosen.trajectories),
        **_rewards(chosen, "filtered_"),
        "curriculum_percentile": percentile,
    }


def _rewards(collection: TrajectoryCollection, prefix: str) -> dict[str, float | None]:
    rewards = [trajectory.reward for group in collection.trajectories for trajectory in group]
    return {
        f"{prefix}avg_reward": fmean(rewards) if rewards else None,
        f"{prefix}min_reward": min(rewards, default=None),
        f"{prefix}max_reward": max(rewards, default=None),
    }


def check_failures(records: Sequence[RolloutRecord], *, where: str, allowed: float) -> None:
    """Refuse to go on from rollouts of which too many failed by no fault of the model."""
    failed = [r for r in records if r.failure and r.failure.kind == "infrastructure"]
    if len(failed) <= allowed * len(records):
        return
    raise RolloutError(
        f"{where}: {len(failed)} of {len(records)} rollouts failed by no fault of the model "
        f"({reasons(failed)}), and finetuning.max_infrastructure_failures allows "
        f"{allowed:.0%}. Fix what failed and run the same command again: rollouts that ended well "
        f"are kept. Where the code had to change, add --fresh.\n{_last(failed)}"
    )


def policy_warning(records: Sequence[RolloutRecord], *, where: str) -> str | None:
    """What to say where many rollouts failed by the model's own doing and are dropped."""
    failed = [r for r in records if r.failure and r.failure.kind == "policy" and r.reward is None]
    if len(failed) <= POLICY_FAILURES_WARNED * len(records):
        return None
    return (
        f"{where}: {len(failed)} of {len(records)} rollouts failed by the model's own doing "
        f"({reasons(failed)}) and were dropped. Dropping them rewards them: set "
        "finetuning.on_policy_failure: {reward: 0.0}, or whatever such a failure is worth.\n"
        f"{_last(failed)}"
    )


def reasons(failed: Sequence[RolloutRecord]) -> str:
    """How often each, the commonest first."""
    counted = Counter(r.failure.reason for r in failed if r.failure)
    return ", ".join(f"{reason}: {n}" for reason, n in counted.most_common())


def _last(failed: Sequence[RolloutRecord]) -> str:
    """What the last few said, each once."""
    messages = dict.fromkeys(
        f"  {r.failure.type}: {r.failure.message}" for r in reversed(failed) if r.failure
    )
    return "\n".join(list(messages)[:MESSAGES_SHOWN])


def none_collected(epoch: int, dropped: Mapping[str, int], targets: Sequence[str]) -> str:
    """What to say of an epoch without a single trajectory."""
    why = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "no rollout was run"
    return (
        f"No trajectories collected for epoch {epoch + 1}. Left out: {why}. Check that "
        f"finetuning.target_functions {list(targets)!r} names functions that call the trained "
        "model, and that the reward's evaluator gives a score (`hone eval` shows every one). Fix "
        "what failed and run the same command again: rollouts that gave nothing to train on are run "
        "anew, the others are kept. Where the code had to change, add --fresh."
    )
