"""A function of the workflow: its name, its description, its input schema and its code.

In:   a Python function, async or plain, of one parameter or several
Out:  Function: an async callable that fits its input to the parameters and runs under its name

A Function runs inside `within(name)`, so every model call carries the path of the functions that
made it. A plain function runs in its own thread with a copy of the context: a thread pool would
limit the number of rollouts, and a function that hangs would keep the process from ending.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel

from hone.capture.scope import keep_patched, within
from hone.config.registry import WRAPPERS
from hone.errors import ConfigError, NotInThisVersion
from hone.workflow.fit import Fit


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """A function, its description and its input schema; a registered function may yield it."""

    fn: Callable[..., Any]
    description: str | None = None
    """Shown to an agent that chooses among functions."""
    input_schema: type[BaseModel] | None = None
    """The schema of its input; taken from its parameters if not set."""

    @classmethod
    def from_fn(
        cls,
        fn: Callable[..., Any],
        *,
        input_schema: type[BaseModel] | None = None,
        description: str | None = None,
    ) -> Self:
        """Without a description, the docstring is used."""
        return cls(fn, description or inspect.getdoc(fn), input_schema)


class Function:
    """An async callable with a name; model calls made while it runs carry the name."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        description: str | None = None,
        input_schema: type[BaseModel] | None = None,
    ) -> None:
        check_not_generator(fn, f"function {name!r}")
        self.name = name
        self.description = description
        self._fn = fn
        self._async = _is(inspect.iscoroutinefunction, fn)
        self._fit = Fit.of(name, fn, input_schema)

    @classmethod
    def of(cls, name: str, fn: Any, description: str | None = None) -> "Function":
        """A Function from the value that a factory yields: a callable, a FunctionInfo, a Function."""
        if isinstance(fn, FunctionInfo):
            text = description or fn.description
            return cls(name, fn.fn, description=text, input_schema=fn.input_schema)
        if isinstance(fn, Function):
            text = description or fn.description
            return cls(name, fn._fn, description=text, input_schema=fn._fit.declared)
        if not callable(fn):
            raise ConfigError(
                f"function {name!r}: its factory yielded {fn!r}; it must yield an async callable, "
                "a FunctionInfo or a Function"
            )
        return cls(name, fn, description=description or _docstring(fn))

    @property
    def input_schema(self) -> type[BaseModel] | None:
        """The schema of its input, if that is a model or several parameters; otherwise None."""
        return self._fit.schema

    @property
    def parameter(self) -> tuple[str, Any]:
        """Name and annotation of its first parameter; Any if it has no annotation."""
        first = self._fit.parameters[0]
        return first.name, Any if first.annotation is first.empty else first.annotation

    async def __call__(self, input: Any = None, /, **arguments: Any) -> Any:
        """Run it on one input (text, JSON text, a dict, a model), or on arguments by name."""
        with within(self.name):
            if arguments and input is not None:
                raise ConfigError(
                    f"function {self.name!r} was given an input and the arguments "
                    f"{', '.join(arguments)}; give one or the other"
                )
            positional, named = self._fit.arguments(arguments or input, by_name=bool(arguments))
            if self._async:
                return await self._fn(*positional, **named)
            result = await in_thread(self._fn, *positional, **named)
            return await result if inspect.isawaitable(result) else result

    async def ainvoke(self, value: Any) -> Any:
        """The same, under NeMo Agent Toolkit's name."""
        return await self(value)

    def __repr__(self) -> str:
        return f"Function({self.name!r})"


WRAPPERS["function"] = Function.of


async def in_thread(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a plain function in its own daemon thread, in a copy of this context.

    If the caller is cancelled, the thread keeps running. Its calls are still captured until it
    ends, so that calls of a finished rollout are refused.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    context = copy_context()
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def work() -> None:
        with keep_patched():
            try:
                outcome.append(context.run(fn, *args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # raised again where it is awaited
                errors.append(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=work, name=f"hone-{_name(fn)}", daemon=True).start()
    await done
    if errors:
        raise errors[0]
    return outcome[0]


def check_not_generator(fn: Any, where: str) -> None:
    """Raise NotInThisVersion for a function that yields: its generator would be the output."""
    if _is(inspect.isasyncgenfunction, fn) or _is(inspect.isgeneratorfunction, fn):
        raise NotInThisVersion(
            f"{where} yields its output, and streaming is not in this version; return the whole output"
        )


def _is(kind: Callable[[Any], bool], fn: Any) -> bool:
    """Whether the function, or the `__call__` of an object, is of this kind."""
    return kind(fn) or (not inspect.isroutine(fn) and kind(type(fn).__call__))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _docstring(fn: Any) -> str | None:
    """The docstring of a function, or of an object's class."""
    if inspect.isroutine(fn):
        return inspect.getdoc(fn)
    return type(fn).__doc__ if type(fn).__module__ != "builtins" else None
