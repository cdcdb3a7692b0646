"""Slots and slot pools."""

from pathlib import Path

import pytest
import torch

from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prompt_batches import MemoryLimit
from hone.inference.embedded.slots import SlotPool, group_by_prompt, keep_slots, slot_capacity
from hone.models.architecture import DecoderConfig

LIKE = torch.zeros(1)


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def prompt(config: DecoderConfig, token: int) -> Block:
    block = Block("a", [token], config, LIKE)
    block.filled = 1
    return block


class Sequence:
    def __init__(self, mark: float, num_decoded: int, block: Block) -> None:
        self.mark, self.num_decoded, self.block = mark, num_decoded, block


def pool_of(config: DecoderConfig, sequences: list[Sequence]) -> SlotPool[Sequence]:
    pool = SlotPool[Sequence](32, config, LIKE, MemoryLimit(0))
    pool.resize(len(sequences))
    for sequence in sequences:
        slot = pool.add(sequence)
        for k, v in zip(pool.k, pool.v, strict=True):
            k[slot, :, : sequence.num_decoded] = sequence.mark
            v[slot, :, : sequence.num_decoded] = -sequence.mark
    return pool


def assert_keys(pool: SlotPool[Sequence]) -> None:
    for slot, sequence in enumerate(pool.sequences):
        for k, v in zip(pool.k, pool.v, strict=True):
            assert (k[slot, :, : sequence.num_decoded] == sequence.mark).all()
            assert (v[slot, :, : sequence.num_decoded] == -sequence.mark).all()


@pytest.mark.parametrize("num_slots", [None, 9])
def test_used_slots_are_contiguous_and_sequences_keep_their_keys(
    config: DecoderConfig, num_slots: int | None
):
    block = prompt(config, 1)
    sequences = [Sequence(float(i), 3 + i, block) for i in range(11)]
    pool, larger = pool_of(config, sequences), SlotPool[Sequence](64, config, LIKE, MemoryLimit(0))
    # 2 and 9 leave, 0 moves and becomes two, 4 becomes two.
    copy, moved = Sequence(4.0, 7, block), Sequence(0.0, 3, block)
    stay = [(sequence, i) for i, sequence in enumerate(sequences) if i not in (0, 2, 9)] + [
        (copy, 4)
    ]
    pool.advance(
        keep_slots(stay),
        [(sequences[0], 0), (moved, 0)],
        larger,
        num_slots=num_slots,
        target_slots=2,
    )
    assert sorted(sequence.mark for sequence in pool.sequences) == [1, 3, 4, 4, 5, 6, 7, 8, 10]
    assert larger.sequences == [sequences[0], moved]
    assert pool.num_slots == (num_slots or 11) and larger.num_slots == 2
    assert_keys(pool)
    assert_keys(larger)
    assert (larger.k[0][:, :, 3:] == 0).all()


def test_as_few_sequences_as_possible_change_their_slot(config: DecoderConfig):
    block = prompt(config, 1)
    sequences = [Sequence(float(i), 20, block) for i in range(5)]
    # 1 has left, 3 has become two: the last sequence and the new one fill the hole and the end.
    assert keep_slots(
        [
            (sequences[0], 0),
            (sequences[2], 2),
            (sequences[3], 3),
            (sequences[3], 3),
            (sequences[4], 4),
        ]
    ) == [
        (sequences[0], 0),
        (sequences[3], 3),
        (sequences[2], 2),
        (sequences[3], 3),
        (sequences[4], 4),
    ]


@pytest.mark.parametrize(("num_decoded", "sorted_again"), [(8, True), (9, False)])
def test_short_sequences_of_one_prompt_become_contiguous(
    config: DecoderConfig, num_decoded: int, sorted_again: bool
):
    one, two = prompt(config, 1), prompt(config, 2)
    sequences = [
        Sequence(float(mark), num_decoded, b) for mark, b in enumerate((one, two, one, two, one))
    ]
    pool = pool_of(config, sequences)
    pool.advance(group_by_prompt([(sequence, slot) for slot, sequence in enumerate(sequences)]))
    assert [sequence.mark for sequence in pool.sequences] == (
        [0, 2, 4, 1, 3] if sorted_again else [0, 1, 2, 3, 4]
    )
    assert_keys(pool)


def test_slot_capacities_are_powers_of_two():
    assert [slot_capacity(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
