"""Run work in parallel with the engine's own thread: load, fuse and hash weights.

In:   a function
Out:  its result, as a Future

Each call gets its own thread, which ends with it. OpenMP keeps a thread pool for every thread that
has ever computed; if there are more pools than cores, OpenMP stops spinning while it waits, and the
engine's steps become 7% slower. Work that runs while requests are sampled has low priority: on two
cores this shortens the pause caused by a publish by a tenth.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from hone.niceness import lower_priority

T = TypeVar("T")

LOWEST_PRIORITY = 19
"""Niceness of low-priority work."""


def run_in_background(function: Callable[[], T], *, low_priority: bool = False) -> Future[T]:
    """Run a function on a new thread; with `low_priority`, other threads get the cores first."""
    future: Future[T] = Future()

    def run() -> None:
        if low_priority:
            lower_priority(LOWEST_PRIORITY)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  the caller gets it from the future
            future.set_exception(error)

    threading.Thread(target=run, name="hone-background", daemon=True).start()
    return future
