"""A real server over a tiny model, one for each file of tests that needs it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.inference.conftest import build_tokenizer
from tests.server.conftest import write_model

from hone import LocalBackend


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template."""
    place = tmp_path_factory.mktemp("models") / "tiny-chat"
    return write_model(place, build_tokenizer("qwen2.5-instruct"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    with LocalBackend(tmp_path_factory.mktemp("hone")) as backend:
        backend.start()
        yield backend
