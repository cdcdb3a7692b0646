"""An adapter staged for vLLM: a copy of its files, and the digests of the tensors vLLM must hold.

In:   a PEFT directory, and the digests that vLLM's workers report (extension.py)
Out:  StagedAdapter; the difference between the two, as text

vLLM casts A and B to the dtype of its buffers and multiplies B by the scale in that dtype. The same
operations are applied here, so the digests are equal if and only if the tensors are.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError, EngineError
from hone.inference.base import AdapterRef
from hone.inference.vllm.extension import digest, tensor_name

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("adapter_config.json", "adapter_model.safetensors")
SHOWN = 3
"""Maximum number of tensors that an error lists."""


@dataclass(eq=False)
class StagedAdapter:
    """An adapter in the engine's directory."""

    ref: AdapterRef
    source: Path
    """The PEFT directory that was copied."""
    path: Path
    scale: float
    tensors: "Mapping[str, Tensor]" = field(default_factory=dict, repr=False)
    """Its factors by PEFT's names, from `read` until their digests are known."""
    id: int | None = None
    """vLLM's number for it."""
    _expected: dict[str, str] = field(default_factory=dict, repr=False)
    _dtype: str | None = None

    def __str__(self) -> str:
        return f"step {self.ref.step} of {self.ref.model!r}"

    def read(self) -> None:
        """Read its tensors; refuses those with another hash. Blocking."""
        from hone.models.lora import read_tensors, tensors_sha256  # loads torch

        tensors = read_tensors(self.source / FILES[1])
        sha256 = tensors_sha256(tensors)
        if sha256 != self.ref.sha256:
            raise EngineError(
                f"publish of {self}: {self.source} holds an adapter with hash {sha256[:16]}, not "
                f"{self.ref.sha256[:16]}. Nothing was changed."
            )
        self.tensors = tensors

    def compare(self, workers: Sequence[Mapping[str, Any]]) -> str | None:
        """How the tensors of vLLM's workers differ from this adapter; None if they do not."""
        for worker in workers:
            if not worker["held"]:
                return f"vLLM does not hold the adapter ({worker.get('error', 'it was evicted')})"
            if worker["ignored"]:
                return f"vLLM ignores {_some(worker['ignored'])}"
            if worker["wrong"]:
                return f"vLLM computes with other weights in {_some(worker['wrong'])}"
            if len(worker["dtypes"]) != 1:
                return f"vLLM holds it in {', '.join(worker['dtypes']) or 'no'} dtypes"
            expected, held = self.expect(worker["dtypes"][0]), worker["tensors"]
            if missing := expected.keys() - held.keys():
                return f"vLLM does not hold {_some(missing)}"
            if other := [name for name in held if held[name] != expected.get(name)]:
                return f"vLLM holds other weights for {_some(other)}"
        return None if workers else "vLLM has no workers"

    def expect(self, dtype: str) -> dict[str, str]:
        """The expected digest of every tensor in this dtype. The first call blocks."""
        if self._dtype is None:
            import torch  # imported here: `hone serve` starts without it

            for name, tensor in self.tensors.items():
                module, factor = _split(name)
                cast = tensor.to(getattr(torch, dtype))
                if factor == "B" and self.scale != 1:
                    cast = cast * self.scale
                self._expected[tensor_name(module, factor)] = digest(cast)
            self._dtype, self.tensors = dtype, {}
        return self._expected if dtype == self._dtype else {}


def stage(ref: AdapterRef, directory: Path, path: Path, *, max_rank: int) -> StagedAdapter:
    """Copy an adapter to `path`; refuses a rank that is too large. Its tensors are not read yet."""
    settings = json.loads((directory / FILES[0]).read_text(encoding="utf-8"))
    if settings["r"] > max_rank:
        raise EngineError(
            f"publish of step {ref.step} of {ref.model!r}: rank {settings['r']} exceeds the "
            f"{max_rank} that vLLM was started with. Set engine_args.max_lora_rank and restart "
            "the server. Nothing was changed."
        )
    if settings.get("use_rslora") or settings.get("rank_pattern") or settings.get("alpha_pattern"):
        raise ConfigError(f"{directory / FILES[0]}: hone serves plain LoRA only")
    path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (path / name).unlink(missing_ok=True)
        try:
            os.link(directory / name, path / name)
        except OSError:  # another file system
            shutil.copyfile(directory / name, path / name)
    return StagedAdapter(ref, directory, path, settings["lora_alpha"] / settings["r"])


def combined(workers: Sequence[Mapping[str, Any]]) -> str:
    """One hash of everything that vLLM's workers hold for an adapter."""
    text = json.dumps(workers, sort_keys=True)
    return "vllm-" + hashlib.sha256(text.encode()).hexdigest()


def _split(name: str) -> tuple[str, str]:
    """`base_model.model.PATH.lora_A.weight` -> PATH, A."""
    stem, _, factor = name.removesuffix(".weight").rpartition(".lora_")
    return stem.removeprefix("base_model.model."), factor


def _some(names: Any) -> str:
    shown = sorted(names)
    more = "" if len(shown) <= SHOWN else f" and {len(shown) - SHOWN} more"
    return ", ".join(shown[:SHOWN]) + more
