"""Merge the busiest adapter into a copy of the weights.

In:   the adapters of every pass, and how many rows each computed
Out:  the decoder for the next pass

An unmerged adapter costs every row two more matrix products per layer. A merge costs as much as
MERGE_AFTER rows lose by that, so it starts once an adapter has computed that many rows: the total
cost is at most twice that of the better choice. One layer is merged before each pass, so that no
pass waits for all of them and the same requests always run the same kernels. A pass with several
adapters uses the unmerged weights.
"""

from collections.abc import Sequence

import torch

from hone.models.decoder import Decoder, Layer, Span
from hone.models.fit import available_memory
from hone.models.lora import Lora

MERGE_AFTER = 2048
"""Number of rows. Measured on two Neoverse-N1 cores with a 135M-parameter model."""
MEMORY_SHARE = 4
"""Weights are copied if they need less than this fraction (1 / N) of the free memory."""


class AdapterMerger:
    """One decoder, and at most one copy of it with an adapter merged into its matrices."""

    def __init__(self, decoder: Decoder, *, after: int = MERGE_AFTER) -> None:
        self._decoder = decoder
        self._after = after
        self._adapter: Lora | None = None
        """The adapter whose rows are counted and whose copy exists or is being built."""
        self._rows = 0
        self._layers: list[Layer] = []
        self._copy: Decoder | None = None

    def decoder(self, rows: int, adapters: Sequence[Span]) -> tuple[Decoder, Sequence[Span]]:
        """The decoder for a pass of `rows` rows, and the adapters that are not merged into it."""
        only = adapters[0][2] if len(adapters) == 1 and adapters[0][:2] == (0, rows) else None
        if only is None:
            return self._decoder, adapters
        if only is not self._adapter:
            self.forget()
            self._adapter = only
        self._rows += rows
        if self._copy is None and self._rows >= self._after:
            self._merge_next_layer(only)
        return (self._decoder, adapters) if self._copy is None else (self._copy, ())

    def forget(self, adapter: Lora | None = None) -> None:
        """Free the copy; with `adapter`, only if it is the copy of that one."""
        if adapter is None or adapter is self._adapter:
            self._adapter, self._rows, self._layers, self._copy = None, 0, [], None

    def _merge_next_layer(self, lora: Lora) -> None:
        """Merge one more layer, if the dtype allows it and there is enough memory."""
        if self._decoder.dtype != torch.float32:
            return
        if not self._layers and not has_memory_for_copy(self._decoder):
            return
        self._layers.append(self._decoder.layers[len(self._layers)].merged(lora))
        if len(self._layers) == len(self._decoder.layers):
            self._copy, self._layers = self._decoder.with_layers(self._layers), []


def has_memory_for_copy(decoder: Decoder) -> bool:
    """Whether there is enough free memory for one more copy of the matrices."""
    return decoder.nbytes < available_memory(str(decoder.device)) // MEMORY_SHARE
