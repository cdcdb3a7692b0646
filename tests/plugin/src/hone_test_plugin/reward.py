"""`_type: my_custom_evaluator`: how near an answer comes to the expected one."""

from collections.abc import AsyncIterator
from difflib import SequenceMatcher

from hone.config.build import Builder
from hone.config.registry import EvaluatorBaseConfig, register_evaluator
from hone.evaluation.base import BaseEvaluator, EvalInputItem, EvalOutputItem


class MyEvaluatorConfig(EvaluatorBaseConfig, name="my_custom_evaluator"):
    """The share of characters that answer and expected answer have in common, in order."""

    ignore_case: bool = False
    """Whether `Yes` is as good as `yes`."""


class Similarity(BaseEvaluator):
    """Scores one item at a time; what it raises is a failure of the item."""

    def __init__(self, config: MyEvaluatorConfig, max_concurrency: int) -> None:
        super().__init__(max_concurrency=max_concurrency)
        self.config = config

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        got, expected = str(item.output_obj), str(item.expected_output_obj)
        if self.config.ignore_case:
            got, expected = got.casefold(), expected.casefold()
        score = SequenceMatcher(None, got, expected, autojunk=False).ratio()
        return EvalOutputItem(id=item.id, score=score, reasoning=f"{got!r} for {expected!r}")


@register_evaluator(config_type=MyEvaluatorConfig)
async def my_custom_evaluator(
    config: MyEvaluatorConfig, builder: Builder
) -> AsyncIterator[Similarity]:
    """How near an answer comes to the expected one, between 0 and 1."""
    yield Similarity(config, builder.get_max_concurrency())
