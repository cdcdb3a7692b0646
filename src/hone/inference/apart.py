"""Work beside the engine's own thread: loading, fusing and hashing of weights.

In:   a function
Out:  its result, as a Future

A new thread each time, which ends with its work. OpenMP keeps a pool for every thread that computed
once, and where pools outnumber the cores it stops waiting actively: the engine's own steps would be
7% slower from then on. What is done while samples run gives way to them: on two cores a publish is
then noticed for a tenth less.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from hone.niceness import give_way

T = TypeVar("T")

LEAST = 19
"""The niceness of what gives way."""


def apart(call: Callable[[], T], *, gives_way: bool = False) -> Future[T]:
    """Run something on a thread that ends with it; one that gives way takes what time others leave."""
    future: Future[T] = Future()

    def run() -> None:
        if gives_way:
            give_way(LEAST)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  whoever waits for the future gets it
            future.set_exception(error)

    threading.Thread(target=run, name="hone-apart", daemon=True).start()
    return future
