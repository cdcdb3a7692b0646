"""The task: a request in plain words, answered with one JSON tool call; its reward and data split.

In:   phrases.json: for each tool, phrases with a placeholder and the arguments to insert
Out:  training and held-out Items, their prompts, the reward of an answer

Training requests are commands and statements. Held-out requests are questions with other arguments,
and the prompt describes one of their tools but training never uses it (UNSEEN). A test checks this:
if a phrase or a (tool, argument) pair were in both parts, the score would measure memory.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARAMETER = {
    "timer": "minutes",
    "call": "name",
    "play": "artist",
    "weather": "city",
    "buy": "item",
    "lights": "room",
}
UNSEEN = "lights"

SYSTEM = """You are a helpful assistant with tools:
set a timer: {"tool": "timer", "minutes": X}
phone a person: {"tool": "call", "name": X}
play an artist: {"tool": "play", "artist": X}
tell the weather: {"tool": "weather", "city": X}
buy an item: {"tool": "buy", "item": X}
switch the lights: {"tool": "lights", "room": X}"""

# One example. Without it, an untrained small model answers in prose, and never samples a tool call
# that could be rewarded.
EXAMPLE = ("Call Alice.", '{"tool": "call", "name": "Alice"}')


@dataclass(frozen=True, slots=True)
class Item:
    """One request and the expected tool call."""

    request: str
    tool: str
    argument: str | int

    @property
    def answer(self) -> dict[str, str | int]:
        """The call as an object: {"tool": "timer", "minutes": 12}."""
        return {"tool": self.tool, PARAMETER[self.tool]: self.argument}


def items(part: str) -> list[Item]:
    """Every phrase of a part ("training" or "heldout"), with every argument of its tool."""
    source = Path(__file__).with_name("phrases.json")
    tools = json.loads(source.read_text(encoding="utf-8"))[part]
    return [
        Item(phrase.format(argument), tool, argument)
        for tool, words in tools.items()
        for phrase in words["phrases"]
        for argument in words["arguments"]
    ]


def stream(seed: int) -> Iterator[Item]:
    """An infinite stream of training requests; each round has every tool once, in random order."""
    order = random.Random(seed)
    of_tool: dict[str, list[Item]] = {}
    for item in items("training"):
        of_tool.setdefault(item.tool, []).append(item)
    while True:
        for tool in order.sample(sorted(of_tool), len(of_tool)):
            yield order.choice(of_tool[tool])


def prompt(item: Item) -> list[dict[str, str]]:
    """The conversation that the model continues."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": EXAMPLE[0]},
        {"role": "assistant", "content": EXAMPLE[1]},
        {"role": "user", "content": item.request},
    ]


def encode(tokenizer: Any, item: Item) -> list[int]:
    """The conversation as token ids, up to the start of the answer."""
    return tokenizer.apply_chat_template(prompt(item), add_generation_prompt=True)["input_ids"]


def exact(text: str, item: Item) -> bool:
    """Whether the answer is the expected call. 12 is neither "12" nor 12.0; key order is free."""
    # Compared as text, because in Python 12 == 12.0 and 1 == True.
    return json.dumps(_parsed(text), sort_keys=True) == json.dumps(item.answer, sort_keys=True)


def reward(text: str, item: Item) -> float:
    """Partial credit: 0.1 for an object, 0.3 for its tool, 0.5 for its parameter, 1 for all of it."""
    call = _parsed(text)
    if not isinstance(call, dict):
        return 0.0
    if call.get("tool") != item.tool:
        return 0.1
    if set(call) != set(item.answer):
        return 0.3
    return 1.0 if exact(text, item) else 0.5


def scores(texts: list[str], expected: list[Item]) -> dict[str, float]:
    """Share of exact answers, per tool."""
    right: dict[str, list[bool]] = {}
    for text, item in zip(texts, expected, strict=True):
        right.setdefault(item.tool, []).append(exact(text, item))
    return {tool: sum(marks) / len(marks) for tool, marks in right.items()}


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
