"""The prefill queue: prompts to compute, in order, and which of them wait for a shared prefix.

In:   blocks to fill
Out:  the chunks of them that the next pass computes

Requests that arrive together often share a prefix (one system prompt, many questions). The first of
them computes the prefix; the others wait for it and copy it. A block waits only for one that came
before it, so there is no deadlock, and none waits longer than in first-come order.
"""

from dataclasses import dataclass

from hone.inference.embedded.batch import Chunk
from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prefix_cache import HASH_TOKENS, prefix_hashes
from hone.models.lora import Lora
from hone.wire.conversation import common_prefix

MIN_SAVED_TOKENS = 2 * HASH_TOKENS
"""A block waits only if that saves this many tokens; one more pass costs about 30 tokens."""
MIN_SAVED_SHARE = 8
"""The saved tokens must also be at least this fraction (1 / N) of the tokens to compute."""


@dataclass(slots=True)
class _Pending:
    block: Block
    lora: Lora | None
    prefixes: tuple[tuple[str, int], ...]
    source: tuple[Block, int] | None = None
    """The block it waits for, and how many tokens it copies from it."""

    @property
    def orphaned(self) -> bool:
        """Whether the block it waits for was abandoned before it was filled far enough."""
        if self.source is None:
            return False
        block, length = self.source
        return not block.users and block.filled < length

    def start(self) -> bool:
        """Copy the shared prefix; False while it is not computed yet."""
        if self.source is not None:
            block, length = self.source
            if block.filled < length:
                return False
            self.block.copy_prefix(block, length)
            self.source = None
        return True


class PrefillQueue:
    """Blocks to fill, first come, first served; filled and abandoned ones are removed."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._first: dict[tuple[str, int], Block] = {}
        """The first block in the queue with each prefix."""

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, block: Block, lora: Lora | None) -> None:
        """Append a block, whose first tokens may be filled already."""
        prefixes = tuple((block.key, prefix) for prefix in prefix_hashes(block.ids))
        pending = _Pending(block, lora, prefixes)
        pending.source = self._shared_prefix(pending)
        self._append(pending)

    def chunks(self, limit: int) -> list[Chunk]:
        """The next tokens to compute, `limit` at most."""
        self._remove_finished()
        chunks: list[Chunk] = []
        for pending in self._pending:
            if limit <= 0:
                break
            if pending.start():
                block = pending.block
                stop = min(len(block.ids), block.filled + limit)
                chunks.append(Chunk(block, block.filled, stop, pending.lora))
                limit -= stop - block.filled
        return chunks

    def clear(self) -> None:
        self._pending, self._first = [], {}

    def _remove_finished(self) -> None:
        unfinished = [p for p in self._pending if p.block.users and not p.block.complete]
        if len(unfinished) == len(self._pending):
            return
        self.clear()
        for pending in unfinished:
            if pending.orphaned:  # the first of the waiting blocks now computes the prefix
                pending.source = self._shared_prefix(pending)
            self._append(pending)

    def _append(self, pending: _Pending) -> None:
        self._pending.append(pending)
        for prefix in pending.prefixes:
            self._first.setdefault(prefix, pending.block)

    def _shared_prefix(self, pending: _Pending) -> tuple[Block, int] | None:
        """The block to wait for and the length of the shared prefix; None if waiting does not pay."""
        source: Block | None = None
        for prefix in pending.prefixes:
            if prefix not in self._first:
                break
            source = self._first[prefix]
        if source is None:
            return None
        ids, filled = pending.block.ids, pending.block.filled
        limit = min(len(source.ids), len(ids) - 1)  # the last token is always computed
        length = min(common_prefix(source.ids, ids), limit)
        saved = length - filled
        pays = saved >= MIN_SAVED_TOKENS and saved * MIN_SAVED_SHARE >= len(ids) - filled
        return (source, length) if pays else None
