"""Base class of built-in evaluators, which need only their configuration and the item.

In:   an item with the workflow's output
Out:  the verdict: a number and the reason for it

A wrong answer of the model is a verdict (0, with the reason). A mistake in the row or in the
configuration raises an exception: it must not count against the model.
"""

import json
import re
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from hone.config.base import EvaluatorBaseConfig
from hone.errors import ConfigError
from hone.evaluation.base import EvalInputItem, EvalOutputItem

Verdict = tuple[float, Any]
"""A score and the reason for it."""

_FENCE = re.compile(r"```[a-zA-Z0-9]*\s*\n(.*?)```", re.DOTALL)


class Rule(EvaluatorBaseConfig):
    """An evaluator that needs only its configuration and the item."""

    @property
    def needs_answer(self) -> bool:
        """Whether every row must have an expected output."""
        return True

    @abstractmethod
    def verdict(self, item: EvalInputItem) -> Verdict:
        """The score and the reason; raises for errors that are not the model's fault."""


class RuleEvaluator:
    """A rule as an Evaluator."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        value, reasoning = self.rule.verdict(item)
        return EvalOutputItem(id=item.id, score=value, reasoning=reasoning)


async def rule_evaluator(config: Rule, builder: Any) -> AsyncIterator[RuleEvaluator]:
    yield RuleEvaluator(config)


def expected_of(item: EvalInputItem) -> Any:
    """The expected output of the row; raises ConfigError if there is none."""
    if item.expected_output_obj is None:
        raise ConfigError(
            f"item {item.id!r}: its row has no expected output; fill the answer column, or name it "
            "in eval.general.dataset.structure.answer_key"
        )
    return item.expected_output_obj


def text(value: Any) -> str:
    """A value as text; values that are not text as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)


def parsed(value: Any) -> Any:
    """The value of JSON text, bare or in a code fence; other values unchanged.

    Raises json.JSONDecodeError on text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        fenced = _FENCE.search(value)
        if fenced is None:
            raise
        return json.loads(fenced.group(1))


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal; numbers within the tolerance. True is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= tolerance
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], tolerance) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in pairs)
    return one == other
