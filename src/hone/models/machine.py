"""Which device and number type this machine computes fastest, found by trying.

In:   the machine
Out:  a device name, a torch dtype, a switch of torch's set once
Used: wherever a Decoder is loaded: the engine, the learner's worker, benchmarks

Guessing from a list of processors is wrong on the next one: a CPU without bf16 units runs bf16
a hundred times slower than fp32, one with them several times faster, and both say they support it.
"""

import functools
import platform
import warnings
from time import perf_counter

import torch

WORTH = 1.3
"""bf16 must be so many times faster to be chosen: it costs precision."""


def prefer_blas() -> None:
    """Send float32 matrix products to BLAS on Arm cores without SVE.

    There torch asks Arm's Compute Library, which is 10 to 30% slower than OpenBLAS at 32 to 128
    rows (Neoverse-N1, torch 2.13). A rule and not a trial: the learner's bits may not depend on
    how busy the machine was when it started. Holds for the whole process.
    """
    if _plain_arm():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TF32 on Intel GPUs, at every use of the switch
            torch.backends.mkldnn.set_flags(False)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices laid out beforehand are multiplied faster than BLAS lays them out itself."""
    return device.type == "cpu" and dtype == torch.float32 and _plain_arm()


def _plain_arm() -> bool:
    arm = platform.machine() in ("aarch64", "arm64")
    return arm and not torch.backends.cpu.get_cpu_capability().startswith("SVE")


def fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def fastest_dtype(device: str) -> torch.dtype:
    """float32, unless a matrix product in bfloat16 is clearly faster."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    wide, narrow = _product_s(torch.float32), _product_s(torch.bfloat16)
    return torch.bfloat16 if wide > WORTH * narrow else torch.float32


def _product_s(dtype: torch.dtype) -> float:
    """Best of three small products; torch's warning that a type lacks units is the answer itself."""
    x, w = torch.ones(32, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    times = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            started = perf_counter()
            torch.nn.functional.linear(x, w)
            times.append(perf_counter() - started)
    return min(times[1:])
