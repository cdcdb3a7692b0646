"""Run work on threads of its own: load, fuse and hash weights; wait for processes and for downloads.

In:   a function
Out:  its result, as a Future or awaited

Each call gets its own thread, which ends with it. The threads of `asyncio.to_thread` are few, and
all requests share them: six models that load would leave none for the others. So what may take
seconds has a thread of its own, and the shared ones do short work only.

OpenMP keeps a thread pool for every thread that has ever computed; if there are more pools than
cores, OpenMP stops spinning while it waits, and the engine's steps become 7% slower. Work that runs
while requests are sampled has low priority: on two cores this shortens the pause caused by a publish
by a tenth.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from hone.tasks.priority import lower_priority

P = ParamSpec("P")
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
        except BaseException as error:  # noqa: BLE001  the caller gets it from the future
            future.set_exception(error)

    threading.Thread(target=run, name="hone-background", daemon=True).start()
    return future


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread` for work that may take seconds: on a thread that nothing else waits for.

    A caller that is cancelled does not wait for the thread, which goes on. The end of the program
    does not wait for it, either.
    """
    call = partial(copy_context().run, function, *args, **kwargs)
    return await asyncio.wrap_future(run_in_background(call))
