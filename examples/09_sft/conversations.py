"""The training requests of 02_tool_calls as whole conversations.

In:   a file of requests, each with the expected call
Out:  rows with `messages`: what the agent sends, and the answer it should get

The example's answer has `weight: 0`, as in OpenAI's fine-tuning format: it is context, and only the
call is trained.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

AGENT = Path(__file__).parent.parent / "02_tool_calls" / "agent.py"


def rows(file_path: Path) -> list[dict[str, Any]]:
    """The rows of the dataset."""
    spec = importlib.util.spec_from_file_location("tool_calls_agent", AGENT)
    assert spec is not None and spec.loader is not None, AGENT
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    context = [
        {"role": "system", "content": agent.SYSTEM},
        *(message | {"weight": 0} for message in agent.EXAMPLE),
    ]
    requests = map(json.loads, file_path.read_text(encoding="utf-8").splitlines())
    return [row | {"messages": [*context, *_turn(**row)]} for row in requests]


def _turn(question: str, answer: str, **_: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
