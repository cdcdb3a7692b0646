"""Functions: their arguments, their context, their names."""

import asyncio
import re
import threading
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.capture.base import current
from hone.capture.scope import recorded
from hone.errors import ConfigError, NotInThisVersion
from hone.workflow.function import Function, FunctionInfo


class Query(BaseModel):
    text: str
    limit: int = 3


class Board(BaseModel):
    cells: list[str]
    turn: str


async def text(input: str) -> Any:
    return input


async def anything(input) -> Any:
    return input


async def numbers(input: list[int]) -> Any:
    return input


async def either(input: str | dict[str, Any]) -> Any:
    return input


async def model(input: Query) -> Any:
    return input


async def board(input: Board) -> Any:
    return input


async def search(query: str, limit: int = 5) -> Any:
    return query, limit


async def add(a: int, b: int) -> Any:
    return a + b


def plain(a: int, b: int = 10) -> Any:
    return a + b


async def odd(json: str, _x: int, /, *, schema: int = 2) -> Any:
    return json, _x, schema


async def nothing() -> str:
    return "done"


async def variadic(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.parametrize(
    ("fn", "input", "expected"),
    [
        (text, "hi", "hi"),
        (text, '{"a": 1}', '{"a": 1}'),
        (text, {"a": "ü"}, '{"a": "ü"}'),
        (text, 5, "5"),
        (text, Query(text="q"), '{"text":"q","limit":3}'),
        (anything, {"a": 1}, {"a": 1}),
        (numbers, [1, 2], [1, 2]),
        (numbers, "[1, 2]", [1, 2]),
        (either, "[1, 2]", "[1, 2]"),
        (either, {"a": 1}, {"a": 1}),
        (model, Query(text="q"), Query(text="q")),
        (model, {"text": "q", "limit": 1}, Query(text="q", limit=1)),
        (model, '{"text": "q"}', Query(text="q")),
        (model, "plain words", Query(text="plain words")),
        (board, '{"cells": ["x"], "turn": "o"}', Board(cells=["x"], turn="o")),
        (search, "plain words", ("plain words", 5)),
        (search, '{"query": "q", "limit": "2"}', ("q", 2)),
        # JSON, but not these parameters: the text itself is the input.
        (search, '{"board": 1}', ('{"board": 1}', 5)),
        (add, '{"a": 1, "b": 2}', 3),
        (add, {"a": "1", "b": 2}, 3),
        (plain, "4", 14),
        (odd, {"json": "j", "_x": 1}, ("j", 1, 2)),
        (nothing, "ignored", "done"),
        (variadic, "x", (("x",), {})),
        (len, "four", 4),
    ],
)
async def test_an_input_becomes_the_arguments(fn: Any, input: Any, expected: Any):
    assert await Function.of("f", fn)(input) == expected


async def test_arguments_may_be_passed_by_name(prose: Prose):
    assert await Function.of("f", add)(a=1, b=2) == 3
    assert await Function.of("f", text)(input="hi") == "hi"
    assert await Function.of("f", model)(text="q", limit=1) == Query(text="q", limit=1)
    with pytest.raises(ConfigError) as caught:
        await Function.of("f", add)({"a": 1}, b=2)
    prose(caught)


@pytest.mark.parametrize(
    ("fn", "input", "takes"),
    [
        (add, '{"a": 1}', "takes a: int, b: int; it was given"),
        (add, "words", "takes a: int, b: int"),
        (add, {"a": 1, "b": 2, "c": 3}, "takes a: int, b: int"),
        (numbers, "words", r"takes input: list\[int\]"),
        (board, "words", "takes input: .*Board"),
        (text, None, "takes input: str"),
    ],
)
async def test_the_error_for_an_input_that_does_not_fit_names_the_parameters(
    fn: Any, input: Any, takes: str
):
    with pytest.raises(ValidationError) as caught:
        await Function.of("f", fn)(input)
    assert re.search(f"function 'f' {takes}", caught.value.__notes__[0])


def test_the_schema_is_that_of_the_model_or_of_the_parameters():
    assert Function.of("f", model).input_schema is Query
    assert Function.of("f", text).input_schema is None
    assert Function.of("f", nothing).input_schema is None
    several = Function.of("f", search).input_schema
    assert several is not None
    assert several.model_json_schema()["properties"] == {
        "query": {"title": "Query", "type": "string"},
        "limit": {"default": 5, "title": "Limit", "type": "integer"},
    }
    assert several.model_json_schema()["required"] == ["query"]


async def test_nat_s_spelling_works():
    async def described(query: str) -> str:
        """Look it up."""
        return query.upper()

    info = FunctionInfo.from_fn(described)
    assert info.description == "Look it up."
    function = Function.of("look", FunctionInfo.from_fn(described, description="Find it."))
    assert (function.name, function.description) == ("look", "Find it.")
    assert await function.ainvoke("a") == "A"

    async def takes_a_query(query: Any) -> str:
        return query.text

    with_schema = FunctionInfo.from_fn(takes_a_query, input_schema=Query)
    assert await Function.of("given", with_schema)('{"text": "q"}') == "q"
    renamed = Function.of("other", Function.of("given", with_schema))
    assert renamed.name == "other" and await renamed({"text": "r"}) == "r"


async def test_objects_and_partial_functions_are_functions():
    class Agent:
        """Plays."""

        async def __call__(self, input: str) -> str:
            return input + "!"

        def plain(self, input: str) -> str:
            return input + "?"

    agent = Function.of("agent", Agent())
    assert await agent("go") == "go!" and agent.description == "Plays."
    assert await Function.of("agent", Agent().plain)("go") == "go?"
    assert await Function.of("more", partial(add, b=1))({"a": 1}) == 2
    assert await Function.of("late", lambda input: text(input))("awaited") == "awaited"


async def test_function_paths_nest_and_are_restored():
    seen: list[str] = []

    async def leaf(input: str) -> None:
        scope = current()
        seen.append(scope.function if scope else "none")

    def leaf_in_a_thread(input: str) -> None:
        scope = current()
        seen.append(scope.function if scope else "none")

    search, look = Function.of("search", leaf), Function.of("look", leaf_in_a_thread)

    async def agent(input: str) -> None:
        await search("a")
        await asyncio.gather(look("b"), look("c"))
        await leaf("d")

    rollout, _ = recorded()
    with rollout:
        await Function.of("<workflow>", agent)("x")
    assert seen == ["<workflow>.search", *["<workflow>.look"] * 2, "<workflow>"]
    await search("outside any rollout")
    assert seen[-1] == "none"


async def test_a_plain_function_does_not_block_the_event_loop():
    entered, leave = threading.Event(), threading.Event()

    def slow(input: str) -> str:
        entered.set()
        assert leave.wait(PATIENCE_S)
        return "done"

    task = asyncio.create_task(Function.of("slow", slow)("x"))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    leave.set()
    assert await task == "done"


async def test_errors_of_a_thread_are_raised_unchanged():
    def fails(input: str) -> None:
        raise LookupError(input)

    with pytest.raises(LookupError, match="gone"):
        await Function.of("f", fails)("gone")

    def stops(input: str) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await Function.of("f", stops)("x")


def test_values_that_are_not_functions_are_refused(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        Function.of("f", 3)
    prose(caught)

    async def pieces(input: str) -> Any:
        yield input

    def plain_pieces(input: str) -> Any:
        yield input

    for fn in (pieces, plain_pieces):
        with pytest.raises(NotInThisVersion) as caught:
            Function.of("f", fn)
        prose(caught)


async def test_annotations_that_cannot_be_resolved_are_ignored():
    async def agent(input: "NoSuchType") -> Any:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        return input

    class Own:
        pass

    async def owned(input: Own) -> Any:
        return input

    async def own_of_two(input: Own, other: int) -> Any:
        return input, other

    assert await Function.of("f", agent)("x") == "x"
    own = Own()
    assert await Function.of("f", owned)(own) is own
    assert await Function.of("f", own_of_two)({"input": own, "other": 1}) == (own, 1)
