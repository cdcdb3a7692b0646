"""A model's files -> the tensors of the decoder, linear layers of one input laid end to end.

In:   an HF directory (safetensors, or whatever transformers can read)
Out:  name -> tensor, as models/decoder.py names them
Used: Decoder.load, in the engine's process and in the learner's

On a CPU the laid-out tensors are written once to hone's cache and mapped from there, so engine and
learner hold one copy between them and the second start takes no time. The file is keyed by the
source's paths, sizes and times, and is written whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.errors import ModelUnsupported
from hone.models.architecture import DecoderConfig
from hone.models.cache import cache_home

Tensors = dict[str, Tensor]
LAYOUT = 2
"""Raised when the names, the shapes or the order of the laid-out tensors change."""
SHARE_FROM_BYTES = 64 << 20
"""Smaller models are laid out in memory at every load: a cache file would save nothing."""


def read_tensors(
    directory: Path, config: DecoderConfig, *, dtype: torch.dtype, device: str | torch.device
) -> Tensors:
    """The decoder's tensors, on the device and in the type asked for."""
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    if torch.device(device).type != "cpu" or size < SHARE_FROM_BYTES:
        with _source(directory, files) as take:
            return _lay_out(config, lambda name: _moved(take(name), dtype, device))
    shared = cache_home() / "weights" / f"{_key(files, config, dtype)}.safetensors"
    if not shared.exists():
        with _source(directory, files) as take:
            _write_whole(_lay_out(config, lambda name: _moved(take(name), dtype, device)), shared)
    return load_file(shared)


def _moved(tensor: Tensor | None, dtype: torch.dtype, device: str | torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


@contextlib.contextmanager
def _source(directory: Path, files: list[Path]) -> Iterator[Callable[[str], Tensor | None]]:
    """A function from a tensor's HF name to the tensor, or None if the model has no such one."""
    if not files:
        # Old checkpoints hold pickles; transformers reads them with its own safeguards.
        from transformers import AutoModelForCausalLM

        state = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
        yield state.get
        return
    with contextlib.ExitStack() as stack:
        where = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where.update(dict.fromkeys(opened.keys(), opened))
        yield lambda name: where[name].get_tensor(name) if name in where else None


def _lay_out(config: DecoderConfig, take: Callable[[str], Tensor | None]) -> Tensors:
    """HF names -> the decoder's names, with the parts of each projection joined."""

    def need(name: str) -> Tensor:
        tensor = take(name)
        if tensor is None:
            raise ModelUnsupported(f"the weights have no tensor {name!r}: the files are incomplete")
        return tensor.contiguous()

    def shaped(name: str, *shape: int) -> Tensor:
        tensor = need(name)
        if tensor.shape != shape:
            raise ModelUnsupported(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        return tensor

    out: Tensors = {
        "embedding": shaped("model.embed_tokens.weight", config.vocab, config.hidden),
        "norm": shaped("model.norm.weight", config.hidden),
    }
    if not config.tied:
        out["head"] = shaped("lm_head.weight", config.vocab, config.hidden)
    for i in range(config.layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        out[ours + "input_norm"] = need(hf + "input_layernorm.weight")
        out[ours + "post_norm"] = need(hf + "post_attention_layernorm.weight")
        if config.qk_norm:
            out[ours + "q_norm"] = need(hf + "self_attn.q_norm.weight")
            out[ours + "k_norm"] = need(hf + "self_attn.k_norm.weight")
        for key, parts in config.projections.items():
            weights = [shaped(f"{hf}{path}.weight", outs, ins) for path, outs, ins in parts]
            # Inputs first: x @ w is the product every BLAS does best, a tenth faster than x @ w.T.
            out[f"{ours}{key}.weight"] = torch.cat(weights).t().contiguous()
            biases = [take(f"{hf}{path}.bias") for path, _, _ in parts]
            if any(bias is not None for bias in biases):
                out[f"{ours}{key}.bias"] = torch.cat([bias for bias in biases if bias is not None])
    return out


def _key(files: list[Path], config: DecoderConfig, dtype: torch.dtype) -> str:
    facts = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    text = json.dumps([LAYOUT, str(dtype), config.raw, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write_whole(tensors: Tensors, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as scratch:
        name = scratch.name
    try:
        save_file(tensors, name)
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
