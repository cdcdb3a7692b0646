"""Metrics and pictures, written beside the run."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.events import FILE, EventLog
from hone.report.writer import Files


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / FILE) as log:
        yield log


async def test_asked_often_they_are_written_once_more(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go, calls = threading.Event(), threading.Event(), []

    def write(path: Path, output_dir: Path, *, picture: bool) -> None:
        calls.append(threading.current_thread())
        begun.set()
        assert go.wait(10)

    monkeypatch.setattr("hone.report.writer.write", write)
    files = Files(events, tmp_path)
    await files.settle()
    files.refresh()
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(5):
        files.refresh()
    go.set()
    await files.settle()
    assert len(calls) == 3  # the last of them draws
    assert threading.main_thread() not in calls


async def test_where_rounds_follow_fast_only_some_are_drawn_and_the_last_always(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seconds, drawn = [0.0], []
    monkeypatch.setattr("hone.report.writer.time.monotonic", lambda: seconds[0])
    monkeypatch.setattr(
        "hone.report.writer.write",
        lambda path, output_dir, *, picture: drawn.append((seconds[0], picture)),
    )
    files = Files(events, tmp_path)
    for now in (3.0, 9.0, 11.0, 12.0, 20.0, 22.0, 25.0):
        seconds[0] = now
        files.refresh()
        while len(drawn) < 1 or drawn[-1][0] != now:
            await asyncio.sleep(0)
    assert [now for now, picture in drawn if picture] == [11.0, 22.0]
    await files.settle()
    assert drawn[-1] == (25.0, True) and len(drawn) == 8
    await files.settle()
    assert len(drawn) == 8  # it shows everything already


async def test_a_full_disk_is_a_warning(
    events: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def write(path: Path, output_dir: Path, *, picture: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hone.report.writer.write", write)
    told: list[dict[str, Any]] = []
    events.listeners.append(told.append)
    files = Files(events, tmp_path)
    with caplog.at_level(logging.WARNING, logger="hone"):
        files.refresh()
        await files.settle()
    assert "No space left on device" in caplog.text
    assert [event["type"] for event in told] == ["warning", "warning"]  # at the end, again
