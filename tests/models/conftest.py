"""Tiny models for the tests of hone.models: an HF directory and GGUF files, made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
MERGES = [("\u010a", "\u010a"), ("1", "2"), ("a", "b")]


def vocabulary() -> list[str]:
    """Three special tokens, the 256 byte symbols, then the merges' results: 262 in all."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(a + b for a, b in MERGES)]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a two-layer llama under transformers' names."""
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(vocabulary()), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (len(vocabulary()), HIDDEN),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, **changed: Any) -> None:
    """The model of `weights()` as llama.cpp would write it; `changed` replaces metadata."""
    import gguf

    options = {"arch": "llama", "pre": "smollm", "kind": "gpt2", "tensors": {}, "quantise": None}
    options["fields"] = {}
    options |= changed
    writer = gguf.GGUFWriter(path, options["arch"])
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    tokens = vocabulary()
    writer.add_tokenizer_model(options["kind"])
    writer.add_tokenizer_pre(options["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    for key, value in options["fields"].items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    for name, array in (weights() | options["tensors"]).items():
        array = _permuted(array, name) if options["arch"] == "llama" else array
        kind = options["quantise"] if array.ndim == 2 and array.shape[-1] % 32 == 0 else None
        if kind is None:
            writer.add_tensor(_gguf_name(name), array)
        else:
            writer.add_tensor(_gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(array: np.ndarray, name: str) -> np.ndarray:
    """llama.cpp's order: row r of the first half of a head goes to 2r, of the second to 2r + 1."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return array
    out = np.empty_like(array)
    for head in range(heads):
        for row in range(HEAD_DIM):
            half, place = divmod(row, HEAD_DIM // 2)
            out[head * HEAD_DIM + 2 * place + half] = array[head * HEAD_DIM + row]
    return out


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names.get(stem, stem)}.{kind}"


def write_directory(path: Path) -> None:
    """The same model as an HF directory."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(vocabulary()),
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(), path / "model.safetensors", metadata={"format": "pt"})
    vocab = {token: i for i, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[2], "bos_token": SPECIAL[1]}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, **special}
    (path / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.fixture
def tiny_weights() -> dict[str, np.ndarray]:
    return weights()


@pytest.fixture
def make_gguf() -> Callable[..., None]:
    return write_gguf


@pytest.fixture
def make_directory() -> Callable[[Path], None]:
    return write_directory


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$HONE_HOME and an offline hub cache of this test's own, here and in its subprocesses."""
    from huggingface_hub import constants

    home, hub = tmp_path / "hone-home", tmp_path / "hf-home" / "hub"
    monkeypatch.setenv("HONE_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The hub's client reads its environment when it is imported, which was long ago here.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home
