"""`_type: python` under `eval.evaluators`: a function of the user's own as the reward.

In:   `target: package.module:function` or `file.py:function`; the item
Out:  what the function returned, as a score

The function takes the parts of an item by their names, or the item as its only parameter. Whether
it can be called so is found out when it is built, not in the first epoch.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import Field, JsonValue

from hone.config.base import EvaluatorBaseConfig, LLMRef
from hone.config.build import Builder
from hone.config.registry import register_evaluator
from hone.errors import ConfigError
from hone.evaluation.base import BaseEvaluator, EvalInputItem, EvalOutputItem, Score
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
"""What a function may take by name."""


class PythonEvaluatorConfig(EvaluatorBaseConfig, name="python"):
    """A Python function, async or plain, that returns the score.

    It takes any of `item`, `id`, `input`, `output`, `expected`, `row`, `calls` and `steps` by name,
    or the item as its only parameter; it returns a number, a number and a reason, or an
    EvalOutputItem.
    """

    target: str
    """`package.module:function`, or `file.py:function` relative to this file."""
    llm: LLMRef | None = None
    """A key of `llms`; the function gets that model as its parameter `llm`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments, by name."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Items that are scored at a time; as many as rollouts if not set."""


class PythonEvaluator(BaseEvaluator):
    """Calls a function with the parts of the item it asks for."""

    def __init__(
        self, target: str, fn: Callable[..., Any], given: Mapping[str, Any], max_concurrency: int
    ) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc=target)
        self._target, self._fn, self._given = target, fn, dict(given)
        self._parts, self._positional = _asked(target, fn, self._given)

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        named = {name: PARTS[name](item) for name in self._parts} | self._given
        positional = (item,) if self._positional else ()
        if inspect.iscoroutinefunction(self._fn):
            told = await self._fn(*positional, **named)
        else:
            told = await in_thread(self._fn, *positional, **named)
            told = await told if inspect.isawaitable(told) else told
        return _told(item.id, told)


@register_evaluator(config_type=PythonEvaluatorConfig)
async def python_evaluator(
    config: PythonEvaluatorConfig, builder: Builder
) -> AsyncIterator[PythonEvaluator]:
    """A Python function of your own."""
    given: dict[str, Any] = dict(config.args)
    if config.llm is not None:
        given["llm"] = await builder.get_llm(config.llm)
    fn = load_target(config.target, builder.document.file.resolve().parent)
    if not callable(fn):
        raise ConfigError(f"target {config.target!r} is {type(fn).__name__}, not a function")
    limit = config.max_concurrency or builder.get_max_concurrency()
    yield PythonEvaluator(config.target, fn, given, limit)


def _asked(target: str, fn: Callable[..., Any], given: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Which parts it takes by name, and whether it takes the item by place instead."""
    parameters = inspect.signature(fn).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in named}
    for name in given:
        if name not in known and not takes_any:
            key = "llm" if name == "llm" else f"args.{name}"
            raise ConfigError(f"target {target!r} has no parameter {name!r}, but {key} is set")
    left = [p for p in named if p.name not in given]
    parts = [p.name for p in left if p.name in PARTS]
    foreign = [p for p in left if p.name not in PARTS and p.default is p.empty]
    by_place = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if len(foreign) + len(by_place) == 1 and not parts:
        return [], True
    if foreign or by_place or not parts:
        wrong = [*foreign, *by_place]
        guess = get_close_matches(wrong[0].name, PARTS, n=1) if wrong else []
        maybe = f" Did you mean {guess[0]!r}?" if guess else ""
        raise ConfigError(
            f"target {target!r} takes ({', '.join(p.name for p in parameters)}).{maybe} It may take "
            f"{', '.join(PARTS)}, and what `args` and `llm` give; or the item alone."
        )
    return parts, False


def _told(id: str, told: Any) -> EvalOutputItem:
    """What a function returned, in an evaluator's words; numbers are checked where all are."""
    if isinstance(told, EvalOutputItem):
        return told
    if isinstance(told, Score):
        error = None if told.failure is None else told.failure.message
        return EvalOutputItem(
            id=id, score=told.value, reasoning=told.reasoning, error=error, failure=told.failure
        )
    if isinstance(told, tuple) and len(told) == 2:
        return EvalOutputItem(id=id, score=told[0], reasoning=told[1])
    return EvalOutputItem(id=id, score=told)
