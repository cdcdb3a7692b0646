"""Fixtures: a real server, the command, Ctrl-C, a run up to its first epoch."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes import MemoryAdapter, ScriptedBuilder
from tests.finetune.command import Command, Parts, rising
from tests.finetune.rehearsal import Rehearsal
from tests.finetune.trainers import Bench

from hone import LocalBackend


@pytest.fixture
def server(shared_server: LocalBackend) -> LocalBackend:
    return shared_server


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Command:
    monkeypatch.chdir(tmp_path)
    Parts.builder, Parts.adapter, Parts.closed = ScriptedBuilder(rising), MemoryAdapter(), []
    caplog.set_level(logging.INFO, logger="hone")
    return Command(tmp_path)


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each time that a reward plot is put in its place."""
    paths: list[Path] = []
    replace = Path.replace

    def counted(path: Path, target: Path) -> Path:
        if target.name == "reward_plot.png":
            paths.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", counted)
    return paths


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
