"""Metrics and pictures, written beside the run."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.events import FILE, EventLog
from hone.finetune.files import Files


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / FILE) as log:
        yield log


async def test_asked_often_they_are_written_once_more(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go, calls = threading.Event(), threading.Event(), []

    def write(path: Path, output_dir: Path) -> None:
        calls.append(threading.current_thread())
        begun.set()
        assert go.wait(10)

    monkeypatch.setattr("hone.finetune.files.write", write)
    files = Files(events, tmp_path)
    await files.settle()
    files.refresh()
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(5):
        files.refresh()
    go.set()
    await files.settle()
    assert len(calls) == 2
    assert threading.main_thread() not in calls


async def test_a_full_disk_is_a_warning(
    events: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def write(path: Path, output_dir: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hone.finetune.files.write", write)
    told: list[dict[str, Any]] = []
    events.listeners.append(told.append)
    files = Files(events, tmp_path)
    with caplog.at_level(logging.WARNING, logger="hone"):
        files.refresh()
        await files.settle()
    assert "No space left on device" in caplog.text
    assert [event["type"] for event in told] == ["warning"]
