"""Stacks: prompts side by side, copied seldom, and never more of them than there is room."""

from pathlib import Path

import pytest
import torch

from hone.inference.blocks import Block
from hone.inference.stacks import Room, Stacks
from hone.models.architecture import DecoderConfig

LIKE = torch.zeros(1)
ROOM = 1 << 20


@pytest.fixture
def config(tiny_llama_dir: Path) -> DecoderConfig:
    return DecoderConfig.read(tiny_llama_dir)


def blocks(config: DecoderConfig, *lengths: int) -> list[Block]:
    """Whose keys are random, 512 bytes a token."""
    made = [Block("a", [7] * length, config, LIKE) for length in lengths]
    for block in made:
        block.k.normal_()
        block.v.normal_()
    return made


def held(stacks: list) -> list[list[int | None]]:
    """The lengths of the prompts in each, None for one that has left."""
    return [[b and len(b.ids) for b in stack.blocks] for stack in stacks]


def test_a_stack_holds_the_keys_of_its_prompts_and_hides_the_rest(config: DecoderConfig):
    prompts = blocks(config, 5, 9, 7)
    (stack,) = Stacks(Room(ROOM)).over(prompts)
    assert stack.blocks == prompts
    assert stack.mask is not None and stack.mask.shape == (3, 1, 1, 9)
    for i, prompt in enumerate(prompts):
        end = len(prompt.ids)
        assert torch.equal(stack.k[:, i, :, :end], prompt.k)
        assert torch.equal(stack.v[:, i, :, :end], prompt.v)
        assert (stack.mask[i, 0, 0, :end] == 0).all() and (stack.mask[i, 0, 0, end:] < -1e29).all()
    (even,) = Stacks(Room(ROOM)).over(blocks(config, 6, 6))
    assert even.mask is None


def test_one_is_kept_until_half_of_it_has_left(config: DecoderConfig):
    stacks, prompts = Stacks(Room(ROOM)), blocks(config, 4, 5, 6, 7)
    (first,) = stacks.over(prompts)
    assert stacks.over(prompts[1:]) == [first]
    assert held([first]) == [[None, 5, 6, 7]]
    again = stacks.over(prompts[2:])
    assert held(again) == [[6, 7]] and again[0] is not first
    assert stacks.over(prompts[3:]) == []  # one prompt is read where it lies


def test_newcomers_wait_until_there_are_four(config: DecoderConfig):
    stacks, old, new = Stacks(Room(ROOM)), blocks(config, 8, 8, 8), blocks(config, 8, 8, 8, 9)
    (first,) = stacks.over(old)
    assert stacks.over([*old, *new[:3]]) == [first]
    assert held(stacks.over([*old, *new])) == [[8, 8, 8, 8, 8, 8, 9]]


def test_a_large_one_is_not_copied_for_newcomers(config: DecoderConfig):
    # A stack may take a quarter: 512 tokens.
    stacks, old, new = Stacks(Room(ROOM)), blocks(config, *[100] * 4), blocks(config, *[90] * 4)
    (first,) = stacks.over(old)
    both = stacks.over([*old, *new])
    assert both[0] is first and held(both) == [[100] * 4, [90] * 4]


def test_what_is_unequal_is_stacked_with_its_like(config: DecoderConfig):
    found = Stacks(Room(ROOM)).over(blocks(config, 3, 100, 4, 90, 5, 80))
    assert held(found) == [[3, 4, 5], [80, 90, 100]]


def test_there_are_never_more_than_there_is_room(config: DecoderConfig):
    long = blocks(config, *[400] * 8)  # two of them would take more than a quarter
    assert Stacks(Room(ROOM)).over(long) == []
    stacks, many = Stacks(Room(ROOM)), blocks(config, *[250] * 10)
    assert stacks.over(many) == []  # 2,500 tokens are more than the 2,048 there is room for
    some = stacks.over(many[:8])
    assert held(some) == [[250, 250]] * 4
    # What cannot be stacked does not make the others be copied anew.
    assert [id(s) for s in stacks.over([*many[:8], *long])] == [id(s) for s in some]
    assert Stacks(Room(0)).over(many) == []


def test_lanes_share_the_room_and_one_that_ends_leaves_its_part(config: DecoderConfig):
    room, first, second = Room(ROOM), blocks(config, *[250] * 6), blocks(config, *[250] * 4)
    one, two = Stacks(room), Stacks(room)
    assert held(one.over(first)) == [[250, 250]] * 3
    assert room.taken == one.nbytes == 6 * 250 * 512
    assert two.over(second) == []  # 2,500 tokens in all
    del one
    assert held(two.over(second)) == [[250, 250]] * 2
    assert room.taken == two.nbytes
