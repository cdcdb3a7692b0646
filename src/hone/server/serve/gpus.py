"""The GPUs of this machine, and which of them the engine and the learner use.

In:   engine_args of a model, `--device`, CUDA_VISIBLE_DEVICES, torch
Out:  Gpus: ids for vLLM and for the learner; the environment of their processes

GPU ids index the GPUs that the server sees. A process sees only the GPUs assigned to it, so its
first GPU is always cuda:0.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hone.errors import ConfigError
from hone.inference.vllm.args import INFERENCE_IDS, TENSOR_PARALLEL, TRAINER_IDS

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""
OTHER_DRIVERS = (Path("/dev/dxg"), Path("/dev/kfd"), Path("/dev/nvmap"))
"""Device files on WSL2, with ROCm and on Jetson. The first two also exist for GPUs that torch cannot
use."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPU ids of engine and learner; empty on a machine without GPUs."""

    inference: tuple[int, ...] = ()
    trainer: int | None = None

    @property
    def shared(self) -> int | None:
        """The GPU that vLLM and the learner share, if they do."""
        return self.trainer if self.trainer in self.inference else None


def choose_gpus(args: Mapping[str, Any], *, device: str | None, count: int) -> Gpus:
    """The GPUs of a model with these engine_args.

    Raises ConfigError if there are fewer than it names, and if it names more than are used.

    Without inference_gpu_ids vLLM takes as many as it needs, from the server's device on. Without
    trainer_gpu_ids the learner takes the server's device.
    """
    needed = int(args.get(TENSOR_PARALLEL) or 1)
    first = int((device or "").partition(":")[2] or 0)
    inference = _existing(args, INFERENCE_IDS, count)
    trainer = _existing(args, TRAINER_IDS, count)
    present = count if inference is None else len(inference)
    if needed > max(1, present):
        raise ConfigError(
            f"engine_args.{TENSOR_PARALLEL} is {needed}, and {present} GPUs are present; lower it"
        )
    if inference is not None and len(inference) > needed:
        raise ConfigError(
            f"engine_args.{INFERENCE_IDS}: {inference!r} names {present} GPUs, and vLLM uses {needed}; "
            f"set engine_args.{TENSOR_PARALLEL} to {present}, or name {needed} "
            f"{'GPU' if needed == 1 else 'GPUs'}"
        )
    if trainer is not None and len(trainer) > 1:
        raise ConfigError(
            f"engine_args.{TRAINER_IDS}: {trainer!r}; the learner trains on one GPU in this version; "
            f"send one number, such as [{trainer[0]}]"
        )
    if not count:
        return Gpus()
    if inference is None:
        start = first if first + needed <= count else 0
        inference = list(range(start, start + needed))
    return Gpus(tuple(inference), first if trainer is None else trainer[0])


def _existing(args: Mapping[str, Any], key: str, count: int) -> list[int] | None:
    ids = args.get(key)
    missing = [gpu for gpu in ids or () if gpu >= count]
    if missing:
        raise ConfigError(
            f"engine_args.{key}: GPU {missing[0]} does not exist; this machine has {count}"
        )
    return ids


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """The environment of a process that sees these GPUs only."""
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return {VISIBLE: ",".join(names[gpu] if names else str(gpu) for gpu in gpus)} if gpus else {}


def check_device(device: str | None) -> None:
    """Raise ConfigError if `--device` names a GPU that this machine does not have."""
    if device is None or device == "cpu":
        return
    if problem := _lacks_cuda():
        raise ConfigError(f"--device {device}: {problem}, or use --device cpu.")
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) < count:
        return
    there = f"{count} CUDA GPUs, numbered from 0" if count else "no CUDA GPU"
    raise ConfigError(
        f"--device {device}: torch sees {there}. Name another device, or cpu, or check the driver "
        f"(nvidia-smi) and {VISIBLE}."
    )


def unused_gpu(device: str | None) -> str | None:
    """Why the server uses the CPU although the machine has a GPU; None if it does not."""
    if device is not None or not DRIVER.exists():
        return None
    problem = _lacks_cuda()
    return problem and f"{problem}, or set --device cpu. The GPU of this machine is not used."


def _lacks_cuda() -> str | None:
    """What to install in place of a torch without CUDA; None if it has it. Does not load torch."""
    package = find_spec("torch")
    assert package is not None and package.origin is not None
    build = runpy.run_path(str(Path(package.origin).with_name("version.py")))
    if build["cuda"] or build.get("hip"):
        return None
    return (
        f"torch {build['__version__']} is built without CUDA. Install a build with CUDA "
        "(https://pytorch.org/get-started/locally)"
    )


def num_gpus(device: str | None) -> int:
    """CUDA devices that torch sees; 0 with `--device cpu`.

    Without `--device`, torch is loaded for it only if a driver has a device file: that takes seconds,
    and a server without a GPU starts without torch.
    """
    if device == "cpu":
        return 0
    is_loaded = sys.modules.get("torch") is not None
    if device is None and not is_loaded and not any(d.exists() for d in (DRIVER, *OTHER_DRIVERS)):
        return 0
    import torch

    with suppress(RuntimeError):
        return torch.cuda.device_count()
    return 0
