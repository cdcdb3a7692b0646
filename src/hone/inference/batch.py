"""One step's tokens on one flat axis, and who of them sees what.

In:   chunks of prompts to read, lanes of branches to advance by one token
Out:  ids, positions, adapter spans, and `attend` for the decoder

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

from hone.inference.blocks import Block
from hone.inference.kv import Lane, Row
from hone.inference.stacks import hide
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Span
from hone.models.layers import wide_product
from hone.models.lora import Lora

Masks = dict[int | None, Tensor | None]
"""By the layer's window; None: everything is seen."""


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
    masks: Masks


@dataclass(frozen=True, slots=True)
class _Decode:
    lane: Lane[Row]
    rows: slice
    place: tuple[Any, ...]  # of the new token in a lane's keys [n, kv_heads, capacity, dim]
    longest: int
    masks: Masks  # [n, 1, 1, longest] added to own scores
    prompts: "list[_Prompts]"
    found: Tensor | None  # [n] int64, where among the prompts' answers a row's is; None: in order

    def read(self, layer: int, window: int | None, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """The attention of all rows [n, kv, g, dim] over their prompts, and its log-sum-exps."""
        parts = [prompts.attend(layer, window, grouped) for prompts in self.prompts]
        seen, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if self.found is not None:
            seen, lse = seen.index_select(0, self.found), lse.index_select(0, self.found)
        return seen.transpose(1, 2), lse


@dataclass(frozen=True, slots=True)
class _Prompts:
    """A prompt, or several side by side, and the rows that read them."""

    k: Tensor  # [layers, P, kv_heads, longest, dim]
    v: Tensor
    masks: Masks  # added to scores
    slots: Tensor | slice  # [P * m], the rows of each, as many of all: some stand twice

    def attend(self, layer: int, window: int | None, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """Of all rows [n, kv, g, dim] the attention of these, [P * m, g, kv, dim], and its log-sum-exps."""
        kv, g, dim = grouped.shape[1:]
        some = grouped[self.slots].unflatten(0, (self.k.shape[1], -1)).transpose(1, 2)
        flat = some.reshape(*some.shape[:2], -1, dim)  # [P, kv, m * g, dim]
        seen, lse = _attention(flat, self.k[layer], self.v[layer], self.masks[window])
        # On a CPU attention leaves its answers in this order, [prompt, row, g, kv, dim].
        seen = seen.transpose(1, 2).reshape(-1, g, kv, dim)
        return seen, lse.view(*some.shape[:4]).transpose(1, 2).reshape(-1, kv, g)


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
        keys, values = lane.k[layer][:n], lane.v[layer][:n]
        keys[decode.place] = k
        values[decode.place] = v
        keys, values = keys[:, :, : decode.longest], values[:, :, : decode.longest]
        mine, mine_lse = _attention(grouped, keys, values, decode.masks[window])
        theirs, theirs_lse = decode.read(layer, window, grouped)
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
        masks: Masks = {}
        for window in self._windows:
            hidden = places > own[:, None]
            if window is not None:
                hidden |= own[:, None] - places >= window
            masks[window] = hide(hidden)[:, None, None] if hidden.any() else None
        groups: dict[int, tuple[Block, list[int]]] = {}
        for slot, row in enumerate(lane.rows):
            groups.setdefault(id(row.block), (row.block, []))[1].append(slot)
        if min(lengths) == longest - 1:  # one column of keys, as among samples that began together
            place: tuple[Any, ...] = (slice(None), slice(None), longest - 1)
        else:
            place = (torch.arange(len(lane.rows), device=device), slice(None), own)
        prompts, found = self._prompts(lane, groups, own)
        return _Decode(lane, rows, place, longest, masks, prompts, found)

    def _prompts(
        self, lane: Lane[Row], groups: dict[int, tuple[Block, list[int]]], own: Tensor
    ) -> tuple[list[_Prompts], Tensor | None]:
        """What the rows read, and where their answers will be; `groups` has the rows by block."""
        alone = dict(groups)
        parts: list[tuple[Tensor, Tensor, Masks, list[list[int]]]] = []
        whole = self._windows == {None}  # a window hides another part of the prompt from each row
        for stack in lane.stacks.over([block for block, _ in groups.values()]) if whole else ():
            rows = [[] if block is None else groups[id(block)][1] for block in stack.blocks]
            if len(rows) * max(map(len, rows)) > 2 * sum(map(len, rows)):
                continue  # one prompt has most of the rows: padding would cost more than the calls
            parts.append((stack.k, stack.v, {None: stack.mask}, rows))
            for block in stack.present:
                del alone[id(block)]
        for block, members in alone.values():
            masks = {w: self._prefix_mask(block, own[members], w) for w in self._windows}
            parts.append((block.k[:, None], block.v[:, None], masks, [members]))

        prompts, found, answers = list[_Prompts](), [0] * len(lane.rows), 0
        for k, v, masks, rows in parts:
            most, slots = max(map(len, rows)), list[int]()
            for members in rows:
                for at, slot in enumerate(members, start=answers + len(slots)):
                    found[slot] = at
                slots += members + (members or [0])[:1] * (most - len(members))
            prompts.append(_Prompts(k, v, masks, _slots(slots, own.device)))
            answers += len(slots)
        in_order = found == list(range(answers))
        return prompts, None if in_order else torch.tensor(found, device=own.device)

    def _prefix_mask(self, block: Block, own: Tensor, window: int | None) -> Tensor | None:
        """[1, 1, m * g, prompt] where a window hides part of the prompt."""
        if window is None:
            return None
        distance = (len(block.ids) + own)[:, None] - torch.arange(len(block.ids), device=own.device)
        heads = self._config.heads // self._config.kv_heads
        return hide(distance >= window).repeat_interleave(heads, 0)[None, None]


def _slots(members: list[int], device: torch.device) -> Tensor | slice:
    """Rows of one prompt; mostly neighbours, and then a slice, which is read without a copy."""
    neighbours = range(members[0], members[0] + len(members))
    if members == list(neighbours):
        return slice(neighbours.start, neighbours.stop)
    return torch.tensor(members, device=device)


def _causal(chunk: Chunk, window: int | None, device: torch.device) -> Tensor | None:
    """[tokens, seen] bool, or None where plain causal attention is meant."""
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    keys = torch.arange(chunk.stop, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (queries - keys < window)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and the log of the sum it was normalised by; [B, kv, Q, dim] and [B, kv, Q]."""
    if mask is not None:
        mask = mask.expand(len(q), 1, q.shape[2], k.shape[2]).to(q.dtype)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask
        )
        return out, lse
    return attention_from_scores(q, k, v, mask)


def attention_from_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same for devices without the CPU's kernel; `mask` is [B, 1, Q, K], added to the scores.

    Scores are float32 before they are scaled: a score of 200 rounded to bfloat16 is off by 0.5.
    """
    scores = wide_product(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(q.dtype) @ v, lse
