"""events.py: appended events can be read, also after a kill; a gap in a history is an error."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.finetune.runs import REST
from tests.prose import Prose, place_of

from hone.errors import DiskFull, StateError
from hone.files.event_log import EventLog, EventReader, read
from hone.files.events import (
    EpochCollected,
    Event,
    JobDone,
    PreflightDone,
    RunStarted,
    WarningLogged,
)


@dataclass
class Check:
    name: str
    ok: bool


def test_what_is_appended_is_read_back_in_order(tmp_path: Path):
    path = tmp_path / "deep" / "events.jsonl"
    with EventLog(path) as log:
        log.append("warning", message="first\nof two lines")
        log.append("preflight", checks=[Check("server", True)], file=Path("a.yml"))
    events = read(path)
    assert [e.type for e in events] == ["warning", "preflight"]
    warning, preflight = events
    assert isinstance(warning, WarningLogged) and warning.message == "first\nof two lines"
    assert isinstance(preflight, PreflightDone)
    assert preflight.checks == [{"name": "server", "ok": True}]
    assert preflight.model_extra == {"file": "a.yml"}
    assert warning.at <= preflight.at
    assert len(path.read_bytes().splitlines()) == 2
    assert list(json.loads(path.read_bytes().splitlines()[0])) == ["at", "type", "message"]


def test_a_password_that_is_also_the_name_of_the_project_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POSTGRES_PASSWORD", "invoice-agent")
    path = tmp_path / "events.jsonl"
    where = {"name": "invoice-agent", "project": "invoice-agent", "root": "/srv/invoice-agent"}
    with EventLog(path) as log:
        log.append("run_started", run_id="r", session=1, epochs=1, step=0, **where)
        log.append("warning", message="invoice-agent was refused")
    started, warning = read(path)
    assert started.model_dump(include={*where}) == where
    assert isinstance(warning, WarningLogged) and warning.message == "<hidden> was refused"


def test_examples_of_a_curriculum_keep_their_ids(tmp_path: Path):
    curriculum = {"history": {"sk-task-000000000001": {"epoch": 0, "excluded": True}}}
    place = {"epoch": 0, "round": 0, "metrics": {}, "dropped": {}, "zero_variance_groups": 0}
    place |= REST["epoch_collected"] | {"curriculum": curriculum}
    with EventLog(tmp_path / "events.jsonl") as log:
        event = log.append("epoch_collected", **place)
    assert isinstance(event, EpochCollected) and event.curriculum == curriculum


def test_a_missing_log_is_empty(tmp_path: Path):
    assert read(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize(
    "torn", [b'{"at": 2.0, "ty', b'{"at": 2.0, "type": "warning"}', b"\0\0\0\n", b"[]\n", b"\n"]
)
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path: Path, torn: bytes):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("warning", message="whole")
    with path.open("ab") as file:
        file.write(torn)
    assert messages(path) == ["whole"]
    with EventLog(path) as log:
        log.append("warning", message="after")
    assert messages(path) == ["whole", "after"]


def test_only_a_torn_line_leaves_nothing(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"at": 1.0')
    assert read(path) == []
    with EventLog(path):
        assert path.read_bytes() == b""


def test_a_bad_line_before_the_last_is_named(prose: Prose, tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("warning", message="one")
    path.write_bytes(path.read_bytes() + b"not json\n" + path.read_bytes())
    with pytest.raises(StateError) as caught:
        read(path)
    prose(caught)
    assert place_of(caught).endswith("events.jsonl:2")


def test_listeners_see_what_a_reader_of_the_file_sees(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    seen: list[Event] = []
    with EventLog(path) as log:
        log.listeners.append(seen.append)
        log.append("job_done", **DONE, metrics={"learn/loss": float("nan"), "n": float("inf")})
        log.tell("job_progress", phase="train", step=1, steps=2)
    assert [e.type for e in seen] == ["job_done", "job_progress"]
    # A value that is not finite is unknown: null, and never a number.
    assert isinstance(seen[0], JobDone) and seen[0].metrics == {"learn/loss": None, "n": None}
    assert read(path) == seen[:1]


def test_appending_an_event_without_a_field_raises(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        with pytest.raises(ValidationError, match=r"WarningLogged\nmessage\n  Field required"):
            log.append("warning", x=1)
        assert log.append("a_plugins_own", x=1).model_extra == {"x": 1}
    assert [event.type for event in read(tmp_path / "events.jsonl")] == ["a_plugins_own"]


def test_a_line_that_lacks_a_field_is_named(prose: Prose, tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"at": 1.0, "type": "warning"}\n')
    with pytest.raises(StateError) as caught:
        read(path)
    prose(caught)
    assert place_of(caught).endswith("events.jsonl:1")


def test_a_run_of_the_sdk_began_with_its_event(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        run = log.append("run_started", run_id="r", session=1, epochs=0, step=None)
    assert isinstance(run, RunStarted)
    assert (run.command_at, run.name, run.evaluators) == (run.at, None, (None, None))


def test_a_reader_returns_each_event_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    with EventLog(path) as log:
        first = log.append("warning", message="one")
        assert reader.read() == [first] and reader.read() == []
        with path.open("ab") as file:
            file.write(b'{"at": 2.0, "type": "war')
        assert reader.read() == []  # not whole yet
        with path.open("ab") as file:
            file.write(b'ning", "message": "two"}\n')
        (second,) = reader.read()
        third = log.append("warning", message="three")
        assert reader.read() == [third]
    assert isinstance(second, WarningLogged) and second.message == "two"
    assert reader.offset == path.stat().st_size


def messages(path: Path) -> list[str]:
    return [event.message for event in read(path) if isinstance(event, WarningLogged)]


DONE = {"epoch": 0, "round": 0, "job": "j-1", "step": 1, "seconds": 1.0}


def test_an_event_holds_no_secret_and_keeps_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_TOKEN", "value-of-the-agent")
    heard: list[Event] = []
    with EventLog(tmp_path / "events.jsonl") as log:
        log.listeners.append(heard.append)
        log.append("warning", message="got value-of-the-agent", example="value-of-the-agent", n=0.5)
        log.tell("warning", message="at http://me:pw@host")
    [event] = read(tmp_path / "events.jsonl")
    assert isinstance(event, WarningLogged) and event.message == "got <hidden>"
    assert event.model_extra == {"example": "value-of-the-agent", "n": 0.5}
    told = [one.message for one in heard if isinstance(one, WarningLogged)]
    assert told == ["got <hidden>", "at http://me:<hidden>@host"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_closing_a_log_on_a_full_disk_does_not_hide_the_readable_error(
    prose: Prose, tmp_path: Path
):
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    # The line stays in the file's buffer, and closing the file writes it once more.
    with pytest.raises(DiskFull) as caught, EventLog(path) as log:
        log.append("warning", message="not written")
    prose(caught)
