"""Safetensors are checked before they are used: damaged headers, NaN and infinity of every type."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.prose import Prose, place_of

from hone.errors import HoneError, ModelUnsupported
from hone.models.architecture import DecoderConfig
from hone.models.files import ModelFiles
from hone.models.lora import Lora
from hone.models.shape import Linears, own_decoder
from hone.models.weight_check import PIECE_BYTES, check_finite, read_header, sha256_of_finite

cheap = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# The bits of NaN and, where there is one, infinity, as the standards for each type define them.
NOT_FINITE = {
    torch.float64: [float("nan"), float("inf")],
    torch.float32: [float("nan"), float("-inf")],
    torch.float16: [float("nan"), float("inf")],
    torch.bfloat16: [float("nan"), float("-inf")],
    torch.float8_e5m2: [float("nan"), float("inf")],
    torch.float8_e4m3fn: [float("nan")],
    torch.float8_e4m3fnuz: [float("nan")],
    torch.float8_e5m2fnuz: [float("nan")],
    torch.float8_e8m0fnu: [float("nan")],
}


@pytest.mark.parametrize("dtype", NOT_FINITE, ids=str)
def test_a_value_that_is_not_finite_is_found_in_every_type(
    prose: Prose, dtype: torch.dtype, tmp_path: Path
):
    file = tmp_path / "w.safetensors"
    # All bit patterns of one byte, or the largest and smallest values: finite ones pass.
    if dtype.itemsize == 1:
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = every[torch.isfinite(every.float())].clone()
    else:
        limits = torch.finfo(dtype)
        finite = torch.tensor([0.0, limits.max, limits.min, limits.tiny], dtype=dtype)
    save_file({"a": finite, "b": finite.clone()}, file)
    check_finite(file)
    for value in NOT_FINITE[dtype]:
        wrong = finite.clone()
        wrong[len(wrong) // 2] = torch.tensor(value).to(dtype)
        save_file({"a": finite, "b": wrong}, file)
        with pytest.raises(ModelUnsupported) as caught:
            check_finite(file)
        prose(caught)
        assert place_of(caught).endswith("w.safetensors")


def test_the_last_value_of_a_large_tensor_is_read_and_the_hash_is_that_of_the_bytes(
    prose: Prose,
    tmp_path: Path,
):
    file = tmp_path / "w.safetensors"
    large = torch.ones(PIECE_BYTES // 4 + 3)
    save_file({"n": torch.arange(5), "large": large, "odd": torch.ones(3, dtype=torch.int8)}, file)
    assert sha256_of_finite([file, file]) == hashlib.sha256(file.read_bytes() * 2).hexdigest()
    large[-1] = float("nan")
    save_file({"n": torch.arange(5), "large": large}, file)
    with pytest.raises(ModelUnsupported) as caught:
        sha256_of_finite([file])
    prose(caught)


def test_a_file_without_tensors_is_whole(tmp_path: Path):
    save_file({}, tmp_path / "w.safetensors")
    assert read_header(tmp_path / "w.safetensors") == []
    check_finite(tmp_path / "w.safetensors")


@cheap
@given(data=st.data())
def test_whatever_bytes_of_a_header_are_wrong_the_file_is_named(
    data: st.DataObject, tmp_path: Path
):
    file = tmp_path / "w.safetensors"
    save_file({"first": torch.ones(4, 2), "second": torch.ones(3, dtype=torch.float16)}, file)
    content = bytearray(file.read_bytes())
    places = st.lists(
        st.tuples(st.integers(0, len(content) - 39), st.integers(0, 255)), min_size=1, max_size=4
    )
    for place, value in data.draw(places):
        content[place] = value
    file.write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    try:
        sha256_of_finite([file])
    except ModelUnsupported as error:
        assert str(file) in str(error)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)
CONFIG: dict[str, Any] = {
    "model_type": "smollm3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "layer_types": ["full_attention"] * 4,
    "no_rope_layers": [1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "eos_token_id": [1, 2],
    "text_config": {},
    "quantization_config": None,
}


@cheap
@example({"no_rope_layers": None, "no_rope_layer_interval": 0})
@example({"layer_types": [["full_attention"]] * 4})
@example({"rope_parameters": {"rope_type": []}})
@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), values, min_size=1, max_size=3))
def test_whatever_fields_of_a_config_are_wrong_the_file_is_named(
    tmp_path: Path, changes: dict[str, Any]
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    files = ModelFiles("m", tmp_path, "directory")
    where = str(tmp_path / "config.json")
    try:
        files.check_config()
        _ = files.end_ids
        if own_decoder(files.config) is not None:
            DecoderConfig.parse(files.config, where=where)
    except ModelUnsupported as error:
        assert str(tmp_path) in str(error)


LAYOUT = Linears({"0.out": (("model.layers.0.self_attn.o_proj", 4, 4),)})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    Lora.init(LAYOUT, rank=2, alpha=4.0).save(tmp_path / "adapter", base_model="m")
    return tmp_path / "adapter"


def test_an_adapter_that_is_not_finite_or_not_whole_is_refused(prose: Prose, adapter: Path):
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    assert Lora.load(adapter, LAYOUT).rank == 2
    value = np.frombuffer(whole, np.float32, 1, len(whole) - 4).copy()
    value[:] = np.inf
    file.write_bytes(whole[:-4] + value.tobytes())
    with pytest.raises(ModelUnsupported) as caught:
        Lora.load(adapter, LAYOUT)
    prose(caught)
    assert place_of(caught).endswith("adapter_model.safetensors")
    for content in (b"", whole[:-1], whole[:20], b"\xff" * 40):
        file.write_bytes(content)
        with pytest.raises(ModelUnsupported) as caught:
            Lora.load(adapter, LAYOUT)
        prose(caught)
        assert place_of(caught).endswith("adapter_model.safetensors")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"r": "two", "lora_alpha": 4}', '{"r": 2, "lora_alpha": []}']
)
def test_the_settings_of_an_adapter_are_checked(prose: Prose, adapter: Path, content: str):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(HoneError) as caught:
        Lora.load(adapter, LAYOUT)
    prose(caught)
    assert place_of(caught).endswith("adapter_config.json")


def test_half_precision_adapters_are_checked_too(prose: Prose, adapter: Path):
    file = adapter / "adapter_model.safetensors"
    tensors = {t.name: torch.ones(t.shape, dtype=torch.bfloat16) for t in read_header(file)}
    save_file(tensors, file)
    assert Lora.load(adapter, LAYOUT).rank == 2
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ModelUnsupported) as caught:
        Lora.load(adapter, LAYOUT)
    prose(caught)
