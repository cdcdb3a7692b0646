"""When two messages are the same, and which conversation a call continues.

In:   messages of chat requests and replies, as JSON gave them
Out:  a text for each that is equal for equal messages; the conversation that a request continues

Agents rebuild messages from their framework's objects, so comparing bytes would never find a
continued turn. Messages are the same if they mean the same to the model: ids of tool calls, the
formatting of argument JSON, parts instead of plain text, keys that chat templates do not read, and
reasoning do not count. Judge, export, harness, SDK and server all ask here, so a rollout has the same
conversations everywhere. Whether a prompt also continues the ids of an earlier call is decided by
the server's bridge (chat/bridge.py), which alone knows template and tools.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hone.wire.json import object_or_none

Arguments = str | Mapping[str, Any] | None
"""The arguments of a tool call: JSON text, as OpenAI has them, or an object."""


# ---- messages ------------------------------------------------------------------------------------


def meaning(message: Mapping[str, Any]) -> str:
    """Equal for messages that are the same. Raises nothing, whatever a client sent."""
    role = str(message.get("role"))
    sent = message.get("tool_calls")
    calls = [_named_call(call) for call in (sent if isinstance(sent, list | tuple) else ())]
    if isinstance(old := message.get("function_call"), Mapping):  # OpenAI's form before tool_calls
        calls.append((str(old.get("name")), old.get("arguments")))
    role = "system" if role == "developer" else role
    return meaning_of_parts(role, text_of(message.get("content"), sort_keys=True), calls)


def meaning_of_parts(role: str, text: str, calls: Iterable[tuple[str, Arguments]]) -> str:
    """The same, for a message that was already taken apart; `calls` are names and arguments."""
    compared = [[name, _comparable(arguments)] for name, arguments in calls]
    return (
        json.dumps([role, text, compared], sort_keys=True, default=str)
        if compared
        else f"{role} {text}"
    )


def text_of(content: Any, *, sort_keys: bool = False) -> str:
    """The text of a message's content, with a line for each part, as in vLLM; otherwise its JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [text_of_part(part) for part in content]
        if None not in texts:
            return "\n".join(text for text in texts if text is not None)
    return json.dumps(content, sort_keys=sort_keys, default=str)


def text_of_part(part: Any) -> str | None:
    """None if it is no text, such as an image."""
    match part:
        case {"type": "text" | "refusal", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case _:
            return None


def _named_call(call: Any) -> tuple[str, Arguments]:
    match call:
        case {"function": {"name": str(name), **rest}}:
            return name, rest.get("arguments")
        case {"custom": {"name": str(name), **rest}}:
            return name, rest.get("input")
        case _:
            return json.dumps(call, sort_keys=True, default=str), None


def _comparable(arguments: Any) -> object:
    """The values of the arguments; their text if a model did not write valid JSON."""
    # For a function without parameters, several clients send nothing at all.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    values = object_or_none(arguments) if isinstance(arguments, str) else arguments
    return arguments if values is None else _without_float_integers(values)


def _without_float_integers(value: object) -> object:
    """A JSON value with 1.0 as 1, because JavaScript and some frameworks write either."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _without_float_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_float_integers(item) for item in value]
    return value


# ---- conversations -------------------------------------------------------------------------------


def continued(request: Sequence[str], conversations: Sequence[Sequence[str]]) -> int | None:
    """The index of the conversation that the request begins with; all by the meanings of messages.

    The longest if there are several, the newest of equally long ones: two samples of one prompt
    are two conversations. One that is empty is continued by any request.
    """
    begun = [
        (len(earlier), index)
        for index, earlier in enumerate(conversations)
        if len(earlier) <= len(request) and list(request[: len(earlier)]) == list(earlier)
    ]
    return max(begun)[1] if begun else None


class Continuations:
    """The conversations of a rollout, as its calls are added in order."""

    def __init__(self) -> None:
        self._conversations: list[list[str]] = []

    def add(
        self, messages: Sequence[Mapping[str, Any]], reply: Mapping[str, Any] | None
    ) -> tuple[int, int]:
        """The number of the call's conversation, and how many of its messages that already had.

        `reply`: None for a call that got no answer. What continues a conversation has all messages
        of it; a request that goes back to an earlier one begins another.
        """
        request = [meaning(message) for message in messages]
        number = continued(request, self._conversations)
        if number is None:
            number = len(self._conversations)
            self._conversations.append([])
        known = len(self._conversations[number])
        answer = [] if reply is None else [meaning(reply)]
        self._conversations[number] = [*request, *answer]
        return number, known


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with in common; by slices, without a loop over items.

    Lists, tuples, bytes, and the `data` of arrays, whose slices are compared by value.
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
