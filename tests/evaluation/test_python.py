"""A function of the user's own as the reward."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.evaluation.made import call, item, step
from tests.prose import Prose

from hone.errors import ConfigError
from hone.evaluation.base import EvalInputItem, EvalOutputItem, Score, score
from hone.evaluation.python import PythonEvaluator
from hone.types import Failure


async def scored(fn: Callable[..., Any], one: EvalInputItem, **arguments: Any) -> Score:
    return await score(PythonEvaluator("m:fn", fn, arguments, 2), one)


async def test_it_takes_the_parts_it_names():
    def all_parts(
        item: Any, id: Any, input: Any, output: Any, expected: Any, row: Any, calls: Any, steps: Any
    ):
        assert item.id == id
        return 1.0, [id, input, output, expected, row, len(calls), steps[0].name]

    one = item(
        "out",
        "exp",
        id="7",
        input_obj="in",
        trajectory=[call()],
        steps=[step()],
        full_dataset_entry={"a": 1},
    )
    assert await scored(all_parts, one) == Score(
        1.0, ["7", "in", "out", "exp", {"a": 1}, 1, "found"]
    )


async def test_it_may_take_the_item_under_any_name():
    assert await scored(lambda thing: float(thing.output_obj), item("0.5")) == Score(0.5)

    def by_place(thing: EvalInputItem, /) -> float:
        return 0.25

    assert await scored(by_place, item("x")) == Score(0.25)


async def test_it_may_be_async_and_have_arguments():
    async def near(output: str, expected: str, *, tolerance: float, more: int = 0) -> float:
        await asyncio.sleep(0)
        return float(abs(float(output) - float(expected)) <= tolerance)

    assert await scored(near, item("1.1", "1"), tolerance=0.2) == Score(1.0)
    assert await scored(near, item("1.1", "1"), tolerance=0.05) == Score(0.0)


async def test_a_plain_function_does_not_block_the_event_loop():
    seen = []

    def where(output: Any) -> int:
        seen.append(threading.current_thread() is threading.main_thread())
        return 1

    assert await scored(where, item("x")) == Score(1.0)
    assert seen == [False]


async def test_valid_return_values(prose: Prose):
    failure = Failure(type="T", message="m")
    returns: list[tuple[Any, Score]] = [
        (True, Score(1.0)),
        ((0.5, "why"), Score(0.5, "why")),
        (Score(0.5, "why"), Score(0.5, "why")),
        (Score(None, failure=failure), Score(None, failure=failure)),
        (EvalOutputItem(id="i", score=2, reasoning="r"), Score(2.0, "r")),
    ]
    for returned, expected in returns:
        assert (
            await scored(lambda output, value=returned: value, item("x"), value=returned)
            == expected
        )
    nothing = await scored(lambda output: None, item("x"))
    assert nothing.failure is not None
    prose(nothing.failure.message)


async def test_an_exception_is_a_failure():
    got = await scored(lambda output: 1 / 0, item("x"))
    assert got.value is None and got.failure is not None
    assert got.failure.type == "ZeroDivisionError"


def two_names(outptu: Any, expected: Any) -> float:
    return 0.0


def nothing_at_all() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (two_names, {}),
        (nothing_at_all, {}),
        (two_names, {"k": 1}),
        (two_names, {"llm": 1}),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused_when_it_is_built(
    prose: Prose, fn: Any, arguments: dict[str, Any]
):
    with pytest.raises(ConfigError) as caught:
        PythonEvaluator("m:fn", fn, arguments, 1)
    prose(caught)
