"""Blocks, prefixes and lanes."""

from pathlib import Path

import pytest
import torch

from hone.inference.blocks import Block
from hone.inference.kv import Lane, Prefixes, in_place, lane_capacity, side_by_side
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
    # 20 tokens x 512 bytes each, and a hidden state of 64 numbers
    assert prefixes.evict(10_000) == 10_496
    assert [("a", (i,) * 20) in prefixes for i in range(4)] == [True, True, False, True]
    assert prefixes.longest("a", (2,) * 30) is None
    assert (prefixes.used_bytes, prefixes.unused_bytes) == (10_496, 20_992)


def test_joined_blocks_continue_their_prompt(config: DecoderConfig):
    front = filled(config, "a", [1, 2, 3])
    own = [torch.full((config.kv_heads, 2, config.head_dim), 7.0)] * config.layers
    block = Block.joined(front, [8, 9], own, own)
    assert block.ids == (1, 2, 3, 8, 9) and block.complete
    assert block.k[0, 0, :, 0].tolist() == [0, 1, 2, 7, 7]


class Row:
    def __init__(self, mark: float, own: int, block: Block) -> None:
        self.mark, self.own, self.block = mark, own, block


def lane_of(config: DecoderConfig, rows: list[Row]) -> Lane[Row]:
    lane = Lane[Row](32, config, LIKE, Room(0))
    lane.resize(len(rows))
    for row in rows:
        slot = lane.add(row)
        for k, v in zip(lane.k, lane.v, strict=True):
            k[slot, :, : row.own] = row.mark
            v[slot, :, : row.own] = -row.mark
    return lane


def assert_keys(lane: Lane[Row]) -> None:
    for slot, row in enumerate(lane.rows):
        for k, v in zip(lane.k, lane.v, strict=True):
            assert (k[slot, :, : row.own] == row.mark).all()
            assert (v[slot, :, : row.own] == -row.mark).all()


@pytest.mark.parametrize("seats", [None, 9])
def test_lanes_stay_without_holes_and_rows_keep_their_keys(
    config: DecoderConfig, seats: int | None
):
    block = filled(config, "a", [1])
    rows = [Row(float(i), 3 + i, block) for i in range(11)]
    lane, larger = lane_of(config, rows), Lane[Row](64, config, LIKE, Room(0))
    # 2 and 9 leave, 0 moves and becomes two, 4 becomes two.
    twin, moved = Row(4.0, 7, block), Row(0.0, 3, block)
    stay = [(row, i) for i, row in enumerate(rows) if i not in (0, 2, 9)] + [(twin, 4)]
    lane.advance(in_place(stay), [(rows[0], 0), (moved, 0)], larger, seats=seats, target_seats=2)
    assert sorted(row.mark for row in lane.rows) == [1, 3, 4, 4, 5, 6, 7, 8, 10]
    assert larger.rows == [rows[0], moved]
    assert lane.seats == (seats or 11) and larger.seats == 2
    assert_keys(lane)
    assert_keys(larger)
    assert (larger.k[0][:, :, 3:] == 0).all()


def test_as_few_rows_as_possible_leave_their_slot(config: DecoderConfig):
    block = filled(config, "a", [1])
    rows = [Row(float(i), 20, block) for i in range(5)]
    # 1 has left, 3 has become two: the last row and the new one fill the hole and the end.
    assert in_place([(rows[0], 0), (rows[2], 2), (rows[3], 3), (rows[3], 3), (rows[4], 4)]) == [
        (rows[0], 0),
        (rows[3], 3),
        (rows[2], 2),
        (rows[3], 3),
        (rows[4], 4),
    ]


@pytest.mark.parametrize(("own", "sorted_again"), [(8, True), (9, False)])
def test_short_rows_of_one_prompt_come_to_lie_side_by_side(
    config: DecoderConfig, own: int, sorted_again: bool
):
    one, two = filled(config, "a", [1]), filled(config, "a", [2])
    rows = [Row(float(mark), own, b) for mark, b in enumerate((one, two, one, two, one))]
    lane = lane_of(config, rows)
    lane.advance(side_by_side([(row, slot) for slot, row in enumerate(rows)]))
    assert [row.mark for row in lane.rows] == ([0, 2, 4, 1, 3] if sorted_again else [0, 1, 2, 3, 4])
    assert_keys(lane)


def test_lane_capacities_are_powers_of_two():
    assert [lane_capacity(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
