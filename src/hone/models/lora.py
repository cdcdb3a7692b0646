"""LoRA adapters: tensors in memory, PEFT's files on disk, and the hash that identifies them.

In:   a model's linear layers, or a directory PEFT wrote
Out:  Lora, which a model adds to its frozen layers

An adapter is identified by the hash of its tensors' bytes, because names and step numbers are
reused: a server could otherwise serve old weights under a new name.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.errors import ConfigError
from hone.models.files import AGAIN, read_object
from hone.models.weight_check import check_finite, read_header
from hone.types import DEFAULT_ALPHA, DEFAULT_RANK

Factors = tuple[Tensor, tuple[Tensor, ...]]
"""A of all parts of a projection [parts * rank, inputs], and B of each part [outputs, rank]."""


class Layout(Protocol):
    """The linear layers that an adapter covers."""

    @property
    def adapted(self) -> Mapping[str, tuple[tuple[str, int, int], ...]]:
        """Key -> the linear layers of one input: (path in the model, outputs, inputs) each."""
        ...


class Lora:
    """One adapter over linear layers of a model, in float32."""

    def __init__(
        self, config: Layout, factors: dict[str, Factors], *, rank: int, alpha: float
    ) -> None:
        self.config = config
        self.rank = rank
        self.alpha = alpha
        self._factors = factors
        self._fused: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def init(
        cls,
        config: Layout,
        *,
        rank: int = DEFAULT_RANK,
        alpha: float = DEFAULT_ALPHA,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> "Lora":
        """A as PEFT draws it (uniform within 1 / sqrt(inputs)), B zero: the base model itself."""
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, Factors] = {}
        for key, parts in config.adapted.items():
            inputs = parts[0][2]
            bound = 1 / math.sqrt(inputs)
            a = torch.empty(len(parts) * rank, inputs).uniform_(-bound, bound, generator=generator)
            b = tuple(torch.zeros(outputs, rank, device=device) for _, outputs, _ in parts)
            factors[key] = (a.to(device), b)
        return cls(config, factors, rank=rank, alpha=alpha)

    @classmethod
    def load(cls, directory: Path, config: Layout, *, device: str | torch.device = "cpu") -> "Lora":
        """Load PEFT's files; refuses an adapter that this decoder would compute only in part."""
        settings = read_object(directory / "adapter_config.json")
        _check(settings, where=directory / "adapter_config.json")
        rank = settings["r"]
        tensors = read_tensors(directory / "adapter_model.safetensors", device)

        def take(name: str, *shape: int) -> Tensor:
            return _matching(tensors.pop(name, None), shape, name, directory).to(torch.float32)

        factors: dict[str, Factors] = {}
        for key, parts in config.adapted.items():
            stems = [(_stem(path), outs, ins) for path, outs, ins in parts]
            a = [take(f"{stem}.lora_A.weight", rank, ins) for stem, _, ins in stems]
            b = [take(f"{stem}.lora_B.weight", outs, rank) for stem, outs, _ in stems]
            factors[key] = (torch.cat(a), tuple(b))
        if tensors:
            raise ConfigError(
                f"{directory}: the adapter has tensors this model has no place for, the first "
                f"being {min(tensors)!r}. It belongs to another model."
            )
        return cls(config, factors, rank=rank, alpha=settings["lora_alpha"])

    def save(self, directory: Path, *, base_model: str) -> None:
        """Write PEFT's two files; equal adapters give equal bytes."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            own_copies(dict(self.named())),
            directory / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        modules = {path for parts in self.config.adapted.values() for path, _, _ in parts}
        settings = {
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": sorted({path.rpartition(".")[2] for path in modules}),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (directory / "adapter_config.json").write_text(text)

    def factors(self, key: str) -> Factors:
        return self._factors[key]

    def fused(self, key: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [inputs, parts * rank] and block-diagonal B [parts * rank, outputs], for inference.

        Kept for an adapter that is served; not for one in training, whose tensors change.
        """
        if key in self._fused:
            return self._fused[key]
        a, b = self._factors[key]
        fused = a.detach().t().contiguous().to(dtype), _block_diagonal(b).to(dtype)
        if not a.requires_grad:
            self._fused[key] = fused
        return fused

    def fuse(self, dtype: torch.dtype, between: Callable[[], None] = lambda: None) -> "Lora":
        """Fuse every layer now rather than at the first request; calls `between` after each layer."""
        for key in self._factors:
            self.fused(key, dtype)
            between()
        return self

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with PEFT's name, in a fixed order; those of A are views."""
        for key, parts in self.config.adapted.items():
            a, b = self._factors[key]
            for i, (path, _, _) in enumerate(parts):
                yield f"{_stem(path)}.lora_A.weight", a[i * self.rank : (i + 1) * self.rank]
                yield f"{_stem(path)}.lora_B.weight", b[i]

    def parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters that an optimizer updates, with hone's own names, in a fixed order."""
        leaves = []
        for key, (a, b) in self._factors.items():
            leaves.append((f"{key}.a", a))
            leaves += [(f"{key}.b{i}", part) for i, part in enumerate(b)]
        return leaves

    def trainable_(self) -> "Lora":
        """Make the tensors require gradients, and drop the fused copies."""
        self._fused.clear()
        for _, tensor in self.parameters():
            tensor.requires_grad_(True)
        return self

    @property
    def sha256(self) -> str:
        """Hash of the tensors: PEFT names, shapes and bytes."""
        return tensors_sha256(dict(self.named()))

    @property
    def served_sha256(self) -> str:
        """The hash, after checking that the fused copies equal the tensors."""
        for key, (a, b) in self._fused.items():
            plain_a, plain_b = self._factors[key]
            same_a = torch.equal(a, plain_a.detach().t().to(a.dtype))
            if not (same_a and torch.equal(b, _block_diagonal(plain_b).to(b.dtype))):
                return f"corrupt:{key}"
        return self.sha256


