"""Metrics and pictures, written beside the run."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.finetune.runs import Story, lines
from tests.finetune.trainers import Bench
from tests.patience import PATIENCE_S

from hone.errors import DiskFull
from hone.files.event_log import FILE, EventLog, EventReader
from hone.files.events import Event
from hone.report.display import Display
from hone.report.history import RunHistory
from hone.report.writer import Files


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / FILE) as log:
        yield log


async def test_concurrent_refreshes_are_written_once_more(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go, calls = threading.Event(), threading.Event(), []

    def write(history: RunHistory, output_dir: Path, *, picture: bool) -> None:
        calls.append(threading.current_thread())
        begun.set()
        assert go.wait(PATIENCE_S)

    monkeypatch.setattr("hone.report.writer.write", write)
    files = Files(events, tmp_path)
    await files.settle()
    files.refresh()
    await asyncio.to_thread(begun.wait, PATIENCE_S)
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
        lambda history, output_dir, *, picture: drawn.append((seconds[0], picture)),
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


async def test_a_full_disk_is_only_a_warning(
    events: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def write(history: RunHistory, output_dir: Path, *, picture: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hone.report.writer.write", write)
    seen: list[Event] = []
    events.listeners.append(seen.append)
    files = Files(events, tmp_path)
    with caplog.at_level(logging.WARNING, logger="hone"):
        files.refresh()
        await files.settle()
    assert "No space left on device" in caplog.text
    assert [event.type for event in seen] == ["warning", "warning"]  # at the end, again


def test_a_report_on_a_full_disk_is_a_warning_without_a_trace(
    events: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def write(*_: object, **__: object) -> None:
        raise DiskFull("report.md: the disk is full")

    monkeypatch.setattr("hone.report.report.write", write)
    Files(events, tmp_path)._report()
    assert caplog.messages == ["The report could not be written: report.md: the disk is full"]
    assert caplog.records[0].exc_info is None


async def test_a_round_reads_what_it_appended_over_50_epochs(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bytes read from the log and events applied per round, by everyone who follows a run."""
    size, applied = [0], [0]
    appended, add = EventReader._appended, RunHistory.add

    def count_bytes(reader: EventReader) -> bytes:
        raw = appended(reader)
        size[0] += len(raw)
        return raw

    def count_event(history: RunHistory, event: Event) -> None:
        applied[0] += 1
        add(history, event)

    monkeypatch.setattr(EventReader, "_appended", count_bytes)
    monkeypatch.setattr(RunHistory, "add", count_event)
    monkeypatch.setattr("hone.report.plots.reward_plot", lambda history, path: None)
    story = Story(epochs=50, examples=3, generations=2, held_out=3, interval=1, failing=0.0)
    files, per_round, end = Files(events, tmp_path), [], 0
    with Display(events):
        for line in lines(story):
            events.append(
                line["type"], **{k: v for k, v in line.items() if k not in ("at", "type")}
            )
            if line["type"] == "epoch_done":
                files.refresh()
                await files.settle()
                per_round.append((size[0], applied[0]))
                assert size[0] == events.path.stat().st_size - end
                end = events.path.stat().st_size
                size[0] = applied[0] = 0
    # A validation of 3 rollouts is 5 events, 6 training rollouts are 11; files and display apply
    # each of them once. The first round also has the two events of the start.
    assert [n for _, n in per_round] == [2 * 18] + [2 * 16] * 49
    early, late = ([n for n, _ in rounds] for rounds in (per_round[1:25], per_round[25:]))
    assert max(late) < 1.05 * max(early)
    written = (tmp_path / "training_metrics.jsonl").read_text().splitlines()
    assert len(written) == 50


async def test_a_report_is_there_after_every_epoch(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So it is there after a kill; it neither draws nor reads the log again."""
    monkeypatch.setattr("hone.report.plots.reward_plot", lambda history, path: None)
    monkeypatch.setattr("hone.report.report.measure", lambda output_dir: pytest.fail("read again"))
    files, epochs = Files(events, tmp_path), []
    for line in lines(Story(epochs=3, examples=3, generations=2, held_out=3, interval=1)):
        events.append(line["type"], **{k: v for k, v in line.items() if k not in ("at", "type")})
        if line["type"] == "epoch_done":
            files.refresh()
            await files.settle()
            numbers = json.loads((tmp_path / "report.json").read_text())
            epochs.append((numbers["epochs"], numbers["status"]))
            text = (tmp_path / "report.md").read_text()
            assert text.startswith(f"# Not finished: {len(epochs)} of 3 epochs done\n\n")
            assert "interrupted" not in text and (tmp_path / "report.html").exists()
            assert "## Resume the run" in text
    assert epochs == [(1, "unfinished"), (2, "unfinished"), (3, "unfinished")]


async def test_a_report_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def write(*_: object, **__: object) -> None:
        raise KeyError("median")

    monkeypatch.setattr("hone.report.report.write", write)
    with caplog.at_level(logging.WARNING, logger="hone"):
        statuses = await Bench(tmp_path).run(2)
    assert len(statuses) == 2 and "The report could not be written: 'median'" in caplog.text


async def test_a_trainer_reads_its_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read, appended = [0], EventReader._appended

    def count_bytes(reader: EventReader) -> bytes:
        raw = appended(reader)
        read[0] += len(raw)
        return raw

    monkeypatch.setattr(EventReader, "_appended", count_bytes)
    monkeypatch.setattr("hone.report.plots.reward_plot", lambda history, path: None)
    bench = Bench(tmp_path)
    await bench.run(20)
    assert read[0] == (tmp_path / FILE).stat().st_size
