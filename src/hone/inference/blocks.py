"""Keys and values of a prompt, shared by every sample of it.

In:   token ids, and keys and values as they are computed
Out:  Block
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.models.architecture import DecoderConfig


class Block:
    """Keys and values of a token sequence, filled from the front."""

    def __init__(self, key: str, ids: Sequence[int], config: DecoderConfig, like: Tensor) -> None:
        shape = (config.layers, config.kv_heads, len(ids), config.head_dim)
        self.key = key
        self.ids = tuple(ids)
        self.k = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.v = torch.empty_like(self.k)
        self.filled = 0
        self.last_hidden: Tensor | None = None  # [hidden], once filled: the next token's state
        self.users = 0
        self.nbytes = self.kv_bytes + config.hidden * like.itemsize
        """Memory it takes once it is filled."""

    @property
    def complete(self) -> bool:
        return self.filled == len(self.ids)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.k.nbytes

    @classmethod
    def joined(
        cls, front: "Block", ids: Sequence[int], k: Sequence[Tensor], v: Sequence[Tensor]
    ) -> "Block":
        """A whole block: one that exists, and the own tokens after it, [kv_heads, T, dim] a layer."""
        block = cls.__new__(cls)
        block.key, block.ids = front.key, front.ids + tuple(ids)
        layers, kv_heads, prompt, dim = front.k.shape
        block.k = front.k.new_empty((layers, kv_heads, prompt + len(ids), dim))
        block.v = torch.empty_like(block.k)
        for joined, before, own in ((block.k, front.k, k), (block.v, front.v, v)):
            joined[:, :, :prompt] = before
            for layer, tokens in enumerate(own):
                joined[layer, :, prompt:] = tokens
        block.filled = len(block.ids)
        block.last_hidden, block.users = None, 0
        block.nbytes = block.kv_bytes
        return block

    def copy_front(self, source: "Block", count: int) -> None:
        """Take over the first tokens of another block that begins alike."""
        self.k[:, :, :count] = source.k[:, :, :count]
        self.v[:, :, :count] = source.v[:, :, :count]
        self.filled = count
