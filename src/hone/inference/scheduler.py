"""Who runs, who waits, and where their keys and values lie.

In:   requests as they come, samples as they end
Out:  what the next step reads and advances

Memory is reserved before a request starts: its prompt, and every sample's row at its longest. So
a sample that has started is never thrown out again, and what does not fit waits in order.

The budget covers all keys and values that exist at any moment: blocks, lanes with their empty seats,
stacks, and the tensor that is copied while a lane is resized. What is not reserved holds stacks and
cached prompts, which make way for reservations.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from hone.inference.batch import Chunk
from hone.inference.blocks import Block
from hone.inference.kv import Lane, Prefixes, in_place, lane_capacity, side_by_side
from hone.inference.reading import Reading
from hone.inference.requests import Branch, Request, Sample
from hone.inference.stacks import Room
from hone.models.decoder import Decoder

STACKED = 4
"""Stacks may take 1 / this of the budget, if so much is not reserved."""


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
        self._probe_bytes = 0
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
        """Memory of running requests and probes; of rows the larger of what they may take and do."""
        rows = max(self._row_bytes, self._with_copy(self._lane_bytes))
        return rows + self.prefixes.used_bytes + self._probe_bytes

    @property
    def stacked_bytes(self) -> int:
        return self._room.taken

    @property
    def _lane_bytes(self) -> int:
        return sum(lane.nbytes for lane in self._lanes.values())

    def _with_copy(self, nbytes: int) -> int:
        """Bytes of lanes, and of the one tensor of them that a resize holds twice."""
        return nbytes + -(-nbytes // (2 * self._config.layers))

    def needed(self, request: Request) -> int:
        """Bytes that must be free for this request to start alone."""
        return self._rows_of(request) + self._prompt_of(request)

    def _rows_of(self, request: Request) -> int:
        return self._with_copy(request.row_tokens() * self.token_bytes)

    def _prompt_of(self, request: Request) -> int:
        hidden = self._config.hidden * self._like.itemsize
        return len(request.prompt_ids) * self.token_bytes + hidden

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
        rows = self._rows_of(request)
        if block is None:
            prompt = self._prompt_of(request)
        else:
            prompt = 0 if block.users else block.nbytes
        if self.reserved_bytes + rows + prompt > self.budget:
            self._trim()
            if self.reserved_bytes + rows + prompt > self.budget:
                return False
        if block is not None:
            self.prefixes.acquire(block)
            prompt = 0
        self._row_bytes += rows
        self._samples += request.sampling.n
        self._make_way(prompt)
        if block is None:
            block = self._new_block(request)
            self.prefixes.acquire(block)
        request.start(block, rows)
        self.running.append(request)
        return True

    def has_room(self, wanted: int) -> bool:
        """Whether a probe of so many bytes may start; one larger than the budget runs alone."""
        if self.reserved_bytes + wanted > self.budget:
            self._trim()
            if self.reserved_bytes + wanted > self.budget and (self.running or self._probe_bytes):
                return False
        self.set_probes(self._probe_bytes + wanted)
        return True

    def set_probes(self, nbytes: int) -> None:
        """Reserve so much for probes in all."""
        if nbytes != self._probe_bytes:
            self._probe_bytes = nbytes
            self._make_way()

    def _make_way(self, wanted: int = 0) -> None:
        """Leave stacks and cached prompts only what is neither reserved nor `wanted`."""
        free = self.budget - self.reserved_bytes - wanted
        self._room.resize(max(0, min(self.budget // STACKED, free)))
        self.prefixes.evict(self.prefixes.unused_bytes + self._room.nbytes - free)

    def _trim(self) -> None:
        """Give back the empty seats of lanes."""
        for lane in self._lanes.values():
            lane.resize(len(lane.rows))

    def _seats(self, lane: Lane[Branch], rows: int, samples: int) -> int:
        """How many seats a lane gets that must hold so many rows.

        More than it needs, so that it is seldom copied, as long as what is reserved allows it.
        """
        if rows <= lane.seats:
            return lane.seats
        more = max(8, samples, 2 * lane.seats)
        copies = 2 * self._config.layers
        free = self._row_bytes * copies // (copies + 1) - self._lane_bytes
        return max(rows, min(more, lane.seats + free // lane.row_bytes))

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
        for lane in reversed(self.lanes):  # the larger ones first: they are moved into
            self._advance(lane)
        entering: dict[str, list[Branch]] = {}
        for branch in fresh:
            entering.setdefault(branch.key, []).extend(branch.parted())
        for key, branches in entering.items():
            if branches:
                self._enter(self._lane(key, 1), branches)
        self._drop_empty_lanes()
        for request in [r for r in self.running if r.done]:
            self._release(request)

    def _advance(self, lane: Lane[Branch]) -> None:
        """The rows of one lane after a draw: each stays, leaves, moves, or becomes several."""
        parts: list[tuple[Branch, int]] = []
        for slot, branch in enumerate(lane.rows):
            for sample in branch.samples:
                if sample.finish == "stop":
                    self._keep(lane, slot, sample)
            parts += [(part, slot) for part in branch.parted()]
        stay = side_by_side([entry for entry in parts if entry[0].own < lane.capacity])
        moving = [entry for entry in parts if entry[0].own == lane.capacity]
        if not moving:
            if len(stay) > lane.seats:
                self._grow(lane, len(stay), _samples(row for row, _ in stay))
            lane.advance(stay)
            return
        target = self._lane(moving[0][0].key, lane.capacity + 1)
        rows, samples = len(target.rows) + len(moving), _samples(row for row, _ in moving)
        seats = self._seats(target, rows, _samples(target.rows) + samples)
        after = self._lane_bytes + (seats - target.seats) * target.row_bytes
        tight = self._with_copy(after) > self._row_bytes
        if tight:
            for other in self._lanes.values():
                if other not in (lane, target):
                    other.resize(len(other.rows))
        if len(stay) > lane.seats:
            self._grow(lane, len(stay), len(stay))
        lane.advance(stay, moving, target, seats=len(stay) if tight else None, target_seats=seats)

    def _enter(self, lane: Lane[Branch], branches: Sequence[Branch]) -> None:
        rows = len(lane.rows) + len(branches)
        if rows > lane.seats:
            self._grow(lane, rows, _samples(lane.rows) + _samples(branches))
        for branch in branches:
            lane.add(branch)

    def _grow(self, lane: Lane[Branch], rows: int, samples: int) -> None:
        seats = self._seats(lane, rows, samples)
        if (
            self._with_copy(self._lane_bytes + (seats - lane.seats) * lane.row_bytes)
            > self._row_bytes
        ):
            self._trim()
        lane.resize(seats)

    def remove_aborted(self) -> None:
        for request in [r for r in self.running if r.aborted]:
            for lane in self._lanes.values():
                for branch in lane.rows:
                    branch.samples = [s for s in branch.samples if s.request is not request]
                rows = [(row, slot) for slot, row in enumerate(lane.rows) if row.samples]
                if len(rows) < len(lane.rows):
                    lane.advance(in_place(rows))
            self._release(request)
        self._drop_empty_lanes()

    def clear(self) -> None:
        """Free all key-value memory; nothing runs any more."""
        self._lanes.clear()
        self._reading.clear()
        self.prefixes = Prefixes()
        self._row_bytes = self._samples = 0

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
        held = self.reserved_bytes + self.prefixes.unused_bytes + self._room.nbytes
        fits = held + size <= self.budget
        if fits and (row.block.key, row.block.ids + tuple(ids)) not in self.prefixes:
            block = Block.joined(
                row.block,
                ids,
                [k[slot, :, : row.own] for k in lane.k],
                [v[slot, :, : row.own] for v in lane.v],
            )
            self.prefixes.add(block)
            self.prefixes.index(block)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._row_bytes -= request.reserved
        self._samples -= request.sampling.n
        self.prefixes.release(request.end())
        self._make_way()


def _samples(branches: Iterable[Branch]) -> int:
    return sum(len(branch.samples) for branch in branches)
