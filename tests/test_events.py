"""events.py: what is appended can be read, after a kill too; a hole in a history is an error."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hone.errors import StateError
from hone.events import EventLog, read


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
    assert [e["type"] for e in events] == ["warning", "preflight"]
    assert events[0]["message"] == "first\nof two lines"
    assert events[1]["checks"] == [{"name": "server", "ok": True}]
    assert events[1]["file"] == "a.yml"
    assert events[0]["at"] <= events[1]["at"]
    assert len(path.read_bytes().splitlines()) == 2
    assert list(json.loads(path.read_bytes().splitlines()[0])) == ["at", "type", "message"]


def test_a_log_that_is_not_there_is_empty(tmp_path: Path):
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
    assert [e["message"] for e in read(path)] == ["whole"]
    with EventLog(path) as log:
        log.append("warning", message="after")
    assert [e["message"] for e in read(path)] == ["whole", "after"]


def test_only_a_torn_line_leaves_nothing(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"at": 1.0')
    assert read(path) == []
    with EventLog(path):
        assert path.read_bytes() == b""


def test_a_bad_line_before_the_last_is_named(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("warning", message="one")
    path.write_bytes(path.read_bytes() + b"not json\n" + path.read_bytes())
    with pytest.raises(StateError, match=r"events.jsonl:2: not an event .*'not json'.*--fresh"):
        read(path)


def test_listeners_see_what_a_reader_of_the_file_sees(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    seen = []
    with EventLog(path) as log:
        log.listeners.append(seen.append)
        log.append("job_done", **DONE, metrics={"learn/loss": float("nan"), "n": float("inf")})
        log.tell("job_progress", phase="train", step=1, steps=2)
    assert [e["type"] for e in seen] == ["job_done", "job_progress"]
    # A value that is not finite is unknown: null, and never a number.
    assert seen[0]["metrics"] == {"learn/loss": None, "n": None}
    assert read(path) == seen[:1]


def test_an_event_that_lacks_a_field_is_our_mistake(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        with pytest.raises(
            AssertionError, match=r"event 'warning' lacks \['message'\], has \['x'\]"
        ):
            log.append("warning", x=1)
        log.append("a_plugins_own", x=1)


DONE = {"epoch": 0, "round": 0, "job": "j-1", "step": 1, "seconds": 1.0}
