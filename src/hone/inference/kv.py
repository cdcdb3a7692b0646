"""Keys and values of what has been read so far: prompts that begin alike, and lanes of own tokens.

In:   token ids as they are prefilled and sampled
Out:  Lane (one row a branch), Prefixes (which blocks a new prompt can start from)

A sample attends to its prompt's block and to its branch's row. The n samples of a prompt, and separate
requests with the same prompt, read one block. Everything is keyed by the adapter's hash: keys
and values computed under one adapter are wrong under any other, even one with the same name.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
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
    a factor of two at most, so at most half of what it reads is padding. Every layer has tensors of
    its own: a lane is resized one tensor at a time, and only that one is held twice meanwhile.
    """

    def __init__(self, capacity: int, config: DecoderConfig, like: Tensor, room: Room) -> None:
        """`room` is for stacks of its prompts."""
        self.capacity = capacity
        self.rows: list[R] = []
        self.stacks = Stacks(room)
        row = (config.kv_heads, capacity, config.head_dim)
        self.k = [like.new_zeros((0, *row))] * config.layers  # each [seats, *row]
        self.v = list(self.k)
        self.row_bytes = 2 * config.layers * math.prod(row) * like.itemsize

    @property
    def seats(self) -> int:
        """Rows there is memory for."""
        return len(self.k[0])

    @property
    def nbytes(self) -> int:
        return self.seats * self.row_bytes

    def resize(self, seats: int) -> None:
        """Make memory for exactly `seats` rows, no fewer than there are."""
        assert seats >= len(self.rows), (seats, len(self.rows))
        for tensors in (self.k, self.v):
            for layer in range(len(tensors)):
                tensors[layer] = _resized(tensors[layer], seats)

    def add(self, row: R) -> int:
        """Append a row without keys, for which there must be a seat; returns its slot."""
        assert len(self.rows) < self.seats, self.seats
        self.rows.append(row)
        return len(self.rows) - 1

    def advance(
        self,
        stay: Sequence[tuple[R, int]],
        moving: Sequence[tuple[R, int]] = (),
        target: "Lane[R] | None" = None,
        *,
        seats: int | None = None,
        target_seats: int = 0,
    ) -> None:
        """Make these the rows, each with the slot whose keys it has; append `moving` to `target`.

        A slot may be named several times. With `seats`, what is left over is given back, layer by
        layer as `target` grows, so that rows on the move are not held in both lanes at once.
        """
        slots = [slot for _, slot in stay]
        changed = [i for i, slot in enumerate(slots) if i != slot]
        if changed or moving or seats is not None:
            longest = max((row.own for row, _ in stay), default=0)
            index = _indices(self.k[0].device)
            to, source = index(changed), index([slots[i] for i in changed])
            every, leave = index(slots), index([slot for _, slot in moving])
            for mine, theirs in ((self.k, target and target.k), (self.v, target and target.v)):
                for layer in range(len(mine)):
                    if target is not None and theirs is not None:
                        start, stop = len(target.rows), len(target.rows) + len(moving)
                        theirs[layer] = _resized(theirs[layer], target_seats)
                        theirs[layer][start:stop, :, : self.capacity] = mine[layer][leave]
                    if seats is not None:
                        mine[layer] = _resized(mine[layer], seats, every)
                    elif changed:
                        mine[layer][to, :, :longest] = mine[layer][source, :, :longest]
        self.rows = [row for row, _ in stay]
        if target is not None:
            target.rows += [row for row, _ in moving]


def _indices(device: torch.device) -> Callable[[list[int]], Tensor]:
    return lambda slots: torch.tensor(slots, dtype=torch.int64, device=device)


def _resized(tensor: Tensor, seats: int, slots: Tensor | None = None) -> Tensor:
    """As many rows as there are seats: those of `slots`, or as they are, and zeros behind them.

    Zeros and not whatever the memory holds: what a row has not written yet is masked, but 0 x NaN
    would still be NaN.
    """
    if slots is None and seats == len(tensor):
        return tensor
    resized = tensor.new_zeros((seats, *tensor.shape[1:]))
    if slots is None:
        count = min(seats, len(tensor))
        resized[:count] = tensor[:count]
    else:
        torch.index_select(tensor, 0, slots, out=resized[: len(slots)])
    return resized


def in_place(rows: Sequence[tuple[R, int]]) -> list[tuple[R, int]]:
    """Rows with their slots, in an order in which as few as possible leave their slot."""
    placed: list[tuple[R, int] | None] = [None] * len(rows)
    others: list[tuple[R, int]] = []
    for row, slot in rows:
        if slot < len(rows) and placed[slot] is None:
            placed[slot] = (row, slot)
        else:
            others.append((row, slot))
    rest = iter(others)
    return [entry if entry is not None else next(rest) for entry in placed]


def side_by_side(rows: Sequence[tuple[R, int]]) -> list[tuple[R, int]]:
    """Rows with their slots, those of one prompt next to each other, so that none is gathered.

    Only while rows are short, which is when branches part: later the copies would cost more.
    """
    if max((row.own for row, _ in rows), default=0) > ARRANGED_TOKENS:
        return in_place(rows)
    first: dict[int, int] = {}
    for place, (row, _) in enumerate(rows):
        first.setdefault(id(row.block), place)
    return sorted(rows, key=lambda entry: first[id(entry[0].block)])
