"""The arguments of a vLLM server: passed through, refused by name, and set by hone. No vLLM needed."""

from typing import Any

import pytest
from tests.prose import Prose, place_of

from hone.errors import ConfigError, EngineError
from hone.inference.vllm.args import (
    check_arg,
    rank_limit,
    server_arguments,
)
from hone.inference.vllm.process import check_version, find_vllm, require_vllm

KNOWN = {"gpu_memory_utilization", "max_num_seqs", "max_loras", "max_lora_rank", "max_model_len"}
KNOWN |= {
    "dtype",
    "max_logprobs",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_cpu_loras",
    "compilation_config",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu_memory_utilization", 0.9),
        ("gpu_memory_utilization", 1),
        ("max_num_seqs", 64),
        ("max_num_seqs", "1k"),
        ("max_lora_rank", 64),
        ("max_model_len", 4096),
        ("max_loras", None),
        ("max_lora_rank", None),
        ("max_model_len", None),
        ("generation_config", "vllm"),
        ("enable_lora", True),
        ("trust_remote_code", False),
        ("compilation_config", {"mode": 0, "cudagraph_capture_sizes": [1, 2]}),
        ("pipeline_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("max_logprobs", 20),
        ("max_logprobs", -1),
        ("inference_gpu_ids", [0, 1]),
        ("trainer_gpu_ids", [1]),
    ],
)
def test_arguments_of_vllm_pass(key: str, value: Any) -> None:
    check_arg(f"engine_args.{key}", key, value, KNOWN)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_sequences", 64),
        ("logprobs_mode", "raw_logprobs"),
        ("generation_config", "auto"),
        ("trust_remote_code", True),
        ("worker_cls", "x.Y"),
        ("lora_target_modules", ["q_proj"]),
        ("speculative_config", {"method": "custom_class"}),
        ("spec_model", "/drafts"),
        ("spec_method", "custom_class"),
        ("ec_manager_config", {"encoder_cache_manager_cls": "x.Y"}),
        ("compilation_config", '{"backend": "x.y"}'),
        ("mm_encoder_fp8_scale_save_path", "/etc/x"),
        ("mm_encoder_fp8_scale_path", "/etc/x"),
        ("allowed_local_media_path", "/"),
        ("download_dir", "/etc"),
        ("max_num_seqs", [1, "--trust-remote-code"]),
        ("data_parallel_size", 2),
        ("data_parallel_size", 0),
        ("data_parallel_address", "0.0.0.0"),
        ("data_parallel_size_local", 2),
        ("master_addr", "10.0.0.1"),
        ("prefill_context_parallel_size", 2),
        ("device_ids", [1]),
        ("revision", "abc"),
        ("tokenizer_revision", "abc"),
        ("enable_lora", False),
        ("generation_config", False),
        ("pipeline_parallel_size", 2),
        ("max_loras", 1),
        ("max_logprobs", 5),
        ("max_lora_rank", 24),
        ("inference_gpu_ids", ["0"]),
        (
            "inference_gpu_ids",
            [0, 1, 0],
        ),
        ("trainer_gpu_ids", [1, 1]),
        # hone computes with these, so they are numbers, although vLLM reads some as text.
        ("max_model_len", "16k"),
        ("max_model_len", -1),
        ("max_cpu_loras", "4"),
        ("tensor_parallel_size", 1.5),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", 90),
    ],
)
def test_what_hone_decides_and_what_vllm_does_not_know_is_refused(
    prose: Prose, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arg(f"engine_args.{key}", key, value, KNOWN)
    prose(refused)
    assert place_of(refused) == f"engine_args.{key}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "x.y"),
        ("inductor_passes", {"a": "x.y"}),
        ("inductor_compile_config", {"cpp.cxx": ["/tmp/x"]}),
        ("cache_dir", "/etc"),
        ("debug_dump_path", "/etc"),
    ],
)
def test_parts_of_the_compilation_config_are_refused(prose: Prose, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arg("compilation_config", "compilation_config", {"mode": 3, key: value}, KNOWN)
    prose(refused)
    assert place_of(refused) == f"compilation_config.{key}"


def options(line: list[str]) -> dict[str, list[str]]:
    """The values of every option of a command line."""
    parsed: dict[str, list[str]] = {}
    for word in line[1:]:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            parsed[name] = [value] if equals else []
        else:
            parsed[list(parsed)[-1]].append(word)
    return parsed


def test_the_command_line() -> None:
    args = {
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 0},
        "cudagraph_capture_sizes": [1, 2, 4],
        "quantization": None,
        "generation_config": "vllm",
        "inference_gpu_ids": [1, 2],
    }
    modules = {"q_proj", "k_proj"}
    line = server_arguments(
        "/m", "base", args, modules=modules, max_adapters=8, rank=12, sleeps=True
    )
    assert line[0] == "/m"
    assert options(line) == {
        "--max-model-len": ["4096"],
        "--max-logprobs": ["20"],
        "--max-lora-rank": ["16"],
        "--disable-log-stats": [],
        "--enable-sleep-mode": [],
        "--gpu-memory-utilization": ["0.9"],
        "--enforce-eager": [],
        "--no-enable-prefix-caching": [],
        "--limit-mm-per-prompt": ['{"image": 0}'],
        "--cudagraph-capture-sizes": ["1", "2", "4"],
        "--max-loras": ["3"],
        "--max-cpu-loras": ["1024"],
        "--served-model-name": ["base"],
        "--generation-config": ["vllm"],
        "--logprobs-mode": ["processed_logprobs"],
        "--structured-outputs-config": ['{"backend": "guidance"}'],
        "--enable-lora": [],
        "--lora-target-modules": ["k_proj", "q_proj"],
        "--disable-uvicorn-access-log": [],
        "--enable-prompt-tokens-details": [],
        "--api-server-count": ["1"],
    }


