"""Log-probabilities of labels from hidden states, without holding all logits in memory.

In:   hidden states, the language-model head, queries (node, temperature) and labels
Out:  the log-probability of every label, the entropy of every query

The gradient of log p(target) with respect to a hidden state is (head[target] - p @ head) /
temperature. So the forward pass keeps one row per query and the backward pass needs no logits, which
would take more memory than the rest of the model.

As p(target) approaches 1 the two terms become equal and their difference is rounding error. So the
row is the gradient of the most likely token f, in which nothing cancels:
pull = (1 - p(f)) head[f] - (sum of p(j) head[j] over the others). The gradient of any other token is
head[target] - head[f] + pull. All of it is float32 or wider until the last sum.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.models.layers import wide_combination, wide_product

CHUNK_BYTES = 48 << 20
"""Logits in memory at a time. Larger chunks gain nothing on a CPU; smaller ones slow the matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Nodes with their temperatures, and the labels to score there."""

    node: Tensor  # [Q] int64, row of the hidden states
    temperature: Tensor  # [Q] float
    label_query: Tensor  # [m] int64, ascending
    target: Tensor  # [m] int64


def label_logprobs(hidden: Tensor, head: Tensor, queries: Queries) -> tuple[Tensor, Tensor]:
    """Log-probabilities [m] (differentiable by `hidden`) and entropies [Q] (not), float32 or 64."""
    return _LabelLogprobs.apply(hidden, head, queries)


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, hidden]
        head: Tensor,  # [vocab, hidden]
        queries: Queries,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        temperature = queries.temperature.to(wide)
        rows = hidden[queries.node]
        logprobs = torch.empty(len(queries.target), dtype=wide, device=hidden.device)
        entropy = torch.empty(len(rows), dtype=wide, device=hidden.device)
        top = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
        pull = torch.empty_like(rows, dtype=wide) if hidden.requires_grad else None
        size = max(1, CHUNK_BYTES // (len(head) * wide.itemsize))
        edges = torch.arange(0, len(rows) + size, size, device=hidden.device)
        ends = torch.searchsorted(queries.label_query, edges).tolist()
        for i, start in enumerate(range(0, len(rows), size)):
            here, labels = slice(start, start + size), slice(ends[i], ends[i + 1])
            logits = wide_product(rows[here], head.t())
            logits /= temperature[here, None]
            most, best = logits.max(-1, keepdim=True)
            logits -= most
            # Probabilities relative to the most likely token's, whose own 1 is left out of the sum:
            # the rest of the probability is then as exact as the sum of the others.
            odds = logits.exp().scatter_(-1, best, 0.0)
            rest = odds.sum(-1, keepdim=True)
            lse = rest.log1p()
            query = queries.label_query[labels] - start
            logprobs[labels] = logits[query, queries.target[labels]] - lse[query, 0]
            entropy[here] = lse[:, 0] - logits.mul_(odds).sum(-1) / (1 + rest[:, 0])
            top[here] = best[:, 0]
            if pull is not None:
                odds /= -(1 + rest)
                pull[here] = wide_combination(odds.scatter_(-1, best, rest / (1 + rest)), head)
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(head, top, pull)
        ctx.queries, ctx.shape, ctx.dtype = queries, hidden.shape, hidden.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        head, top, pull = ctx.saved_tensors
        q: Queries = ctx.queries
        scaled = (grad / q.temperature.to(grad.dtype)[q.label_query])[:, None]
        rows = head[q.target].to(pull.dtype).sub_(head[top[q.label_query]])
        rows.add_(pull[q.label_query]).mul_(scaled)
        out = rows.new_zeros(ctx.shape)
        out.index_add_(0, q.node[q.label_query], rows)
        return out.to(ctx.dtype), None, None
