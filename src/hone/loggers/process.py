"""The loggers of a run: start their processes, notify them, and report those that stopped.

In:   the configurations under `loggers:`, and the event log of the run
Out:  one process per logger (child.py); `logger_stopped` events

Nothing here waits for a logger during the run: an event is a byte in a pipe, and a full pipe is
skipped, because the process still has bytes to read. A logger that stopped is reported once. What
it did not send is sent when the same command is run again.
"""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from hone.config.base import LoggerBaseConfig
from hone.files.event_log import EventLog
from hone.files.events import Event
from hone.files.redact import redact
from hone.loggers.child import FOLDER, Cursor, Settings, num_lines

GRACE_S = 10.0
"""Added to a logger's `timeout_s` at the end of a run, for the start of its process."""
INTERRUPTED_S = 3.0
"""How long an interrupted run waits for its loggers."""

log = logging.getLogger("hone")


def names(configs: Sequence[LoggerBaseConfig]) -> list[str]:
    """The name of each logger: its type, with a number from the second logger of a type on."""
    seen: Counter[str] = Counter()
    labels = []
    for config in configs:
        seen[config.type_name] += 1
        number = seen[config.type_name]
        labels.append(config.type_name + (f"-{number}" if number > 1 else ""))
    return labels


class Logger:
    """The process of one logger."""

    def __init__(self, name: str, config: LoggerBaseConfig, directory: Path) -> None:
        self.name, self.config, self.timed_out = name, config, False
        self.folder = directory / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_file = self.folder / f"{name}.log"
        self.refused_before = self.cursor.refused
        settings = Settings(
            name=name,
            type=config.type_name,
            module=type(config).__module__,
            config=config.model_dump(mode="json"),
            directory=directory.absolute(),
        )
        python = str(config.python or sys.executable)
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "hone.loggers.child"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, which then ends its loggers
            )
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()
        # Settings contain secrets, so they go through a pipe, not the command line, which all users
        # can read.
        with suppress(BrokenPipeError):  # the next event notices it
            os.write(self._pipe, settings.model_dump_json().encode() + b"\n")
        os.set_blocking(self._pipe, False)

    def notify(self) -> bool:
        """Notify the process of an event; False if it has ended."""
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:
            pass  # it has not read the earlier bytes
        except BrokenPipeError:
            return False
        return True

    def close(self, limit_s: float) -> None:
        """End the session, and wait for what is still to be sent; kills a process that hangs."""
        self.end()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """End the session; the process sends the rest and exits."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def cursor(self) -> Cursor:
        return Cursor.load(self.folder / f"{self.name}.json")


class Loggers:
    """The loggers of a run, from its start to its end."""

    def __init__(self, configs: Sequence[LoggerBaseConfig], events: EventLog) -> None:
        self._events = events
        directory = events.path.parent
        self._running = [
            Logger(name, config, directory)
            for name, config in zip(names(configs), configs, strict=True)
        ]
        if self._running:
            events.listeners.append(self._notify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """After an interrupt or an error: what is not sent immediately is sent after a resume."""
        self._stop(INTERRUPTED_S)

    def close(self) -> None:
        """Wait until everything was sent, and report the loggers that failed."""
        for logger in self._stop():
            if logger.process.returncode:
                self._report(logger)
            elif refused := logger.cursor.refused - logger.refused_before:
                message = "Logger %s: its service refused %d items, which were skipped. See %s."
                log.warning(message, logger.name, refused, logger.log_file)

    def _stop(self, limit_s: float | None = None) -> list[Logger]:
        """End all processes, each within the limit, or within its own."""
        if self._notify in self._events.listeners:
            self._events.listeners.remove(self._notify)
        running, self._running = self._running, []
        for logger in running:
            logger.end()
        began = time.monotonic()
        for logger in running:
            own_s = logger.config.timeout_s + GRACE_S if limit_s is None else limit_s
            logger.close(max(0.0, began + own_s - time.monotonic()))
        return running

    def _notify(self, event: Event) -> None:
        for logger in tuple(self._running):
            if not logger.notify():
                self._running.remove(logger)
                logger.close(GRACE_S)
                self._report(logger)

    def _report(self, logger: Logger) -> None:
        """Tell the user once, in the log and in the run's report."""
        cursor, status = logger.cursor, logger.process.returncode
        late = "it was still sending at the end of the run"
        why = late if logger.timed_out else cursor.error or f"its process ended with {status}"
        unsent = num_lines(self._events.path.parent) - cursor.lines
        message = redact(
            f"Logger {logger.name} stopped: {why}. The run continues; {unsent} of its events were not "
            f"sent, and are sent when the command is run again. See {logger.log_file}."
        )
        log.warning("%s", message)
        self._events.append("logger_stopped", logger=logger.name, message=message, unsent=unsent)
