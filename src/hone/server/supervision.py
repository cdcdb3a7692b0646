"""Supervised parts of the server: their status for /health, and when to retry.

In:   failures and recoveries of a part
Out:  a Part: its status, and how long to wait before the next attempt

A failure is logged with its traceback, once, where it is reported. The time between attempts
doubles up to LONGEST_S, so that a part that keeps failing costs little; a success resets it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hone.errors import Unavailable
from hone.files.logs import log
from hone.files.redact import redact
from hone.tasks import retries

T = TypeVar("T")

FIRST_S = 1.0
LONGEST_S = 60.0
"""Time between two attempts: initial and maximum."""


def backoff_s(failures: int) -> float:
    """How long to wait after this many consecutive failures."""
    return retries.backoff_s(failures, FIRST_S, LONGEST_S)


@dataclass(slots=True)
class Part:
    """One supervised part of the server."""

    name: str
    failures: int = 0
    """Number of consecutive failures."""
    reason: str | None = None
    """Why it does not work; None while it does."""

    def fail(self, error: BaseException) -> float:
        """Record and log a failure; returns how long to wait before the next attempt."""
        self.failures += 1
        self.reason = redact(f"{type(error).__name__}: {error}")
        delay_s = backoff_s(self.failures)
        fields = {"part": self.name, "failures": self.failures, "next_attempt_s": delay_s}
        # A full disk needs no traceback; one at every attempt would only fill the disk further.
        trace = None if isinstance(error, Unavailable) else error
        fields |= {} if trace else {"reason": self.reason}
        log.error("a part of the server failed", exc_info=trace, extra={"fields": fields})
        return delay_s

    def recover(self) -> None:
        self.failures, self.reason = 0, None

    def status(self) -> dict[str, Any]:
        if self.reason is None:
            return {"status": "ok"}
        return {"status": "failing", "failures": self.failures, "reason": self.reason}


async def repeat(part: Part, work: Callable[[], Awaitable[object]], interval_s: float) -> None:
    """Run `work` now and at every interval; a failure is retried and never ends the loop."""
    while True:
        delay_s = interval_s
        try:
            await work()
            part.recover()
        except Exception as error:  # noqa: BLE001  whatever it is: logged, shown by /health, retried
            delay_s = min(interval_s, part.fail(error))
        await asyncio.sleep(delay_s)


@asynccontextmanager
async def until(
    event: Callable[[], Awaitable[object]], check: Callable[[], None]
) -> AsyncIterator[None]:
    """Cancel what the block awaits as soon as `event` returns; `check` then raises the error.

    Only for blocks that wait: a thread that they started would go on after their end.
    """
    block = asyncio.timeout(None)

    async def watch() -> None:
        await event()
        block.reschedule(0.0)  # in the past: the block ends now

    watching = asyncio.create_task(watch())
    try:
        async with block:
            yield
    except TimeoutError:
        check()
        raise
    finally:
        watching.cancel()


def shared_task(
    under_way: dict[str, asyncio.Task[T]], key: str, make: Callable[[], Coroutine[Any, Any, T]]
) -> asyncio.Task[T]:
    """One task per key, shared by all callers; after a failure, the next call starts a new one."""

    def forget(task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            under_way.pop(key, None)

    task = under_way.get(key)
    if task is None:
        task = under_way[key] = asyncio.create_task(make())
        task.add_done_callback(forget)
    return task
