"""A block: the KV cache of one token sequence, shared by every sample of that prompt.

In:   token ids, and keys and values as they are computed
Out:  Block

Unlike vLLM's blocks of 16 tokens, a block holds a whole sequence: attention on a CPU then reads it
as one contiguous tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.models.architecture import DecoderConfig


class Block:
    """Keys and values of a token sequence, filled from the front."""

    def __init__(self, key: str, ids: Sequence[int], config: DecoderConfig, like: Tensor) -> None:
        """`key` names the adapter; the tensors get the type and device of `like`."""
        shape = (config.layers, config.kv_heads, len(ids), config.head_dim)
        self.key = key
        self.ids = tuple(ids)
        self.k = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.v = torch.empty_like(self.k)
        self.filled = 0
        """Tokens whose keys and values are computed."""
        self.last_hidden: Tensor | None = None  # [hidden], once filled; the next token's state
        self.users = 0
        """Requests that read it."""
        self.nbytes = self.kv_bytes + config.hidden * like.itemsize
        """Memory it takes once it is filled."""

    @property
    def complete(self) -> bool:
        return self.filled == len(self.ids)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.k.nbytes

    @classmethod
    def extended(
        cls, prompt: "Block", ids: Sequence[int], k: Sequence[Tensor], v: Sequence[Tensor]
    ) -> "Block":
        """A complete block of a prompt and the tokens after it, [kv_heads, T, head_dim] per layer."""
        block = cls.__new__(cls)
        block.key, block.ids = prompt.key, prompt.ids + tuple(ids)
        layers, kv_heads, length, dim = prompt.k.shape
        block.k = prompt.k.new_empty((layers, kv_heads, length + len(ids), dim))
        block.v = torch.empty_like(block.k)
        for target, before, after in ((block.k, prompt.k, k), (block.v, prompt.v, v)):
            target[:, :, :length] = before
            for layer, tokens in enumerate(after):
                target[layer, :, length:] = tokens
        block.filled = len(block.ids)
        block.last_hidden, block.users = None, 0
        block.nbytes = block.kv_bytes
        return block

    def copy_prefix(self, source: "Block", count: int) -> None:
        """Copy the first `count` tokens of a block that begins with the same ids."""
        self.k[:, :, :count] = source.k[:, :, :count]
        self.v[:, :, :count] = source.v[:, :, :count]
        self.filled = count
