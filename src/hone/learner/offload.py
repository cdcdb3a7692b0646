"""Memory that moves between host and GPU: frozen weights between two jobs, inputs of a row.

In:   a model whose parameters never change; tensors in host memory
Out:  the same parameters, on the GPU or in host memory; copies on the GPU

vLLM and the learner take turns on a GPU. The weights are copied to host memory once; after that,
bytes are only copied back to the GPU. Parameters stay the same objects, so compiled code stays
valid.
"""

import torch
from torch import Tensor, nn


class HostWeights:
    """The parameters of a model, and a copy of them in host memory."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._parameters = list(dict.fromkeys(model.parameters()))
        self._device = device
        self._host: list[Tensor] = []
        self._away = False

    def release(self) -> None:
        """Free the parameters' GPU memory, also after a `restore` that ran out of it halfway."""
        if not self._host:
            pinned = self._device.type == "cuda"  # copies are then several times as fast
            self._host = [
                torch.empty_like(parameter, device="cpu", pin_memory=pinned).copy_(parameter)
                for parameter in self._parameters
            ]
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host
        self._away = True

    def restore(self) -> None:
        """Copy the parameters back to the GPU, which needs the same amount of memory."""
        if not self._away:
            return
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host.to(self._device, non_blocking=True, copy=True)
        self._away = False


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device. Does not wait for the GPU to finish its earlier work.

    So the next row is prepared and launched while the GPU still computes this one.
    """
    if torch.device(device).type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def free_cached(device: torch.device) -> None:
    """Return memory that torch's allocator caches to the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
