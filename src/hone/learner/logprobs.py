"""Log-probabilities of labels from hidden states, without holding all logits in memory.

In:   hidden states, the language-model head, queries (node, temperature) and labels
Out:  the log-probability of every label, the entropy of every query

The gradient of log p(target) with respect to a hidden state is (head[target] - p @ head) /
temperature. So the forward pass keeps one row per query and the backward pass needs no logits, which
would take more memory than the rest of the model.

As p(target) approaches 1 the two terms become equal and their difference is rounding error. So the
row is the gradient of the most likely token f, in which nothing cancels:
pull = (1 - p(f)) head[f] - (sum of p(j) head[j] over the others). The gradient of any other token is
head[target] - head[f] + pull. All of it is float32 or wider until the last sum. Where the model caps
its logits, every row of the head is multiplied by the cap's slope at its logit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.learner.offload import to_device
from hone.models.layers import COARSE, wide_combination, wide_product

CHUNK_BYTES = 48 << 20
"""Bytes of logits in memory at a time. Larger chunks gain nothing on a CPU; smaller ones slow the
matmul."""
CUDA_CHUNK_BYTES = 1 << 30
"""The same on CUDA, where every chunk reads the whole head twice."""


@dataclass(frozen=True, slots=True)
class Head:
    """A language-model head: logits = cap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None = None  # [vocab]
    scale: float = 1.0
    softcap: float | None = None
    """Logits are softcap * tanh(logits / softcap)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab], float32 or wider, and not yet divided by a temperature."""
        logits = wide_product(hidden, self.weight.t())
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Nodes with their temperatures, and the labels to score there; on any device."""

    node: Tensor  # [Q] int64, row of the hidden states
    temperature: Tensor  # [Q] float
    label_query: Tensor  # [m] int64, ascending
    target: Tensor  # [m] int64

    def to(self, device: torch.device) -> "Queries":
        return Queries(
            node=to_device(self.node, device),
            temperature=to_device(self.temperature, device),
            label_query=to_device(self.label_query, device),
            target=to_device(self.target, device),
        )


def label_logprobs(hidden: Tensor, head: Tensor | Head, queries: Queries) -> tuple[Tensor, Tensor]:
    """Log-probabilities [m] (differentiable by `hidden`) and entropies [Q] (not), float32 or 64."""
    if isinstance(head, Tensor):
        head = Head(head)
    return _LabelLogprobs.apply(hidden, head.weight, head, queries)


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, hidden]
        weight: Tensor,  # [vocab, hidden]
        head: Head,
        queries: Queries,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        row_bytes = len(weight) * wide.itemsize
        size = max(1, _chunk_bytes(head, cuda=hidden.is_cuda) // row_bytes)
        if hidden.is_cuda:
            size = _even(len(queries.node), size)
        # Where labels are split is computed before they are moved: reading it back would wait for
        # the whole model.
        edges = torch.arange(0, len(queries.node) + size, size, device=queries.node.device)
        ends = torch.searchsorted(queries.label_query, edges).tolist()
        queries = queries.to(hidden.device)
        temperature = queries.temperature.to(wide)
        rows = hidden[queries.node]
        logprobs = torch.empty(len(queries.target), dtype=wide, device=hidden.device)
        entropy = torch.empty(len(rows), dtype=wide, device=hidden.device)
        top = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
        pull = torch.empty_like(rows, dtype=wide) if hidden.requires_grad else None
        slopes = None
        if head.softcap is not None and pull is not None:
            slopes = torch.empty_like(logprobs), torch.empty_like(entropy)  # of target and of top
        fused = hidden.is_cuda and hidden.dtype in COARSE and head.softcap is None
        for i, start in enumerate(range(0, len(rows), size)):
            here, labels = slice(start, start + size), slice(ends[i], ends[i + 1])
            query, target = queries.label_query[labels] - start, queries.target[labels]
            logits = odds = slope = weights = None  # frees the last chunk's before the next one's
            logits = head.logits(rows[here])
            if fused and len(logits) > 1:  # torch compiles a size of 1 as a separate graph
                scaled = temperature[here, None]
                sums = Sums(*_fused(sums_of, logits, scaled))
                logprobs[labels] = sums.logprobs(logits, scaled, query, target)
                entropy[here], top[here] = sums.entropy(), sums.best[:, 0]
                if pull is not None:
                    weights = _fused(other_weights, logits, scaled, *sums[:3])
                    pull[here] = sums.pull(weights, weight)
                continue
            if slopes is not None and head.softcap is not None:
                slope = (logits / head.softcap).square_().neg_().add_(1)
            logits /= temperature[here, None]
            most, best = logits.max(-1, keepdim=True)
            logits -= most
            # Probabilities relative to the most likely token's, whose own 1 is left out of the sum:
            # the rest of the probability is then as exact as the sum of the others.
            odds = logits.exp().scatter_(-1, best, 0.0)
            rest = odds.sum(-1, keepdim=True)
            lse = rest.log1p()
            logprobs[labels] = logits[query, target] - lse[query, 0]
            entropy[here] = lse[:, 0] - logits.mul_(odds).sum(-1) / (1 + rest[:, 0])
            top[here] = best[:, 0]
            if pull is not None:
                odds /= -(1 + rest)
                odds.scatter_(-1, best, rest / (1 + rest))
                if slope is not None and slopes is not None:
                    odds *= slope
                    slopes[0][labels] = slope[query, target]
                    slopes[1][here] = slope.gather(-1, best)[:, 0]
                logits = slope = None  # the product needs as much memory on CUDA
                pull[here] = wide_combination(odds, weight)
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(weight, top, pull, *(slopes or ()))
        ctx.queries, ctx.shape, ctx.dtype, ctx.scale = (
            queries,
            hidden.shape,
            hidden.dtype,
            head.scale,
        )
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None]:
        weight, top, pull, *slopes = ctx.saved_tensors
        q: Queries = ctx.queries
        scaled = (grad / q.temperature.to(grad.dtype)[q.label_query])[:, None]
        if ctx.scale != 1.0:
            scaled = scaled * ctx.scale
        rows, best = weight[q.target].to(pull.dtype), weight[top[q.label_query]]
        if slopes:
            of_target, of_top = slopes
            rows *= of_target[:, None]
            best = best * of_top[q.label_query, None]
        rows.sub_(best)
        rows.add_(pull[q.label_query]).mul_(scaled)
        out = rows.new_zeros(ctx.shape)
        out.index_add_(0, q.node[q.label_query], rows)
        return out.to(ctx.dtype), None, None, None


# ---- the same in a few passes over the logits, for CUDA ---------------------------------------------


class Sums(NamedTuple):
    """Sums over a chunk's logits from which its log-probabilities are computed; [n, 1] each."""

    most: Tensor
    best: Tensor
    """The most likely token."""
    rest: Tensor
    """Sum of the other tokens' probabilities, relative to its own."""
    moment: Tensor
    """Sum of the same, each times its logarithm."""

    def logprobs(
        self, logits: Tensor, temperature: Tensor, query: Tensor, target: Tensor
    ) -> Tensor:
        shifted = logits[query, target] / temperature[query, 0] - self.most[query, 0]
        return shifted - self.rest[query, 0].log1p()

    def pull(self, weights: Tensor, head: Tensor) -> Tensor:
        """The gradient of the most likely token's log-probability, times the temperature."""
        # All weights add up to zero. As the sum of the others after rounding, what all rows of the
        # head have in common still cancels.
        own = weights.sum(-1, keepdim=True, dtype=self.rest.dtype)
        return wide_product(weights, head).sub_(own * head[self.best[:, 0]])

    def entropy(self) -> Tensor:
        return (self.rest.log1p() - self.moment / (1 + self.rest))[:, 0]


