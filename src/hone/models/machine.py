"""The device and dtype for this machine.

In:   the machine, and a device if the user names one
Out:  a device name, a torch dtype, one switch of torch

One function decides for the engine and for the learner: if they differed, every importance weight would
correct for rounding instead of for staleness. A CPU always computes in float32: without bfloat16 units
bfloat16 is a hundred times slower, although torch reports it as supported.
"""

import platform
import warnings

import torch


def prefer_blas() -> None:
    """Send float32 matrix products to BLAS on Arm cores without SVE.

    There torch uses Arm's Compute Library, which is 10 to 30% slower than OpenBLAS at 32 to 128 rows
    (Neoverse-N1, torch 2.13). A fixed rule, not a measurement at startup: the learner's bits must not
    depend on how busy the machine is. Holds for the whole process.
    """
    if _plain_arm():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TF32 on Intel GPUs, at every use of the switch
            torch.backends.mkldnn.set_flags(False)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices in oneDNN's packed layout are faster than plain ones with BLAS."""
    return device.type == "cpu" and dtype == torch.float32 and _plain_arm()


def _plain_arm() -> bool:
    arm = platform.machine() in ("aarch64", "arm64")
    return arm and not torch.backends.cpu.get_cpu_capability().startswith("SVE")


def choose(device: str | None = None) -> tuple[str, torch.dtype]:
    """Device and dtype for engine and learner.

    The default device is CUDA if available. The dtype is bfloat16 on CUDA devices that support it,
    float32 elsewhere. A fixed rule: two processes of one machine must get the same answer, and a job
    the same bits, however busy the machine is.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    coarse = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return device, torch.bfloat16 if coarse else torch.float32
