"""events.jsonl: append events, and read appended events.

In:   event fields from the trainer, the builder and the adapter
Out:  `events.jsonl` in the run's output_dir, one line of JSON per event; typed Events for listeners
      and readers

All curves and numbers of a report come from this file, so a run that was killed and resumed has one
history. An incomplete last line, left by a kill, is removed when the file is opened again; a bad
line anywhere else is an error, because a history with a gap would still look complete. An
interrupted run may log an epoch twice: the later event counts. Secrets are removed here, so neither
the file nor what is made of it (reports, loggers, the console) has any.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import to_json, to_jsonable_python

from hone.errors import StateError
from hone.files.disk import open_lines, storage
from hone.files.events import Event, parse
from hone.files.redact import redact_json

FILE = "events.jsonl"
"""Name of the log in a run's output_dir."""
UNSYNCED = frozenset({"rollout"})
"""Event types that are written without syncing: the journal has the rollout."""
IDS = ("example", "rollout", "run_id", "curriculum", "curriculum_state")
"""Fields that are written as they are: a run finds its rollouts and its examples by them."""
PLACES = ("name", "project", "base_model", "root", "config_file", "output_dir")
"""The same for `run_started`: later commands find the model and its files by them, and a password
may be the name of the project."""

Listener = Callable[[Event], None]


class EventLog:
    """Appends events to the log, thread-safe; an appended event is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; a torn last line is cut off."""
        self.path = path
        self.listeners: list[Listener] = []
        """Called with every event, in order, in the thread that appends it."""
        self._writing = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, type: str, /, **fields: Any) -> Event:
        """Write the event and pass it to the listeners. A number that is not finite becomes null."""
        return self._emit(type, fields, written=True)

    def tell(self, type: str, /, **fields: Any) -> Event:
        """Pass the event to the listeners without writing it."""
        return self._emit(type, fields, written=False)

    def close(self) -> None:
        # An event that could not be written has raised in `append`. Closing tries to write it once
        # more, and a second error would hide the first, which says what to do.
        with suppress(OSError):
            self._file.close()

    def _emit(self, type: str, fields: dict[str, Any], *, written: bool) -> Event:
        # Listeners get the same values as a reader of the file.
        plain = to_jsonable_python(fields, inf_nan_mode="null")
        plain = redact_json(plain, keep=(*IDS, *PLACES) if type == "run_started" else IDS)
        own = {"at": time.time(), "type": type}
        raw = own | plain | own  # first in the line, and not for a plugin's fields to change
        event = parse(raw)
        with self._writing:
            if written:
                with storage(self.path):
                    self._file.write(to_json(raw) + b"\n")
                    self._file.flush()
                    if type not in UNSYNCED:
                        os.fsync(self._file.fileno())
            for listener in tuple(self.listeners):
                listener(event)
        return event


class EventReader:
    """Reads a log incrementally: each call returns the events appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.lines = 0
        """Bytes and lines read so far."""

    def read(self) -> list[Event]:
        """New events, without a torn last line; none if there is no file yet."""
        *lines, _ = self._appended().split(b"\n")
        events: list[Event] = []
        for i, line in enumerate(lines):
            fields = _parsed_json(line)
            if fields is None and i == len(lines) - 1:
                break  # torn; EventLog cuts it off
            events.append(self._event(line, fields))
            self.offset += len(line) + 1
            self.lines += 1
        return events

    def _appended(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read()
        except FileNotFoundError:
            return b""

    def _event(self, line: bytes, fields: dict[str, Any] | None) -> Event:
        where = f"{self.path}:{self.lines + 1}: not an event"
        if fields is None:
            raise StateError(
                f"{where} (expected a JSON object with 'at' and 'type', got "
                f"{line[:60].decode('utf-8', 'replace')!r}). Only a last line can be torn: restore "
                "the file from a backup, or start a new run with --fresh."
            )
        try:
            return parse(fields)
        except ValidationError as error:
            raise StateError(
                f"{where} of type {fields['type']!r} ({first_error(error)}). Restore the file from a "
                "backup, or start a new run with --fresh."
            ) from None


def read(path: Path) -> list[Event]:
    """All events of a log, without a torn last line; none if there is no file yet."""
    return EventReader(path).read()


def first_error(error: ValidationError) -> str:
    """The first of pydantic's errors, in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


def _parsed_json(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "at" in fields and "type" in fields else None
