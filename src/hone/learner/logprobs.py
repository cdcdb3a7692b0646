"""Log-probabilities of given tokens from hidden states, without ever holding all logits.

In:   hidden states, the language-model head, queries (place, temperature) and labels
Out:  the log-probability of every label, the entropy of every query
Used: learner/learner.py, once per row

The gradient of log p(target) with respect to a hidden state is (head[target] - p @ head) /
temperature. So the forward pass keeps one mean row of the head per query and the backward pass
needs no logits at all, where keeping them would cost more memory than the rest of the model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 48 << 20
"""Logits held at a time. Larger chunks gain nothing on a CPU, smaller ones lose in the matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Where to look, and which tokens to price there."""

    node: Tensor  # [Q] int64, row of the hidden states
    temperature: Tensor  # [Q] float
    label_query: Tensor  # [m] int64, ascending
    target: Tensor  # [m] int64


def label_logprobs(hidden: Tensor, head: Tensor, queries: Queries) -> tuple[Tensor, Tensor]:
    """Log-probabilities [m] (differentiable by `hidden`) and entropies [Q] (not), float32 or 64."""
    return _LabelLogprobs.apply(hidden, head, queries)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, hidden]
        head: Tensor,  # [vocab, hidden]
        queries: Queries,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        temperature = queries.temperature.to(wide)
        rows = hidden[queries.node]
        logprobs = torch.empty(len(queries.target), dtype=wide, device=hidden.device)
        entropy = torch.empty(len(rows), dtype=wide, device=hidden.device)
        mean_head = torch.empty_like(rows) if hidden.requires_grad else None
        size = max(1, CHUNK_BYTES // (len(head) * wide.itemsize))
        edges = torch.arange(0, len(rows) + size, size, device=hidden.device)
        ends = torch.searchsorted(queries.label_query, edges).tolist()
        for i, start in enumerate(range(0, len(rows), size)):
            here, labels = slice(start, start + size), slice(ends[i], ends[i + 1])
            logits = (rows[here] @ head.t()).to(wide)
            logits /= temperature[here, None]
            lse = logits.logsumexp(-1)
            query = queries.label_query[labels] - start
            logprobs[labels] = logits[query, queries.target[labels]] - lse[query]
            probs = logits.softmax(-1)
            entropy[here] = lse - logits.mul_(probs).sum(-1)
            if mean_head is not None:
                torch.mm(probs.to(head.dtype), head, out=mean_head[here])
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(head, mean_head)
        ctx.queries, ctx.shape = queries, hidden.shape
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        head, mean_head = ctx.saved_tensors
        q: Queries = ctx.queries
        scaled = (grad / q.temperature.to(grad.dtype)[q.label_query]).to(head.dtype)[:, None]
        rows = mean_head[q.label_query].neg_().add_(head[q.target]).mul_(scaled)
        out = rows.new_zeros(ctx.shape)
        return out.index_add_(0, q.node[q.label_query], rows), None, None
