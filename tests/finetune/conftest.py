"""A real server over a tiny model, one for each file of tests that needs it; a command; a Ctrl-C."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes import MemoryAdapter, ScriptedBuilder
from tests.finetune.command import Command, Parts, rising
from tests.finetune.rehearsal import Rehearsal
from tests.finetune.trainers import Bench
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
    """Each test uses a model of its own."""
    with LocalBackend(tmp_path_factory.mktemp("hone")) as backend:
        backend.start()
        yield backend


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Command:
    monkeypatch.chdir(tmp_path)
    Parts.builder, Parts.adapter, Parts.closed = ScriptedBuilder(rising), MemoryAdapter(), []
    caplog.set_level(logging.INFO, logger="hone")
    return Command(tmp_path)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As a program starts; pytest's workers do not listen to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rehearsal(tmp_path: Path, server: LocalBackend, tiny_model: Path) -> Rehearsal:
    return Rehearsal(tmp_path, server, tiny_model)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "out")
