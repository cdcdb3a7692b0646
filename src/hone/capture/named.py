"""hone.function: a name for the code that makes model calls, for `target_functions`.

In:   `@hone.function("planner")` on a function, or `with hone.function("planner"):` around calls
Out:  calls that carry the name at the end of their function path
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from hone.capture.scope import check_function, within
from hone.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_open: ContextVar[tuple[tuple["NamedFunction", AbstractContextManager[None]], ...]] = ContextVar(
    "hone_named_blocks", default=()
)
"""The open blocks of this task or thread, outermost first: several may be in one NamedFunction."""


class NamedFunction:
    """A name for the functions and blocks that it is applied to."""

    def __init__(self, name: str) -> None:
        self.name = check_function(name)

    def __enter__(self) -> None:
        block = within(self.name)
        block.__enter__()
        _open.set((*_open.get(), (self, block)))

    def __exit__(self, *error: Any) -> None:
        blocks = _open.get()
        own = [place for place, (owner, _) in enumerate(blocks) if owner is self]
        if not own:
            return  # closed from another context, in which it was never open
        _open.set(blocks[: own[-1]] + blocks[own[-1] + 1 :])
        blocks[own[-1]][1].__exit__(*error)

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def plain(*args: P.args, **kwargs: P.kwargs) -> T:
            with within(self.name):
                return fn(*args, **kwargs)

        @functools.wraps(fn)
        async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            with within(self.name):
                return await cast("Awaitable[Any]", fn(*args, **kwargs))

        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ConfigError(
                f"hone.function({self.name!r}) is on {fn.__qualname__}, which yields: code "
                "outside it runs between two values and must not get the name. Use a `with` block "
                "around the model calls inside it."
            )
        return cast("Callable[P, T]", coroutine) if inspect.iscoroutinefunction(fn) else plain


def function(name: str) -> NamedFunction:
    """Name the code that makes model calls: `@hone.function("planner")` or `with hone.function(...)`.

    Calls made inside carry the name, and nested names extend the path (`agent.planner`).
    `target_functions` selects the calls to train by this path. Outside rollouts this does nothing,
    so agents can keep it.

    Args:
        name: ASCII without spaces, at most 200 characters.
    """
    if not name:
        raise ConfigError("hone.function(''): a name has at least one character")
    return NamedFunction(name)
