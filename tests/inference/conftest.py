"""A model directory and a package that stands in for vLLM."""

from pathlib import Path

import pytest

ENGINE_ARGS = """
class EngineArgs:
    model: str = ""
    max_num_seqs: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    max_lora_rank: int = 16
    enable_sleep_mode: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    lora_dtype: str = "auto"
    _private: int = 0

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
"""The source of the arguments, which hone reads without importing vLLM."""


def write_vllm(directory: Path, *, version: str = "0.30.1", main: str = "") -> Path:
    """Write a package called vllm with this command line; returns the directory for PYTHONPATH."""
    package = directory / "packages" / "vllm"
    for part in ("engine", "entrypoints/cli"):
        (package / part).mkdir(parents=True)
    for part in (".", "engine", "entrypoints", "entrypoints/cli"):
        (package / part / "__init__.py").touch()
    (package / "engine" / "arg_utils.py").write_text(ENGINE_ARGS)
    (package / "entrypoints" / "cli" / "main.py").write_text(main)
    info = package.parent / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return package.parent


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """The tiny Llama with a tokenizer file, so that it counts as a whole model."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in tiny_llama_dir.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "tokenizer.json").write_text("{}")
    return directory
