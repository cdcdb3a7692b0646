"""Run a command's coroutine to its end, whatever agents have left behind.

In:   the coroutine of `hone run`, `hone eval` or `hone finetune`; work that ends together
Out:  what it returns, once everything else was cancelled and had time to end

asyncio.run waits for every task and every thread of its pool, however long they take: an agent that
catches its cancellation, or sits in `asyncio.to_thread`, would keep a command that has everything
from ending. Here tasks have GRACE_S, and threads are daemons that the process does not wait for.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 5.0
"""How long what is left may take to end after it was cancelled."""

log = logging.getLogger("hone")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, which leaves behind what does not end."""
    runner = asyncio.Runner()
    loop = runner.get_loop()
    try:
        return runner.run(_alone(main))
    finally:
        # Not runner.close(), which would wait for those that were left.
        asyncio.set_event_loop(None)
        loop.close()


async def ended_together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once, results in order; when one raises, the others are ended first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _alone(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_Threads())
    try:
        return await main
    finally:
        await _leave_others()
        # A library's generators, one inside the other, are now closed all at once: what they say to
        # that is of no use to anybody.
        loop.set_exception_handler(to_debug)
        await loop.shutdown_asyncgens()


async def _leave_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return
    _, left = await asyncio.wait(others, timeout=GRACE_S)
    for task in left:
        log.warning("%s did not end within %g s of being cancelled", task.get_name(), GRACE_S)


def to_debug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For a loop that is ending: what asyncio says of tasks that were left or torn apart."""
    log.debug("%s", context["message"], exc_info=context.get("exception"))


class _Threads(ThreadPoolExecutor):
    """A daemon thread for each call; the loop takes no executor of another class."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        # As asyncio.to_thread does it: event loops of other makes are not tapped by capture/.
        context = copy_context()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(fn, *args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # raised again where it is awaited
                future.set_exception(error)

        threading.Thread(target=work, name="hone-to_thread", daemon=True).start()
        return future
