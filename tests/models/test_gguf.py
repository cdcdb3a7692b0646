"""models/gguf.py: what comes out equals what went in, and what is not understood is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf as gguf_library
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.prose import Prose

from hone.errors import ModelUnsupported
from hone.models import gguf


def _converted(tmp_path: Path, make_gguf: Callable[..., None], **changed: object) -> Path:
    make_gguf(tmp_path / "tiny.gguf", **changed)
    into = tmp_path / "out"
    into.mkdir()
    gguf.convert(tmp_path / "tiny.gguf", into)
    return into


def test_float32_weights_come_back_bit_for_bit(tmp_path, make_gguf, tiny_weights):
    loaded = load_file(_converted(tmp_path, make_gguf) / "model.safetensors")
    assert loaded.keys() == tiny_weights.keys()
    for name, array in tiny_weights.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_other_families_keep_the_order_of_q_and_k(tmp_path, make_gguf, tiny_weights):
    # llama.cpp reorders q and k for llama only; qwen2 has biases there, llama must not.
    bias = {"model.layers.0.self_attn.q_proj.bias": np.arange(32, dtype=np.float32)}
    into = _converted(tmp_path, make_gguf, arch="qwen2", tensors=bias)
    loaded = load_file(into / "model.safetensors")
    for name, array in (tiny_weights | bias).items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)
    assert json.loads((into / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_quantised_weights_equal_what_transformers_reads(tmp_path, make_gguf):
    import torch
    from transformers import AutoModelForCausalLM

    kind = gguf_library.GGMLQuantizationType.Q8_0
    make_gguf(tmp_path / "tiny.gguf", quantise=kind)
    (tmp_path / "out").mkdir()
    origin = gguf.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert origin.quantisation == "Q8_0"
    # 7 matrices in each of 2 layers, embedding and head; 2 norms a layer and the last one.
    assert origin.tensor_types == {"Q8_0": 16, "F32": 5}


def test_digits_are_split_one_by_one(tmp_path, make_gguf):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_converted(tmp_path, make_gguf) / "tokenizer.json"))
    # "12" and two newlines are merges of the vocabulary; only the newlines may merge.
    assert tokenizer.encode("\n\n12").tokens == ["\u010a\u010a", "1", "2"]
    assert tokenizer.encode("ab<|im_end|>").tokens == ["ab", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("h\u00e9 12").ids) == "h\u00e9 12"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345", "\u0120it", "'s"]),
        ("qwen2", ["1", "2", "3", "4", "5", "\u0120it", "'s"]),
        ("llama-bpe", ["123", "45", "\u0120it", "'s"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(tmp_path, make_gguf, pre, pieces):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(
        str(_converted(tmp_path, make_gguf, pre=pre) / "tokenizer.json")
    )
    split = tokenizer.pre_tokenizer.pre_tokenize_str("12345 it's")
    assert [piece for piece, _ in split] == pieces


def test_llama_bpe_begins_with_bos(tmp_path, make_gguf):
    from tokenizers import Tokenizer

    into = _converted(tmp_path, make_gguf, pre="llama-bpe")
    tokenizer = Tokenizer.from_file(str(into / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<|im_start|>", "ab"]


def test_pad_stays_eos_and_the_template_is_kept(tmp_path, make_gguf):
    into = _converted(tmp_path, make_gguf)
    config = json.loads((into / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"]) == (2, 2)
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"] is False
    assert "<|im_start|>" in (into / "chat_template.jinja").read_text()


def test_weights_beyond_a_shard_get_an_index(tmp_path, make_gguf, monkeypatch, tiny_weights):
    monkeypatch.setattr(gguf, "SHARD_BYTES", 40_000)
    into = _converted(tmp_path, make_gguf)
    index = json.loads((into / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(a.size for a in tiny_weights.values())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    loaded = {name: array for file in files for name, array in load_file(into / file).items()}
    assert loaded.keys() == tiny_weights.keys()
    np.testing.assert_array_equal(loaded["lm_head.weight"], tiny_weights["lm_head.weight"])


@pytest.mark.parametrize(
    "changed",
    [
        {"arch": "gemma2"},
        {"pre": "tekken"},
        {"kind": "llama"},
        {"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}},
        {"tensors": {"mystery.weight": np.ones(4, np.float32)}},
        {"tensors": {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}},
        {"fields": {"llama.attention.scale": 0.5}},
        {"fields": {"llama.rope.scaling.factor": 2.0}},
        {"fields": {"llama.attention.value_length": 4}},
    ],
)
def test_what_is_not_understood_is_refused(prose: Prose, tmp_path, make_gguf, changed):
    with pytest.raises(ModelUnsupported) as caught:
        _converted(tmp_path, make_gguf, **changed)
    prose(caught)


def test_fields_that_change_nothing_are_accepted(tmp_path, make_gguf):
    _converted(
        tmp_path,
        make_gguf,
        fields={
            "llama.vocab_size": 300,
            "llama.attention.value_length": 8,
            "llama.attention.causal": True,
            "llama.rope.scaling.factor": 1.0,
            "llama.expert_count": 0,
            "general.quantization_version": 2,
        },
    )


def test_a_file_that_is_no_gguf_says_so(prose: Prose, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf" * 100)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelUnsupported) as caught:
        gguf.convert(tmp_path / "bad.gguf", tmp_path / "out")
    prose(caught)


def test_a_cut_off_file_says_so(prose: Prose, tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelUnsupported) as caught:
        gguf.convert(tmp_path / "cut.gguf", tmp_path / "out")
    prose(caught)
