"""The rollouts of a round: groups by example, numbers, and warnings.

In:   RolloutRecords, TrajectoryCollections
Out:  one group per example; means and counts; refusals where too many rollouts failed

Groups are always of one example: comparing answers to different questions would reward the easier
question.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hone.errors import RolloutError
from hone.finetune.records import RolloutRecord
from hone.finetune.values import Trajectory, TrajectoryCollection

POLICY_FAILURES_WARNED = 0.05
"""Share of policy failures above which dropping them is worth a warning: it rewards them."""
MESSAGES_SHOWN = 3


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
        elif record.reward is None:
            dropped["no_reward"] += 1
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
