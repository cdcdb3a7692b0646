"""The prefill queue: order, shared prefixes, and probes that are cancelled."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hone.inference.base import Sampling
from hone.inference.embedded.batch import Chunk
from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prefill import PrefillQueue
from hone.inference.embedded.requests import Request
from hone.inference.embedded.scheduler import Scheduler
from hone.inference.embedded.scoring import Scorer
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder

LIKE = torch.zeros(1)
FRONT = tuple(range(100, 180))  # 80 tokens


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def add(queue: PrefillQueue, config: DecoderConfig, ids: Sequence[int], key: str = "a") -> Block:
    """A block with one user, in the queue."""
    block = Block(key, ids, config, LIKE)
    block.users = 1
    queue.add(block, None)
    return block


def compute(queue: PrefillQueue, limit: int = 2048) -> list[tuple[int, int, int]]:
    """One pass: the last token of each chunk's block, and where the chunk begins and ends."""
    chunks = queue.chunks(limit)
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


def test_blocks_with_a_common_prefix_wait_for_the_first(config: DecoderConfig):
    queue = PrefillQueue()
    blocks = [add(queue, config, (*FRONT, *[200 + i] * 10)) for i in range(3)]
    assert compute(queue) == [(200, 0, 90)]
    assert compute(queue) == [(201, 80, 90), (202, 80, 90)]
    assert compute(queue) == [] and not queue
    for block in blocks:
        assert block.complete
        assert block.k[0, 0, :, 0].tolist() == list(block.ids)
        assert block.v[0, 0, :, 0].tolist() == list(range(90))


def test_waiting_blocks_start_once_the_common_prefix_is_computed(config: DecoderConfig):
    queue = PrefillQueue()
    add(queue, config, (*FRONT, *[1] * 400))
    add(queue, config, (*FRONT, *[2] * 10))
    assert compute(queue, 64) == [(1, 0, 64)]
    assert compute(queue, 64) == [(1, 64, 128)]  # 80 of them are there now
    assert compute(queue, 362) == [(1, 128, 480), (2, 80, 90)]


def test_short_common_prefixes_are_computed_twice(config: DecoderConfig):
    queue = PrefillQueue()
    add(queue, config, (*FRONT[:31], 1))
    add(queue, config, (*FRONT[:31], 2))  # 31 tokens are less than one pass costs
    add(queue, config, (*FRONT, *[3] * 100))
    add(queue, config, (*FRONT[:40], *[4] * 281))  # 40 of 321 are less than an eighth
    assert [last for last, _, _ in compute(queue)] == [1, 2, 3, 4]
    queue = PrefillQueue()
    add(queue, config, (*FRONT[:40], *[5] * 280))
    add(queue, config, (*FRONT[:40], *[6] * 280))  # 40 of 320 are worth it
    assert [last for last, _, _ in compute(queue)] == [5]


def test_adapters_share_no_prefix(config: DecoderConfig):
    queue = PrefillQueue()
    add(queue, config, (*FRONT, 1), "a")
    add(queue, config, (*FRONT, 2), "b")
    assert compute(queue) == [(1, 0, 81), (2, 0, 81)]


def test_the_last_token_is_always_computed(config: DecoderConfig):
    """Its state is what the first sampled token is drawn from."""
    queue = PrefillQueue()
    add(queue, config, (*FRONT, 1))
    add(queue, config, FRONT)
    assert compute(queue) == [(1, 0, 81)]
    assert compute(queue) == [(179, 79, 80)]


def test_a_block_may_wait_for_a_waiting_block(config: DecoderConfig):
    queue = PrefillQueue()
    add(queue, config, (*FRONT[:40], *[1] * 40))
    add(queue, config, (*FRONT, 2))
    add(queue, config, (*FRONT, 3))
    add(queue, config, (9, *FRONT, 4))  # nothing in common: it overtakes those who wait
    assert compute(queue) == [(1, 0, 80), (4, 0, 82)]
    assert compute(queue) == [(2, 40, 81)]
    assert compute(queue) == [(3, 80, 81)]


