"""The decoder's architecture: sizes and variants from a model's config.json.

In:   an HF config.json
Out:  DecoderConfig, or ModelUnsupported with the unsupported field

An unknown field is refused rather than ignored: a decoder without one factor still writes fluent text,
but trains on log-probabilities of another model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.errors import ModelUnsupported


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type`s that the decoder computes exactly as transformers does."""

_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _COMMON | {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": _COMMON
    | {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "smollm3": _COMMON | {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
"""transformers' defaults of fields that config.json may leave out."""
_THETA = {"smollm3": 2_000_000.0}
"""Default base of the rotary frequencies; 10,000 for the other families."""

_COMPUTED = _words(
    "model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act "
    "quantization_config sliding_window use_sliding_window max_window_layers layer_types "
    "no_rope_layers no_rope_layer_interval rope_theta rope_scaling rope_parameters attention_bias "
    "mlp_bias"
)
"""Fields that the decoder implements or that are checked separately."""
HARMLESS = _words(
    # names, versions and formats
    "_name_or_path architectures transformers_version dtype torch_dtype tokenizer_class "
    "transformers.js_config is_llama_config unsloth_fixed unsloth_version "
    # tokens, which the tokenizer and generation_config.json decide
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
    # initialisation, dropout and layout of a training that is over
    "initializer_range attention_dropout pretraining_tp use_cache "
    "_attn_implementation _attn_implementation_autoset attn_implementation "
    # what transformers returns, and classes of other tasks
    "output_attentions output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss "
    "id2label label2id problem_type finetuning_task task_specific_params prefix "
    # defaults of `generate`, which every request to hone sets itself
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens"
)
"""Fields that may have any value: they do not change what the decoder computes."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "chunk_size_feed_forward": (0,),
}
"""Fields that are supported only with these values."""
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": _words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _words(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate"
    ),
}
"""Supported kinds of rotary embedding, with their parameters."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        _words(
            "intermediate_size num_key_value_heads head_dim sliding_window max_window_layers "
            "no_rope_layer_interval"
        ),
        ((int,), "a whole number above 0"),
    ),
    **dict.fromkeys(_words("rms_norm_eps rope_theta"), ((int, float), "a number of 0 or more")),
    **dict.fromkeys(
        _words("tie_word_embeddings attention_bias mlp_bias use_sliding_window"),
        ((bool,), "true or false"),
    ),
    **dict.fromkeys(_words("layer_types no_rope_layers"), ((list,), "a list of names or numbers")),
    **dict.fromkeys(_words("rope_parameters rope_scaling"), ((dict,), "an object")),
}
"""The types of the fields that the decoder computes with, besides those that every model has."""
_FROM_ZERO = ("max_window_layers", "rms_norm_eps", "rope_theta")
"""Numbers that may be 0, or between 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and variants of a decoder."""

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
    """Sliding window per layer; None: full attention."""
    rotary: tuple[bool, ...]
    """Whether a layer has rotary embeddings (SmolLM3 leaves some out)."""
    biased: frozenset[str]
    """PEFT paths, within the layer, of linear layers with a bias."""
    rope_theta: float
    raw: dict[str, Any]
    """The config.json itself, for transformers' rope functions."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token in float32."""
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

    @property
    def adapted(self) -> dict[str, tuple[tuple[str, int, int], ...]]:
        """Linear layers of the whole model, as lora.Layout describes them."""
        return {
            f"{layer}.{key}": tuple(
                (f"model.layers.{layer}.{path}", outputs, inputs) for path, outputs, inputs in parts
            )
            for layer in range(self.layers)
            for key, parts in self.projections.items()
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
        _check_fields(raw, where=where)
        _check_rope(raw, where=where)
        fields = _DEFAULTS[family] | raw
        layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return cls(
            family=family,
            layers=layers,
            hidden=fields["hidden_size"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            intermediate=fields["intermediate_size"],
            vocab=fields["vocab_size"],
            max_positions=fields["max_position_embeddings"],
            norm_eps=fields["rms_norm_eps"],
            tied=fields["tie_word_embeddings"],
            qk_norm=family == "qwen3",
            windows=_windows(fields, layers, where),
            rotary=_rotary(fields, layers),
            biased=_biased(fields),
            rope_theta=float(
                rope.get("rope_theta") or raw.get("rope_theta") or _THETA.get(family, 10_000.0)
            ),
            raw=raw,
        )


def check_types(raw: dict[str, Any], *, where: str) -> None:
    """Refuse fields of a family of hone's own decoder that have a value of another type."""
    for key, (kinds, expected) in _TYPES.items():
        value = raw.get(key)
        if value is None:
            continue
        wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        if not wrong and type(value) in (int, float):
            wrong = value < (key not in _FROM_ZERO)
        elif not wrong and isinstance(value, list):
            wrong = not all(isinstance(each, int | str) for each in value)
        if wrong:
            raise ModelUnsupported(
                f"{where}: {key} is {value!r:.80}, which is not {expected}. Download or copy the file "
                "again, or use another model."
            )
    for name in ("rope_parameters", "rope_scaling"):
        for key, value in (raw.get(name) or {}).items():
            if not isinstance(value, int | float | str | None):
                raise ModelUnsupported(
                    f"{where}: {name}.{key} is {value!r:.80}, which is neither a number nor a name. "
                    "Download or copy the file again, or use another model."
                )


def _check_fields(raw: dict[str, Any], *, where: str) -> None:
    """Refuse fields that the decoder would ignore; null means not set."""
    family = raw["model_type"]
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(f"{where}: hidden_act {raw['hidden_act']!r}; only 'silu' is run.")
    if raw.get("quantization_config"):
        raise ModelUnsupported(
            f"{where}: the weights are quantised; use the unquantised model of that name."
        )
    for key, value in raw.items():
        if value is None or key in _COMPUTED or key in HARMLESS:
            continue
        if key not in _ONLY:
            raise ModelUnsupported(
                f"{where}: {key} is {value!r}, a field that hone does not know. It may change what "
                "the model computes, so the model is not run; choose another model."
            )
        if value not in _ONLY[key]:
            raise ModelUnsupported(
                f"{where}: {key} is {value!r}; hone runs {_ONLY[key][0]!r} only. "
                "Choose another model."
            )
    families = {
        "attention_bias": ("llama", "qwen3", "smollm3"),
        "mlp_bias": ("llama", "smollm3"),
        "use_sliding_window": ("qwen2", "qwen3", "smollm3"),
        "sliding_window": ("mistral", "qwen2", "qwen3", "smollm3"),
        "no_rope_layers": ("smollm3",),
    }
    for key, known in families.items():
        if raw.get(key) and family not in known:
            raise ModelUnsupported(
                f"{where}: {key} is {raw[key]!r}, which models of type {family!r} do not have. "
                "Choose another model."
            )


def _check_rope(raw: dict[str, Any], *, where: str) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind in ("dynamic", "longrope"):
            raise ModelUnsupported(
                f"{where}: rope_type {kind!r} changes its angles with the length of the text, which "
                f"hone does not run. Choose a model with rope_type {', '.join(_ROPE_FIELDS)}."
            )
        if kind not in _ROPE_FIELDS:
            raise ModelUnsupported(
                f"{where}: rope_type {kind!r} is not among those hone runs "
                f"({', '.join(_ROPE_FIELDS)}). Choose another model."
            )
        known = {"rope_type", "type", "rope_theta"} | _ROPE_FIELDS[kind]
        for key, value in rope.items():
            full = key == "partial_rotary_factor" and value == 1
            if value is not None and key not in known and not full:
                raise ModelUnsupported(
                    f"{where}: {name}.{key} is {value!r}, which hone does not run with rope_type "
                    f"{kind!r}. Choose another model."
                )


def _windows(fields: dict[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """Sliding windows as transformers resolves them: by layer_types, else by the family's rule."""
    family, window, kinds = (
        fields["model_type"],
        fields.get("sliding_window"),
        fields.get("layer_types"),
    )
    if family in ("llama", "mistral"):
        window = window if family == "mistral" else None
        expected = "full_attention" if window is None else "sliding_attention"
        if kinds and set(kinds) != {expected}:
            raise ModelUnsupported(
                f"{where}: layer_types {sorted(set(kinds))} with sliding_window {window!r}; models of "
                f"type {family!r} use the same attention in every layer. Choose another model."
            )
        return (window,) * layers
    if not fields.get("use_sliding_window"):
        window = None
    if not kinds:
        late = fields.get("max_window_layers", layers)
        slides = (
            [not rotary for rotary in _rotary(fields, layers)]
            if family == "smollm3"
            else [i >= late for i in range(layers)]
        )
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise ModelUnsupported(
            f"{where}: layer_types has {len(kinds)} entries, of them {sorted(unknown) or 'none'} "
            f"unknown; hone runs sliding_attention and full_attention, one for each of the {layers} "
            "layers. Choose another model."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary(fields: dict[str, Any], layers: int) -> tuple[bool, ...]:
    if fields["model_type"] != "smollm3":
        return (True,) * layers
    flags = fields.get("no_rope_layers")
    if flags is None:
        every = fields.get("no_rope_layer_interval", 4)
        flags = [int((i + 1) % every != 0) for i in range(layers)]
    return tuple(bool(flag) for flag in flags[:layers])


def _biased(fields: dict[str, Any]) -> frozenset[str]:
    inputs = {f"self_attn.{name}_proj" for name in "qkv"}
    biased = inputs if fields["model_type"] == "qwen2" else set[str]()
    if fields.get("attention_bias"):
        biased = inputs | {"self_attn.o_proj"}
    if fields.get("mlp_bias"):
        biased = biased | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return frozenset(biased)
