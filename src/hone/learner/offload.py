"""Frozen weights that leave the GPU between two jobs.

In:   a model whose parameters never change
Out:  the same parameters, on the GPU or in the machine's memory

vLLM and the learner share a GPU in turn. The weights are copied to the machine's memory once; after that
only the way back to the GPU moves bytes. Parameters stay the same objects, so compiled code stays valid.
"""

import torch
from torch import Tensor, nn


class HostWeights:
    """The parameters of a model, and a copy of them in the machine's memory."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._parameters = list(dict.fromkeys(model.parameters()))
        self._device = device
        self._host: list[Tensor] = []
        self._away = False

    def release(self) -> None:
        """Take the parameters from the GPU."""
        if self._away:
            return
        if not self._host:
            pinned = self._device.type == "cuda"  # from there copies are several times as fast
            self._host = [
                torch.empty_like(parameter, device="cpu", pin_memory=pinned).copy_(parameter)
                for parameter in self._parameters
            ]
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host
        self._away = True

    def restore(self) -> None:
        """Put them back; needs the memory they had."""
        if not self._away:
            return
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host.to(self._device, non_blocking=True, copy=True)
        self._away = False


def free_cached(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
