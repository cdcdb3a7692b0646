"""The process of one logger: send a run to a sink, as its events are appended.

In:   stdin: a line of JSON (the Settings), then a byte whenever an event was appended; its end is
      the end of the session
Out:  the sink; `loggers/NAME.json` in the run directory says how much was sent

This is a separate process, because the packages of services start threads, patch modules, write to
stdout and wait for the network: none of that may happen where rollouts run. The cursor moves only
after the sink has flushed. A lock admits one process at a time; it sends the events of all programs
that append to the log, and the others wait until it has.
"""

import asyncio
import io
import json
import logging
import os
import select
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from hone.config import registry
from hone.config.base import LoggerBaseConfig
from hone.config.secrets import add_secrets_of
from hone.files.disk import write_atomic
from hone.files.event_log import FILE
from hone.files.lock import LockFile, LockHeld
from hone.files.redact import redact
from hone.loggers.base import Sink
from hone.loggers.feed import Delivery, Feed, run_of
from hone.loggers.refusals import is_refusal

FOLDER = "loggers"
"""Folder in the run directory."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
"""Initial and maximum time between two attempts."""
NICENESS = 5
"""Niceness: rollouts and the learner have priority."""
POLL_S = 0.5
"""Time between two checks for events that other programs append."""

T = TypeVar("T")
log = logging.getLogger("hone.loggers")


class Settings(BaseModel):
    """What the parent process sends."""

    name: str
    """Name of the logger among those of the run."""
    type: str
    """Its `_type`."""
    module: str
    """Module that registers the type."""
    config: dict[str, Any]
    directory: Path
    """The run directory."""


class Cursor(BaseModel):
    """How much of a run was sent: `loggers/NAME.json`."""

    run: str | None = None
    """Id of the run; the cursor of another one (`--fresh`) is not used."""
    lines: int = 0
    """Lines of events.jsonl."""
    refused: int = 0
    """Number of items that the service rejected permanently; they are skipped."""
    error: str | None = None
    """Why the logger stopped; null if it did not."""

    @classmethod
    def load(cls, path: Path) -> "Cursor":
        """The cursor; an empty one if there is none, or if it cannot be read."""
        try:
            return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            log.warning("%s cannot be read (%s): the run is sent from its start", path, why)
            return cls()

    def save(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json() + "\n")


class GaveUp(Exception):
    """The sink failed for longer than `timeout_s`."""


class EventPipe:
    """Stdin: a byte for every appended event, until the session ends."""

    def __init__(self, stdin: int = 0) -> None:
        self.ended = False
        self._stdin = stdin

    def settings(self) -> Settings:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._stdin, 1)
            if not byte:
                sys.exit("no settings on stdin")
            line += byte
        return Settings.model_validate(json.loads(line))

    def wait(self) -> None:
        """Wait until an event is appended or the session ends; at most POLL_S."""
        if not self.ended:
            self._read(POLL_S)

    def pause(self, seconds: float) -> None:
        """Wait this long, even if events are appended; returns early if the session ends."""
        if self.ended:
            time.sleep(seconds)
        until = time.monotonic() + seconds
        while not self.ended and (left := until - time.monotonic()) > 0:
            self._read(left)

    def _read(self, limit_s: float) -> None:
        if select.select([self._stdin], [], [], limit_s)[0]:
            self.ended = not os.read(self._stdin, 2**16)


class Worker:
    """Sends one run to one sink."""

    def __init__(self, settings: Settings, config: LoggerBaseConfig, pipe: EventPipe) -> None:
        self.directory, self.config, self.pipe = settings.directory, config, pipe
        self.path = settings.directory / FOLDER / f"{settings.name}.json"
        self.cursor = Cursor.load(self.path)
        """Cursor of this run, once the run is known."""

    def run(self, factory: Callable[[Any, Any], AsyncIterator[Sink]]) -> None:
        """Run until the session ends and everything is sent; raises GaveUp."""
        while (run := run_of(self.directory)) is None or self.has_sent_all(run.id):
            if self.pipe.ended:
                return  # the run never started, or was sent in an earlier session
            self.pipe.wait()
        if self.cursor.run != run.id:
            self.cursor = Cursor(run=run.id)
        with asyncio.Runner() as runner:  # factories are asynchronous, as those of all components
            opened = AsyncExitStack()

            def open_sink() -> Sink:
                one = asynccontextmanager(factory)(self.config, run)
                return runner.run(opened.enter_async_context(one))

            self._follow(self._try(open_sink))
            runner.run(opened.aclose())

    def has_sent_all(self, run_id: str) -> bool:
        return self.cursor.run == run_id and self.cursor.lines >= num_lines(self.directory)

    def _follow(self, sink: Sink) -> None:
        """Send events as they come, until the session ends."""
        self._refused_before = self.cursor.refused
        sent = self.cursor.lines if sink.holds is None else sink.holds
        feed = Feed(self.directory, sent, sink)
        while True:
            ending = self.pipe.ended  # before reading: no event comes after the end
            self._send(feed, sink, ending=ending)
            if ending:
                break
            self.pipe.wait()
        self._try(sink.close)

    def _send(self, feed: Feed, sink: Sink, *, ending: bool) -> None:
        for deliveries in feed.read(ending=ending):
            for deliver in deliveries:
                self._try(partial(_deliver, deliver, sink))
            if feed.line >= self.cursor.lines + sink.flush_events:
                self._flush(feed, sink)
        if feed.line > self.cursor.lines or self.cursor.error:
            self._flush(feed, sink)

    def _flush(self, feed: Feed, sink: Sink) -> None:
        self._try(sink.flush)
        refused = self._refused_before + sink.refused
        self.cursor = Cursor(run=self.cursor.run, lines=feed.line, refused=refused)
        self.cursor.save(self.path)

    def _try(self, action: Callable[[], T]) -> T:
        """Run `action`, and retry it with growing pauses; raises GaveUp after `timeout_s`.

        The pause ends with the session, and one more attempt follows at once: an interrupted run waits
        for a few seconds only.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001  # a service's package may raise anything
                log.warning("%s", redact("".join(traceback.format_exception(error))))
                if time.monotonic() - began + pause > self.config.timeout_s:
                    text = redact(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
                    raise GaveUp(text) from None
            self.pipe.pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _deliver(deliver: Delivery, sink: Sink) -> None:
    try:
        deliver(sink)
    except Exception as error:
        if not is_refusal(error):
            raise
        sink.refuse(error)


def num_lines(directory: Path) -> int:
    """Lines of the run's events.jsonl."""
    path = directory / FILE
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _lock(settings: Settings, pipe: EventPipe) -> LockFile | None:
    """The lock of the logger; None if the session ended and another process has sent everything.

    The other one belongs to a program that reports the same model, or to a session that was killed.
    """
    folder = settings.directory / FOLDER
    while True:
        try:
            return LockFile(folder / f"{settings.name}.lock")
        except LockHeld:
            cursor = Cursor.load(folder / f"{settings.name}.json")
            if pipe.ended and cursor.lines >= num_lines(settings.directory):
                return None
            pipe.pause(POLL_S)


def main() -> int:
    """The exit status: 0 if everything was sent."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = EventPipe()
    settings = pipe.settings()
    add_secrets_of({"loggers": [settings.config]})
    import_module(settings.module)
    component = registry.find("logger", settings.type)
    assert component is not None and issubclass(component.config_type, LoggerBaseConfig), settings
    config = component.config_type.model_validate(settings.config)
    os.nice(NICENESS)
    lock = _lock(settings, pipe)
    if lock is None:
        return 0
    with lock:
        worker = Worker(settings, config, pipe)
        try:
            worker.run(component.factory)
        except GaveUp as error:
            worker.cursor.model_copy(update={"error": str(error)}).save(worker.path)
            return 1
    return 0


class _Output(io.TextIOWrapper):
    """The log file of the process, without the secrets in what packages print."""

    def write(self, text: str, /) -> int:
        super().write(redact(text))
        return len(text)


if __name__ == "__main__":
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = open(descriptor, "wb", closefd=False)  # noqa: SIM115  until the process ends
        setattr(sys, name, _Output(file, "utf-8", "backslashreplace", line_buffering=True))
    sys.exit(main())