def test_if_the_first_block_is_abandoned_the_next_one_computes_the_prefix(config: DecoderConfig):
    queue = PrefillQueue()
    first, second, third = (add(queue, config, (*FRONT, i)) for i in (1, 2, 3))
    assert compute(queue, 50) == [(1, 0, 50)]
    first.users = 0  # its only request was aborted
    assert compute(queue, 50) == [(2, 0, 50)]
    assert compute(queue, 50) == [(2, 50, 81)]
    assert compute(queue, 50) == [(3, 80, 81)]
    assert second.k[0, 0, :, 0].tolist() == [*FRONT, 2]
    assert third.k[0, 0, :, 0].tolist() == [*FRONT, 3]


def test_an_abandoned_block_whose_prefix_was_computed_is_still_copied(config: DecoderConfig):
    queue = PrefillQueue()
    first = add(queue, config, (*FRONT, *[1] * 40))
    add(queue, config, (*FRONT, 2))
    assert compute(queue, 90) == [(1, 0, 90)]
    first.users = 0
    assert compute(queue) == [(2, 80, 81)]


async def test_the_scheduler_keeps_order_and_reservations_while_some_wait(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    config = decoder.config
    scheduler = Scheduler(decoder, budget=512 * 1000, max_running=64, prefill_tokens=512)

    def request(*ids: int, key: str = "a") -> Request:
        loop = asyncio.get_running_loop()
        new = Request(ids, Sampling(max_tokens=8), config, lora=None, key=key, seed=0, loop=loop)
        scheduler.waiting.append(new)
        return new

    requests = [request(*FRONT, i) for i in range(3)]
    same = request(*FRONT, 0)  # waits with the first for the same block
    scheduler.admit()
    # Three blocks of 81 tokens, each with a hidden state of 64 numbers, and four rows of 32 with what
    # a resize holds twice, one tensor of four; whether their reading waits or not.
    assert scheduler.reserved_bytes == 3 * (512 * 81 + 4 * 64) + 4 * 512 * 32 * 5 // 4
    assert [c.block for c in scheduler.chunks(512)] == [requests[0].block]
    requests[0].aborted = True
    scheduler.remove_aborted()
    # The block lives on with the other request that wants it, and keeps its place.
    assert [c.block for c in scheduler.chunks(512)] == [same.block]
    same.aborted = True
    scheduler.remove_aborted()
    assert scheduler.reserved_bytes == 2 * (512 * 81 + 4 * 64) + 2 * 512 * 32 * 5 // 4
    (chunk,) = scheduler.chunks(512)
    assert (chunk.block, chunk.start) == (requests[1].block, 0)
    _fill(chunk)
    (chunk,) = scheduler.chunks(512)
    assert (chunk.block, chunk.start) == (requests[2].block, 80)
    requests[1].aborted = requests[2].aborted = True
    scheduler.remove_aborted()
    assert scheduler.chunks(512) == [] and scheduler.reserved_bytes == 0


def test_a_cancelled_probe_is_not_computed_further(tiny_llama_dir: Path):
    scorer = Scorer(Decoder.load(tiny_llama_dir))
    left, stays = scorer.add([[*FRONT, 1]], None), scorer.add([[*FRONT, 2], [*FRONT, 3]], None)
    scorer.start(lambda nbytes: True)
    # 81 tokens of 512 bytes of keys and values and 256 of hidden state each
    assert scorer.nbytes == 3 * 81 * (512 + 256)
    # Each probe reads for itself, and its own second sequence waits for the first.
    assert [(c.block.ids[-1], c.start) for c in scorer.chunks(512)] == [(1, 0), (2, 0)]
    left.cancel()
    assert [c.block.ids[-1] for c in scorer.chunks(512)] == [2]
    stays.cancel()
    assert scorer.chunks(512) == [] and not scorer and scorer.nbytes == 0
