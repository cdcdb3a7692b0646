"""Turn scored trajectory groups into token-level training samples.

In:   TrajectoryGroups, as the client sent them
Out:  Samples; a group whose rewards are all equal yields none, except for the loss `sft`

Token ids are copied from the calls, never encoded again from text. A turn encoded
twice can differ by one merge at its border, and its logprobs would then describe other tokens.
Tokens that cannot be trained on are counted by reason; samples that would train something wrong are
refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from hone.errors import SampleRefused
from hone.learner.advantage import advantages
from hone.trajectory import Trajectory, TrajectoryGroup, call_values, is_flat
from hone.types import Call, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledCall:
    """One call with at least one token to learn from."""

    ids: NDArray[np.int64]  # [P + C], prompt then completion
    prompt: int
    """P, the length of the prompt."""
    places: NDArray[np.int64]  # [M] ascending, labelled places of the completion
    logprobs: NDArray[np.float64] | None  # [C], the sampler's
    exact: bool
    temperature: float
    advantage: float
    step: int = 0
    """The policy version that answered."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as tokens, logprobs and advantages; `group` and `trajectory` are its indices."""

    group: int
    trajectory: int
    calls: tuple[LabelledCall, ...]
    preferred_to: tuple[int, ...] = ()
    """Trajectories of its group that it is preferred to; only for the loss `dpo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a job, and counts of what was dropped."""

    samples: tuple[Sample, ...]
    dropped: Counter[str]
    """Completion tokens without a label, by reason."""
    groups: int
    """Groups with at least one sample."""
    flat_groups: int
    flat_rollouts: int
    """Rollouts of flat groups."""
    long_rollouts: int


def make_samples(
    groups: Sequence[TrajectoryGroup], config: TrainConfig, *, vocab: int, max_positions: int
) -> Samples:
    """The samples of every group with unequal rewards; for `sft`, of every group."""
    dropped: Counter[str] = Counter()
    limit = min(config.max_seq_length, max_positions)
    short: list[list[tuple[int, Trajectory]]] = []
    long_rollouts = 0
    for g, group in enumerate(groups):
        rest = []
        for t, trajectory in enumerate(group.trajectories):
            _check(trajectory, config, vocab=vocab, where=f"group {g}, trajectory {t}")
            trained = [call for call in trajectory.calls if _trained(call, config)]
            if max(map(_length, trained), default=0) > limit:
                long_rollouts += 1
                dropped["too_long"] += _completion_tokens(trajectory, config)
            else:
                rest.append((t, trajectory))
        short.append(rest)
    samples: list[Sample] = []
    flat_groups = flat_rollouts = 0
    for g, (rest, rows) in enumerate(zip(short, _compare(short, config), strict=True)):
        if rows is None:
            flat_groups, flat_rollouts = flat_groups + bool(rest), flat_rollouts + len(rest)
            dropped["flat_group"] += sum(_completion_tokens(t, config) for _, t in rest)
            continue
        pairs = _pairs(rest, config)
        for (t, trajectory), row in zip(rest, rows, strict=True):
            if config.loss == "dpo" and not any(t in pair for pair in pairs):
                dropped["not_in_pair"] += _completion_tokens(trajectory, config)
                continue
            calls = _labelled(trajectory, row, config, dropped)
            if calls:
                preferred_to = tuple(lost for won, lost in pairs if won == t)
                samples.append(Sample(g, t, calls, preferred_to))
    return Samples(
        samples=tuple(samples),
        dropped=+dropped,
        groups=len({sample.group for sample in samples}),
        flat_groups=flat_groups,
        flat_rollouts=flat_rollouts,
        long_rollouts=long_rollouts,
    )


def by_optimizer_step(samples: Samples, config: TrainConfig) -> list[list[Sample]]:
    """Samples of each optimizer step: groups in order, split evenly; empty groups do not count."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples.samples:
        groups.setdefault(sample.group, []).append(sample)
    each = list(groups.values())
    steps = -(-len(each) // config.groups_per_optimizer_step)
    parts = np.array_split(np.arange(len(each)), steps) if steps else []
    return [[sample for g in part for sample in each[g]] for part in parts]


def _compare(
    groups: list[list[tuple[int, Trajectory]]], config: TrainConfig
) -> list[list[list[float]] | None]:
    """The advantages of every group's trajectories; None where its rewards are equal."""
    if config.loss == "sft":
        return [[[1.0]] * len(rest) for rest in groups]
    values = [
        [call_values(t.reward, t.shaped_rewards, config.credit) for _, t in rest] for rest in groups
    ]
    if config.baseline == "group":
        return [advantages(rows, scale=config.divides_by_spread) for rows in values]
    together = advantages([row for rows in values for row in rows], scale=config.divides_by_spread)
    if together is None:
        return [None] * len(groups)
    rest = iter(together)
    return [[next(rest) for _ in rows] for rows in values]


