"""Admission: constant work however many prompts are cached, and memory inside its budget."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hone.inference.base import SampledToken, Sampling
from hone.inference.requests import Request
from hone.inference.scheduler import Scheduler
from hone.models.decoder import Decoder

TOKEN_BYTES = 512
STOP = 5


def submit(schedule: Scheduler, decoder: Decoder, ids: Sequence[int], **sampling: Any) -> Request:
    request = Request(
        ids,
        Sampling(stop_ids=(STOP,), **sampling),
        decoder.config,
        lora=None,
        key="a",
        seed=0,
        loop=asyncio.get_running_loop(),
    )
    schedule.waiting.append(request)
    return request


def step(schedule: Scheduler, draw: Callable[[Request, int], int]) -> None:
    """One step of the engine without its arithmetic: admit, read, draw `draw(request, sample)`."""
    schedule.remove_aborted()
    schedule.admit()
    running = [row for lane in schedule.lanes for row in lane.rows]
    for chunk in schedule.chunks(schedule.share):
        chunk.block.filled = chunk.stop
        if chunk.block.complete:
            chunk.block.last_hidden = torch.zeros(64)
            schedule.prefixes.index(chunk.block)
    fresh = schedule.fresh()
    for branch in running:
        branch.own += 1
    for branch in (*running, *fresh):
        for sample in branch.samples:
            sample.take(SampledToken(draw(sample.request, sample.index), -1.0), None)
    schedule.rearrange(fresh)


def instructions(call: Callable[[], None]) -> int:
    """How many bytecode instructions `call` runs, in whatever Python function it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
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
    schedule = Scheduler(decoder, budget=1 << 30, max_running=64, prefill_tokens=512)

    def answer(first: int, count: int) -> None:
        """Distinct prompts of 18 tokens, ten at a time, each answered in two tokens."""
        for start in range(first, first + count, 10):
            for i in range(start, start + 10):
                submit(schedule, decoder, [*divmod(i, 256), *[9] * 16], max_tokens=8)
            drawn = iter([7, STOP])
            while schedule.running or schedule.waiting:
                token = next(drawn)
                step(schedule, lambda *_, token=token: token)

    answer(0, 100)
    few = instructions(lambda: answer(100, 50))
    answer(150, 3000)
    assert len(schedule.prefixes) == 2 * 3150  # every prompt, and every prompt with its answer
    many = instructions(lambda: answer(3150, 50))
    assert many < 1.1 * few
    cached = sum(block.nbytes for block in schedule.prefixes.blocks)
    assert (schedule.prefixes.unused_bytes, schedule.reserved_bytes) == (cached, 0)


async def test_eviction_costs_the_same_however_many_prompts_are_cached(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)

    def cost(cached: int) -> int:
        """Instructions of 50 admissions, each of which evicts a prompt of its own size."""
        budget = TOKEN_BYTES * (32 + 18 * (cached + 1))
        schedule = Scheduler(decoder, budget=budget, max_running=1, prefill_tokens=512)

        def answer(first: int, count: int) -> None:
            for i in range(first, first + count):
                submit(schedule, decoder, [*divmod(i, 256), *[9] * 16], max_tokens=1)
                step(schedule, lambda *_: 7)

        answer(0, cached + 10)
        assert len(schedule.prefixes) == cached + 1
        return instructions(lambda: answer(cached + 10, 50))

    assert cost(2000) < 1.1 * cost(50)
