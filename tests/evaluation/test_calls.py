"""The evaluators over calls: tools, time and tokens."""

from typing import Any

import pytest
from tests.evaluation.made import call, item
from tests.prose import Prose

from hone.errors import ConfigError
from hone.evaluation.calls import (
    AvgLlmLatency,
    AvgNumLlmCalls,
    AvgTokensPerLlmEnd,
    AvgWorkflowRuntime,
    ToolCallMatch,
)

A = {"name": "search", "arguments": {"q": "x", "k": 3}}
B = {"name": "open", "arguments": {"page": 1}}
Q = {"name": "search", "arguments": {"q": "x"}}


def number(n: float) -> dict[str, Any]:
    return {"name": "set", "arguments": {"n": n}}


def as_openai(tool: dict[str, Any]) -> dict[str, Any]:
    import json

    arguments = json.dumps(tool["arguments"])
    return {"id": "t", "type": "function", "function": {**tool, "arguments": arguments}}


def value(output: Any, expected: Any, calls: Any = (), **options: Any) -> float:
    return ToolCallMatch(**options).verdict(item(output, expected, trajectory=list(calls)))[0]


@pytest.mark.parametrize(
    ("output", "expected", "options", "right"),
    [
        (A, A, {}, 1),
        ('{"name": "search", "arguments": {"k": 3, "q": "x"}}', [A], {}, 1),
        ([as_openai(A)], A, {}, 1),
        ({"role": "assistant", "tool_calls": [as_openai(A)]}, A, {}, 1),
        ([A, B], [B, A], {}, 1),
        ([A, B], [B, A], {"ordered": True}, 0),
        ([A, B], [B, A], {"ordered": True, "partial": True}, 0.5),
        ([A, B], [A], {}, 0),
        ([A, B], [A], {"extra": "allow"}, 1),
        ([A, B], [A], {"partial": True}, 0.5),
        ([A], [A, B], {"partial": True}, 0.5),
        ([A, A], [A, B], {"partial": True}, 0.5),  # one call cannot answer for two
        ({"name": "search", "arguments": {"q": "y", "k": 3}}, A, {}, 0),
        ({"name": "search", "arguments": {"q": "y", "k": 3}}, A, {"arguments": "ignore"}, 1),
        ({"name": "search", "arguments": {"q": "x", "k": 3, "z": 0}}, A, {}, 0),
        (
            {"name": "search", "arguments": {"q": "x", "k": 3, "z": 0}},
            A,
            {"arguments": "subset"},
            1,
        ),
        ({"name": "search", "arguments": {"q": "x"}}, A, {"arguments": "subset"}, 0),
        ({"name": "search", "arguments": {"q": "x", "k": 3.1}}, A, {"tolerance": 0.2}, 1),
        ({"name": "search", "arguments": "not json"}, A, {}, 0),
        ([], [], {}, 1),
        ([A], [], {}, 0),
        ({"name": "open"}, {"name": "open", "arguments": {}}, {}, 1),
        # The first call is more than either expects; only the second expects all of it.
        ([A, Q], [Q, A], {"arguments": "subset"}, 1),
        ([number(1.0), number(1.2)], [number(1.1), number(0.9)], {"tolerance": 0.15}, 1),
    ],
)
def test_tool_calls(output: Any, expected: Any, options: Any, right: float):
    assert value(output, expected, **options) == right


def test_the_model_calls_are_compared_if_the_output_is_text():
    reply = call({"role": "assistant", "content": None, "tool_calls": [as_openai(A)]})
    then = call({"role": "assistant", "content": None, "tool_calls": [as_openai(B)]}, index=1)
    assert value("It is done.", [A, B], [reply, then, call("done")]) == 1
    assert value("It is done.", [A, B], [reply, then], source="output") == 0
    assert value(B, [A], [reply], source="calls") == 1
    assert value(B, [A], [reply]) == 0


def test_the_reason_lists_the_tool_calls():
    _, reasoning = ToolCallMatch().verdict(item([B], [A, B]))
    assert reasoning == {"made": [B], "matched": 1, "expected": 2}


@pytest.mark.parametrize("expected", ["prose", {"tool": "x"}, [A, 3]])
def test_a_row_without_tool_calls_cannot_be_scored(prose: Prose, expected: Any):
    with pytest.raises(ConfigError) as caught:
        value(A, expected)
    prose(caught)


def test_time_and_tokens():
    # Seconds 0.5 and 1.5: mean 1; tokens 5 and 10 + 1: mean 8; two calls.
    more = call(seconds=1.5, usage={"prompt_tokens": 10, "completion_tokens": 1})
    done = item("x", trajectory=[call(), more], seconds=2.25)
    assert AvgLlmLatency().verdict(done) == (1.0, {"calls": 2})
    assert AvgTokensPerLlmEnd().verdict(done) == (8.0, {"calls": 2})
    assert AvgNumLlmCalls().verdict(done) == (2.0, None)
    assert AvgWorkflowRuntime(max_concurrency=2).verdict(done) == (2.25, None)


def test_a_missing_measurement_is_not_zero(prose: Prose):
    nothing = item("x")
    assert AvgNumLlmCalls().verdict(nothing) == (0.0, None)
    for rule in (AvgLlmLatency(), AvgTokensPerLlmEnd()):
        with pytest.raises(ConfigError) as caught:
            rule.verdict(nothing)
        prose(caught)
    with pytest.raises(ConfigError) as caught:
        AvgWorkflowRuntime().verdict(nothing)
    prose(caught)
