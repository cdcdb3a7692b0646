"""Ctrl-C: the first one ends a run with a report, the second one leaves at once.

In:   SIGINT, while a run goes on
Out:  the run's task is cancelled, once; or the process ends with 130

Python's own way raises KeyboardInterrupt wherever the event loop happens to be, and asyncio then
complains about every task that was torn apart. Here nothing is raised into the loop: a run is cancelled
like any other task, its agents' `finally` blocks are run, and what the loop might still say about them
is left to --log-level debug. Leaving at once is safe at any time, because what a run needs to go on is
on disk before it is needed, and a server of its own ends when its pipe closes.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn, Self

from hone.workflow.loop import to_debug

INTERRUPTED = 130
"""The exit status."""
SAME_S = 0.5
"""Signals so near each other are one Ctrl-C: a terminal sends it to all its processes, and one that
started this one (`uv run`, `make`) may pass it on."""
MESSAGE = b"\nEnding what runs; Ctrl-C again leaves at once\n"


class Interrupts:
    """Handles SIGINT while it is open, in the main thread, unless a program handles it already."""

    def __init__(self) -> None:
        self.received = False
        self._received_at = 0.0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def end_this(self) -> None:
        """From now on the first Ctrl-C cancels the task that calls this."""
        task = asyncio.current_task()
        assert task is not None, "called outside of a task"
        self._running = asyncio.get_running_loop(), task

    def _handle(self, *_: object) -> None:
        now = time.monotonic()
        if self.received:
            if now - self._received_at >= SAME_S:
                leave()
            return
        self.received, self._received_at = True, now
        if self._running is None:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # nobody reads it any more: the run ends all the same
            os.write(2, MESSAGE)  # past the console, whose lock this thread may hold
        loop, task = self._running
        loop.set_exception_handler(to_debug)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(task.cancel)


def leave() -> NoReturn:
    """End the process as interrupted, and wait for no thread of an agent's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a live display hides the cursor
    os._exit(INTERRUPTED)
