"""One step's tokens on one flat axis, and who of them sees what.

In:   chunks of prompts to read, lanes of branches to advance by one token
Out:  ids, positions, adapter spans, and `attend` for the decoder
Used: inference/embedded.py, anew for every step

Prompts are read and branches advanced in the same matrix products: on a CPU a product over 300
rows costs little more than one over 64. A branch's attention is the prompt's part, computed once
for all branches that share the block, and its own part, merged by their log-sum-exps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hone.inference.kv import Block, Lane, Row
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Span
from hone.models.lora import Lora


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..stop of a prompt, to be read now."""

    block: Block
    start: int
    stop: int
    lora: Lora | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    chunk: Chunk
    rows: slice
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Decode:
    lane: Lane[Row]
    rows: slice
    place: tuple[Any, ...]  # of the new token in a lane's keys [n, kv_heads, capacity, dim]
    longest: int
    masks: dict[int | None, Tensor | None]  # window -> [n, 1, 1, longest] added to own scores
    prefixes: list[tuple[Block, Tensor | slice, dict[int | None, Tensor | None]]]
    stack: "_Stack | None"


@dataclass(frozen=True, slots=True)
class _Stack:
    """The prompts of a lane side by side, and which rows belong to which."""

    k: Tensor  # [layers, P, kv_heads, longest, dim]
    v: Tensor
    slots: Tensor  # [P * m] int64, of each prompt's rows; the first one again where too few
    place: Tensor | None  # [n] int64, where each slot stands in `slots`; None: in order
    mask: Tensor | None  # [P, 1, 1, longest] added to scores, where lengths differ

    def attend(self, layer: int, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of all rows [n, kv, g, dim] over their prompts, and its log-sum-exps."""
        prompts, rows = self.k.shape[1], len(self.slots) // self.k.shape[1]
        kv, g, dim = grouped.shape[1:]
        ordered = grouped if self.place is None else grouped.index_select(0, self.slots)
        some = ordered.view(prompts, rows, kv, g, dim).transpose(1, 2)
        flat = some.reshape(prompts, kv, rows * g, dim)
        seen, lse = _attention(flat, self.k[layer], self.v[layer], self.mask)
        # On a CPU attention leaves its answers in this order, [prompt, row, g, kv, dim].
        seen = seen.transpose(1, 2).reshape(-1, g, kv, dim)
        lse = lse.view(prompts, kv, rows, g).transpose(1, 2).reshape(-1, kv, g)
        if self.place is not None:
            seen, lse = seen.index_select(0, self.place), lse.index_select(0, self.place)
        return seen.transpose(1, 2), lse


class Batch:
    """What one forward pass computes."""

    def __init__(
        self,
        config: DecoderConfig,
        chunks: Sequence[Chunk],
        lanes: Sequence[tuple[Lane[Any], Sequence[int], Lora | None]],
        device: torch.device,
    ) -> None:
        self._config = config
        self._windows = set(config.windows)
        ids: list[int] = []
        positions: list[int] = []
        self.spans: list[Span] = []
        self._prefills: list[_Prefill] = []
        self._decodes: list[_Decode] = []
        for chunk in chunks:
            rows = slice(len(ids), len(ids) + chunk.stop - chunk.start)
            ids += chunk.block.ids[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            self._span(rows, chunk.lora)
            masks = {w: _causal(chunk, w, device) for w in self._windows}
            self._prefills.append(_Prefill(chunk, rows, masks))
        self.decode_start = len(ids)
        for lane, pending, lora in lanes:
            rows = slice(len(ids), len(ids) + len(pending))
            ids += pending
            positions += [len(row.block.ids) + row.own for row in lane.rows]
            self._span(rows, lora)
            self._decodes.append(self._decode(lane, rows, device))
        self.token_ids = torch.tensor(ids, device=device)
        self.positions = torch.tensor(positions, device=device)

    def __len__(self) -> int:
        return len(self.token_ids)

    def wanted(self, *, whole: int) -> tuple[list[int] | None, list[int]]:
        """The rows whose states are asked for (None: all), and how many of each chunk, then of lanes.

        All of the first `whole` chunks, which are a probe's, and of the lanes; of a prompt its last,
        which the first token of every answer is drawn from.
        """
        chunks = [prefill.chunk for prefill in self._prefills]
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        asked = lengths[:whole] + [int(c.stop == len(c.block.ids)) for c in chunks[whole:]]
        sizes = [*asked, len(self) - self.decode_start]
        if asked == lengths:
            return None, sizes
        rows: list[int] = []
        for end, count in zip(accumulate(lengths), asked, strict=True):
            rows += range(end - count, end)
        return [*rows, *range(self.decode_start, len(self))], sizes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self._config.windows[layer]
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for prefill in self._prefills:
            block, rows = prefill.chunk.block, prefill.rows
            keys, values = block.k[layer], block.v[layer]
            keys[:, prefill.chunk.start : prefill.chunk.stop] = k[rows].transpose(0, 1)
            values[:, prefill.chunk.start : prefill.chunk.stop] = v[rows].transpose(0, 1)
            mask = prefill.masks[window]
            seen = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys[None, :, : prefill.chunk.stop],
                values[None, :, : prefill.chunk.stop],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[rows] = seen[0].transpose(0, 1).flatten(1)
        for decode in self._decodes:
            rows = decode.rows
            self._attend_lane(decode, layer, q[rows], k[rows], v[rows], out[rows])
        return out

    def _attend_lane(
        self, decode: _Decode, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Write the attention of a lane's rows into `out`, [n, heads * dim]."""
        config, lane, n, window = self._config, decode.lane, len(q), self._config.windows[layer]
        # Heads that share keys are queries of one another's attention: no key is read twice.
        grouped = q.reshape(n, config.kv_heads, -1, config.head_dim)
        keys, values = lane.k[layer, :n], lane.v[layer, :n]
        keys[decode.place] = k
        values[decode.place] = v
        keys, values = keys[:, :, : decode.longest], values[:, :, : decode.longest]
        mine, mine_lse = _attention(grouped, keys, values, decode.masks[window])
        if decode.stack is not None:
            theirs, theirs_lse = decode.stack.attend(layer, grouped)
        else:
            theirs, theirs_lse = torch.empty_like(mine), torch.empty_like(mine_lse)
            for block, slots, masks in decode.prefixes:
                some = grouped[slots].transpose(0, 1)  # [kv, m, g, dim]
                flat = some.reshape(1, config.kv_heads, -1, config.head_dim)
                keys, values = block.k[None, layer], block.v[None, layer]
                seen, lse = _attention(flat, keys, values, masks[window])
                theirs[slots] = seen.view(some.shape).transpose(0, 1)
                theirs_lse[slots] = lse.view(some.shape[:3]).transpose(0, 1)
        # Two parts of one attention, weighed by what each was normalised by.
        share = torch.sigmoid(theirs_lse - mine_lse)[..., None].to(mine.dtype)
        torch.lerp(mine, theirs, share, out=out.view(grouped.shape))

    def _span(self, rows: slice, lora: Lora | None) -> None:
        if lora is None:
            return
        if self.spans and self.spans[-1][1] == rows.start and self.spans[-1][2] is lora:
            self.spans[-1] = (self.spans[-1][0], rows.stop, lora)
        else:
            self.spans.append((rows.start, rows.stop, lora))

    def _decode(self, lane: Lane[Row], rows: slice, device: torch.device) -> _Decode:
        lengths = [row.own for row in lane.rows]
        own = torch.tensor(lengths, device=device)
        longest = max(lengths) + 1
        places = torch.arange(longest, device=device)
        masks: dict[int | None, Tensor | None] = {}
        for window in self._windows:
            hidden = places > own[:, None]
            if window is not None:
                hidden |= own[:, None] - places >= window
            masks[window] = _added(hidden)[:, None, None] if hidden.any() else None
        groups: dict[int, tuple[Block, list[int]]] = {}
        for slot, row in enumerate(lane.rows):
            groups.setdefault(id(row.block), (row.block, []))[1].append(slot)
        prefixes = []
        for block, members in groups.values():
            slots = _slots(members, device)
            prefix = {w: self._prefix_mask(block, own[slots], w) for w in self._windows}
            prefixes.append((block, slots, prefix))
        if min(lengths) == longest - 1:  # one column of keys, as among samples that began together
            place: tuple[Any, ...] = (slice(None), slice(None), longest - 1)
        else:
            place = (torch.arange(len(lane.rows), device=device), slice(None), own)
        stack = self._stack(lane, list(groups.values()), device)
        return _Decode(lane, rows, place, longest, masks, prefixes, stack)

    def _stack(
        self, lane: Lane[Row], groups: list[tuple[Block, list[int]]], device: torch.device
    ) -> _Stack | None:
        most = max(len(members) for _, members in groups)
        if self._windows != {None} or len(groups) * most > 2 * len(lane.rows):
            return None
        stacked = lane.stack([block for block, _ in groups])
        if stacked is None:
            return None
        rows = [members + members[:1] * (most - len(members)) for _, members in groups]
        place = [0] * len(lane.rows)
        for i, (_, members) in enumerate(groups):
            for j, slot in enumerate(members):
                place[slot] = i * most + j
        in_order = place == list(range(len(groups) * most))
        lengths = torch.tensor([len(block.ids) for block, _ in groups], device=device)
        longest = stacked[0].shape[3]
        unequal = bool((lengths != longest).any())
        hidden = torch.arange(longest, device=device) >= lengths[:, None]
        return _Stack(
            *stacked,
            slots=torch.tensor(rows, device=device).flatten(),
            place=None if in_order else torch.tensor(place, device=device),
            mask=_added(hidden)[:, None, None] if unequal else None,
        )

    def _prefix_mask(self, block: Block, own: Tensor, window: int | None) -> Tensor | None:
        """[1, 1, m * g, prompt] where a window hides part of the prompt."""
        if window is None:
            return None
        distance = (len(block.ids) + own)[:, None] - torch.arange(len(block.ids), device=own.device)
        heads = self._config.heads // self._config.kv_heads
        return _added(distance >= window).repeat_interleave(heads, 0)[None, None]


def _slots(members: list[int], device: torch.device) -> Tensor | slice:
    """Rows of one prompt; mostly neighbours, and then a slice, which is read without a copy."""
    if members[-1] - members[0] + 1 == len(members):
        return slice(members[0], members[-1] + 1)
    return torch.tensor(members, device=device)


def _causal(chunk: Chunk, window: int | None, device: torch.device) -> Tensor | None:
    """[tokens, seen] bool, or None where plain causal attention is meant."""
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    keys = torch.arange(chunk.stop, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (queries - keys < window)


def _added(hidden: Tensor) -> Tensor:
    # Finite, so that a row of which everything is hidden gives a weight of zero and not NaN.
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -1e30)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and the log of the sum it was normalised by; [B, kv, Q, dim] and [B, kv, Q]."""
    if mask is not None:
        mask = mask.expand(len(q), 1, q.shape[2], k.shape[2]).to(q.dtype)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask
        )
        return out, lse
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(q.dtype) @ v, lse