def sums_of(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of a chunk."""
    scaled = logits / temperature
    most, best = scaled.max(-1, keepdim=True)
    shifted = scaled - most
    odds = torch.where(_is_best(logits, best), 0.0, shifted.exp())
    return most, best, odds.sum(-1, keepdim=True), (shifted * odds).sum(-1, keepdim=True)


def other_weights(
    logits: Tensor, temperature: Tensor, most: Tensor, best: Tensor, rest: Tensor
) -> Tensor:
    """The weight of every row of the head in `pull` but the most likely token's, in bfloat16.

    Their rounding is less than that of the gradient itself, which is bfloat16 too (SmolLM2's head on
    English text: 0.04% and 0.17% of its norm).
    """
    odds = (logits / temperature - most).exp()
    return torch.where(_is_best(logits, best), 0.0, -odds / (1 + rest)).to(torch.bfloat16)


def _chunk_bytes(head: Head, *, cuda: bool) -> int:
    """Bytes of a chunk's logits: on CUDA, all that exists of one chunk must fit fit.CUDA_LOGITS."""
    if not cuda:
        return CHUNK_BYTES
    # Logits, odds and slopes; there is no fused pass for capped logits.
    return CUDA_CHUNK_BYTES if head.softcap is None else CUDA_CHUNK_BYTES // 3


def _is_best(logits: Tensor, best: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device) == best


def _even(count: int, most: int) -> int:
    """The size of equal chunks of at most `most`."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def _fused(function: Callable[..., Any], *rows: Tensor) -> Any:
    """Call the compiled function: one graph for any number of rows."""
    for tensor in rows:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*rows)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
