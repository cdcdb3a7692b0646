"""Work given to a thread pool runs in the scope of whoever gave it.

In:   the scope that is open where `ThreadPoolExecutor.submit` is called (`map` and
      `loop.run_in_executor` call it too)
Out:  the work, in a copy of that code's context
Used: capture/scope.py, while at least one scope is open

The context goes with each piece of work, never with a thread: a pool's threads outlive the rollout
in which they were started, and would mark the calls of the next one with its id. For the same reason a
bare `threading.Thread` is left alone; it can be handed `contextvars.copy_context().run`.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from hone.capture.scope import current


class ThreadPoolTap:
    """Hands the open scope to work in thread pools."""

    def __init__(self) -> None:
        self._original: Callable[..., Any] | None = None
        self._tapped: Callable[..., Any] | None = None

    def attach(self) -> None:
        original = ThreadPoolExecutor.__dict__["submit"]
        self._original, self._tapped = original, _tapped(original)
        ThreadPoolExecutor.submit = self._tapped

    def detach(self) -> None:
        # Somebody who patched `submit` over us calls ours; see capture/wire.py.
        if self._original is not None and ThreadPoolExecutor.__dict__["submit"] is self._tapped:
            ThreadPoolExecutor.submit = self._original
        self._original = self._tapped = None


def _tapped(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submitting(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if current() is None:
            return submit(self, fn, *args, **kwargs)
        return submit(self, copy_context().run, fn, *args, **kwargs)

    return submitting
