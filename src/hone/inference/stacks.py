"""Prompts laid side by side, so that one call of attention serves many of them.

In:   the blocks whose branches advance
Out:  Stack: keys and values of several prompts in one piece

A call for every prompt costs more than the attention in it, unless prompts are long. But a stack is a
copy: it is made when several prompts have come, kept until half of them have left, and all together
never take more than their room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from hone.inference.blocks import Block

NEWCOMERS = 4
"""So many prompts that are in no stack are worth a copy; or two where there is no stack."""
MASK_BYTES = 4
PIECES = 4
"""One stack takes at most this part of the room, so that what is copied anew stays small."""


@dataclass(slots=True)
class Stack:
    """Keys and values of prompts of about equal length."""

    blocks: list[Block | None]
    """None where a prompt has left."""
    k: Tensor  # [layers, prompts, kv_heads, longest, dim]
    v: Tensor
    mask: Tensor | None  # [prompts, 1, 1, longest] added to scores, where lengths differ

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "Stack":
        like, lengths = blocks[0].k, [len(block.ids) for block in blocks]
        layers, kv_heads, _, dim = like.shape
        # Not empty: what is masked has no weight, but 0 x NaN would still be NaN.
        k = like.new_zeros((layers, len(blocks), kv_heads, max(lengths), dim))
        v = torch.zeros_like(k)
        for i, block in enumerate(blocks):
            k[:, i, :, : len(block.ids)] = block.k
            v[:, i, :, : len(block.ids)] = block.v
        if min(lengths) == max(lengths):
            return cls(list(blocks), k, v, None)
        ends = torch.tensor(lengths, device=like.device)[:, None]
        beyond = torch.arange(max(lengths), device=like.device) >= ends
        return cls(list(blocks), k, v, hide(beyond)[:, None, None])

    @property
    def nbytes(self) -> int:
        return 2 * self.k.nbytes + (0 if self.mask is None else self.mask.nbytes)

    @property
    def present(self) -> list[Block]:
        return [block for block in self.blocks if block is not None]


class Room:
    """Bytes that the stacks of all lanes share."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.users: WeakSet[Stacks] = WeakSet()  # a lane that is dropped leaves its place

    @property
    def taken(self) -> int:
        return sum(stacks.nbytes for stacks in self.users)

    def resize(self, nbytes: int) -> None:
        """Give the stacks more memory, or less: what no longer fits is dropped and made anew later."""
        self.nbytes = nbytes
        if self.taken > nbytes:
            for stacks in self.users:
                stacks.clear()


class Stacks:
    """The stacks of one lane."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._stacks: list[Stack] = []
        room.users.add(self)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks)

    def clear(self) -> None:
        self._stacks = []

    def over(self, blocks: Sequence[Block]) -> list[Stack]:
        """Stacks of these blocks; one that is in none of them is best read by itself."""
        here = {id(block) for block in blocks}
        for stack in self._stacks:
            stack.blocks = [b if b is not None and id(b) in here else None for b in stack.blocks]
        self._stacks = [s for s in self._stacks if 2 * len(s.present) > len(s.blocks)]
        held = {id(block) for stack in self._stacks for block in stack.present}
        if len(blocks) - len(held) >= (NEWCOMERS if held else 2):
            self._take_in([block for block in blocks if id(block) not in held], blocks)
        return self._stacks

    def _take_in(self, new: list[Block], blocks: Sequence[Block]) -> None:
        """Stack the new ones, together with those of stacks that are small yet."""
        most = self._room.nbytes // PIECES
        large = [stack for stack in self._stacks if stack.nbytes > most // 2]
        stay = {id(block) for stack in large for block in stack.present}
        groups = _alike([block for block in blocks if id(block) not in stay], most)
        size = sum(map(_padded, groups))
        stacked = {id(block) for group in groups for block in group}
        others = self._room.taken - self.nbytes + sum(stack.nbytes for stack in large)
        if size + others <= self._room.nbytes and any(id(block) in stacked for block in new):
            self._stacks = large  # the small ones make way before they are copied anew
            for group in groups:
                self._stacks.append(Stack.of(group))


def _alike(blocks: Sequence[Block], most: int) -> list[list[Block]]:
    """Groups of two or more that are padded to twice their size at most, and take `most` bytes."""

    def fits(group: Sequence[Block]) -> bool:
        return _padded(group) <= min(most, 2 * sum(block.kv_bytes for block in group))

    if fits(blocks):  # in their own order, so that nothing has to be gathered
        return [list(blocks)] if len(blocks) > 1 else []
    groups: list[list[Block]] = [[]]
    for block in sorted(blocks, key=lambda block: len(block.ids)):
        if groups[-1] and not fits([*groups[-1], block]):
            groups.append([])
        groups[-1].append(block)
    return [group for group in groups if len(group) > 1]


def _padded(group: Sequence[Block]) -> int:
    """Bytes of their stack and its mask."""
    longest = max(group, key=lambda block: block.kv_bytes)
    return len(group) * (longest.kv_bytes + MASK_BYTES * len(longest.ids))


def hide(hidden: Tensor) -> Tensor:
    """What to add to scores so that these have no weight."""
    # Finite, so that a row of which everything is hidden gives a weight of zero and not NaN.
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -1e30)
