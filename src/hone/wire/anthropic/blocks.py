"""Content blocks of the Anthropic Messages API as chat messages, and chat messages as blocks.

In:   the system prompt and messages of a request; an assistant message, whole or in deltas
Out:  messages of a chat request; content blocks, or the events of a stream that carry them

Blocks that are sent back as they were received become the recorded message, so that the next prompt
continues it: texts are joined, `tool_use` becomes a tool call with its id, and each `tool_result` a
separate message. Arguments that are not JSON are stored as text under INVALID_JSON, as Anthropic's
documentation recommends; otherwise clients could not parse them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby, product
from string import ascii_letters, digits
from typing import Any

from pydantic_core import from_json

from hone.wire.errors import brief, invalid_value
from hone.wire.json import MAX_DEPTH, object_or_none
from hone.wire.openai.chat import assistant_message, tool_call
from hone.wire.openai.dialect import Event

INVALID_JSON = "INVALID_JSON"
"""Key of an `input` under which arguments that are not a JSON object are stored as text."""
_INPUT_DEPTH = MAX_DEPTH - 5
"""Levels of nesting of an `input`, which is inside `messages[].content[].input` of the next request."""

BILLING = "x-anthropic-billing-header:"
"""Start of the first block of Claude Code's system prompt, which differs in every request. It is not
an instruction, and with it no request would continue the previous one."""

_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Block types that messages of each role may contain."""

# ---- blocks to messages ------------------------------------------------------------------------

_Block = tuple[str, dict[str, Any]]
"""A content block, and where it is in the request."""


