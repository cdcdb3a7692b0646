"""Blocks, prefixes and lanes."""

from pathlib import Path

import pytest
import torch

from hone.inference.blocks import Block
from hone.inference.kv import Lane, Prefixes, lane_capacity
from hone.inference.stacks import Room
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
    prefixes = Prefixes()
    block = filled(config, "a", list(range(50)))
    prefixes.add(block)
    prefixes.index(block)
    assert prefixes.longest("a", (*range(40), 7, 7)) == (block, 40)
    assert prefixes.longest("a", tuple(range(50))) == (block, 49)  # the last is always read
    assert prefixes.longest("b", tuple(range(50))) is None
    assert prefixes.longest("a", (9, *range(1, 50))) is None
    assert prefixes.longest("a", tuple(range(10))) is None  # shorter than a chunk


def test_eviction_takes_the_oldest_unused(config: DecoderConfig):
    prefixes = Prefixes()
    blocks = [filled(config, "a", [i] * 20) for i in range(4)]
    for block in blocks:
        prefixes.add(block)
        prefixes.index(block)
    prefixes.acquire(blocks[0])
    prefixes.acquire(blocks[1])
    prefixes.release(blocks[1])  # used just now, so no longer the oldest
    # 20 tokens x 512 bytes each
    assert prefixes.evict(10_000) == 10_240
    assert [("a", (i,) * 20) in prefixes for i in range(4)] == [True, True, False, True]
    assert prefixes.longest("a", (2,) * 30) is None
    assert (prefixes.used_bytes, prefixes.unused_bytes) == (10_240, 20_480)


def test_joined_blocks_continue_their_prompt(config: DecoderConfig):
    front = filled(config, "a", [1, 2, 3])
    own = torch.full((config.layers, config.kv_heads, 2, config.head_dim), 7.0)
    block = Block.joined(front, [8, 9], own, own)
    assert block.ids == (1, 2, 3, 8, 9) and block.complete
    assert block.k[0, 0, :, 0].tolist() == [0, 1, 2, 7, 7]


class Row:
    def __init__(self, mark: float, own: int, block: Block) -> None:
        self.mark, self.own, self.block = mark, own, block


def test_lanes_stay_without_holes_and_rows_keep_their_keys(config: DecoderConfig):
    block = filled(config, "a", [1])
    lane = Lane[Row](32, config, LIKE, Room(0))
    rows = [Row(float(i), 3 + i, block) for i in range(11)]
    for row in rows:
        slot = lane.add(row)
        lane.k[:, slot, :, : row.own] = row.mark
        lane.v[:, slot, :, : row.own] = -row.mark
    lane.remove(2)
    lane.remove(9)
    larger = Lane[Row](64, config, LIKE, Room(0))
    larger.copy_in(lane.rows[0], lane, 0)
    lane.remove(0)
    assert len(lane.rows) == 8
    for held in (lane, larger):
        for slot, row in enumerate(held.rows):
            assert (held.k[:, slot, :, : row.own] == row.mark).all()
            assert (held.v[:, slot, :, : row.own] == -row.mark).all()


@pytest.mark.parametrize(("own", "sorted_again"), [(8, True), (9, False)])
def test_short_rows_of_one_prompt_come_to_lie_side_by_side(
    config: DecoderConfig, own: int, sorted_again: bool
):
    one, two = filled(config, "a", [1]), filled(config, "a", [2])
    lane = Lane[Row](32, config, LIKE, Room(0))
    for mark, block in enumerate((one, two, one, two, one)):
        slot = lane.add(Row(float(mark), own, block))
        lane.k[:, slot, :, :own] = mark
        lane.v[:, slot, :, :own] = -mark
    lane.arrange()
    assert [row.mark for row in lane.rows] == ([0, 2, 4, 1, 3] if sorted_again else [0, 1, 2, 3, 4])
    for slot, row in enumerate(lane.rows):
        assert (lane.k[:, slot, :, :own] == row.mark).all()
        assert (lane.v[:, slot, :, :own] == -row.mark).all()


def test_lane_capacities_are_powers_of_two():
    assert [lane_capacity(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
