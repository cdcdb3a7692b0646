"""Whatever a workflow returns can be written as JSON that every reader accepts."""

import json
from typing import Any

import pytest

from hone.workflow.jsonable import DEPTH, dumps


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Detached(dict[str, Any]):
    """Like a row of a database whose session is closed."""

    def items(self) -> Any:
        raise RuntimeError("detached")

    values = items


def test_json_values_are_unchanged():
    value = {"a": [1, 2.5, None, True, "\u00e9"], "b": {"c": ()}}
    assert json.loads(dumps(value)) == {"a": [1, 2.5, None, True, "\u00e9"], "b": {"c": []}}


def test_other_values_become_text():
    circle: list[Any] = [1]
    circle.append(circle)
    value = {("a", 1): float("nan"), 3: {7}, None: Mute(), "c": circle, "n": 10**5000}
    value_read = json.loads(dumps(value))
    assert value_read["('a', 1)"] == "NaN" and value_read["3"] == [7]
    assert value_read["null"] == "<Mute, whose str() failed: RuntimeError>"
    assert value_read["c"] == [1, "<holds itself>"]
    assert int(value_read["n"], 16) == 10**5000
    assert json.loads(dumps([1, Detached(a=2)])) == [1, "{'a': 2}"]


@pytest.mark.parametrize(("depth", "cut"), [(DEPTH, False), (DEPTH + 2, True), (5000, True)])
def test_values_nested_too_deep_are_cut(depth: int, cut: bool):
    deep: Any = "x"
    for i in range(depth):
        deep = [deep] if i % 2 else {"in": deep}
    written = dumps(deep)
    assert (f"nested deeper than {DEPTH}" in written) == cut
    assert json.loads(written) is not None and ('"x"' in written) != cut


def test_values_that_contain_themselves_twice_are_written_too():
    twice: list[Any] = []
    twice += [twice, twice]
    assert json.loads(dumps(twice)) == ["<holds itself>", "<holds itself>"]
