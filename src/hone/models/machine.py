"""Which device and number type this machine computes in.

In:   the machine, a device if one is asked for
Out:  a device name, a torch dtype, a switch of torch's set once

One function decides for the engine and for the learner: where they differ, every importance weight
corrects for rounding instead of for staleness. A CPU computes in float32 always: without units for
bfloat16 it runs that a hundred times slower, and says that it supports it all the same.
"""

import platform
import warnings

import torch


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


def choose(device: str | None = None) -> tuple[str, torch.dtype]:
    """Where to compute and in which number type, for engine and learner alike.

    By default on CUDA if there is any. bfloat16 on CUDA devices that have units for it, float32
    elsewhere. A rule and not a trial: two processes of one machine must come to the same answer,
    and a job to the same bits, however busy the machine is.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    coarse = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return device, torch.bfloat16 if coarse else torch.float32
