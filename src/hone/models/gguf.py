"""Convert a GGUF file to a Hugging Face directory: weights, config, tokenizer, chat template.

In:   one .gguf of a llama, qwen2 or qwen3 model with a byte-level BPE tokenizer
Out:  config.json, generation_config.json, model*.safetensors in float32, tokenizer.json,
      tokenizer_config.json, chat_template.jinja; ModelUnsupported for what it cannot carry over

An unknown field, tensor or pre-tokenizer is refused, because a model without one factor or one digit
rule still writes fluent text, with other ids.

transformers reads GGUF files too, with equal weights, but it passes over what it does not know, and
gives SmolLM2's digits other ids.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hone.errors import HoneError, ModelUnsupported
from hone.models.gguf_layout import check_layout
from hone.models.weight_check import refusal

ReportProgress = Callable[[str, int, int], None]
"""progress(phase, done, total)"""

SHARD_BYTES = 2**31
"""Largest shard; a conversion holds one in memory."""

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_READ_FIELDS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
}
"""The fields FAMILY.* from which the config is made."""
_UNUSED_FIELDS = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "vocab_size"}
"""Fields FAMILY.* that have no effect on a model that is converted."""
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.type": ("none",),
}
"""Fields FAMILY.* that are accepted only with a value that has no effect."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
}
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The GGUF's own metadata, for hone.json."""

    architecture: str
    pre_tokenizer: str
    quantisation: str
    """The type of most weights."""
    tensor_types: dict[str, int]
    license: str | None


