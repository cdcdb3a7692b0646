"""Rewards for an answer: `exact` for reports, `graded` with partial credit for training.

In:   the agent's answer, and the expected call from the dataset
Out:  a number between 0 and 1

Training needs partial credit: equal rewards within a group teach nothing, and at the start hardly
any answer is exact.
"""

import json


def exact(output: str, expected: str) -> float:
    """1 if the answer is the expected call. 12 is neither "12" nor 12.0; key order is free."""
    # Compared as text, because in Python 12 == 12.0 and 1 == True.
    return float(_canonical(_parsed(output)) == _canonical(json.loads(expected)))


def graded(output: str, expected: str) -> float:
    """0.1 for an object, plus 0.2 each for the right tool, parameter and value; 1 for all of it."""
    call, wanted = _parsed(output), json.loads(expected)
    if not isinstance(call, dict):
        return 0.0
    if exact(output, expected):
        return 1.0
    tool, value = call.pop("tool", None) == wanted.pop("tool"), list(wanted.values())
    right = (
        tool + (set(call) == set(wanted)) + (_canonical(list(call.values())) == _canonical(value))
    )
    return round(0.1 + 0.2 * right, 1)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
