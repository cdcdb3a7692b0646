"""Slots: the KV cache of the tokens that running sequences have sampled.

In:   token ids as they are sampled
Out:  SlotPool, with one slot per sequence

A sequence attends to its prompt's block and to its own slot. The n samples of a prompt, and separate
requests with the same prompt, read one block.
"""

import math
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prompt_batches import MemoryLimit, PromptBatches
from hone.models.architecture import DecoderConfig

MIN_SLOT_TOKENS = 32
MAX_MOVED_TOKENS = 8
"""Sequences that have decoded more than this are no longer moved next to those of their prompt."""


def slot_capacity(tokens: int) -> int:
    """Capacity of a slot for this many tokens: the next power of two."""
    return max(MIN_SLOT_TOKENS, 1 << (tokens - 1).bit_length())


class Decoding(Protocol):
    """A sequence that occupies a slot."""

    @property
    def num_decoded(self) -> int:
        """Sampled tokens that have keys and values."""
        ...

    @property
    def block(self) -> Block:
        """Keys and values of its prompt."""
        ...


S = TypeVar("S", bound=Decoding)


class SlotPool(Generic[S]):
    """Slots of one capacity for the running sequences of one adapter.

    Used slots are contiguous, so one attention call covers them all; lengths differ by at most a
    factor of two, so at most half of what it reads is padding. Every layer has its own tensors: a
    pool is resized one tensor at a time, and only that tensor exists twice meanwhile.
    """

    def __init__(
        self, capacity: int, config: DecoderConfig, like: Tensor, limit: MemoryLimit
    ) -> None:
        """`limit` bounds the memory of the prompt batches of all pools."""
        self.capacity = capacity
        self.sequences: list[S] = []
        """The sequence in each used slot."""
        self.prompt_batches = PromptBatches(limit)
        slot = (config.kv_heads, capacity, config.head_dim)
        self.k = [like.new_zeros((0, *slot))] * config.layers  # each [num_slots, *slot]
        self.v = list(self.k)
        self.slot_bytes = 2 * config.layers * math.prod(slot) * like.itemsize

    @property
    def num_slots(self) -> int:
        """Used slots and spare ones."""
        return len(self.k[0])

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def resize(self, num_slots: int) -> None:
        """Allocate exactly `num_slots` slots, no fewer than are used."""
        assert num_slots >= len(self.sequences), (num_slots, len(self.sequences))
        for tensors in (self.k, self.v):
            for layer in range(len(tensors)):
                tensors[layer] = _resized(tensors[layer], num_slots)

    def add(self, sequence: S) -> int:
        """Put a new sequence into a spare slot, which must exist; returns the slot's index."""
        assert len(self.sequences) < self.num_slots, self.num_slots
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def advance(
        self,
        stay: Sequence[tuple[S, int]],
        moving: Sequence[tuple[S, int]] = (),
        target: "SlotPool[S] | None" = None,
        *,
        num_slots: int | None = None,
        target_slots: int = 0,
    ) -> None:
        """Keep the sequences `stay` and append `moving` to `target`; each names its source slot.

        A slot may be named several times. With `num_slots`, spare slots are freed layer by layer as
        `target` grows, so that moving sequences are not held in both pools at once.
        """
        slots = [slot for _, slot in stay]
        changed = [i for i, slot in enumerate(slots) if i != slot]
        if changed or moving or num_slots is not None:
            longest = max((sequence.num_decoded for sequence, _ in stay), default=0)
            index = _indices(self.k[0].device)
            to, source = index(changed), index([slots[i] for i in changed])
            every, leave = index(slots), index([slot for _, slot in moving])
            for mine, theirs in ((self.k, target and target.k), (self.v, target and target.v)):
                for layer in range(len(mine)):
                    if target is not None and theirs is not None:
                        start, stop = len(target.sequences), len(target.sequences) + len(moving)
                        theirs[layer] = _resized(theirs[layer], target_slots)
                        theirs[layer][start:stop, :, : self.capacity] = mine[layer][leave]
                    if num_slots is not None:
                        mine[layer] = _resized(mine[layer], num_slots, every)
                    elif changed:
                        mine[layer][to, :, :longest] = mine[layer][source, :, :longest]
        self.sequences = [sequence for sequence, _ in stay]
        if target is not None:
            target.sequences += [sequence for sequence, _ in moving]


def _indices(device: torch.device) -> Callable[[list[int]], Tensor]:
    return lambda slots: torch.tensor(slots, dtype=torch.int64, device=device)


def _resized(tensor: Tensor, num_slots: int, slots: Tensor | None = None) -> Tensor:
    """The given slots, or the first ones, followed by zeros.

    Zeros rather than uninitialised memory: unwritten keys are masked, but 0 x NaN would still be NaN.
    """
    if slots is None and num_slots == len(tensor):
        return tensor
    resized = tensor.new_zeros((num_slots, *tensor.shape[1:]))
    if slots is None:
        count = min(num_slots, len(tensor))
        resized[:count] = tensor[:count]
    else:
        torch.index_select(tensor, 0, slots, out=resized[: len(slots)])
    return resized


def keep_slots(sequences: Sequence[tuple[S, int]]) -> list[tuple[S, int]]:
    """Sequences with their slots, ordered so that as few as possible change slots."""
    placed: list[tuple[S, int] | None] = [None] * len(sequences)
    others: list[tuple[S, int]] = []
    for sequence, slot in sequences:
        if slot < len(sequences) and placed[slot] is None:
            placed[slot] = (sequence, slot)
        else:
            others.append((sequence, slot))
    rest = iter(others)
    return [entry if entry is not None else next(rest) for entry in placed]


def group_by_prompt(sequences: Sequence[tuple[S, int]]) -> list[tuple[S, int]]:
    """Sequences with their slots; those of one prompt are contiguous, so that attention copies none.

    Only while they are short, which is when samples diverge: later, moving them would cost more.
    """
    if max((sequence.num_decoded for sequence, _ in sequences), default=0) > MAX_MOVED_TOKENS:
        return keep_slots(sequences)
    first: dict[int, int] = {}
    for place, (sequence, _) in enumerate(sequences):
        first.setdefault(id(sequence.block), place)
    return sorted(sequences, key=lambda entry: first[id(entry[0].block)])
