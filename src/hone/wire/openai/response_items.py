"""Convert items of the OpenAI Responses API to chat messages, and back.

In:   `input` of a request, `output` of a response; an assistant message
Out:  messages as a chat completion has them; the output items of a message

The conversion is lossless: an answer that comes back as items gives the recorded message, so that
the next prompt continues exactly the sampled ids (chat/bridge.py). The reasoning, the text and the
calls of one answer are one assistant message.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import BadRequest
from hone.wire.errors import brief
from hone.wire.openai.chat import assistant_message, tool_call

_ROLES = ("user", "assistant", "system", "developer")
_INPUT = "in"
"""Separates the digits of a call from the index of one of its input messages."""


class ItemIds:
    """The ids of a response and of its items, derived from the id of the recorded call."""

    def __init__(self, call_id: str) -> None:
        self._digits = call_id.removeprefix("call-")
        self.response = f"resp_{self._digits}"
        self.reasoning = f"rs_{self._digits}"

    def message(self, index: int = 0) -> str:
        return f"msg_{self._digits}" + (f"_{index}" if index else "")

    def function_call(self, index: int) -> str:
        return f"fc_{self._digits}_{index}"

    def function_call_output(self) -> str:
        return f"fco_{self._digits}"

    def input(self, index: int) -> "ItemIds":
        """The ids of the items of one input message.

        Each message has its own ids, so that read_input can join function calls of the same
        message.
        """
        return ItemIds(f"{self._digits}{_INPUT}{index}")


def call_id_of(item_id: str) -> str:
    """The id of the recorded call that a response or an item belongs to."""
    return _owner(item_id).partition(_INPUT)[0]


def _owner(item_id: str) -> str:
    """The recorded call, or the input message of one, whose item this is."""
    return "call-" + item_id.partition("_")[2].partition("_")[0]


# ---- to messages -------------------------------------------------------------------------------


def read_input(
    value: str | list[Any], items: Mapping[str, dict[str, Any] | None] | None = None
) -> list[dict[str, Any]]:
    """The messages of an `input`. Raises BadRequest naming the first wrong item.

    `items` are those that an item_reference may name, by id; None for one that adds nothing.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    turns = _Turns(items)
    for index, item in enumerate(value):
        try:
            turns.add(item)
        except ValueError as error:
            message = f"input[{index}]{error}"
            raise BadRequest(message, param="input", code="invalid_value") from None
    return turns.finished()


def references(value: str | list[Any]) -> list[str]:
    """The ids that items of an `input` refer to."""
    items = [] if isinstance(value, str) else [item for item in value if isinstance(item, dict)]
    return [str(item.get("id")) for item in items if _kind(item) == "item_reference"]


def _kind(item: Mapping[str, Any]) -> str:
    """The type of an item. Clients leave it out of messages, and out of references."""
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


