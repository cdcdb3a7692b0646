"""Items, calls and steps for tests, with defaults for fields that a test does not set."""

from typing import Any

from hone.capture.base import SeenCall, Step
from hone.evaluation.base import EvalInputItem


def item(output: Any = None, expected: Any = None, **fields: Any) -> EvalInputItem:
    return EvalInputItem(
        **{"id": "i", "input_obj": "q", **fields}, output_obj=output, expected_output_obj=expected
    )


def call(reply: Any = "yes", **fields: Any) -> SeenCall:
    """A call that was answered with this text or message."""
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    known: dict[str, Any] = {
        "index": 0,
        "function": "<workflow>",
        "model": "m",
        "host": "localhost",
        "messages": [{"role": "user", "content": "q"}],
        "tools": None,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "id": "c0",
        "policy_step": 1,
        "started_at": 100.0,
        "seconds": 0.5,
        "status": 200,
        "error": None,
    }
    return SeenCall(**(known | fields))


def step(name: str = "found", **fields: Any) -> Step:
    known: dict[str, Any] = {
        "value": 0.25,
        "metadata": {"page": 3},
        "function": "<workflow>.search",
        "calls": 1,
    }
    return Step(name, **(known | fields))
