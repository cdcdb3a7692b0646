"""The built-in rewards over outputs: every number by hand."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.evaluation.made import item
from tests.prose import Prose

from hone.errors import ConfigError
from hone.evaluation.base import score
from hone.evaluation.evaluators import F1, Contains, ExactMatch, JsonMatch, Numeric, Regex
from hone.evaluation.rule import Rule, RuleEvaluator, same


def value(rule: Rule, output: Any, expected: Any = None) -> float:
    return rule.verdict(item(output, expected))[0]


def reason(rule: Rule, output: Any, expected: Any = None) -> Any:
    return rule.verdict(item(output, expected))[1]


async def test_a_rule_scores_as_evaluators_do(prose: Prose):
    evaluator = RuleEvaluator(ExactMatch())
    assert (await score(evaluator, item("a", "a"))).value == 1.0
    assert (await score(evaluator, item("a", "b"))).value == 0.0
    missing = await score(evaluator, item("a", None, id="row-3"))
    assert missing.value is None and missing.failure is not None
    prose(missing.failure.message)


@pytest.mark.parametrize(
    ("output", "expected", "options", "right"),
    [
        (" Paris\n", "Paris", {}, 1),
        (" Paris\n", "Paris", {"strip": False}, 0),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": True}, 1),
        ("42", 42, {}, 1),
        (42, "42", {}, 1),
        ("", "", {}, 1),
        (None, "", {}, 1),
        ('{"b": 1, "a": [2]}', {"a": [2], "b": 1}, {}, 1),
        ({"a": 1}, '{"a": 1.0}', {}, 1),
        ({"a": True}, {"a": 1}, {}, 0),
        ("not json", {"a": 1}, {}, 0),
        ([1, 2], [2, 1], {}, 0),
        (True, True, {}, 1),
        ("true", True, {}, 1),
    ],
)
def test_exact_match(output: Any, expected: Any, options: Any, right: int):
    assert value(ExactMatch(**options), output, expected) == right


@pytest.mark.parametrize(
    ("output", "expected", "options", "right"),
    [
        ("It is Paris.", "Paris", {}, 1),
        ("It is paris.", "Paris", {}, 0),
        ("It is paris.", "Paris", {"ignore_case": True}, 1),
        ("a and b", ["a", "b"], {}, 1),
        ("only a", ["a", "bb"], {}, 0),
        ("only a", ["a", "bb"], {"match": "any"}, 1),
        ("only a", ["bb", "cc"], {"match": "any"}, 0),
        ("costs 12", 12, {}, 1),
        ("xyz", None, {"substrings": ["y"]}, 1),
    ],
)
def test_contains(output: Any, expected: Any, options: Any, right: int):
    assert value(Contains(**options), output, expected) == right


def test_contains_names_what_is_missing(prose: Prose):
    assert reason(Contains(), "only a", ["a", "bb"]) == {"missing": ["bb"]}
    with pytest.raises(ConfigError) as caught:
        value(Contains(), "a", [])
    prose(caught)


@pytest.mark.parametrize(
    ("output", "expected", "options", "right"),
    [
        ("call 555-1234 now", None, {"pattern": r"\d{3}-\d{4}"}, 1),
        ("call 555-1234 now", None, {"pattern": r"\d{3}-\d{4}", "match": "full"}, 0),
        (" 555-1234\n", None, {"pattern": r"\d{3}-\d{4}", "match": "full"}, 1),
        (
            "Answer: B because",
            "B",
            {"pattern": r"answer:\s*(\w)", "group": 1, "ignore_case": True},
            1,
        ),
        ("Answer: C because", "B", {"pattern": r"Answer:\s*(\w)", "group": 1}, 0),
        ("<a>\nx\n</a>", "x", {"pattern": r"<a>(?P<in>.*)</a>", "group": "in"}, 1),
        ("hello world", "^hello", {}, 1),
        ("world", "^hello", {}, 0),
    ],
)
def test_regex(output: Any, expected: Any, options: Any, right: int):
    assert value(Regex(**options), output, expected) == right


def test_an_invalid_pattern_is_a_config_error(prose: Prose):
    with pytest.raises(ValidationError, match=r"'\(' is not a regular expression"):
        Regex(pattern="(")
    with pytest.raises(ConfigError) as caught:
        value(Regex(), "x", "(")
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        value(Regex(pattern="(?P<a>x)", group=2), "x", "x")
    prose(caught)


@pytest.mark.parametrize(
    ("output", "expected", "options", "right"),
    [
        ("First 3, then 4.", 4, {}, 1),
        ("First 3, then 4.", 3, {"which": "first"}, 1),
        ("First 3, then 4.", 4, {"which": "whole"}, 0),
        ("$1,234.50", "1234.5", {}, 1),
        ("$1,234.50", "1234.5", {"which": "whole"}, 1),
        ("-7", -7, {}, 1),
        ("about \N{MINUS SIGN}7", -7, {}, 1),
        ("1e3", 1000, {}, 1),
        (3.14, 3.14159, {"tolerance": 0.01}, 1),
        (3.14, 3.2, {"tolerance": 0.05}, 0),
        (98, 100, {"relative_tolerance": 0.02}, 1),
        (97, 100, {"relative_tolerance": 0.02}, 0),
        ("no idea", 4, {}, 0),
        ("1e999", 4, {}, 0),
        (".5", 0.5, {}, 1),
    ],
)
def test_numeric(output: Any, expected: Any, options: Any, right: int):
    assert value(Numeric(**options), output, expected) == right


def test_numeric_requires_a_number_in_the_row(prose: Prose):
    assert reason(Numeric(), "no idea", 4) == "no number in the output"
    with pytest.raises(ConfigError) as caught:
        value(Numeric(), "4", "four")
    prose(caught)


def test_json_match_is_the_share_of_paths_that_agree():
    expected = {"name": "x", "tags": ["a", "b"], "price": 2.0}
    output = '```json\n{"name": "x", "tags": ["a", "c"], "price": 2.004}\n```'
    paths = ["$.name", "$.tags[0]", "$.tags[1]", "$.price"]
    # name and tags[0] agree; tags[1] and price do not; with the tolerance price does too.
    assert value(JsonMatch(paths=paths), output, expected) == 0.5
    assert reason(JsonMatch(paths=paths), output, expected) == {
        "differing": ["$.tags[1]", "$.price"]
    }
    assert value(JsonMatch(paths=paths, tolerance=0.01), output, expected) == 0.75
    assert value(JsonMatch(paths=paths, match="all"), output, expected) == 0.0
    assert value(JsonMatch(), output, expected) == 0.0
    assert value(JsonMatch(), expected, expected) == 1.0


@pytest.mark.parametrize(
    ("paths", "output", "expected", "right"),
    [
        (["$.a"], {"b": 1}, {"c": 1}, 1),  # there in neither
        (["$.a"], {"a": 1}, {"c": 1}, 0),
        (["$..x"], [{"x": 1}, {"x": 2}], [{"x": 1}, {"x": 2}], 1),
        (["$.a"], "3", {"a": 3}, 0),
        (["$"], "3", 3, 1),
    ],
)
def test_json_match_of_paths_with_no_value_or_several(
    paths: list[str], output: Any, expected: Any, right: int
):
    assert value(JsonMatch(paths=paths), output, expected) == right


def test_json_that_cannot_be_read(prose: Prose):
    assert value(JsonMatch(), "nothing", {"a": 1}) == 0.0
    assert "the output is not JSON" in reason(JsonMatch(), "nothing", {"a": 1})
    with pytest.raises(ConfigError) as caught:
        value(JsonMatch(), {"a": 1}, "{")
    prose(caught)
    with pytest.raises(ValidationError, match=r"'\$\[' is not a JSONPath"):
        JsonMatch(paths=["$["])


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        # Words in common 2 of 4 and 2 of 2: 2 * 2 / (4 + 2).
        ("red and blue car", "blue car", 2 / 3),
        ("red red", "red", 2 / 3),
        ("x", ["a b", "x y"], 2 / 3),  # the better of 0 and 2 * 1 / (1 + 2)
        ("", "red", 0.0),
        ("the", "a", 1.0),  # neither holds a word
        ("blue", "red", 0.0),
    ],
)
def test_f1(output: Any, expected: Any, right: float):
    assert value(F1(), output, expected) == pytest.approx(right)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(one=JSON, other=JSON)
def test_values_are_compared_as_json(one: Any, other: Any):
    written = [json.dumps(value, sort_keys=True) for value in (one, other)]
    assert same(one, other) == (written[0] == written[1])
    assert same(one, json.loads(written[0]))


@settings(max_examples=100, deadline=None)
@given(one=st.text("ab c.", max_size=12), other=st.text("ab c.", max_size=12))
def test_f1_is_symmetric_and_between_0_and_1(one: str, other: str):
    assert 0 <= value(F1(), one, other) == value(F1(), other, one) <= 1
    assert value(F1(), one, one) == 1
