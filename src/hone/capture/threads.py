"""Patch executors so that submitted work runs in the scope that submitted it.

In:   the scope that is open where `ThreadPoolExecutor.submit` (`map` calls it too) or
      `loop.run_in_executor` is called, with any executor
Out:  the work, in a copy of the caller's context

The context belongs to each piece of work, never to a thread: a pool's threads outlive the rollout
that started them, and would mark the calls of the next one with its id. For the same reason a bare
`threading.Thread` is not patched; give it `contextvars.copy_context().run`.
"""

import functools
from asyncio import BaseEventLoop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from hone.capture.base import Patch, current


class _InContext:
    """A function with a copy of the context; in another process, the function alone."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn, self._context = fn, copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._context.run(self._fn, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a context cannot be pickled
        return functools.partial, (self._fn,)


# The originals are called as methods: another patch may have put a descriptor there that has to be
# bound, as wrapt's are, with which OpenTelemetry patches `submit`.


def _submitting(submit: Any) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submitting(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        submit_to = submit.__get__(self, type(self))
        return submit_to(fn if current() is None else _InContext(fn), *args, **kwargs)

    return submitting


def _running(run: Any) -> Callable[..., Any]:
    @functools.wraps(run)
    def running(self: Any, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        run_in = run.__get__(self, type(self))
        return run_in(executor, func if current() is None else _InContext(func), *args)

    return running


EXECUTOR_PATCHES: tuple[Patch, ...] = (
    (ThreadPoolExecutor, "submit", _submitting),
    (BaseEventLoop, "run_in_executor", _running),
)
