"""The interface between the learner and a model: hidden states of a packed row, and the head.

In:   a PackedRow and an adapter or none
Out:  hidden states with gradients of the adapter's tensors; the head that turns them into logits

There are two bodies: hone's own decoder, which is faster on a CPU, and the transformers model,
which runs on CUDA and supports every family. Both use the same adapters and write the same files.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hone.learner.attention import ancestors_attention
from hone.learner.logprobs import Head
from hone.learner.offload import free_cached
from hone.learner.trie import PackedRow
from hone.models import fit
from hone.models.decoder import Decoder
from hone.models.lora import Layout, Lora
from hone.models.shape import trains_decoder, unrestricted


class Body(Protocol):
    """A frozen model that an adapter is trained on."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def layout(self) -> Layout:
        """The linear layers that an adapter of this model covers."""
        ...

    def layout_of(self, target_modules: Collection[str]) -> Layout:
        """The linear layers of an adapter that covers only these; ConfigError if impossible."""
        ...

    @property
    def head(self) -> Head: ...

    @property
    def unshared(self) -> str:
        """Why every path is computed separately; empty if paths share their prefixes."""
        ...

    @property
    def fills_rows(self) -> bool:
        """Whether unrelated subtrees in one row cost nothing, so that long rows are faster."""
        ...

    def arranged(self, row: PackedRow, like: int = 0) -> PackedRow:
        """The row as this body computes it: the same nodes, perhaps with padding between them.

        A body that pads gives it the length of a row of `like` tokens, if that is longer.
        """
        ...

    def hidden(self, row: PackedRow, lora: Lora | None) -> Tensor:
        """Hidden states of an arranged row before the head, [L, hidden]; no adapter: the base model.

        Under `torch.no_grad` the same kernels run and give the same bits.
        """
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about training this model, for the log."""
        ...

    def row_tokens(self, rank: int) -> int:
        """Tokens of the longest row that fits into the learner's memory."""
        ...

    def release(self, *, weights: bool) -> None:
        """Free device memory that only a job needs; with `weights` that of the model, too."""
        ...

    def restore(self, rank: int) -> None:
        """Prepare for a job that trains an adapter of this rank, also after `release`."""
        ...


class DecoderBody:
    """hone's own decoder."""

    unshared = ""
    fills_rows = False
    notes: tuple[str, ...] = ()

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def vocab(self) -> int:
        return self.decoder.config.vocab

    @property
    def max_positions(self) -> int:
        return self.decoder.config.max_positions

    @property
    def layout(self) -> Layout:
        return self.decoder.config

    @property
    def head(self) -> Head:
        return Head(self.decoder.head)

    def layout_of(self, target_modules: Collection[str]) -> Layout:
        return unrestricted(self.layout, target_modules)

    def arranged(self, row: PackedRow, like: int = 0) -> PackedRow:
        return row

    def hidden(self, row: PackedRow, lora: Lora | None) -> Tensor:
        decoder, device = self.decoder, self.device
        attend = ancestors_attention(row, decoder.config, device=device, dtype=decoder.dtype)
        token_ids, positions = row.token_ids.to(device), row.positions.to(device)
        return decoder.hidden_for_training(token_ids, positions, attend, lora)

    def row_tokens(self, rank: int) -> int:
        decoder = self.decoder
        return fit.row_tokens(
            decoder.config.raw,
            dtype_bytes=decoder.dtype.itemsize,
            rank=rank,
            device=str(decoder.device),
        )

    def release(self, *, weights: bool) -> None:
        """Does nothing: its models are small, and their weights stay in memory."""
        free_cached(self.device)

    def restore(self, rank: int) -> None:
        """Does nothing: nothing was released."""


def load_body(
    directory: Path, *, device: str, dtype: torch.dtype, memory: int | None = None
) -> Body:
    """The body of an HF directory: on a CPU, hone's own decoder if it supports the model.

    `memory` replaces the learner's share of a GPU, in bytes.
    """
    raw = json.loads((directory / "config.json").read_text())
    if trains_decoder(raw, device):
        return DecoderBody(Decoder.load(directory, device=device, dtype=dtype))
    from hone.learner.transformers_body import TransformersBody  # takes seconds to import

    return TransformersBody.load(directory, device=device, dtype=dtype, memory=memory)


def as_body(model: Decoder | Body) -> Body:
    return DecoderBody(model) if isinstance(model, Decoder) else model
