"""DPO: which trajectory of a group is preferred to which, and the gradient of the loss by sequence.

In:   rewards of a group; log-probabilities of an optimizer step's labels under policy and reference
Out:  pairs; the DPO loss of the step, and an advantage per label that gives its exact gradient

The loss of a pair depends on the log-probabilities of two whole sequences, and their labels may be in
different rows. So a pass without gradients comes first, with the weights that the step starts from. It
gives the sequences' log-probabilities s. The loss is a function of s alone, and s is a sum over labels;
by the chain rule the gradient of the loss is the sum over labels of dL/ds x the gradient of the label's
log-probability. dL/ds is a number per sequence. Each row is then trained with it as a constant, so rows
stay independent, and DPO uses the trie just as GRPO does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.learner.samples import Sample
from hone.types import TrainConfig


@dataclass(frozen=True, slots=True)
class Preference:
    """The DPO loss of one optimizer step with P pairs."""

    loss: float
    advantage: (
        Tensor  # [M] float64, minus the derivative of the loss by the label's log-probability
    )
    sums: dict[str, float]
    """Sums over pairs, for the metrics."""


def step_pairs(samples: Sequence[Sample]) -> Tensor:
    """Pairs (preferred, rejected) of an optimizer step, as indices of its samples, [P, 2]."""
    index = {(sample.group, sample.trajectory): i for i, sample in enumerate(samples)}
    pairs = [(i, index[s.group, other]) for i, s in enumerate(samples) for other in s.preferred_to]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def preference(
    policy: Tensor,  # [M] float64, log-probabilities of the labels
    reference: Tensor,  # [M] float64
    sequence: Tensor,  # [M] int64, index of each label's sample
    pairs: Tensor,  # [P, 2] int64
    config: TrainConfig,
) -> Preference:
    """Mean over pairs of -log sigmoid(beta x ((s_w - r_w) - (s_l - r_l)))."""
    count = int(pairs.max()) + 1
    ratio = torch.zeros(count, dtype=torch.float64).index_add(0, sequence, policy - reference)
    ratio.requires_grad_()
    rewards = config.dpo_beta * ratio[pairs]  # [P, 2], the implicit rewards
    margin = rewards[:, 0] - rewards[:, 1]
    loss = -logsigmoid(margin).mean()
    (slope,) = torch.autograd.grad(loss, ratio)
    sums = {
        "chosen_reward": rewards[:, 0].sum(),
        "rejected_reward": rewards[:, 1].sum(),
        "reward_margin": margin.sum(),
        "reward_accuracy": (margin > 0).sum(),
    }
    return Preference(loss.item(), -slope[sequence], {k: v.item() for k, v in sums.items()})
