"""Who is read, who waits for whose beginning, and what a probe makes of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hone.inference.base import Sampling
from hone.inference.batch import Chunk
from hone.inference.blocks import Block
from hone.inference.reading import Reading
from hone.inference.requests import Request
from hone.inference.scheduler import Scheduler
from hone.inference.scoring import Scoring
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder

LIKE = torch.zeros(1)
FRONT = tuple(range(100, 180))  # 80 tokens


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def wanted(reading: Reading, config: DecoderConfig, ids: Sequence[int], key: str = "a") -> Block:
    """A block that somebody uses, on its way."""
    block = Block(key, ids, config, LIKE)
    block.users = 1
    reading.add(block, None)
    return block


def read(reading: Reading, limit: int = 2048) -> list[tuple[int, int, int]]:
    """One pass: the last token of each chunk's block, and where the chunk begins and ends."""
    chunks = reading.chunks(limit)
    for chunk in chunks:
        _fill(chunk)
    return [(chunk.block.ids[-1], chunk.start, chunk.stop) for chunk in chunks]


def _fill(chunk: Chunk) -> None:
    """Keys that tell the token and values that tell its place, as a pass would leave them."""
    ids = torch.tensor(chunk.block.ids[chunk.start : chunk.stop]).float()
    chunk.block.k[:, :, chunk.start : chunk.stop] = ids[:, None]
    places = torch.arange(chunk.start, chunk.stop).float()
    chunk.block.v[:, :, chunk.start : chunk.stop] = places[:, None]
    chunk.block.filled = chunk.stop


def test_those_that_begin_alike_wait_for_the_first(config: DecoderConfig):
    reading = Reading()
    blocks = [wanted(reading, config, (*FRONT, *[200 + i] * 10)) for i in range(3)]
    assert read(reading) == [(200, 0, 90)]
    assert read(reading) == [(201, 80, 90), (202, 80, 90)]
    assert read(reading) == [] and not reading
    for block in blocks:
        assert block.complete
        assert block.k[0, 0, :, 0].tolist() == list(block.ids)
        assert block.v[0, 0, :, 0].tolist() == list(range(90))


def test_they_start_as_soon_as_the_common_part_is_there(config: DecoderConfig):
    reading = Reading()
    wanted(reading, config, (*FRONT, *[1] * 400))
    wanted(reading, config, (*FRONT, *[2] * 10))
    assert read(reading, 64) == [(1, 0, 64)]
    assert read(reading, 64) == [(1, 64, 128)]  # 80 of them are there now
    assert read(reading, 362) == [(1, 128, 480), (2, 80, 90)]


def test_little_in_common_is_read_twice(config: DecoderConfig):
    reading = Reading()
    wanted(reading, config, (*FRONT[:31], 1))
    wanted(reading, config, (*FRONT[:31], 2))  # 31 tokens are less than one pass costs
    wanted(reading, config, (*FRONT, *[3] * 100))
    wanted(reading, config, (*FRONT[:40], *[4] * 281))  # 40 of 321 are less than an eighth
    assert [last for last, _, _ in read(reading)] == [1, 2, 3, 4]
    reading = Reading()
    wanted(reading, config, (*FRONT[:40], *[5] * 280))
    wanted(reading, config, (*FRONT[:40], *[6] * 280))  # 40 of 320 are worth it
    assert [last for last, _, _ in read(reading)] == [5]


def test_adapters_share_nothing(config: DecoderConfig):
    reading = Reading()
    wanted(reading, config, (*FRONT, 1), "a")
    wanted(reading, config, (*FRONT, 2), "b")
    assert read(reading) == [(1, 0, 81), (2, 0, 81)]


def test_the_last_token_is_always_read(config: DecoderConfig):
    """Its state is what the first sampled token is drawn from."""
    reading = Reading()
    wanted(reading, config, (*FRONT, 1))
    wanted(reading, config, FRONT)
    assert read(reading) == [(1, 0, 81)]
    assert read(reading) == [(179, 79, 80)]


