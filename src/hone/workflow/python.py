"""`_type: python`: a function of the user's own, as a workflow or as a function of one.

In:   `target: package.module:function` or `file.py:function`, and what it is to be called with
Out:  a FunctionInfo that calls it with the input

The function stays what it is, plain or async; it gets `llm` and `functions` where its signature
has them. Whether it can be called at all is found out when it is built: a name that is wrong in a
signature would otherwise fail every rollout of the first epoch.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from difflib import get_close_matches
from typing import Any

from pydantic import Field, JsonValue

from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, FunctionRef, LLMRef, register_function
from hone.errors import ConfigError
from hone.workflow.fit import signature_of
from hone.workflow.function import FunctionInfo
from hone.workflow.target import load_target


class PythonFunctionConfig(FunctionBaseConfig, name="python"):
    """A Python function, async or plain, called as `fn(input, **args)`."""

    target: str
    """`package.module:function`, or `file.py:function` relative to this file."""
    llm: LLMRef | None = None
    """A key of `llms`; the function gets that model as its parameter `llm`."""
    functions: list[FunctionRef] = Field(default_factory=list)
    """Keys of `functions`; the function gets them by name in its parameter `functions`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments, by name."""
    description: str | None = None
    """What an agent that chooses among functions is told; the docstring if left out."""


@register_function(config_type=PythonFunctionConfig)
async def python_function(
    config: PythonFunctionConfig, builder: Builder
) -> AsyncIterator[FunctionInfo]:
    """A Python function of your own."""
    where = f"target {config.target!r}"
    fn = load_target(config.target, builder.document.file.resolve().parent)
    if not callable(fn):
        raise ConfigError(f"{where} is {type(fn).__name__} {fn!r}; it must be a function")
    offered: dict[str, Any] = dict(config.args)
    if config.llm is not None:
        offered["llm"] = await builder.get_llm(config.llm)
    if config.functions:
        offered["functions"] = {name: await builder.get_function(name) for name in config.functions}
    yield FunctionInfo.from_fn(bound(fn, offered, where), description=config.description)


def bound(fn: Callable[..., Any], given: dict[str, Any], where: str) -> Callable[..., Any]:
    """The function with these arguments given; what is left of its signature is its input."""
    left = _left(fn, given, where)

    async def waits(*args: Any, **kwargs: Any) -> Any:
        return await fn(*args, **kwargs, **given)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs, **given)

    is_async = inspect.iscoroutinefunction(fn) or (
        not inspect.isroutine(fn) and inspect.iscoroutinefunction(type(fn).__call__)
    )
    called: Any = waits if is_async else plain
    called.__name__ = getattr(fn, "__name__", type(fn).__name__)
    called.__doc__ = inspect.getdoc(fn) if inspect.isroutine(fn) else type(fn).__doc__
    called.__signature__ = inspect.Signature(left)
    called.__annotations__ = {p.name: p.annotation for p in left if p.annotation is not p.empty}
    return called


def _left(fn: Callable[..., Any], given: dict[str, Any], where: str) -> list[inspect.Parameter]:
    """The parameters that are not given, with resolved annotations; an error if it cannot be called."""
    parameters = signature_of(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    for name in given:
        if name not in named and not takes_any:
            raise ConfigError(_not_taken(where, name, named))
    left = [p for n, p in parameters.items() if n not in given]
    for p in left:
        if p.name in ("llm", "functions") and p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            value = "a key of `llms`" if p.name == "llm" else "keys of `functions`"
            raise ConfigError(
                f"{where} has the parameter {p.name!r}, and {p.name} is not set beside it; set it "
                f"to {value}"
            )
    # What is left of these two has a default, and is not an input.
    left = [p for p in left if p.name not in ("llm", "functions")]
    if not any(p.kind is not p.VAR_KEYWORD for p in left):
        raise ConfigError(
            f"{where} takes no input: its parameters are ({', '.join(parameters)}); the first must "
            "be what the workflow is run on"
        )
    return left


def _not_taken(where: str, name: str, known: set[str]) -> str:
    guess = get_close_matches(name, known, n=1)
    maybe = f" Did you mean {guess[0]!r}?" if guess else ""
    key = name if name in ("llm", "functions") else f"args.{name}"
    return (
        f"{where} has no parameter {name!r}, but {key} is set.{maybe} Its parameters: "
        f"{', '.join(sorted(known)) or 'none'}."
    )
