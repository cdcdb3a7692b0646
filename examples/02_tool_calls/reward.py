"""What an answer is worth: the expected tool call, or something near it.

In:   the agent's answer, and the call that the dataset expects
Out:  a number between 0 and 1

Training needs the finer one: what all answers of a group get alike teaches nothing, and at the
start hardly any is exact.
"""

import json


def exact(output: str, expected: str) -> float:
    """1 if the whole answer is the expected call. 12 is neither "12" nor 12.0; order is free."""
    # As text, because Python holds 12 == 12.0 and 1 == True for equal.
    return float(_canonical(_parsed(output)) == _canonical(json.loads(expected)))


def graded(output: str, expected: str) -> float:
    """An object is worth .1; its tool, its parameter and its value, where right, .2 more each; all 1."""
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
