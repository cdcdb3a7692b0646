"""Retry with backoff: `@hone.retry()` for rollouts and tools, and the delays used elsewhere.

In:   a function, plain or async; a number of failures
Out:  a function that gives up after `max_attempts` calls, with the last failure; seconds to wait

The file is not called retry.py, because importing it would replace `hone.retry` by the module.
"""

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from hone.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("hone")


def backoff_s(failures: int, first_s: float, longest_s: float, factor: float = 2.0) -> float:
    """Seconds to wait after this many consecutive failures."""
    return min(longest_s, first_s * factor ** min(failures - 1, 30))


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Call a function again, plain or async, when it raises.

    Args:
        max_attempts: number of calls; the last failure is raised.
        delay: seconds before the second call.
        backoff_factor: factor by which each later pause is longer.
        exceptions: the exceptions that are retried.
        on_retry: called with the failure and the number of the call that failed, from 1.
    """
    if max_attempts < 1:
        raise ConfigError(f"retry: max_attempts is {max_attempts}; it must be at least 1")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__qualname__", repr(function))

        def wait_after(error: Exception, attempt: int) -> float:
            if attempt == max_attempts:
                raise error
            pause = backoff_s(attempt, delay, math.inf, backoff_factor)
            log.warning(
                "%s failed (%s: %s), call %d of %d; again in %.2g s",
                *(name, type(error).__name__, error, attempt, max_attempts, pause),
            )
            if on_retry is not None:
                on_retry(error, attempt)
            return pause

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return await cast("Awaitable[Any]", function(*args, **kwargs))
                except exceptions as error:
                    await asyncio.sleep(wait_after(error, attempt))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    time.sleep(wait_after(error, attempt))

        retried = call_async if inspect.iscoroutinefunction(function) else call
        return cast("Callable[P, R]", retried)

    return decorate
