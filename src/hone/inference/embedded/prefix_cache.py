"""The prefix cache: blocks of earlier prompts and answers that new prompts can start from.

In:   blocks as they are filled
Out:  the block of a whole prompt, or the one with the longest common prefix

Every key contains the adapter's hash: keys and values computed with one adapter are wrong for any
other, even one with the same name.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from hone.inference.embedded.blocks import Block
from hone.wire.conversation import common_prefix

HASH_TOKENS = 16
"""Prefixes are hashed at multiples of this many tokens; shorter ones are not shared."""


class PrefixCache:
    """Blocks by the tokens they begin with; unused ones stay until their memory is needed.

    Bytes are counted incrementally: no method except `forget` visits more blocks than it returns or
    drops, however many are cached.
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
        """The block of exactly these tokens, if it can be sampled from now or once it is filled."""
        block = self._blocks.get((key, ids))
        if block is None or (block.complete and block.last_hidden is None):
            return None
        return block

    def longest(self, key: str, ids: tuple[int, ...]) -> tuple[Block, int] | None:
        """The block with the longest prefix of `ids`, and its length, which is below len(ids)."""
        best: Block | None = None
        for prefix in prefix_hashes(ids):
            block = self._index.get((key, prefix))
            if block is None:
                break
            best = block
        if best is None:
            return None
        limit = min(best.filled, len(ids) - 1)
        length = min(common_prefix(best.ids, ids), limit)
        return (best, length) if length >= HASH_TOKENS else None

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
        for prefix in prefix_hashes(block.ids):
            self._index[block.key, prefix] = block

    def drop(self, block: Block) -> None:
        """Remove a block that no request uses."""
        del self._unused[block.key, block.ids]
        del self._blocks[block.key, block.ids]
        self.unused_bytes -= block.nbytes
        for prefix in prefix_hashes(block.ids):
            if self._index.get((block.key, prefix)) is block:
                del self._index[block.key, prefix]

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


def prefix_hashes(ids: Sequence[int]) -> Iterator[int]:
    """A hash of the first 16, 32, ... tokens."""
    prefix = 0
    for end in range(HASH_TOKENS, len(ids) + 1, HASH_TOKENS):
        prefix = hash((prefix, tuple(ids[end - HASH_TOKENS : end])))
        yield prefix
