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
from hone.inference.kv import Block, Lane, Prefixes, lane_capacity
from hone.inference.reading import Reading
from hone.inference.requests import Request, Sample
from hone.models.decoder import Decoder


class Scheduler:
    """The engine's bookkeeping; computes nothing."""

    def __init__(
        self, decoder: Decoder, *, budget: int, max_running: int, prefill_tokens: int
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes = Prefixes()
        self._reading = Reading()
        self.budget = budget
        self.max_running = max_running
        self.token_bytes = decoder.config.kv_bytes_per_token * decoder.embedding.itemsize // 4
        self._config = decoder.config
        self._like = decoder.embedding
        self._prefill_tokens = prefill_tokens
        self._lanes: dict[tuple[str, int], Lane[Sample]] = {}

    @property
    def lanes(self) -> list[Lane[Sample]]:
        """In one order, so that the same requests make the same batch; adapters side by side."""
        return [self._lanes[key] for key in sorted(self._lanes)]

    @property
    def reserved_bytes(self) -> int:
        return sum(request.reserved for request in self.running) + self.prefixes.used_bytes

    def admit(self) -> None:
        """First come, first served: a large request is not overtaken for ever by small ones."""
        while self.waiting:
            request = self.waiting[0]
            if request.aborted:
                self.waiting.popleft()
                continue
            running = sum(len(r.samples) for r in self.running)
            if running + request.sampling.n > self.max_running or not self._make_room(request):
                return
            block = self.prefixes.whole(request.key, request.prompt_ids)
            request.start(block or self._new_block(request), request.row_bytes(self.token_bytes))
            self.running.append(self.waiting.popleft())

    def _make_room(self, request: Request) -> bool:
        block = self.prefixes.whole(request.key, request.prompt_ids)
        held = block is not None and block.users > 0
        wanted = request.row_bytes(self.token_bytes)
        wanted += 0 if held else len(request.prompt_ids) * self.token_bytes
        free = self.budget - self.reserved_bytes
        if wanted > free:
            return False
        self.prefixes.evict(wanted + self.prefixes.unused_bytes - free)
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

    def fresh(self) -> list[Sample]:
        """Samples whose prompt has been read and whose first token has not been drawn."""
        return [
            sample
            for request in self.running
            if request.block.last_hidden is not None
            for sample in request.samples
            if not sample.ids
        ]

    def rearrange(self, fresh: Sequence[Sample]) -> None:
        """After a draw: finished samples leave, outgrown ones move, new ones enter."""
        for lane in self.lanes:
            for slot in reversed(range(len(lane.rows))):
                row = lane.rows[slot]
                if row.done:
                    self._keep(lane, slot)
                elif row.own >= lane.capacity:
                    self._lane(row.request.key, row.own + 1).move_in(row, lane, slot)
                else:
                    continue
                lane.remove(slot)
        entering: dict[str, list[Sample]] = {}
        for sample in fresh:
            if not sample.done:
                entering.setdefault(sample.request.key, []).append(sample)
        for key, samples in entering.items():
            lane = self._lane(key, 1)
            lane.reserve(len(lane.rows) + len(samples))
            for sample in samples:
                lane.add(sample)
        self._drop_empty_lanes()
        for request in [r for r in self.running if r.done]:
            self._release(request)

    def remove_aborted(self) -> None:
        for request in [r for r in self.running if r.aborted]:
            for lane in self._lanes.values():
                for slot in reversed(range(len(lane.rows))):
                    if lane.rows[slot].request is request:
                        lane.remove(slot)
            self._release(request)
        self._drop_empty_lanes()

    def clear(self) -> None:
        """Free all key-value memory; nothing runs any more."""
        self._lanes.clear()
        self._reading.clear()
        self.prefixes = Prefixes()

    def _lane(self, key: str, tokens: int) -> Lane[Sample]:
        capacity = lane_capacity(tokens)
        if (key, capacity) not in self._lanes:
            self._lanes[key, capacity] = Lane[Sample](capacity, self._config, self._like)
        return self._lanes[key, capacity]

    def _drop_empty_lanes(self) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.rows}

    def _keep(self, lane: Lane[Sample], slot: int) -> None:
        """Turn an answer into a block, so that the next turn need not read it again.

        One that was cut at its limit is seldom continued, and copying it is not free.
        """
        row = lane.rows[slot]
        if row.finish != "stop":
            return
        ids = row.ids[: row.own]
        size = (len(row.block.ids) + row.own) * self.token_bytes
        fits = self.reserved_bytes + self.prefixes.unused_bytes + size <= self.budget
        if fits and (row.block.key, row.block.ids + tuple(ids)) not in self.prefixes:
            k, v = lane.k[:, slot, :, : row.own], lane.v[:, slot, :, : row.own]
            block = Block.joined(row.block, ids, k, v)
            self.prefixes.add(block)
            self.prefixes.index(block)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        block = request.block
        block.users -= 1
        if block.users == 0 and not block.complete:
            self.prefixes.drop(block)
