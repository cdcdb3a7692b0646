"""Rollouts of a round -> groups by example, and counts of what became of them all.

In:   RolloutRecords, each with the trajectory made of it
Out:  one group per example, in the order of the examples; what is left out, by reason; Collected

Groups are always of one example: comparing answers to different questions would reward whoever got
the easier one.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hone.finetune.base import RolloutRecord, Trajectory


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of the rollouts of one `finalize`."""

    rollouts: int
    """All that were asked for."""
    resumed: int
    """Of these, found in the journal and not run again."""
    infrastructure: int
    """Failed because of their world (connection, server, evaluator)."""
    policy: int
    """Failed because of what the model said."""
    trajectories: int
    groups: int
    calls: int
    tokens: int
    policy_steps: tuple[int, ...]


def grouped(
    records: Sequence[RolloutRecord], examples: Sequence[str], smallest: int
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """Groups of at least `smallest` trajectories, and what they do without."""
    dropped = Counter[str]()
    by_example: dict[str, list[Trajectory]] = {example: [] for example in examples}
    for record in records:
        if record.trajectory is not None:
            by_example[record.example].append(record.trajectory)
        elif record.failure is not None:
            dropped[f"{record.failure.kind}/{record.failure.reason}"] += 1
    groups = []
    for group in by_example.values():
        if len(group) >= smallest:
            groups.append(group)
        elif group:
            dropped["small_group"] += len(group)
    _fill_shaped(groups)
    return groups, dropped


def collected(
    records: Sequence[RolloutRecord],
    groups: Sequence[Sequence[Trajectory]],
    resumed: Collection[str],
) -> Collected:
    """The counts; `resumed` are ids of rollouts that had ended before this round began."""
    kinds = Counter(record.failure.kind for record in records if record.failure is not None)
    return Collected(
        rollouts=len(records),
        resumed=sum(record.rollout in resumed for record in records),
        infrastructure=kinds["infrastructure"],
        policy=kinds["policy"],
        trajectories=sum(map(len, groups)),
        groups=len(groups),
        calls=sum(record.calls for record in records),
        tokens=sum(record.tokens for record in records),
        policy_steps=tuple(sorted({step for record in records for step in record.policy_steps})),
    )


def _fill_shaped(groups: Sequence[Sequence[Trajectory]]) -> None:
    """Where some rollouts told values, those that told none earned 0 at each of their calls."""
    every = [trajectory for group in groups for trajectory in group]
    if all(trajectory.shaped_rewards is None for trajectory in every):
        return
    for trajectory in every:
        if trajectory.shaped_rewards is None:
            trained = [
                i for i in trajectory.episode if "call" in (getattr(i, "metadata", None) or {})
            ]
            trajectory.shaped_rewards = [0.0] * len(trained)
