"""What every evaluator must do, as one suite: subclass EvaluatorConformance and give it yours.

In:   an `evaluator` fixture, and `cases`: items with the value they must get, None for a failure
Out:  failures that name the promise broken
"""

import asyncio
import json
from collections.abc import Sequence

import pytest

from hone.evaluation.base import EvalInput, EvalInputItem, Evaluator, output_of, score

Cases = Sequence[tuple[EvalInputItem, float | None]]


class EvaluatorConformance:
    """Promises of an Evaluator."""

    @pytest.fixture
    def cases(self) -> Cases:
        raise NotImplementedError("give items and the value each must get")

    async def test_it_gives_the_values_it_promises(self, evaluator: Evaluator, cases: Cases):
        for item, value in cases:
            got = await score(evaluator, item)
            assert got.value == pytest.approx(value), (item, got)
            assert (got.failure is None) == (value is not None), (item, got)

    async def test_items_at_once_do_not_disturb_each_other(
        self, evaluator: Evaluator, cases: Cases
    ):
        many = [case for case in cases for _ in range(8)]
        got = await asyncio.gather(*(score(evaluator, item) for item, _ in many))
        assert [one.value for one in got] == [pytest.approx(value) for _, value in many]

    async def test_it_answers_under_the_item_s_id(self, evaluator: Evaluator, cases: Cases):
        for item, value in cases:
            if value is not None:
                renamed = item.copy_with_updates(id="another id")
                assert (await evaluator.evaluate_item(renamed)).id == "another id"

    async def test_it_leaves_the_item_as_it_was(self, evaluator: Evaluator, cases: Cases):
        for item, _ in cases:
            before = item.model_copy(deep=True)
            await score(evaluator, item)
            assert item == before

    async def test_what_it_says_can_be_written(self, evaluator: Evaluator, cases: Cases):
        scores = [(item.id, await score(evaluator, item)) for item, _ in cases]
        written = json.loads(output_of(scores).model_dump_json())
        assert [one["score"] for one in written["eval_output_items"]] == [
            pytest.approx(value) for _, value in cases
        ]

    async def test_an_item_without_an_output_is_no_accident(
        self, evaluator: Evaluator, cases: Cases
    ):
        for item, _ in cases:
            blank = item.copy_with_updates(output_obj=None, trajectory=[], steps=[], seconds=None)
            got = await score(evaluator, blank)
            accidents = ("TypeError", "AttributeError", "KeyError", "IndexError")
            assert got.failure is None or got.failure.type not in accidents, got.failure

    async def test_a_whole_dataset_gives_the_same(self, evaluator: Evaluator, cases: Cases):
        evaluate = getattr(evaluator, "evaluate", None)
        if evaluate is None:
            return  # it scores item by item only, and is asked so
        items = [item.copy_with_updates(id=str(n)) for n, (item, _) in enumerate(cases)]
        output = await evaluate(EvalInput(eval_input_items=items))
        assert [(one.id, one.score) for one in output.eval_output_items] == [
            (str(n), pytest.approx(value)) for n, (_, value) in enumerate(cases)
        ]
