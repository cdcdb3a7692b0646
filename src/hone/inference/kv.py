"""Keys and values of what has been read so far: prompts that begin alike, and lanes of own tokens.

In:   token ids as they are prefilled and sampled
Out:  Lane (one row a branch), Prefixes (which blocks a new prompt can start from)
Used: scheduler.py, batch.py, embedded.py

A sample attends to its prompt's block and to its branch's row. The n samples of a prompt, and separate
requests with the same prompt, read one block. Everything is keyed by the adapter's hash: keys
and values computed under one adapter are wrong under any other, even one with the same name.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hone.inference.blocks import Block
from hone.inference.stacks import Room, Stacks
from hone.models.architecture import DecoderConfig

CHUNK = 16
"""Prefixes are found at multiples of so many tokens."""
SMALLEST_LANE = 32
ARRANGED_TOKENS = 8
"""Own tokens of rows that are still sorted by their prompts."""


class Prefixes:
    """Blocks by the tokens they begin with; unused ones stay until their memory is wanted.

    Bytes are counted as blocks come, change hands and go: no call but `forget` visits more blocks
    than it returns or drops, however many are cached.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, tuple[int, ...]], Block] = {}
        self._unused: OrderedDict[tuple[str, tuple[int, ...]], Block] = OrderedDict()
        """Least recently used first."""
        self._index: dict[tuple[str, int], Block] = {}
        self.used_bytes = 0
        self.unused_bytes = 0

    def __contains__(self, block: tuple[str, tuple[int, ...]]) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> Collection[Block]:
        return self._blocks.values()

    def whole(self, key: str, ids: tuple[int, ...]) -> Block | None:
        """A block of exactly these tokens that can be sampled from, now or once it is filled."""
        block = self._blocks.get((key, ids))
        if block is None or (block.complete and block.last_hidden is None):
            return None
        return block

    def longest(self, key: str, ids: tuple[int, ...]) -> tuple[Block, int] | None:
        """A block that begins as `ids` does, and for how many tokens; never for all of them."""
        best: Block | None = None
        for mark in marks(ids):
            block = self._index.get((key, mark))
            if block is None:
                break
            best = block
        if best is None:
            return None
        limit = min(best.filled, len(ids) - 1)
        same = next((i for i in range(limit) if best.ids[i] != ids[i]), limit)
        return (best, same) if same >= CHUNK else None

    def add(self, block: Block) -> None:
        """Cache a block that no request uses yet; it replaces one of the same tokens."""
        assert block.users == 0, block.users
        if (old := self._blocks.get((block.key, block.ids))) is not None:
            self.drop(old)
        self._blocks[block.key, block.ids] = self._unused[block.key, block.ids] = block
        self.unused_bytes += block.nbytes

    def acquire(self, block: Block) -> None:
        """Count one more request that reads this block; it is not evicted meanwhile."""
        if block.users == 0:
            del self._unused[block.key, block.ids]
            self.unused_bytes -= block.nbytes
            self.used_bytes += block.nbytes
        block.users += 1

    def release(self, block: Block) -> None:
        """The opposite of `acquire`; a block that was not filled is dropped with its last user."""
        block.users -= 1
        if block.users == 0:
            self._unused[block.key, block.ids] = block
            self.unused_bytes += block.nbytes
            self.used_bytes -= block.nbytes
            if not block.complete:
                self.drop(block)

    def index(self, block: Block) -> None:
        """Let later prompts start from this block, which is filled now."""
        for mark in marks(block.ids):
            self._index[block.key, mark] = block

    def drop(self, block: Block) -> None:
        """Forget a block that no request uses."""
        del self._unused[block.key, block.ids]
        del self._blocks[block.key, block.ids]
        self.unused_bytes -= block.nbytes
        for mark in marks(block.ids):
            if self._index.get((block.key, mark)) is block:
                del self._index[block.key, mark]

    def evict(self, wanted_bytes: int) -> int:
        """Drop unused blocks, least recently used first, until `wanted_bytes` are freed.

        Returns the bytes freed.
        """
        freed = 0
        while freed < wanted_bytes and self._unused:
            block = next(iter(self._unused.values()))
            self.drop(block)
            freed += block.nbytes
        return freed

    def forget(self, key: str) -> None:
        """Drop the unused blocks of one adapter."""
        for block in [block for block in self._unused.values() if block.key == key]:
            self.drop(block)


