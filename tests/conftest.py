"""Tests that need what this machine does not have are skipped, each with the reason.

A marker names the need (pyproject.toml lists them); everything else always runs. `make test` runs as many processes as
there are cores (at most MOST_PROCESSES), each with one thread: two pools of two threads on two cores wait for each other.
The properties draw the same examples in every run; `make test ARGS=--hypothesis-profile=search` draws new ones, ten times as many.
"""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from hone import LocalBackend

MOST_PROCESSES = 8  # each takes a gigabyte or two
VLLM_PYTHON = "HONE_TEST_VLLM_PYTHON"  # `make test-vllm` sets it

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported, and for what the tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in its background; what the tests start must hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.conformance")  # its files are imported, not collected

settings.register_profile("same", derandomize=True)
settings.register_profile("search", max_examples=1000)
settings.load_profile("same")


def pytest_xdist_auto_num_workers() -> int:
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        MOST_PROCESSES,
    )


def _no_cuda() -> str | None:
    import torch  # here, because most runs have no such test and torch takes seconds to load

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_package(name: str) -> str | None:
    return None if find_spec(name) else f"{name} is not installed"


def _no_vllm() -> str | None:
    return None if os.environ.get(VLLM_PYTHON) else f"{VLLM_PYTHON} names no interpreter with vLLM"


NEEDS = {
    "gpu": _no_cuda,
    "vllm": _no_vllm,
    "browser": lambda: _no_package("playwright"),
    "trl": lambda: _no_package("trl"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, lacking in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := lacking()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    # A file's tests stay in one process, so the long files begin first and short ones fill the end.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that fits in a megabyte, with Qwen2.5's tokenizer and chat template."""
    from tests.chat.conftest import build_tokenizer
    from tests.server.conftest import write_model

    place = tmp_path_factory.mktemp("models") / "tiny-chat"
    return write_model(place, build_tokenizer("qwen2.5-instruct"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[LocalBackend]":
    """One for the tests of a process, for it takes seconds to load; each uses models of its own."""
    from hone import LocalBackend

    with LocalBackend(tmp_path_factory.mktemp("hone")) as backend:
        backend.start()
        yield backend


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that learns in seconds: vocabulary 512, untied, weights drawn wide (0.2).

    With a real vocabulary or narrow weights its distribution is flat, and no reward is ever seen.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    directory = tmp_path_factory.mktemp("tiny-llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory
