"""Ctrl-C: the first one ends a run with a report, the second one exits at once.

In:   SIGINT during a run, or while a workflow is served
Out:  the run's task is cancelled, or the service stops, once; or the process exits with 130

By default Python raises KeyboardInterrupt wherever the event loop is, and asyncio then logs an
error for every interrupted task. Here the run is cancelled like any other task, `finally` blocks of
agents are run, and further errors of the loop are logged at debug level. Exiting at once is safe at
any time: what a run needs to resume is on disk, and the run's own server ends when its pipe closes.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Self

from hone.tasks.loop import to_debug

INTERRUPTED = 130
"""The exit status."""
SAME_S = 0.5
"""Signals within this time count as one Ctrl-C: a terminal sends it to all processes, and a parent
process (`uv run`, `make`) may forward it too."""
MESSAGE = b"\nStopping the run; press Ctrl-C again to exit at once\n"


class Interrupts:
    """Handles SIGINT in the main thread, unless the program has its own handler."""

    def __init__(self, message: bytes = MESSAGE) -> None:
        self.received = False
        self._received_at = 0.0
        self._message = message
        self._running: tuple[asyncio.AbstractEventLoop, Callable[[], object]] | None = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def cancel_on_interrupt(self) -> None:
        """Let the first Ctrl-C cancel the current task."""
        task = asyncio.current_task()
        assert task is not None, "called outside of a task"
        self.call_on_interrupt(task.cancel)

    def call_on_interrupt(self, stop: Callable[[], object]) -> None:
        """Let the first Ctrl-C call `stop` in the current event loop."""
        self._running = asyncio.get_running_loop(), stop

    def _handle(self, *_: object) -> None:
        now = time.monotonic()
        if self.received:
            if now - self._received_at >= SAME_S:
                leave()
            return
        self.received, self._received_at = True, now
        if self._running is None:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # stderr may be closed; the run ends anyway
            os.write(2, self._message)  # bypasses the console, whose lock this thread may hold
        loop, stop = self._running
        loop.set_exception_handler(to_debug)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(stop)


def leave() -> NoReturn:
    """Exit as interrupted, without waiting for threads of agents."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a live display hides the cursor
    os._exit(INTERRUPTED)
