"""Who runs, who waits, and where their keys and values lie.

In:   requests as they come, samples as they end
Out:  what the next step reads and advances
Used: inference/embedded.py, on the engine's thread and under its lock

Memory is reserved before a request starts: its prompt, and every sample's row at its longest. So
a sample that has started is never thrown out again, and what does not fit waits in order.
"""

from collections import deque
from collections.abc import Sequence

from hone.inference.batch import Chunk
from hone.inference.blocks import Block
from hone.inference.kv import Lane, Prefixes, lane_capacity
from hone.inference.reading import Reading
from hone.inference.requests import Branch, Request, Sample
from hone.inference.stacks import Room
from hone.models.decoder import Decoder

STACKED = 4
"""Copies of prompts that lie side by side may take the budget's fourth part, besides it."""


class Scheduler:
    """The engine's bookkeeping; computes nothing."""

    def __init__(
        self, decoder: Decoder, *, budget: int, max_running: int, prefill_tokens: int
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes = Prefixes()
        self._reading = Reading()
        self._row_bytes = 0
        self._samples = 0
        self.budget = budget
        self.max_running = max_running
        self.token_bytes = decoder.config.kv_bytes_per_token * decoder.embedding.itemsize // 4
        self._config = decoder.config
        self._like = decoder.embedding
        self._prefill_tokens = prefill_tokens
        self._lanes: dict[tuple[str, int], Lane[Branch]] = {}
        self._room = Room(budget // STACKED)

    @property
    def lanes(self) -> list[Lane[Branch]]:
        """In one order, so that the same requests make the same batch; adapters side by side."""
        return [self._lanes[key] for key in sorted(self._lanes)]

    @property
    def reserved_bytes(self) -> int:
        return self._row_bytes + self.prefixes.used_bytes

    def admit(self) -> None:
        """First come, first served: a large request is not overtaken for ever by small ones."""
        while self.waiting:
            request = self.waiting[0]
            if not request.aborted:
                if self._samples + request.sampling.n > self.max_running:
                    return
                if not self._start(request):
                    return
            self.waiting.popleft()

    def _start(self, request: Request) -> bool:
        """Reserve the request's memory and start it; False where it must wait for memory."""
        block = self.prefixes.whole(request.key, request.prompt_ids)
        rows = request.row_bytes(self.token_bytes)
        if block is None:
            prompt = len(request.prompt_ids) * self.token_bytes
        else:
            prompt = 0 if block.users else block.nbytes
        free = self.budget - self.reserved_bytes - rows - prompt
        if free < 0:
            return False
        if block is not None:
            self.prefixes.acquire(block)
        self.prefixes.evict(self.prefixes.unused_bytes - free)
        if block is None:
            block = self._new_block(request)
            self.prefixes.acquire(block)
        request.start(block, rows)
        self.running.append(request)
        self._row_bytes += rows
        self._samples += request.sampling.n
        return True

    def _new_block(self, request: Request) -> Block:
        block = Block(request.key, request.prompt_ids, self._config, self._like)
        found = self.prefixes.longest(request.key, request.prompt_ids)
        if found is not None:
            block.copy_front(*found)
        self.prefixes.add(block)
        self._reading.add(block, request.lora)
        return block

    @property
    def share(self) -> int:
        """Tokens to read in the next pass, of prompts and of what else there is.

        Where no sample waits for its next token there is nobody to keep waiting: four shares.
        """
        return self._prefill_tokens * (1 if self._lanes else 4)

    def chunks(self, limit: int) -> list[Chunk]:
        """The next tokens of prompts not read yet, up to so many; adapters side by side."""
        return sorted(self._reading.chunks(limit), key=lambda chunk: chunk.block.key)

    def fresh(self) -> list[Branch]:
        """Samples whose prompt has been read and whose first token has not been drawn, by prompt."""
        by_block: dict[int, list[Sample]] = {}
        for request in self.running:
            if request.block.last_hidden is not None:
                undrawn = [sample for sample in request.samples if not sample.ids]
                by_block.setdefault(id(request.block), []).extend(undrawn)
        return [Branch(samples) for samples in by_block.values() if samples]

    def rearrange(self, fresh: Sequence[Branch]) -> None:
        """After a draw: finished samples leave, branches part, outgrown ones move, new ones enter."""
        for lane in self.lanes:
            for slot in reversed(range(len(lane.rows))):
                self._part(lane, slot)
            lane.arrange()
        entering: dict[str, list[Branch]] = {}
        for branch in fresh:
            entering.setdefault(branch.key, []).extend(branch.parted())
        for key, branches in entering.items():
            lane = self._lane(key, 1)
            lane.reserve(len(lane.rows) + sum(len(branch.samples) for branch in branches))
            for branch in branches:
                lane.add(branch)
        self._drop_empty_lanes()
        for request in [r for r in self.running if r.done]:
            self._release(request)

    def remove_aborted(self) -> None:
        for request in [r for r in self.running if r.aborted]:
            for lane in self._lanes.values():
                for slot in reversed(range(len(lane.rows))):
                    stay = [s for s in lane.rows[slot].samples if s.request is not request]
                    if stay:
                        lane.rows[slot].samples = stay
                    else:
                        lane.remove(slot)
            self._release(request)
        self._drop_empty_lanes()

    def clear(self) -> None:
        """Free all key-value memory; nothing runs any more."""
        self._lanes.clear()
        self._reading.clear()
        self.prefixes = Prefixes()

    def _part(self, lane: Lane[Branch], slot: int) -> None:
        """One row after a draw: it stays, leaves, moves, or becomes several."""
        branch = lane.rows[slot]
        for sample in branch.samples:
            if sample.finish == "stop":
                self._keep(lane, slot, sample)
        parts = branch.parted()
        if parts and branch.own < lane.capacity:
            lane.rows[slot] = parts.pop(0)
            for part in parts:
                lane.copy_in(part, lane, slot)
            return
        for part in parts:
            self._lane(part.key, part.own + 1).copy_in(part, lane, slot)
        lane.remove(slot)

    def _lane(self, key: str, tokens: int) -> Lane[Branch]:
        capacity = lane_capacity(tokens)
        if (key, capacity) not in self._lanes:
            lane = Lane[Branch](capacity, self._config, self._like, self._room)
            self._lanes[key, capacity] = lane
        return self._lanes[key, capacity]

    def _drop_empty_lanes(self) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.rows}

    def _keep(self, lane: Lane[Branch], slot: int, sample: Sample) -> None:
        """Turn an answer into a block, so that the next turn need not read it again.

        Not one that was cut at its limit: it is seldom continued, and copying it is not free.
        """
        row = lane.rows[slot]
        ids = sample.ids[: row.own]
        size = (len(row.block.ids) + row.own) * self.token_bytes
        fits = self.reserved_bytes + self.prefixes.unused_bytes + size <= self.budget
        if fits and (row.block.key, row.block.ids + tuple(ids)) not in self.prefixes:
            k, v = lane.k[:, slot, :, : row.own], lane.v[:, slot, :, : row.own]
            block = Block.joined(row.block, ids, k, v)
            self.prefixes.add(block)
            self.prefixes.index(block)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._row_bytes -= request.reserved
        self._samples -= request.sampling.n
        self.prefixes.release(request.block)
