"""Admission: constant work however many prompts are cached, and memory inside its budget."""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hone.inference.base import SampledToken, Sampling
from hone.inference.embedded.batch import Batch
from hone.inference.embedded.requests import Request
from hone.inference.embedded.scheduler import PROMPT_BATCH_SHARE, Scheduler
from hone.inference.embedded.scoring import Scorer
from hone.models.decoder import Decoder

TOKEN_BYTES = 512
STOP = 5


def submit(scheduler: Scheduler, decoder: Decoder, ids: Sequence[int], **sampling: Any) -> Request:
    request = Request(
        ids,
        Sampling(stop_ids=(STOP,), **sampling),
        decoder.config,
        lora=None,
        key="a",
        seed=0,
        loop=asyncio.get_running_loop(),
    )
    scheduler.waiting.append(request)
    return request


def step(
    scheduler: Scheduler, draw: Callable[[Request, int], int], decoder: Decoder | None = None
) -> None:
    """One step of the engine without its arithmetic: admit, prefill, draw `draw(request, sample)`.

    With a decoder the batch is put together too, which prompt_batches prompts.
    """
    scheduler.remove_aborted()
    scheduler.admit()
    pools = scheduler.pools
    running = [branch for pool in pools for branch in pool.sequences]
    chunks = scheduler.chunks(scheduler.prefill_limit)
    if decoder is not None:
        decodes = [(pool, [b.last_id for b in pool.sequences], None) for pool in pools]
        Batch(decoder.config, chunks, decodes, decoder.device)
    for chunk in chunks:
        chunk.block.filled = chunk.stop
        if chunk.block.complete:
            chunk.block.last_hidden = torch.zeros(64)
            scheduler.prefixes.index(chunk.block)
    new = scheduler.new_branches()
    for branch in running:
        branch.num_decoded += 1
    for branch in (*running, *new):
        for sample in branch.samples:
            sample.append(SampledToken(draw(sample.request, sample.index), -1.0), None)
    scheduler.update(new)


