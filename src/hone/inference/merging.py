"""The adapter that samples most, merged into a copy of the weights.

In:   the adapters of every pass, and how many rows each computed
Out:  the decoder to take the next pass with

An adapter beside the weights costs every row two more products a layer, five percent on two cores.
Merging it costs as much as two thousand rows lose by that, so it is done once that many have been
computed: whatever comes, that is at most twice what the better choice would have cost. One layer is
merged before each pass: nobody waits for all of them, and the same requests always take the same
way. A pass in which others take part is computed as before.
"""

from collections.abc import Sequence

import torch

from hone.models.decoder import Decoder, Layer, Span
from hone.models.fit import available_memory
from hone.models.lora import Lora

MERGE_AFTER = 2048
"""Rows: on two Neoverse-N1 cores and a model of 135M what they lose is what a merged copy costs."""
ROOMY = 4
"""Weights are copied if they take less than 1 / this of the free memory."""


class Merging:
    """One decoder, and at most one copy of it with an adapter in its matrices."""

    def __init__(self, decoder: Decoder, *, after: int = MERGE_AFTER) -> None:
        self._decoder = decoder
        self._after = after
        self._adapter: Lora | None = None
        """Whose rows are counted, and whose copy is made or there."""
        self._rows = 0
        self._layers: list[Layer] = []
        self._copy: Decoder | None = None

    def decoder(self, rows: int, adapters: Sequence[Span]) -> tuple[Decoder, Sequence[Span]]:
        """With what to compute so many rows, and what is still to be added beside it."""
        alone = adapters[0][2] if len(adapters) == 1 and adapters[0][:2] == (0, rows) else None
        if alone is None:
            return self._decoder, adapters
        if alone is not self._adapter:
            self.forget()
            self._adapter = alone
        self._rows += rows
        if self._copy is None and self._rows >= self._after:
            self._go_on(alone)
        return (self._decoder, adapters) if self._copy is None else (self._copy, ())

    def forget(self, adapter: Lora | None = None) -> None:
        """Free the copy, if there is one; with an adapter, only the copy of that one."""
        if adapter is None or adapter is self._adapter:
            self._adapter, self._rows, self._layers, self._copy = None, 0, [], None

    def _go_on(self, lora: Lora) -> None:
        """One layer more, if there is a point in it and room for it."""
        if self._decoder.dtype != torch.float32 or not (self._layers or roomy(self._decoder)):
            return
        self._layers.append(self._decoder.layers[len(self._layers)].merged(lora))
        if len(self._layers) == len(self._decoder.layers):
            self._copy, self._layers = self._decoder.with_layers(self._layers), []


def roomy(decoder: Decoder) -> bool:
    """Whether the memory has room for one more copy of the matrices."""
    return decoder.nbytes < available_memory(str(decoder.device)) // ROOMY