def chat_messages(system: Any, messages: list[Any]) -> list[dict[str, Any]]:
    """System prompt and messages as those of a chat; raises BadRequest naming the wrong block.

    Consecutive messages of one role are one turn.
    """
    chat: list[dict[str, Any]] = []
    if system:
        blocks = [
            (where, block)
            for where, block in _blocks(system, "system", "system")
            if not str(block.get("text", "")).startswith(BILLING)
        ]
        chat += [{"role": "system", "content": _text(blocks)}] if blocks else []
    roles = [_role(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for role, turn in groupby(enumerate(messages), key=lambda item: roles[item[0]]):
        blocks = [
            block
            for i, message in turn
            for block in _blocks(message.get("content"), role, f"messages[{i}].content")
        ]
        chat += _user_turn(blocks) if role == "user" else [_turn(role, blocks)]
    return chat


def _role(message: Any, where: str) -> str:
    match message:
        case {"role": str(role)} if role in _KINDS:
            return role
    raise invalid_value(
        where, f"expected role 'user' or 'assistant' and content, got {brief(message)}"
    )


def _turn(role: str, blocks: list[_Block]) -> dict[str, Any]:
    """A message of the assistant, or of the system among the others."""
    if role == "system":
        return {"role": role, "content": _text(blocks)}
    # Between two texts of one answer there was only a tool call.
    text = "".join(_string(block, where, "text") for where, block in _of_type(blocks, "text"))
    thoughts = [_string(b, where, "thinking") for where, b in _of_type(blocks, "thinking")]
    calls = [_tool_call(block, where) for where, block in _of_type(blocks, "tool_use")]
    return assistant_message(text, calls, thoughts)


def _user_turn(blocks: list[_Block]) -> list[dict[str, Any]]:
    """The tool results, then the user's text."""
    results = [
        {
            "role": "tool",
            "tool_call_id": _string(block, where, "tool_use_id"),
            "content": _tool_result(block, where),
        }
        for where, block in _of_type(blocks, "tool_result")
    ]
    texts = list(_of_type(blocks, "text"))
    if texts or not results:
        return [*results, {"role": "user", "content": _text(texts)}]
    return results


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid_value(f"{where}.input", f"expected an object, got {brief(arguments)}")
    name, text = _string(block, where, "name"), arguments_text(arguments)
    return tool_call(_string(block, where, "id"), name, text)


def arguments_text(arguments: dict[str, Any]) -> str:
    """The `input` of a tool_use block as the arguments of a tool call."""
    invalid = arguments.get(INVALID_JSON)
    return invalid if isinstance(invalid, str) else json.dumps(arguments, ensure_ascii=False)


def _tool_result(block: dict[str, Any], where: str) -> str:
    content = block.get("content")
    text = "" if content is None else _text(_blocks(content, "system", f"{where}.content"))
    # Chat templates have no field for is_error, so the text begins with it.
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return text


def _blocks(content: Any, role: str, where: str) -> list[_Block]:
    """Content as blocks that a message of this role may hold."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise invalid_value(
            where, f"expected text or a list of content blocks, got {brief(content)}"
        )
    if not content and role == "user":
        raise invalid_value(where, "expected at least one content block, got []")
    blocks = [(f"{where}[{i}]", block) for i, block in enumerate(content)]
    for at, block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document", "search_result", "container_upload"):
            raise invalid_value(
                at,
                f"got a block of type {kind!r}; this model reads text only, so describe or leave out "
                "images and files",
            )
        if kind not in _KINDS[role]:
            known = ", ".join(_KINDS[role])
            raise invalid_value(at, f"expected a block of type {known}, got {brief(block)}")
    return blocks


def _of_type(blocks: list[_Block], kind: str) -> Iterator[_Block]:
    return (pair for pair in blocks if pair[1]["type"] == kind)


def _text(blocks: list[_Block]) -> str:
    # One line per block, as the parts of chat messages are joined.
    return "\n".join(_string(block, where, "text") for where, block in blocks)


def _string(block: dict[str, Any], where: str, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid_value(f"{where}.{key}", f"expected text, got {brief(value)}")
    return value


# ---- messages to blocks ------------------------------------------------------------------------


def message_blocks(
    message: Mapping[str, Any], *, signature: str, hidden: bool = False
) -> list[dict[str, Any]]:
    """The blocks of an assistant message; `hidden`: thinking blocks are empty."""
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        thinking = {"thinking": "" if hidden else reasoning, "signature": signature}
        blocks.append({"type": "thinking", **thinking})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = object_or_none(function["arguments"], _INPUT_DEPTH)
        if arguments is None:
            arguments = {INVALID_JSON: function["arguments"]}
        used = {"id": call["id"], "name": function["name"], "input": arguments}
        blocks.append({"type": "tool_use", **used})
    return blocks


class BlockWriter:
    """Writes the deltas of a chat message as events of content blocks."""

    def __init__(self, *, signature: str, hidden: bool) -> None:
        """`hidden`: thinking blocks are empty."""
        self._signature = signature
        self._hidden = hidden
        self._index = -1
        self._open: tuple[str, int] | None = None
        """Type of the open block, and which tool call it is."""
        self._arguments = _Arguments()

    def add(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content"):
            events += self._enter("thinking", {"thinking": "", "signature": ""})
            if not self._hidden:
                events.append(self._delta("thinking_delta", thinking=reasoning))
        if text := delta.get("content"):
            events += self._enter("text", {"text": ""})
            events.append(self._delta("text_delta", text=text))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            used = {"id": call.get("id"), "name": function.get("name"), "input": {}}
            events += self._enter("tool_use", used, call["index"])
            if new := self._arguments.add(function.get("arguments") or ""):
                events.append(self._delta("input_json_delta", partial_json=new))
        return events

    def close(self) -> list[Event]:
        if self._open is None:
            return []
        last: list[Event] = []
        if self._open[0] == "thinking":
            last = [self._delta("signature_delta", signature=self._signature)]
        elif self._open[0] == "tool_use" and (rest := self._arguments.end()):
            last = [self._delta("input_json_delta", partial_json=rest)]
        self._open, self._arguments = None, _Arguments()
        return [*last, {"type": "content_block_stop", "index": self._index}]

    def _enter(self, kind: str, block: dict[str, Any], call: int = 0) -> list[Event]:
        """Close the open block and start this one, unless it is the same."""
        if self._open == (kind, call):
            return []
        closed = self.close()
        self._index += 1
        self._open = kind, call
        start: Event = {
            "type": "content_block_start",
            "index": self._index,
            "content_block": {"type": kind, **block},
        }
        return [*closed, start]

    def _delta(self, kind: str, **fields: Any) -> Event:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _Arguments:
    """The JSON of one tool call, sent as it grows, and completed if it turns out to be invalid.

    Clients parse the part received so far, and raise if it cannot become JSON. So nothing is sent
    after the first invalid character, and the last brace only when everything was read.
    """

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0
        """Characters of the text that were sent."""
        self._checked = 0
        """Characters of the text when it was last checked."""
        self._open = "", ""
        """The quote and the inner brackets that close what was sent."""
        self._in_string = False

    def add(self, text: str) -> str:
        """The part that can be sent now.

        Text outside strings is checked together with everything sent so far. It is held back until
        there is enough of it, so that the checks of a long call take linear time.
        """
        # CPython appends in place to a string that nothing else refers to.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        start = self._sent
        if self._in_string and (characters := _CHARACTERS.match(self._text, start)):
            self._sent = characters.end()
            # A backslash begins an escape sequence that may not be complete.
            self._in_string = self._text[self._sent : self._sent + 1] in ("", "\\")
        if not self._in_string and 8 * (len(self._text) - self._checked) >= self._checked:
            self._check()
        return self._text[start : self._sent]

    def end(self) -> str:
        """The rest, which completes everything sent to a JSON object."""
        if not self._text or object_or_none(self._text, _INPUT_DEPTH) is not None:
            return self._text[self._sent :]
        if not self._sent:
            return json.dumps({INVALID_JSON: self._text})
        sent, invalid = self._text[: self._sent], json.dumps(self._text)
        closing = _closing(sent, self._open, invalid)
        assert closing is not None, sent
        return closing

    def _check(self) -> None:
        self._checked = len(self._text)
        text, opened = _read_partial(self._text)
        if _closing(text, opened, "null") is not None:
            self._sent, self._open, self._in_string = len(text), opened, bool(opened[0])


def _read_partial(text: str) -> tuple[str, tuple[str, str]]:
    """The part of an object that can be sent, and the quote and inner brackets that close it."""
    brackets = ""
    for token in _TOKEN.finditer(text):
        if token[1] == "":
            return text[: token.end()], ('"', brackets[:-1])
        if token[0] in _CLOSE:
            if len(brackets) == _INPUT_DEPTH:
                return text[: token.start()], ("", brackets[:-1])
            brackets = _CLOSE[token[0]] + brackets
        elif token[0] in "}]":
            # The last brace is sent when the text is known to be JSON.
            if len(brackets) == 1:
                return text[: token.start()], ("", "")
            brackets = brackets[1:]
    return text.rstrip(_WORD), ("", brackets[:-1])


def _closing(sent: str, opened: tuple[str, str], invalid: str) -> str | None:
    """Text that completes what was sent, with this JSON under INVALID_JSON; None if impossible."""
    quote, brackets = opened
    for rest, comma in product(_RESTS, (", ", "")):
        closing = f'{quote}{rest}{brackets}{comma}"{INVALID_JSON}": {invalid}}}'
        with suppress(ValueError):
            from_json(sent + closing, allow_inf_nan=False)
            return closing
    return None


_ESCAPE = (
    r"""\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"""
)
_CHARACTERS = re.compile(rf"""[^"\\\x00-\x1f]*(?:{_ESCAPE}[^"\\\x00-\x1f]*)*""")
"""Inside a string, up to its end or to the first that is incomplete or does not belong there."""
_TOKEN = re.compile(rf"""[{{}}\[\]]|"{_CHARACTERS.pattern}("?)""")
"""A bracket or a string; the group is empty if the string has no end."""
_CLOSE = {"{": "}", "[": "]"}
_WORD = ascii_letters + digits + "+-."
"""Characters of a number or a word, which may not be complete."""
_RESTS = ("", "null", ":null", '"":null')
"""What completes a key or a value that was cut off."""