def test_the_user_may_raise_the_values_that_hone_needs() -> None:
    args = {"max_loras": 12, "max_cpu_loras": 40, "max_lora_rank": 256, "enable_sleep_mode": False}
    line = server_arguments("/m", "base", args, modules=(), max_adapters=8, rank=8, sleeps=False)
    given = options(line)
    assert "--lora-target-modules" not in given
    assert given["--max-loras"] == ["12"] and given["--max-cpu-loras"] == ["40"]
    assert given["--max-lora-rank"] == ["256"] and "--no-enable-sleep-mode" in given


def test_vllm_keeps_more_adapters_than_hone_may_serve() -> None:
    """Else it would drop one, and read its files again while requests wait."""
    for asked, given in ((6, "12"), (12, "12"), (30, "30"), (None, "1024")):
        args = {"max_cpu_loras": asked}
        line = server_arguments("/m", "b", args, modules=(), max_adapters=10, rank=8, sleeps=False)
        assert options(line)["--max-cpu-loras"] == [given]


def test_no_value_is_read_as_an_option() -> None:
    args = {"dtype": "--trust-remote-code", "max_model_len": -1}
    line = server_arguments("/m", "base", args, modules=(), max_adapters=8, rank=8, sleeps=False)
    assert "--dtype=--trust-remote-code" in line and "--max-model-len=-1" in line
    assert "--trust-remote-code" not in line


def test_ranks() -> None:
    assert [rank_limit(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]


@pytest.mark.parametrize("version", ["0.20.2", "0.24.0rc1", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    check_version(version, where="/python")


@pytest.mark.parametrize("version", ["0.19.9", "0.33.0", "1.0", "dev"])
def test_other_versions_are_refused(prose: Prose, version: str) -> None:
    with pytest.raises(EngineError) as caught:
        check_version(version, where="/python")
    prose(caught)


@pytest.mark.e2e
def test_an_interpreter_without_vllm(prose: Prose, tmp_path: Any) -> None:
    import venv

    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    assert find_vllm(python) is None
    with pytest.raises(EngineError) as caught:
        require_vllm(python)
    prose(caught)


def test_a_file_that_is_no_interpreter(prose: Prose) -> None:
    with pytest.raises(EngineError) as caught:
        find_vllm("/nowhere/python")
    prose(caught)
    assert place_of(caught) == "--engine-python /nowhere/python"