def _pairs(rest: list[tuple[int, Trajectory]], config: TrainConfig) -> list[tuple[int, int]]:
    """Pairs (preferred, rejected) of a group's trajectories with labels, for the loss `dpo`."""
    if config.loss != "dpo":
        return []
    usable = [(t, one.reward) for t, one in rest if _num_labels(one)]
    usable.sort(key=lambda item: -item[1])  # stable: of equal rewards the first is taken
    ranked = [usable[0], next(one for one in usable if one[1] == usable[-1][1])] if usable else []
    if config.dpo_pairs == "all":
        ranked = usable
    return [
        (won, lost)
        for (won, high), (lost, low) in combinations(ranked, 2)
        if not is_flat([high, low])
    ]


def _num_labels(trajectory: Trajectory) -> int:
    calls = [call for call in trajectory.calls if call.trained]
    return sum(len(call.completion_ids) - len(set(call.forced)) for call in calls)


def _labelled(
    trajectory: Trajectory, row: list[float], config: TrainConfig, dropped: Counter[str]
) -> tuple[LabelledCall, ...]:
    """The calls with labels. `row` has an advantage per trained call, labelled or not."""
    calls: list[LabelledCall] = []
    index = 0
    for call in trajectory.calls:
        if not call.trained:
            dropped["not_trained"] += len(call.completion_ids)
            continue
        advantage = row[0] if config.credit == "outcome" else row[index]
        index += 1
        if call.temperature == 0 and config.is_on_policy:
            dropped["temperature_0"] += len(call.completion_ids)
            continue
        forced = set(call.forced)
        dropped["forced"] += len(forced)
        places = [i for i in range(len(call.completion_ids)) if i not in forced]
        if places:
            logprobs, sampled = call.logprobs, config.is_on_policy
            calls.append(
                LabelledCall(
                    ids=np.array(call.prompt_ids + call.completion_ids, dtype=np.int64),
                    prompt=len(call.prompt_ids),
                    places=np.array(places, dtype=np.int64),
                    # Losses that need no sampler train the policy itself, at temperature 1.
                    logprobs=np.array(logprobs) if sampled and logprobs is not None else None,
                    exact=call.exact and sampled,
                    temperature=call.temperature if sampled else 1.0,
                    advantage=advantage,
                    step=call.step,
                )
            )
    return tuple(calls)


def _check(trajectory: Trajectory, config: TrainConfig, *, vocab: int, where: str) -> None:
    """Refuse a trajectory that would train on anything other than what was sampled."""
    if config.credit != "outcome" and trajectory.shaped_rewards is None:
        raise SampleRefused(
            f"{where}: credit is {config.credit!r} and shaped_rewards is missing. Send one value "
            "per trained call, or set credit: outcome."
        )
    shaped = trajectory.shaped_rewards or []
    if not all(isfinite(value) for value in shaped):
        raise SampleRefused(f"{where}: shaped_rewards {shaped!r} are not all finite numbers.")
    for c, call in enumerate(trajectory.calls):
        # Other models' calls keep their own vocabulary; they are never computed here.
        if not call.trained:
            continue
        ids = call.prompt_ids + call.completion_ids
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(i for i in ids if not 0 <= i < vocab)
            raise SampleRefused(
                f"{where}, call {c}: token id {bad} is outside the vocabulary of {vocab}. The "
                "call was sampled from another model; train the model that answered it."
            )
        for place, value in enumerate(call.logprobs or ()):
            if not isfinite(value):
                raise SampleRefused(
                    f"{where}, call {c}: the logprob of completion token {place} is {value!r}. "
                    "Send finite logprobs, or none for this call."
                )


def _trained(call: Call, config: TrainConfig) -> bool:
    return call.trained and (call.temperature > 0 or not config.is_on_policy)


def _length(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def _completion_tokens(trajectory: Trajectory, config: TrainConfig) -> int:
    return sum(len(call.completion_ids) for call in trajectory.calls if _trained(call, config))
