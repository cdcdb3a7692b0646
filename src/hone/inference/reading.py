"""Prompts that are being read, in order, and which of them waits for another's beginning.

In:   blocks whose keys and values are wanted
Out:  the chunks of them that the next pass reads

Requests that come together often begin alike (one system prompt, many questions). The first of
them reads the common beginning; the others wait until it is there and start from a copy. A block
waits only for one that came before it, so no two can wait for each other, and the one waited for
is always read first: nobody waits longer than he would have for his turn.
"""

from dataclasses import dataclass

from hone.inference.batch import Chunk
from hone.inference.blocks import Block
from hone.inference.kv import CHUNK, marks
from hone.models.lora import Lora

WORTH = 2 * CHUNK
"""Tokens that must be saved for a block to wait: one more pass costs about as much as reading 30."""
WORTH_SHARE = 8
"""And they must be at least 1 / this of what the block would have to read."""


@dataclass(slots=True)
class _Unread:
    block: Block
    lora: Lora | None
    marks: tuple[tuple[str, int], ...]
    follows: tuple[Block, int] | None = None
    """From whom it will copy how many tokens."""

    @property
    def lost(self) -> bool:
        """Whether the one it waits for will never be read."""
        return self.follows is not None and not (
            self.follows[0].users or self.follows[0].filled >= self.follows[1]
        )

    def may_start(self) -> bool:
        """Takes over the common beginning as soon as it is there."""
        if self.follows is not None:
            source, same = self.follows
            if source.filled < same:
                return False
            self.block.copy_front(source, same)
            self.follows = None
        return True


class Reading:
    """Blocks on their way; one that nobody uses any more, or that is filled, leaves by itself."""

    def __init__(self) -> None:
        self._unread: list[_Unread] = []
        self._first: dict[tuple[str, int], Block] = {}
        """Who came first of those that begin so."""

    def __bool__(self) -> bool:
        return bool(self._unread)

    def add(self, block: Block, lora: Lora | None) -> None:
        """Read this block after those that came before; its front may be there already."""
        beginnings = tuple((block.key, mark) for mark in marks(block.ids))
        unread = _Unread(block, lora, beginnings)
        unread.follows = self._worth_waiting_for(unread)
        self._enter(unread)

    def chunks(self, limit: int) -> list[Chunk]:
        """The next tokens of whoever may be read, in the order they came, up to so many."""
        self._let_go()
        chunks: list[Chunk] = []
        for unread in self._unread:
            if limit <= 0:
                break
            if unread.may_start():
                block = unread.block
                stop = min(len(block.ids), block.filled + limit)
                chunks.append(Chunk(block, block.filled, stop, unread.lora))
                limit -= stop - block.filled
        return chunks

    def clear(self) -> None:
        self._unread, self._first = [], {}

    def _let_go(self) -> None:
        stay = [u for u in self._unread if u.block.users and not u.block.complete]
        if len(stay) == len(self._unread):
            return
        self.clear()
        for unread in stay:
            if unread.lost:  # the first of those that waited for it is now waited for
                unread.follows = self._worth_waiting_for(unread)
            self._enter(unread)

    def _enter(self, unread: _Unread) -> None:
        self._unread.append(unread)
        for mark in unread.marks:
            self._first.setdefault(mark, unread.block)

    def _worth_waiting_for(self, unread: _Unread) -> tuple[Block, int] | None:
        source: Block | None = None
        for mark in unread.marks:
            if mark not in self._first:
                break
            source = self._first[mark]
        if source is None:
            return None
        ids, filled = unread.block.ids, unread.block.filled
        limit = min(len(source.ids), len(ids) - 1)  # the last token is always read
        same = next((i for i in range(limit) if source.ids[i] != ids[i]), limit)
        saved = same - filled
        worth = saved >= WORTH and saved * WORTH_SHARE >= len(ids) - filled
        return (source, same) if worth else None
