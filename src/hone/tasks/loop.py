"""Run a command's coroutine, and end even if agents left tasks or threads behind.

In:   the coroutine of `hone run`, `hone eval` or `hone finetune`
Out:  its result, after all other tasks were cancelled and had GRACE_S to end

asyncio.run waits for every task and every thread of its pool, however long they take: an agent that
catches its cancellation, or blocks in `asyncio.to_thread`, would keep a finished command from
ending. Here threads are daemons, which the process does not wait for. It also ends as soon as any
task raises SystemExit; here that is the failure of the rollout that awaits the task.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 5.0
"""How long remaining tasks may take to end after they were cancelled."""

log = logging.getLogger("hone")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, but does not wait for tasks that do not end."""
    runner = asyncio.Runner(loop_factory=_Loop)
    loop = runner.get_loop()
    asyncio.set_event_loop(loop)
    try:
        return runner.run(_alone(main))
    finally:
        # Not runner.close(), which would wait for them.
        asyncio.set_event_loop(None)
        loop.close()


async def _alone(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop), loop
    loop.main = asyncio.current_task()
    loop.set_default_executor(_Threads())
    try:
        return await main
    finally:
        await _leave_others()
        # Nested generators of a library are all closed at once now; their errors are useless.
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
    """Exception handler of a loop that is ending: log at debug level."""
    log.debug("%s", context["message"], exc_info=context.get("exception"))


class _Loop(asyncio.SelectorEventLoop):
    """Runs until its main task is done, whichever other task raises SystemExit."""

    main: "asyncio.Task[Any] | None" = None

    def run_forever(self) -> None:
        while True:
            try:
                return super().run_forever()
            except SystemExit:  # the task has it too, and so has whoever awaits the task
                if self.main is None or self.main.done():
                    raise


class _Threads(ThreadPoolExecutor):
    """A daemon thread for each call; the loop accepts only a ThreadPoolExecutor."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        # Like asyncio.to_thread: capture/ does not tap other implementations of the event loop.
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
