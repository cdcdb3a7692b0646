"""The prefix cache: longest prefixes, eviction, and blocks of whole answers."""

from pathlib import Path

import pytest
import torch

from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prefix_cache import PrefixCache
from hone.models.architecture import DecoderConfig

LIKE = torch.zeros(1)


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def filled(config: DecoderConfig, key: str, ids: list[int]) -> Block:
    block = Block(key, ids, config, LIKE)
    block.k[:] = torch.arange(len(ids)).float()[:, None]
    block.v[:] = -block.k
    block.filled, block.last_hidden = len(ids), torch.zeros(64)
    return block


def test_the_longest_prefix_is_found_to_the_token_and_by_adapter(config: DecoderConfig):
    prefixes = PrefixCache()
    block = filled(config, "a", list(range(50)))
    prefixes.add(block)
    prefixes.index(block)
    assert prefixes.longest("a", (*range(40), 7, 7)) == (block, 40)
    assert prefixes.longest("a", tuple(range(50))) == (
        block,
        49,
    )  # the last token is always computed
    assert prefixes.longest("b", tuple(range(50))) is None
    assert prefixes.longest("a", (9, *range(1, 50))) is None
    assert prefixes.longest("a", tuple(range(10))) is None  # shorter than a chunk


def test_eviction_takes_the_oldest_unused(config: DecoderConfig):
    prefixes = PrefixCache()
    blocks = [filled(config, "a", [i] * 20) for i in range(4)]
    for block in blocks:
        prefixes.add(block)
        prefixes.index(block)
    prefixes.acquire(blocks[0])
    prefixes.acquire(blocks[1])
    prefixes.release(blocks[1])  # used just now, so no longer the oldest
    # 20 tokens x 512 bytes each, and a hidden state of 64 numbers
    assert prefixes.evict(10_000) == 10_496
    assert [("a", (i,) * 20) in prefixes for i in range(4)] == [True, True, False, True]
    assert prefixes.longest("a", (2,) * 30) is None
    assert (prefixes.used_bytes, prefixes.unused_bytes) == (10_496, 20_992)


def test_an_extended_block_continues_its_prompt(config: DecoderConfig):
    prompt = filled(config, "a", [1, 2, 3])
    answer = [torch.full((config.kv_heads, 2, config.head_dim), 7.0)] * config.layers
    block = Block.extended(prompt, [8, 9], answer, answer)
    assert block.ids == (1, 2, 3, 8, 9) and block.complete
    assert block.k[0, 0, :, 0].tolist() == [0, 1, 2, 7, 7]