@dataclass(slots=True)
class _Answer:
    """The items of one assistant message."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    """The recorded calls that the ids of its function calls name."""


class _Turns:
    """Builds messages from items. Its errors start with the place in the item."""

    def __init__(self, items: Mapping[str, dict[str, Any] | None] | None) -> None:
        self._messages: list[dict[str, Any] | _Answer] = []
        self._items = items
        self._answer: _Answer | None = None
        """The answer that the next items may belong to."""
        self._last: _Answer | None = None
        """The last answer, if only outputs of functions followed it."""
        self._adders: dict[str, Callable[[dict[str, Any]], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._output,
            "item_reference": self._reference,
        }

    def add(self, item: Any) -> None:
        if not isinstance(item, dict):
            raise ValueError(f": expected an object, got {brief(item)}")
        add = self._adders.get(_kind(item))
        if add is None:
            raise ValueError(
                f".type: {brief(item.get('type'))} is not in this version; possible here: "
                + ", ".join(self._adders)
            )
        add(item)

    def finished(self) -> list[dict[str, Any]]:
        """The messages, when every item was added."""
        return [
            assistant_message("".join(turn.texts), turn.calls, turn.thoughts)
            if isinstance(turn, _Answer)
            else turn
            for turn in self._messages
        ]

    def _message(self, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise ValueError(f".role: expected one of {', '.join(_ROLES)}, got {brief(role)}")
        content = _read_parts(item, "content")
        if role != "assistant":
            self._answer = self._last = None
            self._messages.append({"role": role, "content": content})
            return
        answer = self._answer
        # Text after a call of the same answer: a stream sends it as a message of its own.
        if answer is None or (answer.texts and not answer.calls):
            answer = self._open()
        answer.texts.append(_join_parts(content))

    def _reasoning(self, item: dict[str, Any]) -> None:
        answer = self._answer
        if answer is None or answer.texts or answer.calls:
            answer = self._open()
        answer.thoughts.append(_read_reasoning(item))

    def _function_call(self, item: dict[str, Any]) -> None:
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not name:
            raise ValueError(f".name: expected the name of a function, got {brief(name)}")
        if not isinstance(arguments, str):
            raise ValueError(f".arguments: expected JSON as text, got {brief(arguments)}")
        if arguments.strip() and not arguments.lstrip().startswith("{"):
            # Arguments that the model left incomplete are accepted: they come back as they were.
            raise ValueError(f".arguments: expected a JSON object, got {brief(arguments)}")
        owner = _owner(str(item.get("id") or ""))
        # Clients that run calls one by one send each call followed by its output.
        same = self._last is not None and owner in self._last.owners
        answer = self._answer or (self._last if same else None) or self._open()
        answer.owners |= {owner} - {_owner("")}
        answer.calls.append(tool_call(_call_id(item), name, arguments))

    def _output(self, item: dict[str, Any]) -> None:
        content = _join_parts(_read_parts(item, "output"))
        self._answer = None
        self._messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": content})

    def _reference(self, item: dict[str, Any]) -> None:
        name = item.get("id")
        if not isinstance(name, str):
            raise ValueError(f".id: expected the id of an item, got {brief(name)}")
        if self._items is None:
            # Not looked up yet: it stands for an answer, until ResponsesRequest.resumed.
            self._answer = self._answer or self._open()
        elif name not in self._items:
            raise ValueError(
                f".id: no item is stored as {brief(name)}; send the item itself instead of an "
                "item_reference"
            )
        elif stored := self._items[name]:
            self.add(stored)

    def _open(self) -> _Answer:
        answer = self._answer = self._last = _Answer()
        self._messages.append(answer)
        return answer


def _call_id(item: dict[str, Any]) -> str:
    call = item.get("call_id")
    if not isinstance(call, str) or not call:
        raise ValueError(f".call_id: expected the id of a function call, got {brief(call)}")
    return call


def _read_parts(item: dict[str, Any], key: str) -> str | list[dict[str, str]]:
    """The value of this key as text, or as parts of a chat message."""
    content = item.get(key)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f".{key}: expected text or a list of parts, got {brief(content)}")
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str(text)}:
                parts.append({"type": "text", "text": text})
            case _:
                raise ValueError(
                    f".{key}[{index}]: expected a part of type 'input_text' or 'output_text', got "
                    f"{brief(part)}; this model reads text only, so describe or leave out images, "
                    "audio and files"
                )
    return parts[0]["text"] if len(parts) == 1 else parts


def _join_parts(content: str | list[dict[str, str]]) -> str:
    """One line per part, as the parts of chat messages are joined."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _read_reasoning(item: dict[str, Any]) -> str:
    """The text of a reasoning item; empty if it has none."""
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(key) or []
        if not isinstance(parts, list):
            raise ValueError(f".{key}: expected a list of parts, got {brief(parts)}")
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f".{key}: expected parts of type {kind!r}, got {brief(parts)}")
        if texts:
            return "\n".join(map(str, texts))
        if key == "content" and item.get("encrypted_content") is not None:
            return _decrypt(item["encrypted_content"])
    return ""


def encrypt(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item. It is not secret: `content` has the text, too."""
    return base64.b64encode(reasoning.encode()).decode()


def _decrypt(text: Any) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(
            ".encrypted_content: not written by this server; leave the reasoning item out"
        ) from None


# ---- from messages -----------------------------------------------------------------------------


def output_items(
    message: Mapping[str, Any],
    ids: ItemIds,
    *,
    status: str = "completed",
    encrypted: bool = False,
    logprobs: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """The items of an assistant message. `status` is that of the last one."""
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(ids, reasoning, encrypted=encrypted))
    if message.get("content") or not (items or calls):
        part = text_part(message.get("content") or "", logprobs)
        items.append(message_item(ids.message(), [part]))
    for index, call in enumerate(calls):
        function = call["function"]
        items.append(
            function_call_item(
                ids.function_call(index), call["id"], function["name"], function["arguments"]
            )
        )
    items[-1]["status"] = status
    return items


def input_items(
    messages: Sequence[Mapping[str, Any]], ids: ItemIds, *, encrypted: bool = False
) -> list[dict[str, Any]]:
    """The items of the messages of a request, oldest first."""
    items: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        own, content = ids.input(index), message.get("content")
        if message["role"] == "assistant":
            items += output_items(message, own, encrypted=encrypted)
        elif message["role"] == "tool":
            items.append(
                {
                    "id": own.function_call_output(),
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": content,
                    "status": "completed",
                }
            )
        else:
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            texts = [{"type": "input_text", "text": part["text"]} for part in parts]
            items.append(message_item(own.message(), texts) | {"role": message["role"]})
    return items


def reasoning_item(
    ids: ItemIds, text: str | None, *, encrypted: bool = False, status: str = "completed"
) -> dict[str, Any]:
    """`text` is None for an item that has just begun."""
    return {
        "id": ids.reasoning,
        "type": "reasoning",
        "summary": [],
        "content": [] if text is None else [{"type": "reasoning_text", "text": text}],
        "encrypted_content": encrypt(text) if encrypted and text is not None else None,
        "status": status,
    }


def message_item(
    item_id: str, content: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "status": status,
    }


def text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def function_call_item(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
