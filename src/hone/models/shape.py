"""The sizes of a model of any family, on which its memory, adapter and requests depend.

In:   a config.json
Out:  Shape, or ModelUnsupported if transformers does not know the family either; which model the
      learner trains on a device, and which of its layers

Families of hone's own decoder are read without transformers, which takes seconds to import. For
others, a transformers model without weights is built and measured.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError, ModelUnsupported
from hone.models.architecture import FAMILIES, DecoderConfig

if TYPE_CHECKING:
    from hone.models.lora import Layout

BODY = "HONE_LEARNER_BODY"
"""Environment variable that overrides `runs_own_decoder`: decoder or transformers."""
MIN_HEAD_DIM = 16
"""Minimum head dimension that FlexAttention supports on CUDA."""
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""Sizes that the configuration of every model that hone trains must have."""


@dataclass(frozen=True, slots=True)
class Linears:
    """A Layout with one key per linear layer."""

    adapted: dict[str, tuple[tuple[str, int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    parameters: int
    activations: int
    """Elements that the backward pass of one layer needs, per token."""
    feed_forward: int
    """Of these, those between the feed-forward part's linear layers: gate, up and their product."""
    layout: "Layout"

    @property
    def adapter_width(self) -> int:
        """Weights of an adapter of rank 1."""
        parts = [part for group in self.layout.adapted.values() for part in group]
        return sum(outputs + inputs for _, outputs, inputs in parts)


def shape_of(config_json: Mapping[str, Any], *, where: str = "config.json") -> Shape:
    """The sizes of the model with this config.json."""
    return _shape(json.dumps(config_json, sort_keys=True, default=str), where)


@lru_cache(maxsize=8)
def _shape(config: str, where: str) -> Shape:
    raw = json.loads(config)
    decoder = own_decoder(raw)
    return _of_transformers(raw, where) if decoder is None else _of_decoder(decoder)


def own_decoder(raw: Mapping[str, Any]) -> DecoderConfig | None:
    """The configuration of hone's own decoder; None if it does not support this model."""
    if raw.get("model_type") not in FAMILIES:
        return None
    try:
        return DecoderConfig.parse(dict(raw), where="config.json")
    except ModelUnsupported:
        return None


def runs_own_decoder(raw: Mapping[str, Any], device: str) -> bool:
    """Whether hone's own decoder is faster: on a CPU, and where FlexAttention cannot run."""
    decoder = own_decoder(raw)
    return decoder is not None and (device.startswith("cpu") or decoder.head_dim < MIN_HEAD_DIM)


def trains_decoder(raw: Mapping[str, Any], device: str) -> bool:
    """Whether the learner trains with hone's own decoder, not with the transformers model."""
    own = runs_own_decoder(raw, device)
    return os.environ.get(BODY, "decoder" if own else "transformers") == "decoder"


def _of_decoder(config: DecoderConfig) -> Shape:
    linear = sum(out * inp for group in config.projections.values() for _, out, inp in group)
    per_layer = linear + 2 * config.hidden
    if config.family == "qwen2":  # the only family run here whose q, k and v have biases
        per_layer += (config.heads + 2 * config.kv_heads) * config.head_dim
    if config.qk_norm:
        per_layer += 2 * config.head_dim
    embeddings = config.vocab * config.hidden * (1 if config.tied else 2)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Shape(
        family=config.family,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        max_positions=config.max_positions,
        parameters=config.layers * per_layer + embeddings + config.hidden,
        # Two residuals, two normalised inputs and their statistics (6 hidden), q, k and v before and
        # after rotation, gate, up, their activation and product. Qwen2.5-3B, bf16, one row of 8,192:
        # 36 GB by this count; 36 GB measured beyond the weights (own LoRA linear, eager, one H200).
        activations=6 * config.hidden + 2 * (q + 2 * kv) + 4 * config.intermediate,
        feed_forward=3 * config.intermediate,
        layout=config,
    )


def _of_transformers(raw: dict[str, Any], where: str) -> Shape:
    model = empty_model(raw, where)
    text = model.config.get_text_config()
    if lacking := [name for name in NEEDED if getattr(text, name, None) is None]:
        raise ModelUnsupported(
            f"{where}: model_type {raw['model_type']!r} has no {' and no '.join(lacking)}, which hone "
            "needs. Choose another model."
        )
    layout = adapted_linears(raw, model)
    parts = [part for group in layout.adapted.values() for part in group]
    heads = text.num_attention_heads
    # Every linear layer's output and its input; experts that a token visits besides.
    experts = (getattr(text, "num_experts_per_tok", None) or 0) * 4 * _expert_width(text)
    linears = sum(outputs + inputs for _, outputs, inputs in parts) // text.num_hidden_layers
    return Shape(
        family=raw["model_type"],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        activations=6 * text.hidden_size + linears + experts,
        feed_forward=0 if experts else 3 * (getattr(text, "intermediate_size", None) or 0),
        layout=layout,
    )


def _expert_width(text: Any) -> int:
    names = ("moe_intermediate_size", "intermediate_size")
    return next((width for name in names if (width := getattr(text, name, None))), 0)


def empty_model(raw: Mapping[str, Any], where: str) -> Any:
    """The transformers model of a config.json, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(raw.get("model_type", ""), **fields)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    # Foreign values: the library also raises what a wrong type causes inside it.
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        import transformers

        raise ModelUnsupported(
            f"{where}: model_type {raw.get('model_type')!r} is not a causal language model that "
            f"transformers {transformers.__version__} knows ({str(error).partition(chr(10))[0]}). Choose "
            "another model."
        ) from error


def adapted_linears(raw: Mapping[str, Any], model: Any) -> "Layout":
    """The linear layers of a transformers model that an adapter covers by default.

    Where hone's own decoder knows the model, in the decoder's order, so that adapter, optimizer state
    and hash are the same for both.
    """
    decoder = own_decoder(raw)
    if decoder is not None:
        return decoder
    from hone.models.lora_linear import linear_layers

    linears = linear_layers(model, model.get_decoder())
    if not linears:
        raise ModelUnsupported(
            f"{type(model).__name__}: it has no linear layers, so no adapter can cover them. Choose "
            "another model."
        )
    return Linears({path: ((path, *size),) for path, size in linears.items()})


def restricted(layout: "Layout", target_modules: Collection[str]) -> "Layout":
    """The linear layers with these names (last parts of paths, as in PEFT); none or all: the layout."""
    parts = [part for group in layout.adapted.values() for part in group]
    names = {path.rpartition(".")[2] for path, _, _ in parts}
    if unknown := sorted(set(target_modules) - names):
        raise ConfigError(
            f"target_modules: this model has no linear layer called {unknown[0]!r}. "
            f"It has: {', '.join(sorted(names))}."
        )
    if not target_modules or names == set(target_modules):
        return layout
    return Linears({p[0]: (p,) for p in parts if p[0].rpartition(".")[2] in target_modules})


def unrestricted(layout: "Layout", target_modules: Collection[str]) -> "Layout":
    """The layout, which hone's own decoder trains completely; ConfigError for a part of it."""
    if restricted(layout, target_modules) is not layout:
        raise ConfigError(
            f"target_modules: on a CPU hone trains all linear layers of this model, not only "
            f"{', '.join(sorted(target_modules))}. Leave target_modules out, or set "
            f"{BODY}=transformers for the server."
        )
    return layout


def check_targets(raw: Mapping[str, Any], target_modules: Collection[str], device: str) -> None:
    """Refuse layers that a learner on this device cannot train.

    Checks families of hone's own decoder only: for others, transformers would have to be imported.
    """
    decoder = own_decoder(raw)
    if decoder is not None:
        check = unrestricted if trains_decoder(raw, device) else restricted
        check(decoder, target_modules)
