"""models/fit.py: bytes by hand, published parameter counts, and the refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prose import Prose, place_of

from hone.errors import ModelTooLarge, ModelUnsupported
from hone.learner.optim import AdamW
from hone.models.files import ModelFiles
from hone.models.find import find
from hone.models.fit import (
    ADAPTER_BYTES,
    CUDA_LOGITS,
    Recomputation,
    available_memory,
    cgroup_available,
    cgroup_limit,
    estimate,
    padded_length,
    recomputation,
    require_fit,
    row_tokens,
    total_memory,
)
from hone.models.known import KNOWN
from hone.models.shape import shape_of

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def test_every_part_by_hand():
    got = estimate(CONFIG, dtype_bytes=4, kv_tokens=10, train_row_tokens=5, rank=3)
    # Head dimension 4. A layer: q 8x8, k and v 4x8 each, o 8x8, three of 16x8: 64+64+64+384 = 576;
    # two norms of 8: 592. Two layers 1184, embedding 800, last norm 8: 1992 weights.
    assert got.weights == 4 * 1992
    # Keys and values: 2 x 2 layers x 4 numbers x 10 tokens.
    assert got.kv == 4 * 160
    # Kept per token and layer: 6x8 + 2x(8+8) + 4x16 = 144; 5 tokens, 2 layers; logits twice, fp32.
    assert got.activations == 4 * 5 * 2 * 144 + 2 * 4 * 100 * 5
    # LoRA: (8+8) + 2x(4+8) + (8+8) + 3x(16+8) = 128, x rank 3 x 2 layers = 768, 28 bytes each.
    assert got.adapter == 28 * 768
    assert got.total == 7968 + 640 + 9760 + 21504


def test_an_adapters_bytes_are_what_a_job_holds():
    leaves = [(str(n), torch.zeros(5, n).requires_grad_()) for n in (3, 4)]
    optimizer = AdamW(leaves)
    gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves}
    parts = (dict(leaves), gradients, optimizer.state(), optimizer.snapshot())
    held = sum(t.nbytes for part in parts for t in part.values() if t.ndim)  # not the step numbers
    assert held == ADAPTER_BYTES * 35


def test_serving_keeps_no_activations_and_no_optimizer():
    serving = estimate(CONFIG, dtype_bytes=2, kv_tokens=10, rank=3)
    assert serving.adapter == 4 * 768
    assert serving.activations == 2 * 4 * 100 * 64


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("smollm2-135m-instruct", 134_515_008),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
    ],
)
def test_the_table_has_the_published_number_of_parameters(name, published):
    assert shape_of(KNOWN[name].config).parameters == published


def test_activations_are_near_what_was_measured():
    # Qwen2.5-3B, bf16, one row of 8,192 tokens on an H200: 42 GB with 6.2 GB of weights.
    config = KNOWN["Qwen/Qwen2.5-3B-Instruct"].config
    got = estimate(config, dtype_bytes=2, kv_tokens=0, train_row_tokens=8192, rank=8)
    assert got.total / 1e9 == pytest.approx(42, rel=0.1)


def _files(name: str, directory: Path) -> ModelFiles:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(KNOWN[name].config))
    return ModelFiles(name=name, path=directory, source="directory")


def test_too_large_is_refused_with_the_numbers_and_a_model_that_fits(tmp_path):
    files = _files("Qwen/Qwen2.5-7B-Instruct", tmp_path / "m")
    with pytest.raises(ModelTooLarge) as caught:
        require_fit(files, kv_tokens=8192, available=2 * 2**30)
    first, second = str(caught.value).splitlines()
    # 7,615,616,512 x 4 bytes = 28.4 GiB; KV 2 x 28 x 512 x 8192 x 4 bytes = 0.875 GiB.
    assert first.startswith(
        "Qwen/Qwen2.5-7B-Instruct needs 29.3 GiB on cpu and 2.0 GiB is free: weights 28.4 GiB, "
        "KV cache of 8,192 tokens 896.0 MiB"
    )
    # In 2,048 MiB: Qwen2.5-0.5B 1885 + 192 + 74 = 2151 does not fit, SmolLM2-360M does with
    # 1380 of weights, 2 x 32 x 320 x 8192 x 4 bytes = 640 of KV and 24 of logits = 2044.
    assert second == (
        "The weights alone do not fit. HuggingFaceTB/SmolLM2-360M-Instruct would fit."
    )


def test_weights_that_fit_leave_something_to_lower(prose: Prose, tmp_path):
    files = _files("smollm2-135m-instruct", tmp_path / "m")
    with pytest.raises(ModelTooLarge) as caught:
        require_fit(files, kv_tokens=100_000, train_row_tokens=512, rank=8, available=2**30)
    # They are those of the device and dtype of this machine.
    size, device = re.compile(r"[\d.]+ [KMG]iB"), re.compile(r"(?<= on )\w+(?= and )")
    prose(caught, size=size, device=device)


def test_what_fits_is_estimated_and_returned(tmp_path, make_directory):
    make_directory(tmp_path / "tiny")
    files = find(str(tmp_path / "tiny"))
    needed = require_fit(files, kv_tokens=100, available=2**30)
    assert 0 < needed.total < 2**30
    assert require_fit(files, kv_tokens=100) == needed  # and in this machine's own memory
    with pytest.raises(ModelTooLarge):
        require_fit(files, kv_tokens=100, available=needed.total - 1)
    assert require_fit(files, kv_tokens=100, available=needed.total) == needed


def _group(folder: Path, limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def test_the_tightest_control_group_counts(tmp_path):
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    _group(tmp_path / "outer", "1000", used=400, inactive=100)
    _group(tmp_path / "outer" / "inner", "max", used=300, inactive=0)
    # The inner group has no limit; the outer leaves 1000 - 400 + 100.
    assert cgroup_available(tmp_path, tmp_path / "membership") == 700
    _group(tmp_path / "outer" / "inner", "350", used=300, inactive=0)
    assert cgroup_available(tmp_path, tmp_path / "membership") == 50


def test_version_1_groups_and_none_at_all(tmp_path):
    assert cgroup_available(tmp_path, tmp_path / "absent") is None
    (tmp_path / "membership").write_text("5:cpu:/\n4:memory:/docker/abc\n")
    folder = tmp_path / "memory"  # inside a container the root is the group itself
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000")
    (folder / "memory.usage_in_bytes").write_text("600")
    (folder / "memory.stat").write_text("cache 1\ntotal_inactive_file 50\n")
    assert cgroup_available(tmp_path, tmp_path / "membership") == 450


def test_this_machine_has_some_memory():
    assert available_memory() > 2**20


def test_rows_are_sized_from_the_total_memory_by_hand():
    # Weights 4 x 1992 and adapter 28 x 768 as above; 4 x 2 x 144 bytes a token; logits of 1,024.
    fixed, each = 4 * 1992 + 28 * 768 + 2 * 4 * 100 * 1024, 4 * 2 * 144
    wanted = {"dtype_bytes": 4, "rank": 3}
    for tokens in (1024, 1025, 5000):
        share = fixed + each * tokens
        assert row_tokens(CONFIG, **wanted, device="cpu", total=3 * share) == tokens
        assert row_tokens(CONFIG, **wanted, device="cpu", total=3 * share - 3) == max(
            1024, tokens - 1
        )
    assert row_tokens(CONFIG, **wanted, device="cpu", total=1) == 1024  # no row is shorter


def test_the_total_is_that_of_the_tightest_control_group(tmp_path):
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    _group(tmp_path / "outer", "1000", used=400, inactive=100)
    _group(tmp_path / "outer" / "inner", "2000", used=900, inactive=0)
    assert cgroup_limit(tmp_path, tmp_path / "membership") == 1000
    assert cgroup_limit(tmp_path, tmp_path / "absent") is None
    assert total_memory() >= available_memory() > 0


def test_rows_on_cuda_have_few_lengths_and_recompute_what_does_not_fit():
    # Kept per token and layer: 0.5 x 144 = 72 numbers, 2 x 16 of them by the feed-forward part; of a
    # recomputed layer its input of 8.
    fixed, activations, feed_forward, passed = 4 * 1992 + 32 * 768, 4 * 72, 4 * 32, 4 * 8
    wanted = {"dtype_bytes": 4, "rank": 3, "device": "cuda:1"}
    roomy = fixed + CUDA_LOGITS + 2 * activations * 20_000
    assert row_tokens(CONFIG, **wanted, total=2 * roomy) == 16_384
    assert recomputation(CONFIG, **wanted, tokens=16_384, learner=roomy) == Recomputation()
    # 6,000 tokens fit with all kept: 3,456,000 bytes. With a feed-forward part less, 448 each, 7,714;
    # with both, 320 each, 10,800; the logits are larger than a layer that is computed again.
    tight = fixed + CUDA_LOGITS + 2 * activations * 6_000
    assert 2 * activations - feed_forward == 448 and 2 * passed == 64

    def chosen(tokens: int) -> Recomputation:
        return recomputation(CONFIG, **wanted, tokens=tokens, learner=tight)

    assert chosen(6000) == Recomputation()
    assert chosen(6001) == chosen(7714) == Recomputation(feed_forward=1)
    assert chosen(7715) == chosen(10_800) == Recomputation(feed_forward=2)
    # One whole layer and the other's feed-forward part: 32 + 160 = 192 each, 18,000. Both: 54,000.
    assert chosen(18_000) == Recomputation(feed_forward=2, layers=1)
    assert chosen(18_001) == chosen(10**9) == Recomputation(feed_forward=2, layers=2)
    assert row_tokens(CONFIG, **wanted, learner=tight) == 8192


def test_the_plan_agrees_with_measured_peaks():
    """Qwen2.5 in bf16, one row of 8,192 on an H200: measured peaks and what the plan chooses for them."""
    wanted: dict[str, Any] = {"dtype_bytes": 2, "rank": 8, "device": "cuda", "tokens": 8192}
    config = KNOWN["Qwen/Qwen2.5-3B-Instruct"].config
    # Whole jobs: 27.10 GB, with rank 64 30.22.
    assert recomputation(config, **wanted, learner=int(27.2e9)) == Recomputation()
    assert recomputation(config, **wanted, learner=int(27.1e9)).feed_forward == 1
    higher: dict[str, Any] = wanted | {"rank": 64}
    assert recomputation(config, **higher, learner=int(30.3e9)) == Recomputation()
    assert recomputation(config, **higher, learner=int(30.2e9)).feed_forward == 1
    # Steps, without the 0.18 GB to which a failed job returns: with 28 feed-forward parts 16.82 GB, with
    # all of them 13.9, and with all layers 10.0.
    assert recomputation(config, **wanted, learner=int(17e9)) == Recomputation(feed_forward=29)
    assert recomputation(config, **wanted, learner=int(14.2e9)) == Recomputation(feed_forward=36)
    assert recomputation(config, **wanted, learner=int(13.7e9)).layers > 0
    config = KNOWN["Qwen/Qwen2.5-7B-Instruct"].config
    # A step was 42.41 GB; a job has 0.24 more.
    assert recomputation(config, **wanted, learner=int(42.75e9)) == Recomputation()


@pytest.mark.parametrize(
    "family",
    ["bloom", "mpt", "mamba", "rwkv"],
)
def test_a_family_without_the_sizes_that_hone_needs_is_refused(prose: Prose, family: str):
    with pytest.raises(ModelUnsupported) as caught:
        shape_of({"model_type": family})
    prose(caught)
    assert place_of(caught) == "config.json"


def test_a_family_may_leave_the_size_of_its_feed_forward_part_out():
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
    shape = shape_of({"model_type": "gpt_neo", "attention_types": [[["global"], 1]], **sizes})
    # Inputs and outputs: four layers of 8x8, and 8x32 twice; 64 + 80. Six times the hidden size: 48.
    assert shape.activations == 48 + 64 + 80


def test_lengths_of_rows():
    assert [padded_length(n) for n in (1, 512, 513, 768, 769, 1024, 1025, 1537)] == [
        512, 512, 768, 768, 1024, 1024, 1536, 2048,
    ]  # fmt: skip
