"""Use an evaluator of NeMo Agent Toolkit as an evaluator of hone.

In:   the toolkit's EvaluatorInfo; items of hone
Out:  scores; a failure where the toolkit would give 0.0 with an error in the reasoning

The item has the toolkit's intermediate steps as its trajectory. If the workflow is not one of the
toolkit's, they are made from the model calls that hone captured.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from nat.data_models.evaluator import EvalInput, EvalInputItem
from nat.data_models.intermediate_step import IntermediateStep

from hone.errors import ConfigError
from hone.evaluation import base as hone
from hone.evaluation.steps import all_steps


class ToolkitEvaluator:
    """Scores one item at a time with the toolkit's evaluator."""

    def __init__(self, info: Any, *, is_service: bool = False) -> None:
        if not callable(getattr(info, "evaluate_fn", None)):
            raise ConfigError(
                "has no evaluate_fn: it evaluates the trajectory format ATIF only, which is not in "
                "this version of hone"
            )
        self._evaluate = info.evaluate_fn
        self.is_service = is_service

    async def evaluate_item(self, item: hone.EvalInputItem) -> hone.EvalOutputItem:
        """The score of one item; an exception of the evaluator is a failure, never a zero."""
        result = await self._result(
            EvalInputItem(
                id=item.id,
                input_obj=item.input_obj,
                expected_output_obj=item.expected_output_obj,
                output_obj=item.output_obj,
                trajectory=_steps(all_steps(item.trajectory, item.steps, item.events)),
                expected_trajectory=_steps(item.expected_trajectory),
                full_dataset_entry=item.full_dataset_entry,
            )
        )
        error = result.error
        if not error and isinstance(result.reasoning, Mapping) and not result.score:
            # When the toolkit catches an exception, it scores 0.0 and puts the text there.
            message = result.reasoning.get("error")
            error = message if isinstance(message, str) and message else None
        return hone.EvalOutputItem(
            id=item.id,
            score=result.score,
            reasoning=result.reasoning,
            error=None if error is None else str(error),
        )

    async def _result(self, item: EvalInputItem) -> Any:
        evaluator = getattr(self._evaluate, "__self__", None)
        if getattr(self._evaluate, "__name__", "") == "evaluate" and callable(
            getattr(evaluator, "evaluate_item", None)
        ):
            # The toolkit's own loop over items would turn an exception into a score of 0.0.
            assert evaluator is not None
            async with getattr(evaluator, "semaphore", None) or nullcontext():
                return await evaluator.evaluate_item(item)
        output = await self._evaluate(EvalInput(eval_input_items=[item]))
        results = list(output.eval_output_items)
        if len(results) != 1:
            raise ValueError(
                f"evaluate_fn was given one item, {item.id!r}, and returned {len(results)} results"
            )
        return results[0]


def _steps(entries: list[Any]) -> list[IntermediateStep]:
    """Steps as the toolkit reads them; hone writes null for what it does not know."""
    return [
        IntermediateStep.model_validate(
            {**entry, "payload": {k: v for k, v in entry["payload"].items() if v is not None}}
        )
        for entry in entries
    ]