def lines_run(call: Callable[[], None]) -> int:
    """How many lines `call` runs, in whatever Python function it calls; a loop counts each turn."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


async def test_an_admission_costs_the_same_however_many_prompts_are_cached(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    scheduler = Scheduler(decoder, budget=1 << 30, max_running=64, prefill_tokens=512)

    def answer(first: int, count: int) -> None:
        """Distinct prompts of 18 tokens, ten at a time, each answered in two tokens."""
        for start in range(first, first + count, 10):
            for i in range(start, start + 10):
                submit(scheduler, decoder, [*divmod(i, 256), *[9] * 16], max_tokens=8)
            drawn = iter([7, STOP])
            while scheduler.running or scheduler.waiting:
                token = next(drawn)
                step(scheduler, lambda *_, token=token: token)

    answer(0, 100)
    few = lines_run(lambda: answer(100, 50))
    answer(150, 3000)
    assert len(scheduler.prefixes) == 2 * 3150  # every prompt, and every prompt with its answer
    many = lines_run(lambda: answer(3150, 50))
    assert many < 1.1 * few
    cached = sum(block.nbytes for block in scheduler.prefixes.blocks)
    assert (scheduler.prefixes.unused_bytes, scheduler.reserved_bytes) == (cached, 0)


async def test_eviction_costs_the_same_however_many_prompts_are_cached(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)

    def cost(cached: int) -> int:
        """Lines run by 50 admissions, each of which evicts a prompt of its own size."""
        budget = (
            (TOKEN_BYTES * 18 + 4 * 64)
            * (cached + 1)
            * PROMPT_BATCH_SHARE
            // (PROMPT_BATCH_SHARE - 1)
        )
        scheduler = Scheduler(decoder, budget=budget, max_running=1, prefill_tokens=512)

        def answer(first: int, count: int) -> None:
            for i in range(first, first + count):
                submit(scheduler, decoder, [*divmod(i, 256), *[9] * 16], max_tokens=1)
                step(scheduler, lambda *_: 7)

        answer(0, 2 * cached)
        assert abs(len(scheduler.prefixes) - cached) < 10
        return lines_run(lambda: answer(2 * cached, 50))

    assert cost(2000) < 1.1 * cost(50)


class Allocated(TorchDispatchMode):
    """Bytes of keys, values and hidden states made inside the block: now, and at most.

    Counts storages, so views cost nothing and a copy counts from the moment it is made.
    """

    def __init__(self, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.most = 0
        self._head_dim, self._hidden = head_dim, hidden
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        return sum(size for reference, size in self._held.values() if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and self._counts(out):
            storage = out.untyped_storage()
            if storage._cdata not in self._held or self._held[storage._cdata][0].expired():
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def _counts(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype != torch.float32:
            return False
        masks = tensor.ndim == 4 and tensor.shape[1:3] == (1, 1)
        kv = tensor.ndim >= 3 and tensor.shape[-1] == self._head_dim and not masks
        return kv or tensor.shape == (self._hidden,)


def test_the_count_of_allocated_bytes_sees_copies_and_ends():
    with Allocated(16, 64) as memory:
        first = torch.zeros(2, 3, 16)
        assert memory.now == 2 * 3 * 16 * 4
        second = first.clone()
        view = second[0]
        del first, second
        assert (memory.now, memory.most) == (384, 768)
        del view
        assert memory.now == 0


async def test_one_long_answer_takes_no_more_than_it_reserved(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    config = decoder.config
    # 6 tokens of prompt and a hidden state; a row of 512 tokens and one of its 4 tensors once more
    budget = TOKEN_BYTES * 6 + 4 * 64 + TOKEN_BYTES * 512 * 5 // 4
    scheduler = Scheduler(decoder, budget=budget, max_running=8, prefill_tokens=512)
    with Allocated(config.head_dim, config.hidden) as memory:
        request = submit(scheduler, decoder, range(6), max_tokens=400)
        assert scheduler.needed(request) == budget
        while not request.done:
            step(scheduler, lambda *_: 7)
            assert scheduler.reserved_bytes <= budget
    assert TOKEN_BYTES * 512 <= memory.most <= budget
    assert len(request.samples[0].ids) == 400


@pytest.mark.parametrize("seed", range(4))
async def test_all_keys_and_values_together_stay_inside_the_budget(tiny_llama_dir: Path, seed: int):
    """Whatever comes: answers that part and grow, prompts that begin alike, requests that leave."""
    decoder = Decoder.load(tiny_llama_dir)
    config, chance = decoder.config, random.Random(seed)
    budget = TOKEN_BYTES * 2500
    scheduler = Scheduler(decoder, budget=budget, max_running=40, prefill_tokens=128)
    with Allocated(config.head_dim, config.hidden) as memory:
        requests = []
        for _ in range(60):
            front = [chance.randrange(2)] * chance.choice([4, 40])
            ids = [*front, *(chance.randrange(99) for _ in range(chance.randrange(1, 30)))]
            longest, n = chance.choice([3, 30, 70, 200]), chance.randrange(1, 6)
            request = submit(scheduler, decoder, ids, max_tokens=longest, n=n)
            assert scheduler.needed(request) <= budget
            requests.append(request)
        tokens = [7] * 30 + [8, 9, STOP]
        most_reserved = 0
        while scheduler.running or scheduler.waiting:
            step(scheduler, lambda *_: chance.choice(tokens), decoder)
            most_reserved = max(most_reserved, scheduler.reserved_bytes)
            cached = scheduler.prefixes.unused_bytes
            assert scheduler.reserved_bytes + cached + scheduler._batch_limit.used_bytes <= budget
            if chance.random() < 0.02 and scheduler.running:
                chance.choice(scheduler.running).aborted = True
        assert memory.now == scheduler.prefixes.unused_bytes  # nothing else is left
    assert all(request.done or request.aborted for request in requests)
    assert budget // 2 < most_reserved
    assert memory.most <= budget


async def test_a_probe_waits_for_memory_and_takes_that_of_cached_prompts(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    scheduler = Scheduler(decoder, budget=TOKEN_BYTES * 200, max_running=8, prefill_tokens=512)
    scorer, tokens = Scorer(decoder), [7, 7, STOP]
    for first in range(6):
        submit(scheduler, decoder, [first] * 20, max_tokens=1)
        step(scheduler, lambda *_: 7)
    assert scheduler.prefixes.unused_bytes > TOKEN_BYTES * 100
    request = submit(scheduler, decoder, [9] * 20, max_tokens=65)  # 20 + 80
    step(scheduler, lambda *_: tokens[0])
    scorer.add([[1] * 80], None)  # 120: the keys and values of 80 tokens, and their hidden states
    scorer.start(scheduler.reserve_probe)
    assert scorer.has_waiting and scorer.nbytes == 0
    request.aborted = True
    scheduler.remove_aborted()
    scorer.start(scheduler.reserve_probe)
    assert not scorer.has_waiting and scorer.nbytes == TOKEN_BYTES * 120
    assert scheduler.reserved_bytes == TOKEN_BYTES * 120
    assert scheduler.prefixes.unused_bytes <= TOKEN_BYTES * 80
    scheduler.set_probe_bytes(0)
    assert scheduler.reserved_bytes == 0
