"""Read a model's weights as the decoder's tensors, with linear layers of one input joined.

In:   an HF directory with safetensors
Out:  name -> tensor, as models/decoder.py names them

A model with a tensor that the decoder does not use is refused: it is another model. On a CPU the
converted tensors are written once to hone's cache and memory-mapped, so that engine and learner share
one copy and later starts are fast. A cache file is keyed by its sources' paths, sizes and times; it is
written atomically, by one process at a time, and removed when a source has changed or is gone.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.errors import ModelUnsupported
from hone.files.disk import move, storage, sync
from hone.models.architecture import DecoderConfig
from hone.models.cache import cache_home
from hone.models.files import AGAIN, weight_files

Tensors = dict[str, Tensor]
LAYOUT = 2
"""Incremented when the names, shapes or order of the converted tensors change."""
SHARE_FROM_BYTES = 64 << 20
"""Smaller models are converted in memory at every load: a cache file would save nothing."""


def read_tensors(
    directory: Path, config: DecoderConfig, *, dtype: torch.dtype, device: str | torch.device
) -> Tensors:
    """The decoder's tensors on this device in this type."""
    files = weight_files(directory)
    if not files:
        raise ModelUnsupported(f"{directory}: the weights are missing (*.safetensors)")

    def laid_out() -> Tensors:
        with contextlib.ExitStack() as stack:
            source = _Source(files, stack)
            take = lambda name: _moved(source.take(name), dtype, device)  # noqa: E731
            tensors = _lay_out(config, take, directory)
            source.require_used(config, directory)
            return tensors

    size = sum(file.stat().st_size for file in files)
    if torch.device(device).type != "cpu" or size < SHARE_FROM_BYTES:
        return laid_out()
    identity = _identity(files, config, dtype)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    shared = cache_home() / "weights" / f"{key}.safetensors"
    if not shared.exists():
        shared.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(shared)):
            if not shared.exists():  # another process may have written it while this one waited
                prune(shared.parent)
                _write_whole(laid_out(), identity, shared)
    return load_file(shared)


def prune(home: Path) -> list[Path]:
    """Remove cache files whose sources have changed or are gone; returns them.

    A process that has mapped one keeps its pages. A file that another process is writing stays.
    """
    removed: list[Path] = []
    for file in sorted(home.glob("*.safetensors*")):
        shared = home / f"{file.name.partition('.')[0]}.safetensors"
        if file.suffix == ".json" or (file == shared and _is_current(shared)):
            continue
        with contextlib.suppress(Timeout), FileLock(_lock(shared), timeout=0):
            if file == shared:
                _identity_file(shared).unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed


def _is_current(shared: Path) -> bool:
    """Whether the sources of a cache file are unchanged since it was written."""
    try:
        identity = json.loads(_identity_file(shared).read_text(encoding="utf-8"))
        return identity["layout"] == LAYOUT and identity["files"] == _stats(
            [Path(path) for path, _, _ in identity["files"]]
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False
    except OSError:  # unreadable for now, which does not mean that it is outdated
        return True


def _identity_file(shared: Path) -> Path:
    return shared.with_suffix(".json")


def _lock(shared: Path) -> Path:
    return shared.with_suffix(".lock")


def _moved(tensor: Tensor | None, dtype: torch.dtype, device: str | torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


class _Source:
    """The tensors of a model's files by HF name; remembers which were used."""

    def __init__(self, files: list[Path], stack: contextlib.ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            self._files.update(dict.fromkeys(opened.keys(), opened))
        self._used: set[str] = set()

    def take(self, name: str) -> Tensor | None:
        """The tensor with this name, or None."""
        self._used.add(name)
        return self._files[name].get_tensor(name) if name in self._files else None

    def require_used(self, config: DecoderConfig, directory: Path) -> None:
        """Refuse files with tensors that were not used, except copies of used ones."""
        extra = {name for name in self._files if not name.endswith(".rotary_emb.inv_freq")}
        extra -= self._used
        if config.tied and "lm_head.weight" in extra:
            head, embedding = self.take("lm_head.weight"), self.take("model.embed_tokens.weight")
            assert head is not None and embedding is not None
            if not torch.equal(head, embedding):
                raise ModelUnsupported(
                    f"{directory}: config.json ties the head to the embedding, and the files hold a "
                    "head of their own (lm_head.weight) that differs from it. Set "
                    "tie_word_embeddings to false if that head is meant."
                )
            extra.remove("lm_head.weight")
        if extra:
            raise ModelUnsupported(
                f"{directory}: the files hold {len(extra)} tensors that models of type "
                f"{config.family!r} do not have, the first being {min(extra)!r}. hone would leave "
                "them out, so the model is not run; choose another model."
            )


def _lay_out(
    config: DecoderConfig, take: Callable[[str], Tensor | None], directory: Path
) -> Tensors:
    """Map HF names to the decoder's names and join the parts of each projection."""

    def shaped(name: str, *shape: int) -> Tensor:
        tensor = take(name)
        if tensor is None:
            raise ModelUnsupported(
                f"{directory}: the weights have no tensor {name!r}, which config.json asks for. "
                f"{AGAIN}"
            )
        if tensor.shape != shape:
            raise ModelUnsupported(
                f"{directory}: the tensor {name!r} has shape {tuple(tensor.shape)}, config.json says "
                f"{shape}. {AGAIN}"
            )
        return tensor.contiguous()

    out: Tensors = {
        "embedding": shaped("model.embed_tokens.weight", config.vocab, config.hidden),
        "norm": shaped("model.norm.weight", config.hidden),
    }
    if not config.tied:
        out["head"] = shaped("lm_head.weight", config.vocab, config.hidden)
    for i in range(config.layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        out[ours + "input_norm"] = shaped(hf + "input_layernorm.weight", config.hidden)
        post_norm = hf + "post_attention_layernorm.weight"
        out[ours + "post_norm"] = shaped(post_norm, config.hidden)
        if config.qk_norm:
            out[ours + "q_norm"] = shaped(hf + "self_attn.q_norm.weight", config.head_dim)
            out[ours + "k_norm"] = shaped(hf + "self_attn.k_norm.weight", config.head_dim)
        for key, parts in config.projections.items():
            weights = [shaped(f"{hf}{path}.weight", outs, ins) for path, outs, ins in parts]
            # Inputs first: BLAS computes x @ w a tenth faster than x @ w.T.
            out[f"{ours}{key}.weight"] = torch.cat(weights).t().contiguous()
            biased = [(path, outs) for path, outs, _ in parts if path in config.biased]
            biases = [shaped(f"{hf}{path}.bias", outs) for path, outs in biased]
            if biases:
                out[f"{ours}{key}.bias"] = torch.cat(biases)
    return out


def _identity(files: list[Path], config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Everything a cache file depends on."""
    return {
        "layout": LAYOUT,
        "dtype": str(dtype),
        "config": config.raw,
        "files": _stats(files),
    }


def _stats(files: list[Path]) -> list[list[Any]]:
    return [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _write_whole(tensors: Tensors, identity: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".safetensors.part")
    try:
        with storage(path):
            save_file(tensors, partial)
            _identity_file(path).write_text(json.dumps(identity), encoding="utf-8")
            sync(partial)
            move(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
