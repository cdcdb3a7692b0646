"""The losses: GRPO, DAPO, Dr. GRPO, CISPO, DPO and SFT, as pure functions of tensors over labels.

In:   log-probabilities under the weights being trained, those at the start of the job, the sampler
      and the base model; advantages
Out:  a row's share of the step's loss, and sums for its metrics

Every label gets its weight from the labels of the whole step; a row only sums weight x term. A mean
over a row would make the loss depend on which labels are packed together. DPO compares whole
sequences; preference.py turns that into an advantage per label.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.learner.trie import Labels
from hone.train_config import LossName
from hone.types import TrainConfig

Term = Callable[[Tensor, Tensor, Tensor, TrainConfig], tuple[Tensor, Tensor]]
"""term(new [m], old [m], advantage [m], config) -> loss per label, whether the bound was active"""

Weighing = Callable[[Labels, TrainConfig], Tensor]
"""weighing(labels, config) -> weight per label [M]"""


@dataclass(frozen=True, slots=True)
class Loss:
    """The term of one label, and the weights of labels."""

    term: Term
    weights: Weighing


def clipped(
    new: Tensor, old: Tensor, advantage: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """PPO's term: no gain once the ratio leaves [1 - epsilon, 1 + epsilon_high]."""
    ratio = torch.exp(new - old)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    term = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return term, ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))


def capped(
    new: Tensor, old: Tensor, advantage: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """CISPO's term: the ratio is a bounded constant weight, so every token keeps its gradient."""
    ratio = torch.exp(new.detach() - old)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return -ratio.clamp(low, high) * advantage * new, (ratio < low) | (ratio > high)


def likelihood(
    new: Tensor, old: Tensor, advantage: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """The log-likelihood of the label, times its advantage: 1 for SFT, from pairs for DPO."""
    return -advantage * new, torch.zeros_like(new, dtype=torch.bool)


def per_sequence(labels: Labels, config: TrainConfig) -> Tensor:
    """Equal weight for every sequence: 1 / (labels in it x sequences)."""
    counts = torch.bincount(sequences(labels, config))
    return 1.0 / (counts[sequences(labels, config)] * (counts > 0).sum()).double()


def per_label(labels: Labels, config: TrainConfig) -> Tensor:
    """Equal weight for every label: 1 / labels of the step."""
    return torch.full((len(labels),), 1.0 / len(labels), dtype=torch.float64)


def one(labels: Labels, config: TrainConfig) -> Tensor:
    """1 for every label: the advantages of DPO already include the weight of their pair."""
    return torch.ones(len(labels), dtype=torch.float64)


def constant(labels: Labels, config: TrainConfig) -> Tensor:
    """1 / (sequences x dr_grpo_tokens), whatever the length and the number of labels."""
    count = len(sequences(labels, config).unique())
    return torch.full((len(labels),), 1.0 / (count * config.dr_grpo_tokens), dtype=torch.float64)


LOSSES: dict[LossName, Loss] = {
    "grpo": Loss(clipped, per_sequence),
    "dapo": Loss(clipped, per_label),
    "dr_grpo": Loss(clipped, constant),
    "cispo": Loss(capped, per_label),
    "dpo": Loss(likelihood, one),
    "sft": Loss(likelihood, per_label),
}


def sequences(labels: Labels, config: TrainConfig) -> Tensor:
    """Index of the sequence of each label, [M]."""
    return labels.call if config.unit == "call" else labels.rollout


def weights(labels: Labels, config: TrainConfig) -> Tensor:
    """The weight of every label in the step's loss, [M] float64."""
    return LOSSES[config.loss].weights(labels, config)


def importance(old: Tensor, sampler: Tensor, exact: Tensor, cap: float | None) -> Tensor:
    """min(pi_old / pi_sampler, cap); 1 where the sampler's log-probability is not exact."""
    if cap is None:
        return torch.ones_like(old)
    return torch.where(exact, torch.exp(old - sampler).clamp(max=cap), 1.0).detach()


def k3(policy: Tensor, other: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy || other) from the policy's own tokens."""
    difference = other - policy
    return torch.exp(difference) - difference - 1


def penalised(advantage: Tensor, old: Tensor, reference: Tensor, coef: float) -> Tensor:
    """ART's penalty: tokens further from the base model than the step's mean lose advantage."""
    kl = (old - reference).detach()
    return advantage + coef * (kl.mean() - kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLabels:
    """The loss inputs of a row's m labels; float64, no gradients."""

    old: Tensor  # [m]
    sampler: Tensor  # [m], unused where not exact
    exact: Tensor  # [m] bool
    advantage: Tensor  # [m]
    weight: Tensor  # [m]
    reference: Tensor | None  # [m], under the base model


def row_loss(
    new: Tensor,  # [m], with gradients
    labels: RowLabels,
    config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A row's share of the step's loss, and sums over its labels for the metrics."""
    new = new.double()
    term, bounded = LOSSES[config.loss].term(new, labels.old, labels.advantage, config)
    term = term * importance(labels.old, labels.sampler, labels.exact, config.importance_cap)
    if config.beta > 0 and labels.reference is not None:
        term = term + config.beta * k3(new, labels.reference)
    loss = (labels.weight * term).sum()
    if not config.is_on_policy:
        return loss, {}
    with torch.no_grad():
        mismatch = k3(labels.sampler, labels.old)
        sums = {
            "mismatch_kl": torch.where(labels.exact, mismatch, 0.0).sum(),
            "clip_frac": bounded.sum(),
            "ratio": torch.exp(new - labels.old).sum(),
        }
        if labels.reference is not None:
            sums["kl"] = k3(new, labels.reference).sum()
    return loss, sums
