"""`_type: python` under `eval.evaluators`: a Python function of the user as the evaluator.

In:   `target: package.module:function` or `file.py:function`; the item
Out:  the function's return value, as a score

The function takes the parts of an item by their names, or the item as its only parameter. Its
signature is checked when it is built, not in the first epoch.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

from pydantic import ConfigDict, Field, JsonValue

from hone.config.base import EvaluatorBaseConfig, LLMRef
from hone.config.build import Builder
from hone.config.registry import register_evaluator
from hone.errors import ConfigError, did_you_mean
from hone.evaluation.base import BaseEvaluator, EvalInputItem, EvalOutputItem, Score, output_of
from hone.workflow.function import in_thread
from hone.workflow.target import load_target

PARTS: Mapping[str, Callable[[EvalInputItem], Any]] = {
    "item": lambda item: item,
    "id": lambda item: item.id,
    "input": lambda item: item.input_obj,
    "output": lambda item: item.output_obj,
    "expected": lambda item: item.expected_output_obj,
    "row": lambda item: item.full_dataset_entry,
    "calls": lambda item: item.trajectory,
    "steps": lambda item: item.steps,
}
"""The parameters that a function may have."""


class PythonEvaluatorConfig(EvaluatorBaseConfig, name="python"):
    """A Python function, async or plain, that returns the score.

    It takes any of `item`, `id`, `input`, `output`, `expected`, `row`, `calls` and `steps` by name,
    or the item as its only parameter; it returns a number, a number and a reason, or an
    EvalOutputItem.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # `args` are the function's own

    target: str
    """`package.module:function`, or `file.py:function` relative to this file."""
    llm: LLMRef | None = None
    """A key of `llms`; the function gets that model as its parameter `llm`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the function, by name."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Number of items scored at a time; `eval.general.max_concurrency` if not set, or 8."""


class PythonEvaluator(BaseEvaluator):
    """Calls a function with the parts of the item that its signature names."""

    def __init__(
        self,
        target: str,
        fn: Callable[..., Any],
        arguments: Mapping[str, Any],
        max_concurrency: int,
    ) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc=target)
        self._target, self._fn, self._arguments = target, fn, dict(arguments)
        self._parts, self._positional = parts_of(target, fn, self._arguments)
        self.is_service = "llm" in self._arguments  # a judge of the user's own

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        named = {name: PARTS[name](item) for name in self._parts} | self._arguments
        positional = (item,) if self._positional else ()
        if inspect.iscoroutinefunction(self._fn):
            result = await self._fn(*positional, **named)
        else:
            result = await in_thread(self._fn, *positional, **named)
            result = await result if inspect.isawaitable(result) else result
        return _output_item(item.id, result)


@register_evaluator(config_type=PythonEvaluatorConfig)
async def python_evaluator(
    config: PythonEvaluatorConfig, builder: Builder
) -> AsyncIterator[PythonEvaluator]:
    """Your own Python function."""
    arguments: dict[str, Any] = dict(config.args)
    if config.llm is not None:
        arguments["llm"] = await builder.get_llm(config.llm)
    fn = load_target(config.target, builder.document.file.resolve().parent)
    if not callable(fn):
        raise ConfigError(f"target {config.target!r} is {type(fn).__name__}, not a function")
    limit = config.max_concurrency or builder.get_max_concurrency()
    yield PythonEvaluator(config.target, fn, arguments, limit)


def parts_of(
    target: str, fn: Callable[..., Any], arguments: Collection[str]
) -> tuple[list[str], bool]:
    """The parts that it takes by name, or whether it takes the item as its only argument.

    `arguments`: names that `args` and `llm` set. Raises ConfigError for a signature that hone cannot
    call.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"target {target!r}: its parameters cannot be read; wrap it in a function of your own"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in named}
    for name in arguments:
        if name not in known and not takes_any:
            key = "llm" if name == "llm" else f"args.{name}"
            raise ConfigError(f"target {target!r} has no parameter {name!r}, but {key} is set")
    unset = [p for p in named if p.name not in arguments]
    parts = [p.name for p in unset if p.name in PARTS]
    foreign = [p for p in unset if p.name not in PARTS and p.default is p.empty]
    by_place = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if len(foreign) + len(by_place) == 1 and not parts:
        return [], True
    if foreign or by_place or not parts:
        wrong = [*foreign, *by_place]
        maybe = did_you_mean(wrong[0].name, PARTS) if wrong else ""
        raise ConfigError(
            f"target {target!r} takes ({', '.join(p.name for p in parameters)}).{maybe} It may take "
            f"{', '.join(PARTS)}, and what `args` and `llm` set; or the item alone."
        )
    return parts, False


def _output_item(id: str, result: Any) -> EvalOutputItem:
    """The return value of a function as an EvalOutputItem; `score_of` checks its number."""
    if isinstance(result, EvalOutputItem):
        return result
    if isinstance(result, Score):
        return output_of([(id, result)]).eval_output_items[0]
    if isinstance(result, tuple) and len(result) == 2:
        return EvalOutputItem(id=id, score=result[0], reasoning=result[1])
    return EvalOutputItem(id=id, score=result)
