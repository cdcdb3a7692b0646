"""What the scripted model says in its three turns, in the form that each framework expects.

In:   a prompt, as text
Out:  which turn it is, and what the model says

The first turn asks for tools, the second follows their results, and the third answers. Most
frameworks use the tool calls of the chat template, the first one with two calls in parallel.
"""

import json
from typing import Any


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def answer(rollout: str) -> str:
    """What the agent returns."""
    return f"12 in Paris, 21 in Rome, which is 69.8 Fahrenheit ({rollout})."


class ToolCalls:
    """Tool calls and their results as the chat template writes them."""

    def turn(self, prompt: str) -> int:
        return {0: 0, 2: 1, 3: 2}[prompt.count("\n<tool_response>\n")]

    def says(self, turn: int, rollout: str) -> str:
        first = f"{call('weather', city='Paris')}\n{call('weather', city='Rome')}"
        second = f"Now in Fahrenheit.\n{call('fahrenheit', celsius=21)}"
        return (first, second, self.ends(rollout))[turn]

    def ends(self, rollout: str) -> str:
        return answer(rollout)


class Observations(ToolCalls):
    """smolagents: results are text of the user, and the answer is a tool call."""

    def turn(self, prompt: str) -> int:
        return prompt.count("user\nObservation:\n")

    def ends(self, rollout: str) -> str:
        return call("final_answer", answer=answer(rollout))


class Fields:
    """DSPy: tools, results and the answer are fields in the text of single questions."""

    def turn(self, prompt: str) -> int:
        return prompt.count("\n[[ ## observation_")

    def says(self, turn: int, rollout: str) -> str:
        look = {"next_tool_name": "weather", "next_tool_args": '{"city": "Paris"}'}
        finish = {"next_tool_name": "finish", "next_tool_args": "{}"}
        return (
            _fields({"next_thought": "Look it up."} | look),
            _fields({"next_thought": "That is enough."} | finish),
            _fields({"reasoning": "Both are known.", "answer": answer(rollout)}),
        )[turn]


def _fields(fields: dict[str, str]) -> str:
    named = (fields | {"completed": ""}).items()
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}".strip() for name, value in named)


_SCRIPTS = {"smolagents": Observations(), "dspy": Fields()}


def script_of(rollout: str) -> ToolCalls | Fields:
    """The script for the client that a rollout is named after."""
    return _SCRIPTS.get(rollout.partition("-")[0], ToolCalls())