class _Source:
    """An open GGUF file: fields by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            check_layout(path)
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise ModelUnsupported(
                f"{path}: not a whole GGUF file ({error}).\nDownload or copy it again."
            ) from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._fields if key.startswith(prefix)]

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            self.refuse(f"the field {key} is missing")
        return value

    def refuse(self, what: str) -> NoReturn:
        raise ModelUnsupported(
            f"{self.path}: {what}.\nUse the model's Hugging Face directory instead of this GGUF."
        )


def convert(path: Path, into: Path, *, progress: ReportProgress | None = None) -> Origin:
    """Write the HF directory `into`, which exists and is empty. Raises ModelUnsupported."""
    try:
        return _convert(path, into, progress=progress)
    except (HoneError, OSError, MemoryError):
        raise
    # Foreign values: tokenizers raises bare Exceptions, and a field of another type fails anywhere.
    except Exception as error:
        raise ModelUnsupported(
            f"{path}: cannot be converted ({type(error).__name__}: {error!s:.200}).\n"
            "Download or copy it again, or use the model's Hugging Face directory."
        ) from error


def _convert(path: Path, into: Path, *, progress: ReportProgress | None) -> Origin:
    report = progress or (lambda what, done, total: None)
    report("reading", 0, 1)
    source = _Source(path)
    config = _config(source)
    tokenizer_config = _write_tokenizer(source, into)
    _write_weights(source, config, into, report)
    eos = config["eos_token_id"]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos}
    generation["pad_token_id"] = config["pad_token_id"]
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (into / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    template = source.get("tokenizer.chat_template")
    if template is not None:
        (into / "chat_template.jinja").write_text(template, encoding="utf-8")
    types = Counter({t.tensor_type.name: 0 for t in source.tensors.values()})
    elements: Counter[str] = Counter()
    for tensor in source.tensors.values():
        types[tensor.tensor_type.name] += 1
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    return Origin(
        architecture=source.need("general.architecture"),
        pre_tokenizer=source.need("tokenizer.ggml.pre"),
        quantisation=elements.most_common(1)[0][0],
        tensor_types=dict(sorted(types.items())),
        license=source.get("general.license"),
    )


def _config(source: _Source) -> dict[str, Any]:
    family = source.need("general.architecture")
    if family not in _FAMILIES:
        source.refuse(
            f"general.architecture is {family!r}; hone converts {', '.join(sorted(_FAMILIES))}"
        )
    # Llama 3.1 and later keep their rope scaling only as a table of factors, from which the
    # parameters an HF config needs cannot be recovered.
    if "rope_freqs.weight" in source.tensors:
        source.refuse("its rope scaling is stored as factors (rope_freqs.weight)")
    for key in source.keys(f"{family}."):
        field, value = key.removeprefix(f"{family}."), source.get(key)
        if field in _READ_FIELDS | _UNUSED_FIELDS or value in _DEFAULTS.get(field, ()):
            continue
        source.refuse(f"{key} is {value!r:.80}, which hone does not convert")
    hidden, heads = source.need(f"{family}.embedding_length"), _heads(source, family, "head_count")
    head_dim = source.get(f"{family}.attention.key_length")
    if head_dim is None and family == "llama":
        head_dim = source.get("llama.rope.dimension_count")
    head_dim = head_dim or hidden // heads
    for field in ("attention.value_length", "rope.dimension_count"):
        size = source.get(f"{family}.{field}", head_dim)
        if size != head_dim:
            source.refuse(f"{family}.{field} is {size!r}, and the heads have size {head_dim}")
    theta = source.get(f"{family}.rope.freq_base", 10000.0)
    eos, eot = source.need("tokenizer.ggml.eos_token_id"), source.get("tokenizer.ggml.eot_token_id")
    return {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.need(f"{family}.feed_forward_length"),
        "num_hidden_layers": source.need(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _heads(source, family, "head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.need(f"{family}.context_length"),
        "rms_norm_eps": source.need(f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "vocab_size": len(source.need("tokenizer.ggml.tokens")),
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if eot in (None, eos) else [eos, eot],
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }


def _heads(source: _Source, family: str, key: str, default: int | None = None) -> int:
    count = source.get(f"{family}.attention.{key}", default)
    if not isinstance(count, int):
        source.refuse(f"{family}.attention.{key} is {count!r}, not one number for all layers")
    return count


def _write_weights(
    source: _Source, config: dict[str, Any], into: Path, report: ReportProgress
) -> None:
    """Dequantize tensor by tensor, a shard at a time, under the names that transformers uses."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file

    named = {_hf_name(source, name): tensor for name, tensor in source.tensors.items()}
    size = sum(4 * int(tensor.n_elements) for tensor in named.values())
    shards: list[dict[str, Any]] = [{}]
    shard_bytes = 0
    for name, tensor in named.items():
        if shards[-1] and shard_bytes + 4 * int(tensor.n_elements) > SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += 4 * int(tensor.n_elements)
    index: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays: dict[str, Any] = {}
        for name, tensor in shard.items():
            # A block's scale may be infinite, and its values NaN.
            with np.errstate(invalid="ignore", over="ignore"):
                array = gguf.dequantize(tensor.data, tensor.tensor_type)
            array = array.astype(np.float32, copy=False)
            if not np.isfinite(array).all():
                raise refusal(source.path, tensor.name)
            arrays[name] = np.ascontiguousarray(_unpermuted(array, tensor.name, config))
            done += 1
            report("converting", done, len(named))
        save_file(arrays, into / file, metadata={"format": "pt"})
        index |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (into / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _hf_name(source: _Source, name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    parts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    biased = source.need("general.architecture") == "qwen2" and name.endswith(
        ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    )
    if parts is None or parts[2] not in _TENSORS or (parts[3] == "bias" and not biased):
        source.refuse(f"the tensor {name} has no place in a model of this family")
    return f"model.layers.{parts[1]}.{_TENSORS[parts[2]]}.{parts[3]}"


def _unpermuted(array: Any, name: str, config: dict[str, Any]) -> Any:
    """Undo llama.cpp's order of the rotary pairs in q and k, which it uses for llama only."""
    if config["model_type"] != "llama" or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return array
    kind = "num_attention_heads" if "attn_q" in name else "num_key_value_heads"
    pairs = array.reshape(config[kind], -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _write_tokenizer(source: _Source, into: Path) -> dict[str, Any]:
    """Write tokenizer.json; return tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kind, pre = source.get("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        source.refuse(
            f"its tokenizer is {kind!r} with pre-tokenizer {pre!r}; hone rebuilds 'gpt2' with "
            + ", ".join(repr(known) for known in _PRE_TOKENIZERS)
        )
    tokens = source.need("tokenizer.ggml.tokens")
    types = source.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in source.need("tokenizer.ggml.merges")]
    # Unused entries only pad the embedding; the original tokenizer does not have them.
    vocab = {t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k != _UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    special = {
        f"{role}_token": tokens[token_id]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (token_id := source.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    # llama.cpp adds the token by itself for llama-bpe when the file does not say.
    if source.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    tokenizer.save(str(into / "tokenizer.json"))
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.need(f"{source.need('general.architecture')}.context_length"),
    }


def _pre_tokenizer(pre: str) -> Any:
    """The pre-tokenizer, which the GGUF only names and tokenizer.json spells out."""
    from tokenizers import Regex, pre_tokenizers

    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        # Without the digits' own split "\n\n1" is one piece and gets other ids than in training.
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
