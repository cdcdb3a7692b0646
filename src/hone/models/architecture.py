"""What a decoder looks like: sizes and variants read from a model's config.json.

In:   an HF config.json
Out:  DecoderConfig, or ModelUnsupported with the field that is in the way
Used: models/decoder.py to build weights, models/lora.py to size adapters, the engine for its cache

A field this file does not understand is refused rather than skipped: a decoder that leaves out
one factor still writes fluent text, and trains on log-probabilities that nobody sampled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.errors import ModelUnsupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type`s the decoder computes exactly as transformers does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder and the variants that change what it computes."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how far back a token sees; None is all the way."""
    rotary: tuple[bool, ...]
    """Per layer: whether positions are rotated in (SmolLM3 leaves some layers out)."""
    eos_ids: tuple[int, ...]
    raw: dict[str, Any]
    """The config.json itself, for what only transformers can read (rope scaling)."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Key-value memory of one token in float32."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[tuple[str, int, int], ...]]:
        """Linear layers computed together: key -> (PEFT path in the layer, outputs, inputs)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, inner = self.hidden, self.intermediate
        return {
            "qkv": (
                ("self_attn.q_proj", q, hidden),
                ("self_attn.k_proj", kv, hidden),
                ("self_attn.v_proj", kv, hidden),
            ),
            "out": (("self_attn.o_proj", hidden, q),),
            "gate_up": (("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden)),
            "down": (("mlp.down_proj", hidden, inner),),
        }

    @classmethod
    def read(cls, directory: Path) -> "DecoderConfig":
        """From an HF directory."""
        raw = json.loads((directory / "config.json").read_text())
        return cls.parse(raw, where=str(directory / "config.json"))

    @classmethod
    def parse(cls, raw: dict[str, Any], *, where: str) -> "DecoderConfig":
        family = raw.get("model_type", "")
        if family not in FAMILIES:
            raise ModelUnsupported(
                f"{where}: model_type {family!r} is not among those hone runs "
                f"({', '.join(FAMILIES)}).\nChoose a model of one of these families."
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelUnsupported(
                f"{where}: hidden_act {raw['hidden_act']!r}; only 'silu' is run."
            )
        if raw.get("quantization_config"):
            raise ModelUnsupported(
                f"{where}: the weights are quantised; use the unquantised model of that name."
            )
        layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            layers=layers,
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            tied=raw.get("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            windows=_windows(raw, layers),
            rotary=_rotary(raw, layers),
            eos_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
            raw=raw,
        )


def _windows(raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding windows as transformers resolves them: by layer_types, else by the family's rule."""
    window = raw.get("sliding_window")
    if window is None:
        return (None,) * layers
    if raw["model_type"] in ("qwen2", "qwen3", "smollm3"):
        if not raw.get("use_sliding_window", False):
            return (None,) * layers
        kinds = raw.get("layer_types") or [
            "sliding_attention" if i >= raw.get("max_window_layers", layers) else "full_attention"
            for i in range(layers)
        ]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window,) * layers if raw["model_type"] == "mistral" else (None,) * layers


def _rotary(raw: dict[str, Any], layers: int) -> tuple[bool, ...]:
    if raw["model_type"] != "smollm3":
        return (True,) * layers
    flags = raw.get("no_rope_layers")
    if flags is None:
        every = raw.get("no_rope_layer_interval", 4)
        flags = [int((i + 1) % every != 0) for i in range(layers)]
    return tuple(bool(flag) for flag in flags)
