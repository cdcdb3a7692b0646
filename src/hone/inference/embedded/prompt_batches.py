"""Prompt batches: the blocks of several prompts copied into one tensor, for one attention call.

In:   the blocks of the running sequences
Out:  PromptBatch: padded keys and values of several prompts

One attention call per prompt costs more than the attention itself, unless prompts are long. A batch is
a copy: it is built when several prompts have come, used until half of them have left, and the memory of
all batches is limited.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from hone.inference.embedded.blocks import Block

MIN_NEW_PROMPTS = 4
"""Number of unbatched prompts that are worth a copy; two if there is no batch."""
MASK_BYTES = 4
MAX_BATCH_SHARE = 4
"""One batch takes at most this fraction (1 / N) of the limit, so that rebuilding it stays cheap."""


@dataclass(slots=True)
class PromptBatch:
    """Keys and values of prompts of similar length."""

    blocks: list[Block | None]
    """None where a prompt has left."""
    k: Tensor  # [layers, prompts, kv_heads, longest, head_dim]
    v: Tensor
    mask: Tensor | None  # [prompts, 1, 1, longest] added to scores, where lengths differ

    @classmethod
    def build(cls, blocks: Sequence[Block]) -> "PromptBatch":
        like, lengths = blocks[0].k, [len(block.ids) for block in blocks]
        layers, kv_heads, _, dim = like.shape
        # Not empty: padding is masked, but 0 x NaN would still be NaN.
        k = like.new_zeros((layers, len(blocks), kv_heads, max(lengths), dim))
        v = torch.zeros_like(k)
        for i, block in enumerate(blocks):
            k[:, i, :, : len(block.ids)] = block.k
            v[:, i, :, : len(block.ids)] = block.v
        if min(lengths) == max(lengths):
            return cls(list(blocks), k, v, None)
        ends = torch.tensor(lengths, device=like.device)[:, None]
        padding = torch.arange(max(lengths), device=like.device) >= ends
        return cls(list(blocks), k, v, additive_mask(padding)[:, None, None])

    @property
    def nbytes(self) -> int:
        return 2 * self.k.nbytes + (0 if self.mask is None else self.mask.nbytes)

    @property
    def present(self) -> list[Block]:
        return [block for block in self.blocks if block is not None]


class MemoryLimit:
    """Maximum total memory of the prompt batches of all pools."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.users: WeakSet[PromptBatches] = WeakSet()  # a dropped pool frees its share

    @property
    def used_bytes(self) -> int:
        return sum(batches.nbytes for batches in self.users)

    def resize(self, nbytes: int) -> None:
        """Raise or lower the limit; all batches are dropped if they exceed it, and rebuilt later."""
        self.nbytes = nbytes
        if self.used_bytes > nbytes:
            for batches in self.users:
                batches.clear()


class PromptBatches:
    """The prompt batches of one slot pool."""

    def __init__(self, limit: MemoryLimit) -> None:
        self._limit = limit
        self._batches: list[PromptBatch] = []
        limit.users.add(self)

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def clear(self) -> None:
        self._batches = []

    def update(self, blocks: Sequence[Block]) -> list[PromptBatch]:
        """Batches over these blocks; a block that is in none of them is read separately."""
        here = {id(block) for block in blocks}
        for batch in self._batches:
            batch.blocks = [b if b is not None and id(b) in here else None for b in batch.blocks]
        self._batches = [b for b in self._batches if 2 * len(b.present) > len(b.blocks)]
        batched = {id(block) for batch in self._batches for block in batch.present}
        if len(blocks) - len(batched) >= (MIN_NEW_PROMPTS if batched else 2):
            self._add([block for block in blocks if id(block) not in batched], blocks)
        return self._batches

    def _add(self, new: list[Block], blocks: Sequence[Block]) -> None:
        """Batch the new blocks, together with those of small batches."""
        max_bytes = self._limit.nbytes // MAX_BATCH_SHARE
        large = [batch for batch in self._batches if batch.nbytes > max_bytes // 2]
        stay = {id(block) for batch in large for block in batch.present}
        groups = _group_by_length([block for block in blocks if id(block) not in stay], max_bytes)
        size = sum(map(_padded_bytes, groups))
        batched = {id(block) for group in groups for block in group}
        others = self._limit.used_bytes - self.nbytes + sum(batch.nbytes for batch in large)
        if size + others <= self._limit.nbytes and any(id(block) in batched for block in new):
            self._batches = large  # free the small ones before they are rebuilt
            for group in groups:
                self._batches.append(PromptBatch.build(group))


def _group_by_length(blocks: Sequence[Block], max_bytes: int) -> list[list[Block]]:
    """Groups of two or more; padding at most doubles a group, which takes `max_bytes` at most."""

    def fits(group: Sequence[Block]) -> bool:
        return _padded_bytes(group) <= min(max_bytes, 2 * sum(block.kv_bytes for block in group))

    if fits(blocks):  # in their original order, so that attention gathers no rows
        return [list(blocks)] if len(blocks) > 1 else []
    groups: list[list[Block]] = [[]]
    for block in sorted(blocks, key=lambda block: len(block.ids)):
        if groups[-1] and not fits([*groups[-1], block]):
            groups.append([])
        groups[-1].append(block)
    return [group for group in groups if len(group) > 1]


def _padded_bytes(group: Sequence[Block]) -> int:
    """Bytes of the group's batch and its mask."""
    longest = max(group, key=lambda block: block.kv_bytes)
    return len(group) * (longest.kv_bytes + MASK_BYTES * len(longest.ids))


def additive_mask(hidden: Tensor) -> Tensor:
    """A mask to add to attention scores: very negative where `hidden`."""
    # Finite, so that a fully masked row gives a weight of zero and not NaN.
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -1e30)