def marks(ids: Sequence[int]) -> Iterator[int]:
    """A hash of the first 16, 32, ... tokens."""
    mark = 0
    for end in range(CHUNK, len(ids) + 1, CHUNK):
        mark = hash((mark, tuple(ids[end - CHUNK : end])))
        yield mark


def lane_capacity(tokens: int) -> int:
    """Rows of one lane are this long: the power of two that holds so many tokens."""
    return max(SMALLEST_LANE, 1 << (tokens - 1).bit_length())


class Row(Protocol):
    """What a lane asks of the branches in it."""

    @property
    def own(self) -> int:
        """Own tokens that have keys and values."""
        ...

    @property
    def block(self) -> Block: ...


R = TypeVar("R", bound=Row)


class Lane(Generic[R]):
    """Own keys and values of the running branches of one adapter that are about equally long.

    Rows lie side by side without holes, so one attention call serves them all; lengths differ by
    a factor of two at most, so at most half of what it reads is padding.
    """

    def __init__(self, capacity: int, config: DecoderConfig, like: Tensor, room: Room) -> None:
        """`room` is for stacks of its prompts."""
        self.capacity = capacity
        self.rows: list[R] = []
        self._config = config
        self.stacks = Stacks(room)
        self.k = self._zeros(0, like)
        self.v = self._zeros(0, like)

    def _zeros(self, rows: int, like: Tensor) -> Tensor:
        # Not empty: what a row has not written yet is masked, but 0 x NaN would still be NaN.
        config = self._config
        shape = (config.layers, rows, config.kv_heads, self.capacity, config.head_dim)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _grown(self, full: Tensor, rows: int) -> Tensor:
        larger = self._zeros(rows, full)
        larger[:, : full.shape[1]] = full
        return larger

    def add(self, row: R) -> int:
        """Make room for one more row and say which it is."""
        slot = len(self.rows)
        if slot == self.k.shape[1]:
            self.reserve(max(8, 2 * slot))
        self.rows.append(row)
        return slot

    def arrange(self) -> None:
        """Rows of one prompt side by side again, so that the stack need not gather them.

        Only while rows are short, which is when branches part: later the copies would cost more.
        """
        longest = max((row.own for row in self.rows), default=0)
        if longest > ARRANGED_TOKENS:
            return
        first: dict[int, int] = {}
        for slot, row in enumerate(self.rows):
            first.setdefault(id(row.block), slot)
        order = sorted(range(len(self.rows)), key=lambda slot: first[id(self.rows[slot].block)])
        if order == list(range(len(order))):
            return
        for held in (self.k, self.v):
            held[:, : len(order), :, :longest] = held[:, order, :, :longest]
        self.rows = [self.rows[slot] for slot in order]

    def reserve(self, rows: int) -> None:
        """Make room for so many rows at once."""
        if rows > self.k.shape[1]:
            self.k, self.v = self._grown(self.k, rows), self._grown(self.v, rows)

    def copy_in(self, row: R, source: "Lane[R]", slot: int) -> None:
        """One more row that begins as one of this or another lane does."""
        ours = self.add(row)
        self.k[:, ours, :, : row.own] = source.k[:, slot, :, : row.own]
        self.v[:, ours, :, : row.own] = source.v[:, slot, :, : row.own]

    def remove(self, slot: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self.rows) - 1
        if slot != last:
            moved = self.rows[last]
            self.rows[slot] = moved
            self.k[:, slot, :, : moved.own] = self.k[:, last, :, : moved.own]
            self.v[:, slot, :, : moved.own] = self.v[:, last, :, : moved.own]
        self.rows.pop()
