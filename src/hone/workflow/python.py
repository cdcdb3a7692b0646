"""`_type: python`: a Python function of the user, as the workflow or as a function.

In:   `target: package.module:function` or `file.py:function`, and its arguments
Out:  a FunctionInfo that calls it with the input

The function may be plain or async; it gets `llm` and `functions` if its signature has them. The
signature is checked when the function is built: a wrong name would otherwise fail every rollout of
the first epoch.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import ConfigDict, Field, JsonValue

from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, FunctionRef, LLMRef, register_function
from hone.errors import ConfigError, did_you_mean
from hone.workflow.fit import signature_of
from hone.workflow.function import FunctionInfo, check_not_generator
from hone.workflow.target import load_target


class PythonFunctionConfig(FunctionBaseConfig, name="python"):
    """A Python function, async or plain, called as `fn(input, **args)`."""

    model_config = ConfigDict(allow_inf_nan=True)  # `args` are the function's own

    target: str
    """`package.module:function`, or `file.py:function` relative to this file."""
    llm: LLMRef | None = None
    """A key of `llms`; the function gets that model as its parameter `llm`."""
    functions: list[FunctionRef] = Field(default_factory=list)
    """Keys of `functions`; the function gets them by name in its parameter `functions`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the function, by name."""
    description: str | None = None
    """Shown to an agent that chooses among functions; the docstring if not set."""


@register_function(config_type=PythonFunctionConfig)
async def python_function(
    config: PythonFunctionConfig, builder: Builder
) -> AsyncIterator[FunctionInfo]:
    """A Python function of your own."""
    where = f"target {config.target!r}"
    fn = load_target(config.target, builder.document.file.resolve().parent)
    if not callable(fn):
        raise ConfigError(f"{where} is {type(fn).__name__} {fn!r}; it must be a function")
    check_not_generator(fn, where)  # here: Function sees only what `bind` returns
    arguments: dict[str, Any] = dict(config.args)
    if config.llm is not None:
        arguments["llm"] = await builder.get_llm(config.llm)
    if config.functions:
        arguments["functions"] = {f: await builder.get_function(f) for f in config.functions}
    yield FunctionInfo.from_fn(bind(fn, arguments, where), description=config.description)


def bind(fn: Callable[..., Any], arguments: dict[str, Any], where: str) -> Callable[..., Any]:
    """The function with these arguments set; its other parameters are its input."""
    inputs = _inputs(fn, arguments, where)

    async def waits(*args: Any, **kwargs: Any) -> Any:
        return await fn(*args, **kwargs, **arguments)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs, **arguments)

    is_async = inspect.iscoroutinefunction(fn) or (
        not inspect.isroutine(fn) and inspect.iscoroutinefunction(type(fn).__call__)
    )
    called: Any = waits if is_async else plain
    called.__name__ = getattr(fn, "__name__", type(fn).__name__)
    called.__doc__ = inspect.getdoc(fn) if inspect.isroutine(fn) else type(fn).__doc__
    called.__signature__ = inspect.Signature(inputs)
    called.__annotations__ = {p.name: p.annotation for p in inputs if p.annotation is not p.empty}
    return called


def _inputs(
    fn: Callable[..., Any], arguments: dict[str, Any], where: str
) -> list[inspect.Parameter]:
    """The parameters that `arguments` does not set; raises ConfigError if it cannot be called so."""
    parameters = signature_of(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    for name in arguments:
        if name not in named and not takes_any:
            raise ConfigError(_unknown_parameter(where, name, named))
    inputs = [p for n, p in parameters.items() if n not in arguments]
    for p in inputs:
        if p.name in ("llm", "functions") and p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            value = "a key of `llms`" if p.name == "llm" else "keys of `functions`"
            raise ConfigError(
                f"{where} has the parameter {p.name!r}, and {p.name} is not set beside it; set it "
                f"to {value}"
            )
    # Those of these two that are left have a default; they are not the input.
    inputs = [p for p in inputs if p.name not in ("llm", "functions")]
    if not any(p.kind is not p.VAR_KEYWORD for p in inputs):
        raise ConfigError(
            f"{where} takes no input: its parameters are ({', '.join(parameters)}); the first must "
            "be the input of the workflow"
        )
    return inputs


def _unknown_parameter(where: str, name: str, known: set[str]) -> str:
    maybe = did_you_mean(name, known)
    key = name if name in ("llm", "functions") else f"args.{name}"
    return (
        f"{where} has no parameter {name!r}, but {key} is set.{maybe} Its parameters: "
        f"{', '.join(sorted(known)) or 'none'}."
    )
