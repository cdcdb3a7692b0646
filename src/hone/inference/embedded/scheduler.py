"""The scheduler: which requests run or wait, and where their keys and values are stored.

In:   requests as they arrive, samples as they finish
Out:  what the next step prefills and decodes

Memory is reserved before a request starts: for its prompt, and for every sample's slot at full
length. So a sample that has started is never preempted, and requests that do not fit wait in order.

The budget covers all keys and values that exist at any moment: blocks, slot pools with their spare
slots, prompt batches, and the tensor that is copied while a pool is resized. Memory that is not
reserved holds prompt batches and cached prompts, which are evicted for reservations.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from hone.inference.embedded.batch import Chunk
from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prefill import PrefillQueue
from hone.inference.embedded.prefix_cache import PrefixCache
from hone.inference.embedded.prompt_batches import MemoryLimit
from hone.inference.embedded.requests import Branch, Request, SampledSequence
from hone.inference.embedded.slots import SlotPool, group_by_prompt, keep_slots, slot_capacity
from hone.models.decoder import Decoder

PROMPT_BATCH_SHARE = 4
"""Prompt batches may take this fraction (1 / N) of the budget, if that much is not reserved."""


class Scheduler:
    """The engine's bookkeeping; it computes nothing."""

    def __init__(
        self, decoder: Decoder, *, budget: int, max_running: int, prefill_tokens: int
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes = PrefixCache()
        self._prefills = PrefillQueue()
        self._slot_bytes = 0
        """Reserved for the slots of running requests."""
        self._probe_bytes = 0
        self._samples = 0
        self.budget = budget
        self.max_running = max_running
        self.token_bytes = decoder.config.kv_bytes_per_token * decoder.embedding.itemsize // 4
        self._config = decoder.config
        self._like = decoder.embedding
        self._prefill_tokens = prefill_tokens
        self._pools: dict[tuple[str, int], SlotPool[Branch]] = {}
        self._batch_limit = MemoryLimit(budget // PROMPT_BATCH_SHARE)

    @property
    def pools(self) -> list[SlotPool[Branch]]:
        """Sorted, so that equal requests make equal batches; pools of one adapter are adjacent."""
        return [self._pools[key] for key in sorted(self._pools)]

    @property
    def reserved_bytes(self) -> int:
        """Memory of running requests and probes; for slots the larger of reserved and allocated."""
        slots = max(self._slot_bytes, self._with_copy(self._pool_bytes))
        return slots + self.prefixes.used_bytes + self._probe_bytes

    @property
    def _pool_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())

    def _with_copy(self, nbytes: int) -> int:
        """Bytes of pools, plus the one tensor that exists twice during a resize."""
        return nbytes + -(-nbytes // (2 * self._config.layers))

    def needed(self, request: Request) -> int:
        """Bytes that must be free for this request to start alone."""
        return self._bytes_of_slots(request) + self._bytes_of_prompt(request)

    def _bytes_of_slots(self, request: Request) -> int:
        return self._with_copy(request.slot_tokens() * self.token_bytes)

    def _bytes_of_prompt(self, request: Request) -> int:
        hidden = self._config.hidden * self._like.itemsize
        return len(request.prompt_ids) * self.token_bytes + hidden

    def admit(self) -> None:
        """Start requests, first come, first served: small requests cannot starve a large one."""
        while self.waiting:
            request = self.waiting[0]
            if not request.aborted:
                if self._samples + request.sampling.n > self.max_running:
                    return
                if not self._start(request):
                    return
            self.waiting.popleft()

    def _start(self, request: Request) -> bool:
        """Reserve the request's memory and start it; False if it must wait for memory."""
        block = self.prefixes.whole(request.key, request.prompt_ids)
        slots = self._bytes_of_slots(request)
        if block is None:
            prompt = self._bytes_of_prompt(request)
        else:
            prompt = 0 if block.users else block.nbytes
        if self.reserved_bytes + slots + prompt > self.budget:
            self._free_spare_slots()
            if self.reserved_bytes + slots + prompt > self.budget:
                return False
        if block is not None:
            self.prefixes.acquire(block)
            prompt = 0
        self._slot_bytes += slots
        self._samples += request.sampling.n
        self._shrink_caches(prompt)
        if block is None:
            block = self._new_block(request)
            self.prefixes.acquire(block)
        request.start(block, slots)
        self.running.append(request)
        return True

    def reserve_probe(self, nbytes: int) -> bool:
        """Reserve memory for a probe if there is enough; one larger than the budget runs alone."""
        if self.reserved_bytes + nbytes > self.budget:
            self._free_spare_slots()
            if self.reserved_bytes + nbytes > self.budget and (self.running or self._probe_bytes):
                return False
        self.set_probe_bytes(self._probe_bytes + nbytes)
        return True

    def set_probe_bytes(self, nbytes: int) -> None:
        """Reserve this many bytes for all probes together."""
        if nbytes != self._probe_bytes:
            self._probe_bytes = nbytes
            self._shrink_caches()

    def _shrink_caches(self, wanted: int = 0) -> None:
        """Limit prompt batches and cached prompts to what is neither reserved nor `wanted`."""
        free = self.budget - self.reserved_bytes - wanted
        self._batch_limit.resize(max(0, min(self.budget // PROMPT_BATCH_SHARE, free)))
        self.prefixes.evict(self.prefixes.unused_bytes + self._batch_limit.nbytes - free)

    def _free_spare_slots(self) -> None:
        for pool in self._pools.values():
            pool.resize(len(pool.sequences))

    def _num_slots(self, pool: SlotPool[Branch], sequences: int, samples: int) -> int:
        """How many slots to allocate in a pool that must hold this many sequences.

        More than needed, if the reservation allows it, so that the pool is rarely copied.
        """
        if sequences <= pool.num_slots:
            return pool.num_slots
        more = max(8, samples, 2 * pool.num_slots)
        copies = 2 * self._config.layers
        free = self._slot_bytes * copies // (copies + 1) - self._pool_bytes
        return max(sequences, min(more, pool.num_slots + free // pool.slot_bytes))

    def _new_block(self, request: Request) -> Block:
        block = Block(request.key, request.prompt_ids, self._config, self._like)
        prefix = self.prefixes.longest(request.key, request.prompt_ids)
        if prefix is not None:
            block.copy_prefix(*prefix)
        self.prefixes.add(block)
        self._prefills.add(block, request.lora)
        return block

    @property
    def prefill_limit(self) -> int:
        """Tokens to prefill in the next pass, of prompts and probes together.

        Four times as many while no sample is decoding, because none is delayed.
        """
        return self._prefill_tokens * (1 if self._pools else 4)

    def chunks(self, limit: int) -> list[Chunk]:
        """The next prompt tokens to prefill, `limit` at most; those of one adapter are adjacent."""
        return sorted(self._prefills.chunks(limit), key=lambda chunk: chunk.block.key)

    def new_branches(self) -> list[Branch]:
        """Samples whose prompt is computed and whose first token is not drawn, by prompt."""
        by_block: dict[int, list[SampledSequence]] = {}
        for request in self.running:
            if request.block.last_hidden is not None:
                undrawn = [sample for sample in request.samples if not sample.ids]
                by_block.setdefault(id(request.block), []).extend(undrawn)
        return [Branch(samples) for samples in by_block.values() if samples]

    def update(self, new: Sequence[Branch]) -> None:
        """After a draw: finished samples leave, branches split or outgrow their slot, new ones enter."""
        for pool in reversed(self.pools):  # the larger ones first: branches move into them
            self._advance(pool)
        entering: dict[str, list[Branch]] = {}
        for branch in new:
            entering.setdefault(branch.key, []).extend(branch.split())
        for key, branches in entering.items():
            if branches:
                self._enter(self._pool(key, 1), branches)
        self._drop_empty_pools()
        for request in [r for r in self.running if r.done]:
            self._release(request)

    def _advance(self, pool: SlotPool[Branch]) -> None:
        """Update one pool after a draw: each branch stays, leaves, moves, or becomes several."""
        parts: list[tuple[Branch, int]] = []
        for slot, branch in enumerate(pool.sequences):
            for sample in branch.samples:
                if sample.finish == "stop":
                    self._cache_answer(pool, slot, sample)
            parts += [(part, slot) for part in branch.split()]
        stay = group_by_prompt([entry for entry in parts if entry[0].num_decoded < pool.capacity])
        moving = [entry for entry in parts if entry[0].num_decoded == pool.capacity]
        if not moving:
            if len(stay) > pool.num_slots:
                self._grow(pool, len(stay), _num_samples(branch for branch, _ in stay))
            pool.advance(stay)
            return
        target = self._pool(moving[0][0].key, pool.capacity + 1)
        sequences = len(target.sequences) + len(moving)
        samples = _num_samples(target.sequences) + _num_samples(branch for branch, _ in moving)
        num_slots = self._num_slots(target, sequences, samples)
        after = self._pool_bytes + (num_slots - target.num_slots) * target.slot_bytes
        tight = self._with_copy(after) > self._slot_bytes
        if tight:
            for other in self._pools.values():
                if other not in (pool, target):
                    other.resize(len(other.sequences))
        if len(stay) > pool.num_slots:
            self._grow(pool, len(stay), len(stay))
        pool.advance(
            stay, moving, target, num_slots=len(stay) if tight else None, target_slots=num_slots
        )

    def _enter(self, pool: SlotPool[Branch], branches: Sequence[Branch]) -> None:
        sequences = len(pool.sequences) + len(branches)
        if sequences > pool.num_slots:
            self._grow(pool, sequences, _num_samples(pool.sequences) + _num_samples(branches))
        for branch in branches:
            pool.add(branch)

    def _grow(self, pool: SlotPool[Branch], sequences: int, samples: int) -> None:
        num_slots = self._num_slots(pool, sequences, samples)
        after = self._pool_bytes + (num_slots - pool.num_slots) * pool.slot_bytes
        if self._with_copy(after) > self._slot_bytes:
            self._free_spare_slots()
        pool.resize(num_slots)

    def remove_aborted(self) -> None:
        for request in [r for r in self.running if r.aborted]:
            for pool in self._pools.values():
                for branch in pool.sequences:
                    branch.samples = [s for s in branch.samples if s.request is not request]
                left = [(branch, slot) for slot, branch in enumerate(pool.sequences)]
                left = [(branch, slot) for branch, slot in left if branch.samples]
                if len(left) < len(pool.sequences):
                    pool.advance(keep_slots(left))
            self._release(request)
        self._drop_empty_pools()

    def clear(self) -> None:
        """Free the whole KV cache. Nothing may be running."""
        self._pools.clear()
        self._prefills.clear()
        self.prefixes = PrefixCache()
        self._slot_bytes = self._samples = 0

    def _pool(self, key: str, tokens: int) -> SlotPool[Branch]:
        capacity = slot_capacity(tokens)
        if (key, capacity) not in self._pools:
            pool = SlotPool[Branch](capacity, self._config, self._like, self._batch_limit)
            self._pools[key, capacity] = pool
        return self._pools[key, capacity]

    def _drop_empty_pools(self) -> None:
        self._pools = {key: pool for key, pool in self._pools.items() if pool.sequences}

    def _cache_answer(self, pool: SlotPool[Branch], slot: int, sample: SampledSequence) -> None:
        """Add prompt and answer to the prefix cache, so that the next turn can start from them.

        Only answers that ended normally: one cut at its token limit is rarely continued.
        """
        branch = pool.sequences[slot]
        decoded = branch.num_decoded
        ids = sample.ids[:decoded]
        size = (len(branch.block.ids) + decoded) * self.token_bytes
        used_bytes = self.reserved_bytes + self.prefixes.unused_bytes + self._batch_limit.nbytes
        fits = used_bytes + size <= self.budget
        if fits and (branch.block.key, branch.block.ids + tuple(ids)) not in self.prefixes:
            block = Block.extended(
                branch.block,
                ids,
                [k[slot, :, :decoded] for k in pool.k],
                [v[slot, :, :decoded] for v in pool.v],
            )
            self.prefixes.add(block)
            self.prefixes.index(block)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._slot_bytes -= request.reserved
        self._samples -= request.sampling.n
        self.prefixes.release(request.end())
        self._shrink_caches()


def _num_samples(branches: Iterable[Branch]) -> int:
    return sum(len(branch.samples) for branch in branches)
