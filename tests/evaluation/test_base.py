"""What counts as a score, and what is a failure."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from pydantic import ValidationError
from tests.evaluation.made import item
from tests.prose import Prose

from hone.evaluation.base import (
    BaseEvaluator,
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluatorInfo,
    Score,
    output_of,
    score,
    score_of,
)
from hone.types import Failure


class Says(BaseEvaluator):
    """Scores each item with its output, or raises it."""

    def __init__(self, max_concurrency: int = 4) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc="says")
        self.running = self.most = 0

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        if isinstance(item.output_obj, Exception):
            raise item.output_obj
        return EvalOutputItem(id=item.id, score=item.output_obj, reasoning="as it says")


@pytest.mark.parametrize(
    ("returned", "value"),
    [(1, 1.0), (0.25, 0.25), (-3.5, -3.5), (True, 1.0), (Fraction(1, 4), 0.25)],
)
async def test_a_number_is_a_score(returned: Any, value: float):
    assert await score(Says(), item(returned)) == Score(value, "as it says")


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.int64(2), 2.0),
        (numpy.bool_(True), 1.0),
        (numpy.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_other_types_are_numbers(returned: Any, value: float):
    got = score_of(EvalOutputItem(id="i", score=returned))
    assert got == Score(value) and type(got.value) is float


@pytest.mark.parametrize(
    "returned",
    [
        *(None, math.nan, math.inf, "0.5", [1], {"score": 1}, 1j, 10**400, Decimal("NaN")),
        *(numpy.array([0.5]), torch.tensor([0.5]), numpy.str_("0.5"), numpy.complex64(1)),
    ],
)
async def test_a_value_that_is_not_a_finite_number_is_a_failure(prose: Prose, returned: Any):
    got = await score(Says(), item(returned, id="row-7"))
    assert got.value is None
    assert got.failure is not None
    prose(got.failure.message)


async def test_an_exception_is_a_failure_with_its_traceback():
    got = await score(Says(), item(KeyError("price")))
    assert got.value is None and got.failure is not None
    assert (got.failure.type, got.failure.message) == ("KeyError", "'price'")
    assert "in evaluate_item" in got.failure.traceback


async def test_cancellation_is_not_a_failure_of_the_evaluator():
    task = asyncio.create_task(score(Says(), item(1)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_error_takes_precedence_over_a_score():
    got = score_of(EvalOutputItem(id="i", score=0.0, reasoning="r", error="the judge is down"))
    assert got == Score(
        None, "r", Failure(type="EvaluatorError", message="the judge is down", traceback="")
    )


async def test_the_mean_is_over_scored_items_and_not_rounded():
    items = [item(v, id=str(n)) for n, v in enumerate([1, 0, 0, ValueError("no"), math.nan])]
    output = await Says().evaluate(EvalInput(eval_input_items=items))
    assert output.average_score == pytest.approx(1 / 3, abs=1e-12)
    assert [one.score for one in output.eval_output_items] == [1.0, 0.0, 0.0, None, None]
    assert output.eval_output_items[3].error == "ValueError: no"
    assert output.eval_output_items[3].failure is not None
    assert output.model_dump()["eval_output_items"][3] == {
        "id": "3",
        "score": None,
        "reasoning": None,
        "error": "ValueError: no",
    }


async def test_nothing_scored_has_no_mean():
    output = await Says().evaluate(EvalInput(eval_input_items=[item(None)]))
    assert output.average_score is None
    assert output_of([]) == EvalOutput(average_score=None, eval_output_items=[])


async def test_max_concurrency_is_not_exceeded():
    evaluator = Says(max_concurrency=2)
    await asyncio.gather(*(score(evaluator, item(n, id=str(n))) for n in range(9)))
    assert evaluator.most == 2
    assert evaluator.tqdm_desc == "says"


async def test_a_function_of_many_items_is_called_with_one():
    seen = []

    async def evaluate_fn(eval_input: EvalInput) -> EvalOutput:
        seen.append([one.id for one in eval_input.eval_input_items])
        items = [EvalOutputItem(id=one.id, score=0.5) for one in eval_input.eval_input_items]
        return EvalOutput(average_score=0.5, eval_output_items=items)

    info = EvaluatorInfo(config=None, evaluate_fn=evaluate_fn, description="d")
    assert await score(info, item(1, id=7)) == Score(0.5)
    assert seen == [["7"]]


async def test_the_failures_of_a_class_behind_a_function_keep_their_traceback():
    info = EvaluatorInfo(config=None, evaluate_fn=Says().evaluate)
    got = await score(info, item(KeyError("price")))
    assert got.failure is not None and "in evaluate_item" in got.failure.traceback


async def test_a_result_for_another_item_is_a_failure(prose: Prose):
    async def evaluate_fn(eval_input: EvalInput) -> EvalOutput:
        return EvalOutput(eval_output_items=[EvalOutputItem(id="other", score=1)])

    got = await score(EvaluatorInfo(None, evaluate_fn), item(1, id="mine"))
    assert got.failure is not None
    prose(got.failure.message)


def test_ids_are_text_whatever_a_row_holds():
    assert (item(id=7).id, item(id=7.5).id, item(id="7").id) == ("7", "7.5", "7")


def test_a_copy_is_checked():
    changed = item("a").copy_with_updates(output_obj="b", id=3)
    assert (changed.output_obj, changed.id, changed.input_obj) == ("b", "3", "q")
    with pytest.raises(ValidationError, match="outptu_obj"):
        item("a").copy_with_updates(outptu_obj="b")


async def test_the_timeout_of_an_evaluator_does_not_include_waiting_for_a_slot(prose: Prose):
    class Slow(BaseEvaluator):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            await asyncio.sleep(item.output_obj)
            return EvalOutputItem(id=item.id, score=1)

    hung = await score(Slow(), item(60, id="7"), timeout_s=0.05)
    assert hung.failure is not None
    prose(hung.failure.message)
    # Ten in a row take longer than the timeout of one.
    one_by_one = EvaluatorInfo(None, Slow(max_concurrency=1).evaluate)
    got = await asyncio.gather(*(score(one_by_one, item(0.04), timeout_s=0.3) for _ in range(10)))
    assert [one.value for one in got] == [1.0] * 10


async def test_a_timeout_of_its_own_is_a_failure_like_any_other(prose: Prose):
    got = await score(Says(), item(TimeoutError("the database")), timeout_s=60)
    assert got.failure is not None
    prose(got.failure.message)
