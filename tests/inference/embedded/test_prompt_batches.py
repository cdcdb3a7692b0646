"""Prompt batches: several prompts in one tensor, rebuilt seldom, within a memory limit."""

from pathlib import Path

import pytest
import torch

from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prompt_batches import MemoryLimit, PromptBatches
from hone.models.architecture import DecoderConfig

LIKE = torch.zeros(1)
LIMIT = 1 << 20


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def blocks(config: DecoderConfig, *sizes: int) -> list[Block]:
    """Blocks with random keys, 512 bytes a token."""
    blocks = [Block("a", [7] * length, config, LIKE) for length in sizes]
    for block in blocks:
        block.k.normal_()
        block.v.normal_()
    return blocks


def lengths(batches: list) -> list[list[int | None]]:
    """The lengths of the prompts in each, None for one that has left."""
    return [[b and len(b.ids) for b in batch.blocks] for batch in batches]


def test_a_batch_holds_the_keys_of_its_prompts_and_masks_the_padding(config: DecoderConfig):
    prompts = blocks(config, 5, 9, 7)
    (batch,) = PromptBatches(MemoryLimit(LIMIT)).update(prompts)
    assert batch.blocks == prompts
    assert batch.mask is not None and batch.mask.shape == (3, 1, 1, 9)
    for i, prompt in enumerate(prompts):
        end = len(prompt.ids)
        assert torch.equal(batch.k[:, i, :, :end], prompt.k)
        assert torch.equal(batch.v[:, i, :, :end], prompt.v)
        assert (batch.mask[i, 0, 0, :end] == 0).all() and (batch.mask[i, 0, 0, end:] < -1e29).all()
    (even,) = PromptBatches(MemoryLimit(LIMIT)).update(blocks(config, 6, 6))
    assert even.mask is None


def test_a_batch_is_used_until_half_of_it_has_left(config: DecoderConfig):
    batches, prompts = PromptBatches(MemoryLimit(LIMIT)), blocks(config, 4, 5, 6, 7)
    (first,) = batches.update(prompts)
    assert batches.update(prompts[1:]) == [first]
    assert lengths([first]) == [[None, 5, 6, 7]]
    again = batches.update(prompts[2:])
    assert lengths(again) == [[6, 7]] and again[0] is not first
    assert batches.update(prompts[3:]) == []  # one prompt is read from its own block


def test_new_prompts_are_batched_once_there_are_four(config: DecoderConfig):
    batches = PromptBatches(MemoryLimit(LIMIT))
    old, new = blocks(config, 8, 8, 8), blocks(config, 8, 8, 8, 9)
    (first,) = batches.update(old)
    assert batches.update([*old, *new[:3]]) == [first]
    assert lengths(batches.update([*old, *new])) == [[8, 8, 8, 8, 8, 8, 9]]


def test_a_large_batch_is_not_rebuilt_for_new_prompts(config: DecoderConfig):
    # A batch may take a quarter: 512 tokens.
    batches = PromptBatches(MemoryLimit(LIMIT))
    old, new = blocks(config, *[100] * 4), blocks(config, *[90] * 4)
    (first,) = batches.update(old)
    both = batches.update([*old, *new])
    assert both[0] is first and lengths(both) == [[100] * 4, [90] * 4]


def test_prompts_are_batched_with_those_of_similar_length(config: DecoderConfig):
    batches = PromptBatches(MemoryLimit(LIMIT)).update(blocks(config, 3, 100, 4, 90, 5, 80))
    assert lengths(batches) == [[3, 4, 5], [80, 90, 100]]


def test_batches_stay_within_the_limit(config: DecoderConfig):
    long = blocks(config, *[400] * 8)  # two of them would take more than a quarter
    assert PromptBatches(MemoryLimit(LIMIT)).update(long) == []
    batches, many = PromptBatches(MemoryLimit(LIMIT)), blocks(config, *[250] * 10)
    assert batches.update(many) == []  # 2,500 tokens exceed the limit of 2,048
    some = batches.update(many[:8])
    assert lengths(some) == [[250, 250]] * 4
    # Prompts that cannot be batched do not cause the others to be rebuilt.
    assert [id(s) for s in batches.update([*many[:8], *long])] == [id(s) for s in some]
    assert PromptBatches(MemoryLimit(0)).update(many) == []


def test_pools_share_the_limit_and_a_dropped_pool_frees_its_share(config: DecoderConfig):
    limit, first, second = (
        MemoryLimit(LIMIT),
        blocks(config, *[250] * 6),
        blocks(config, *[250] * 4),
    )
    one, two = PromptBatches(limit), PromptBatches(limit)
    assert lengths(one.update(first)) == [[250, 250]] * 3
    assert limit.used_bytes == one.nbytes == 6 * 250 * 512
    assert two.update(second) == []  # 2,500 tokens in all
    del one
    assert lengths(two.update(second)) == [[250, 250]] * 2
    assert limit.used_bytes == two.nbytes