def test_one_may_wait_for_one_that_waits(config: DecoderConfig):
    reading = Reading()
    wanted(reading, config, (*FRONT[:40], *[1] * 40))
    wanted(reading, config, (*FRONT, 2))
    wanted(reading, config, (*FRONT, 3))
    wanted(reading, config, (9, *FRONT, 4))  # nothing in common: it overtakes those who wait
    assert read(reading) == [(1, 0, 80), (4, 0, 82)]
    assert read(reading) == [(2, 40, 81)]
    assert read(reading) == [(3, 80, 81)]


def test_if_the_one_waited_for_leaves_the_next_is_waited_for(config: DecoderConfig):
    reading = Reading()
    first, second, third = (wanted(reading, config, (*FRONT, i)) for i in (1, 2, 3))
    assert read(reading, 50) == [(1, 0, 50)]
    first.users = 0  # its only request was aborted
    assert read(reading, 50) == [(2, 0, 50)]
    assert read(reading, 50) == [(2, 50, 81)]
    assert read(reading, 50) == [(3, 80, 81)]
    assert second.k[0, 0, :, 0].tolist() == [*FRONT, 2]
    assert third.k[0, 0, :, 0].tolist() == [*FRONT, 3]


def test_one_that_leaves_after_its_beginning_was_read_is_still_copied(config: DecoderConfig):
    reading = Reading()
    first = wanted(reading, config, (*FRONT, *[1] * 40))
    wanted(reading, config, (*FRONT, 2))
    assert read(reading, 90) == [(1, 0, 90)]
    first.users = 0
    assert read(reading) == [(2, 80, 81)]


async def test_the_scheduler_keeps_order_and_reservations_while_some_wait(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    config = decoder.config
    schedule = Scheduler(decoder, budget=512 * 1000, max_running=64, prefill_tokens=512)

    def request(*ids: int, key: str = "a") -> Request:
        loop = asyncio.get_running_loop()
        made = Request(ids, Sampling(max_tokens=8), config, lora=None, key=key, seed=0, loop=loop)
        schedule.waiting.append(made)
        return made

    requests = [request(*FRONT, i) for i in range(3)]
    same = request(*FRONT, 0)  # waits with the first for the same block
    schedule.admit()
    # Three blocks of 81 tokens, each with a hidden state of 64 numbers, and four rows of 32 with what
    # a resize holds twice, one tensor of four; whether their reading waits or not.
    assert schedule.reserved_bytes == 3 * (512 * 81 + 4 * 64) + 4 * 512 * 32 * 5 // 4
    assert [c.block for c in schedule.chunks(512)] == [requests[0].block]
    requests[0].aborted = True
    schedule.remove_aborted()
    # The block lives on with the other request that wants it, and keeps its place.
    assert [c.block for c in schedule.chunks(512)] == [same.block]
    same.aborted = True
    schedule.remove_aborted()
    assert schedule.reserved_bytes == 2 * (512 * 81 + 4 * 64) + 2 * 512 * 32 * 5 // 4
    (chunk,) = schedule.chunks(512)
    assert (chunk.block, chunk.start) == (requests[1].block, 0)
    _fill(chunk)
    (chunk,) = schedule.chunks(512)
    assert (chunk.block, chunk.start) == (requests[2].block, 80)
    requests[1].aborted = requests[2].aborted = True
    schedule.remove_aborted()
    assert schedule.chunks(512) == [] and schedule.reserved_bytes == 0


def test_a_probe_that_was_cancelled_is_not_read_on(tiny_llama_dir: Path):
    scoring = Scoring(Decoder.load(tiny_llama_dir))
    left, stays = scoring.add([[*FRONT, 1]], None), scoring.add([[*FRONT, 2], [*FRONT, 3]], None)
    scoring.start(lambda nbytes: True)
    # 81 tokens of 512 bytes of keys and values and 256 of hidden state each
    assert scoring.nbytes == 3 * 81 * (512 + 256)
    # Each probe reads for itself, and its own second sequence waits for the first.
    assert [(c.block.ids[-1], c.start) for c in scoring.chunks(512)] == [(1, 0), (2, 0)]
    left.cancel()
    assert [c.block.ids[-1] for c in scoring.chunks(512)] == [2]
    stays.cancel()
    assert scoring.chunks(512) == [] and not scoring and scoring.nbytes == 0