def _block_diagonal(b: Sequence[Tensor]) -> Tensor:
    """B of every part, transposed, along the diagonal of one matrix [parts * rank, outputs]."""
    blocks = b[0].new_zeros(sum(part.shape[1] for part in b), sum(len(part) for part in b))
    row = column = 0
    for part in b:
        outputs, rank = part.shape
        blocks[row : row + rank, column : column + outputs] = part.detach().t()
        row, column = row + rank, column + outputs
    return blocks


def target_modules(directory: Path) -> list[str]:
    """Names of the linear layers that an adapter on disk covers; empty: all of them."""
    named = read_object(directory / "adapter_config.json").get("target_modules")
    return list(named) if isinstance(named, list) else []  # PEFT also takes "all-linear"


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory, contiguous; those of a device as views of one copy per type."""
    result = {name: tensor.detach() for name, tensor in tensors.items()}
    for dtype in {tensor.dtype for tensor in result.values() if not tensor.is_cpu}:
        moved = {n: t for n, t in result.items() if not t.is_cpu and t.dtype == dtype}
        flat = torch.cat([tensor.flatten() for tensor in moved.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in moved.values()])
        result |= {
            name: part.view(tensor.shape)
            for (name, tensor), part in zip(moved.items(), parts, strict=True)
        }
    return {name: tensor.contiguous() for name, tensor in result.items()}


def own_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory, each with its own storage: safetensors refuses to save views."""
    return {name: tensor.clone() for name, tensor in on_host(tensors).items()}


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """One hash over named tensors, whatever their order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(on_host(tensors).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _stem(path: str) -> str:
    """PEFT's name of a linear layer."""
    return f"base_model.model.{path}"


def read_tensors(file: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file; float32 tensors on a CPU are views of one buffer.

    Refuses a file that is not whole, and weights that are not finite, with ModelUnsupported.

    `load_file` makes hundreds of tensors one by one while it holds the interpreter's lock: requests
    that are sampled meanwhile waited 72 ms for a publish instead of 41 ms (bench/publish.py).
    """
    stored = read_header(file)
    is_float32 = all(tensor.dtype == "F32" for tensor in stored)
    if torch.device(device).type != "cpu" or not is_float32:
        check_finite(file)
        return load_file(file, device=str(device))
    data = np.fromfile(file, dtype=np.float32, offset=stored[0].start if stored else 0)
    # In pieces, for the CPU's cache; numpy releases the interpreter's lock meanwhile.
    pieces = np.array_split(data, len(data) // 2**18 + 1)
    if not all(np.isfinite(piece).all() for piece in pieces):
        check_finite(file)  # names the tensor
    values = torch.from_numpy(data)
    return {
        tensor.name: values[
            (tensor.start - stored[0].start) // 4 : (tensor.end - stored[0].start) // 4
        ].view(tensor.shape)
        for tensor in stored
    }


def _matching(tensor: Tensor | None, shape: tuple[int, ...], name: str, directory: Path) -> Tensor:
    if tensor is None:
        raise ConfigError(
            f"{directory}: the adapter has no tensor {name!r}. hone serves and trains adapters "
            "over all linear layers; this one covers fewer, or belongs to another model."
        )
    if tensor.shape != shape:
        raise ConfigError(
            f"{directory}: {name!r} has shape {tuple(tensor.shape)}, this model needs "
            f"{shape}. The adapter belongs to another model."
        )
    return tensor


_NO_EFFECT = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "task_type",
        "peft_version",
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "qalora_group_size",
        "eva_config",
        "runtime_config",
    ]
)
"""Fields of adapter_config.json that are read elsewhere, that the tensors prove, or that matter only
in training."""
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The other ways (pissa, olora, corda, loftq, ...) change the base weights too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def _check(settings: dict[str, object], *, where: Path) -> None:
    """Refuse an adapter that is not exactly x + alpha / r * B A x."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ConfigError(
            f"{where}: r is {rank!r:.80} and lora_alpha {alpha!r:.80}; both must be numbers. "
            f"{AGAIN}"
        )
    for key, value in settings.items():
        if key in _NO_EFFECT or value is None:
            continue
        allowed = _ONLY.get(key)
        if value not in allowed if allowed else bool(value):
            raise ConfigError(
                f"{where}: {key} is {value!r}; hone runs plain LoRA only. Train or export the "
                "adapter without it."
            )
