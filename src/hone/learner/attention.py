"""Trie attention: a token sees its ancestors and itself.

In:   a PackedRow; queries, keys and values of a layer, with its window, scale, sinks and soft cap
Out:  the layer's attention: an Attend for Decoder.hidden_for_training, or SegmentAttention

Attention runs segment by segment over the keys of the path above. A dense mask over a row would
compute every pair of unrelated branches and discard it. learner/flex.py does the same on CUDA.

Position is depth, so one buffer indexed by depth holds the keys of the path to a segment: in
depth-first order each segment overwrites the part of its earlier sibling. Every key is copied once, and
attention reads a slice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hone.learner.trie import PackedRow, Segment
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Attend

BLOCK = 48
"""Queries computed together. A block reads keys up to its own end, so a long segment in blocks skips
most of its masked pairs: 4.4 ms instead of 7.5 for 256 tokens. 32 to 64 are equally fast."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries start..stop of a row; the first is at `depth`."""

    start: int
    stop: int
    depth: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The attention pattern of a row under one window, shared by all layers with that window."""

    parts: tuple[tuple[Segment, tuple[_Block, ...]], ...]
    window: int | None
    longest: int
    """Tokens of the longest path."""
    mask: Tensor  # [BLOCK, longest + BLOCK], 0 or -inf; see `masked`

    def keys(self, block: _Block) -> tuple[int, int]:
        """Range of depths that the queries of the block see."""
        low = 0 if self.window is None else max(0, block.depth - self.window + 1)
        return low, block.depth + block.stop - block.start

    def masked(self, block: _Block) -> Tensor:
        """The block's mask [queries, keys]: a slice of `mask` with the block's diagonal."""
        low, high = self.keys(block)
        queries = block.stop - block.start
        left = self.longest - (high - low - queries)
        return self.mask[:queries, left : left + high - low]


def ancestors_attention(
    row: PackedRow,
    config: DecoderConfig,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Attend:
    """Attention over the ancestors, for every layer of the decoder."""
    attention = SegmentAttention(row, device or torch.device("cpu"), dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window=config.windows[layer])

    return attend


class SegmentAttention:
    """Attention over the ancestors, for every layer of one row."""

    def __init__(self, row: PackedRow, device: torch.device, dtype: torch.dtype) -> None:
        self._row, self._device, self._dtype = row, device, dtype
        self._plans: dict[int | None, _Plan] = {}

    def __call__(
        self,
        q: Tensor,  # [N, heads, dim]
        k: Tensor,  # [N, kv_heads, dim]
        v: Tensor,  # [N, kv_heads, value_dim]
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [heads]
    ) -> Tensor:
        """The weighted values that each token sees, [N, heads * value_dim]."""
        if window not in self._plans:
            self._plans[window] = _plan(self._row, window, self._device, self._dtype)
        plan = self._plans[window]
        plain = softcap is None and sinks is None and q.shape[-1] == v.shape[-1]
        if plain and self._device.type == "cpu":
            return _OnCpu.apply(q, k, v, plan, scale)
        return _anywhere(q, k, v, plan, _Scores(scale, softcap, sinks))


def _plan(row: PackedRow, window: int | None, device: torch.device, dtype: torch.dtype) -> _Plan:
    parts = []
    for segment in row.segments:
        starts = range(segment.start, segment.stop, BLOCK)
        blocks = tuple(
            _Block(s, min(s + BLOCK, segment.stop), segment.depth + s - segment.start)
            for s in starts
        )
        parts.append((segment, blocks))
    longest = max(s.depth + s.stop - s.start for s in row.segments)
    # Column j is the key at distance j - longest from the first query.
    query = torch.arange(BLOCK, device=device)[:, None]
    key = torch.arange(-longest, BLOCK, device=device)[None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    mask = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return _Plan(tuple(parts), window, longest, mask)


class _OnCpu(torch.autograd.Function):
    """All segments of a row for one layer.

    One autograd function, because autograd's own graph would add a full-sized gradient of q, k and v
    per segment.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan, scale: float | None
    ) -> Tensor:
        out = q.new_empty(q.shape)
        path = _PathBuffer(k, v, plan.longest)
        sums = []
        for segment, blocks in plan.parts:
            path.enter(segment)
            for block in blocks:
                keys, values = path.slices(*plan.keys(block))
                here = slice(block.start, block.stop)
                part, lse = _forward(
                    _heads_first(q[here]), keys, values, attn_mask=plan.masked(block), scale=scale
                )
                out[here] = part[0].transpose(0, 1)
                sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.plan, ctx.scale = plan, scale
        return out.view(len(q), -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, *sums = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad = grad.view(q.shape)
        grad_q = q.new_empty(q.shape)
        grad_k, grad_v = k.new_zeros(k.shape), v.new_zeros(v.shape)
        path = _PathBuffer(k, v, plan.longest)
        rest = iter(sums)
        for segment, blocks in plan.parts:
            path.enter(segment)
            for block in blocks:
                low, high = plan.keys(block)
                here = slice(block.start, block.stop)
                dq, dk, dv = _backward(
                    _heads_first(grad[here]),
                    _heads_first(q[here]),
                    *path.slices(low, high),
                    _heads_first(out[here]),
                    next(rest),
                    0.0,
                    False,
                    attn_mask=plan.masked(block),
                    scale=ctx.scale,
                )
                grad_q[here] = dq[0].transpose(0, 1)
                _add_along_path(grad_k, dk[0].transpose(0, 1), segment, low, high)
                _add_along_path(grad_v, dv[0].transpose(0, 1), segment, low, high)
        return grad_q, grad_k, grad_v, None, None


class _PathBuffer:
    """Keys and values of the path from the root to the current segment, by depth."""

    def __init__(self, k: Tensor, v: Tensor, longest: int) -> None:
        self._sources = k, v
        self._buffers = tuple(x.new_empty((x.shape[1], longest, x.shape[2])) for x in (k, v))

    def enter(self, segment: Segment) -> None:
        stop = segment.depth + segment.stop - segment.start
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            rows = source[segment.start : segment.stop].transpose(0, 1)
            buffer[:, segment.depth : stop] = rows

    def slices(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """[1, kv_heads, high - low, head_dim] each."""
        keys, values = (buffer[None, :, low:high] for buffer in self._buffers)
        return keys, values


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _add_along_path(total: Tensor, part: Tensor, segment: Segment, low: int, high: int) -> None:
    """Add gradients of the keys at depths low..high to the rows of these keys."""
    depth = 0
    for start, stop in (*segment.ancestors, (segment.start, segment.stop)):
        first, last = max(low, depth), min(high, depth + stop - start)
        if first < last:
            total[start + first - depth : start + last - depth] += part[first - low : last - low]
        depth += stop - start


@dataclass(frozen=True, slots=True)
class _Scores:
    """How a layer turns products of queries and keys into weights."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention of [1, heads, queries, dim] over [1, kv_heads, keys, dim]."""
        grouped = q.shape[1] != k.shape[1]
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped
            )
        if grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * (self.scale or q.shape[-1] ** -0.5)
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores = scores + mask
        if self.sinks is not None:
            # A sink takes part in the sum of every query and has no value.
            sinks = self.sinks.to(scores)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), -1)
        return scores.softmax(-1)[..., : k.shape[2]] @ v


def _anywhere(q: Tensor, k: Tensor, v: Tensor, plan: _Plan, scores: _Scores) -> Tensor:
    """Attention variants without a CPU kernel, computed with autograd's own graph."""
    parts = []
    for segment, blocks in plan.parts:
        ranges = (*segment.ancestors, (segment.start, segment.stop))
        keys = torch.cat([k[a:b] for a, b in ranges])
        values = torch.cat([v[a:b] for a, b in ranges])
        for block in blocks:
            low, high = plan.keys(block)
            part = scores.attend(
                _heads_first(q[block.start : block.stop]),
                _heads_first(keys[low:high]),
                _heads_first(values[low:high]),
                plan.masked(block),
            )
            parts.append(part[0].transpose(0, 1))
    return torch.cat(parts).reshape(len(q), -1)
