"""Rewards for one customer: `exact` for reports, `graded` with partial credit for training.

In:   the agent's last message, its model calls, and the expected call and number from the dataset
Out:  a number between 0 and 1

The tool calls are read from the recorded model calls, so the same reward works for an agent in any
framework or language.
"""

import json
import re
from typing import Any


def exact(output: str, expected: str, calls: list[Any]) -> float:
    """1 if the right tool was called once, and the answer gives its number and no other."""
    wanted = json.loads(expected)
    called = _tool_calls(calls) == [(wanted["tool"], {"item": wanted["item"]})]
    return float(called and re.findall(r"\d+", output) == [str(wanted["number"])])


def graded(output: str, expected: str, calls: list[Any]) -> float:
    """1 if exact, else 0.2 each for the right tool, the right arguments and the number."""
    if exact(output, expected, calls):
        return 1.0
    wanted, made = json.loads(expected), _tool_calls(calls)
    tool, arguments = made[0] if made else ("", None)
    has_number = str(wanted["number"]) in re.findall(r"\d+", output)
    credit = (
        0.2 * (tool == wanted["tool"]) + 0.2 * has_number + _item_credit(arguments, wanted["item"])
    )
    return round(credit, 1)


def _item_credit(arguments: Any, item: str) -> float:
    """0.2 for the item and nothing else; 0.1 if its name is in the argument."""
    if arguments == {"item": item}:
        return 0.2
    named = isinstance(arguments, dict) and item in str(arguments.get("item")).lower()
    return 0.1 if named else 0.0


def _tool_calls(calls: list[Any]) -> list[tuple[str, Any]]:
    """Name and arguments of every tool call that the model made."""
    made = [call for one in calls for call in (one.reply or {}).get("tool_calls") or ()]
    return [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in made]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
