"""The batch of one step: its tokens on one flat axis, and the attention over the KV cache.

In:   chunks to prefill, slot pools whose sequences decode one token each
Out:  ids, positions, adapter spans, and `attend` for the decoder

Prefill and decode share the matrix products: on a CPU a product over 300 rows costs little more than
one over 64. The attention of a decoding sequence has two parts, merged by their log-sum-exps: over its
prompt's block, computed together for all sequences of that prompt, and over its own slot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prompt_batches import additive_mask
from hone.inference.embedded.slots import Decoding, SlotPool
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Span
from hone.models.layers import wide_product
from hone.models.lora import Lora

Masks = dict[int | None, Tensor | None]
"""Masks by the layer's window; None if nothing is masked."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..stop of a block, to prefill in this step."""

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
    pool: SlotPool[Decoding]
    rows: slice
    new_keys: tuple[Any, ...]  # index of the new token in [n, kv_heads, capacity, head_dim]
    longest: int
    masks: Masks  # [n, 1, 1, longest] added to the scores over the slots
    prompts: "list[_Prompts]"
    order: Tensor | None  # [n] int64, row of the prompts' output for each sequence; None: in order

    def attend_prompts(
        self, layer: int, window: int | None, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries [n, kv_heads, group, head_dim] over prompts, and its log-sum-exps."""
        parts = [prompts.attend(layer, window, queries) for prompts in self.prompts]
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if self.order is not None:
            out, lse = out.index_select(0, self.order), lse.index_select(0, self.order)
        return out.transpose(1, 2), lse


@dataclass(frozen=True, slots=True)
class _Prompts:
    """One prompt or one PromptBatch, and the slots of the sequences that read it."""

    k: Tensor  # [layers, P, kv_heads, longest, head_dim]
    v: Tensor
    masks: Masks  # added to the scores
    slots: Tensor | slice  # [P * m]: m per prompt, padded by repeating one

    def attend(self, layer: int, window: int | None, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of these slots, [P * m, group, kv_heads, head_dim], and its log-sum-exps."""
        kv, g, dim = queries.shape[1:]
        mine = queries[self.slots].unflatten(0, (self.k.shape[1], -1)).transpose(1, 2)
        flat = mine.reshape(*mine.shape[:2], -1, dim)  # [P, kv, m * g, dim]
        out, lse = _attention(flat, self.k[layer], self.v[layer], self.masks[window])
        # A CPU's attention returns memory in this order: [prompt, slot, group, kv_heads, head_dim].
        out = out.transpose(1, 2).reshape(-1, g, kv, dim)
        return out, lse.view(*mine.shape[:4]).transpose(1, 2).reshape(-1, kv, g)


class Batch:
    """What one forward pass computes."""

    def __init__(
        self,
        config: DecoderConfig,
        chunks: Sequence[Chunk],
        pools: Sequence[tuple[SlotPool[Any], Sequence[int], Lora | None]],
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
        for pool, last_ids, lora in pools:
            rows = slice(len(ids), len(ids) + len(last_ids))
            ids += last_ids
            positions += [len(s.block.ids) + s.num_decoded for s in pool.sequences]
            self._span(rows, lora)
            self._decodes.append(self._decode(pool, rows, device))
        self.token_ids = torch.tensor(ids, device=device)
        self.positions = torch.tensor(positions, device=device)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each chunk, then of all pools together."""
        chunks = [prefill.chunk for prefill in self._prefills]
        return [*(c.stop - c.start for c in chunks), len(self) - self.decode_start]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self._config.windows[layer]
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for prefill in self._prefills:
            block, rows = prefill.chunk.block, prefill.rows
            keys, values = block.k[layer], block.v[layer]
            keys[:, prefill.chunk.start : prefill.chunk.stop] = k[rows].transpose(0, 1)
            values[:, prefill.chunk.start : prefill.chunk.stop] = v[rows].transpose(0, 1)
            mask = prefill.masks[window]
            part = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys[None, :, : prefill.chunk.stop],
                values[None, :, : prefill.chunk.stop],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[rows] = part[0].transpose(0, 1).flatten(1)
        for decode in self._decodes:
            rows = decode.rows
            self._attend_pool(decode, layer, q[rows], k[rows], v[rows], out[rows])
        return out

    def _attend_pool(
        self, decode: _Decode, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Write the attention of a pool's sequences into `out`, [n, heads * head_dim]."""
        config, pool, n, window = self._config, decode.pool, len(q), self._config.windows[layer]
        # Query heads that share keys are attended together, so that no key is read twice.
        queries = q.reshape(n, config.kv_heads, -1, config.head_dim)
        keys, values = pool.k[layer][:n], pool.v[layer][:n]
        keys[decode.new_keys] = k
        values[decode.new_keys] = v
        keys, values = keys[:, :, : decode.longest], values[:, :, : decode.longest]
        slot, slot_lse = _attention(queries, keys, values, decode.masks[window])
        prompt, prompt_lse = decode.attend_prompts(layer, window, queries)
        # Two parts of one softmax, weighted by their normalizers.
        share = torch.sigmoid(prompt_lse - slot_lse)[..., None].to(slot.dtype)
        torch.lerp(slot, prompt, share, out=out.view(queries.shape))

    def _span(self, rows: slice, lora: Lora | None) -> None:
        if lora is None:
            return
        if self.spans and self.spans[-1][1] == rows.start and self.spans[-1][2] is lora:
            self.spans[-1] = (self.spans[-1][0], rows.stop, lora)
        else:
            self.spans.append((rows.start, rows.stop, lora))

    def _decode(self, pool: SlotPool[Decoding], rows: slice, device: torch.device) -> _Decode:
        lengths = [sequence.num_decoded for sequence in pool.sequences]
        decoded = torch.tensor(lengths, device=device)
        longest = max(lengths) + 1
        places = torch.arange(longest, device=device)
        masks: Masks = {}
        for window in self._windows:
            hidden = places > decoded[:, None]
            if window is not None:
                hidden |= decoded[:, None] - places >= window
            masks[window] = additive_mask(hidden)[:, None, None] if hidden.any() else None
        groups: dict[int, tuple[Block, list[int]]] = {}
        for slot, sequence in enumerate(pool.sequences):
            groups.setdefault(id(sequence.block), (sequence.block, []))[1].append(slot)
        if min(lengths) == longest - 1:  # all equally long: samples that began together
            new_keys: tuple[Any, ...] = (slice(None), slice(None), longest - 1)
        else:
            new_keys = (torch.arange(len(lengths), device=device), slice(None), decoded)
        prompts, order = self._prompts(pool, groups, decoded)
        return _Decode(pool, rows, new_keys, longest, masks, prompts, order)

    def _prompts(
        self,
        pool: SlotPool[Decoding],
        groups: dict[int, tuple[Block, list[int]]],  # slots by block
        decoded: Tensor,
    ) -> tuple[list[_Prompts], Tensor | None]:
        """What the sequences read, and the order of the output rows."""
        unbatched = dict(groups)
        parts: list[tuple[Tensor, Tensor, Masks, list[list[int]]]] = []
        # A sliding window hides another part of the prompt from each sequence.
        blocks = [block for block, _ in groups.values()] if self._windows == {None} else []
        for batch in pool.prompt_batches.update(blocks) if blocks else ():
            slots = [[] if block is None else groups[id(block)][1] for block in batch.blocks]
            if len(slots) * max(map(len, slots)) > 2 * sum(map(len, slots)):
                continue  # most sequences have one prompt: padding would cost more than calls
            parts.append((batch.k, batch.v, {None: batch.mask}, slots))
            for block in batch.present:
                del unbatched[id(block)]
        for block, members in unbatched.values():
            masks = {w: self._prompt_mask(block, decoded[members], w) for w in self._windows}
            parts.append((block.k[:, None], block.v[:, None], masks, [members]))

        prompts, order, outputs = list[_Prompts](), [0] * len(decoded), 0
        for k, v, masks, slots in parts:
            most, padded = max(map(len, slots)), list[int]()
            for members in slots:
                for output, slot in enumerate(members, start=outputs + len(padded)):
                    order[slot] = output
                padded += members + (members or [0])[:1] * (most - len(members))
            prompts.append(_Prompts(k, v, masks, _index(padded, decoded.device)))
            outputs += len(padded)
        in_order = order == list(range(outputs))
        return prompts, None if in_order else torch.tensor(order, device=decoded.device)

    def _prompt_mask(self, block: Block, decoded: Tensor, window: int | None) -> Tensor | None:
        """[1, 1, m * group, prompt] where a sliding window hides part of the prompt."""
        if window is None:
            return None
        places = torch.arange(len(block.ids), device=decoded.device)
        distance = (len(block.ids) + decoded)[:, None] - places
        heads = self._config.heads // self._config.kv_heads
        return additive_mask(distance >= window).repeat_interleave(heads, 0)[None, None]


def _index(slots: list[int], device: torch.device) -> Tensor | slice:
    """Slots as an index; contiguous ones as a slice, which is read without a copy."""
    contiguous = range(slots[0], slots[0] + len(slots))
    if slots == list(contiguous):
        return slice(contiguous.start, contiguous.stop)
    return torch.tensor(slots, device=device)


def _causal(chunk: Chunk, window: int | None, device: torch.device) -> Tensor | None:
    """[tokens, keys] bool; None if plain causal attention is enough."""
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    keys = torch.arange(chunk.stop, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (queries - keys < window)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention [B, kv_heads, Q, head_dim] and its log-sum-exps [B, kv_heads, Q]."""
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
    """`_attention` for devices without the CPU's kernel; `mask` is [B, 1, Q, K], added to the scores.

    Scores are float32 before they are scaled: a score of 200 rounded to bfloat16 is off by 0.5.
    """
    scores = wide_product(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(q.dtype) @ v, lse
