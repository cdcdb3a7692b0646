"""Check the messages and tools of a chat request.

In:   `messages` and `tools` of a chat request, as JSON gave them
Out:  Messages, which can be rendered and compared; or a TemplateError naming the field

Two messages are equal when they mean the same to the model: ids of tool calls, the formatting of
argument JSON, and parts instead of plain text do not count. Agents rebuild messages from objects of
their own framework, and a comparison of bytes would find no turn that continues.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from hone.errors import TemplateError
from hone.wire.errors import brief
from hone.wire.json import load_object

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant message."""

    name: str
    arguments: str
    """JSON of an object, as it was sent or returned."""
    id: str = ""

    @property
    def values(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.arguments))

    def plain(self, arguments: str | dict[str, Any]) -> dict[str, Any]:
        """As messages carry it, with the arguments as JSON text or as an object."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as text."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def meaning(self) -> str:
        """Equal for messages that mean the same; does not include the reasoning."""
        calls = [[call.name, _without_float_integers(call.values)] for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls], sort_keys=True)

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: arguments are objects, not JSON text."""
        optional = {
            "tool_calls": [call.plain(call.values) for call in self.tool_calls] or None,
            "reasoning_content": self.reasoning,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": self.content, **present}


Tools = Sequence[Mapping[str, Any]]


def check_messages(messages: object) -> list[Message]:
    """The messages; raises TemplateError for what no template could express."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        _refuse("messages", f"expected a list of at least one message, got {brief(messages)}")
    return [_message(entry, f"messages[{i}]") for i, entry in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]]:
    """The tools; an empty list when there are none."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        _refuse("tools", f"expected a list of tools, got {brief(tools)}")
    checked: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _refuse(
                f"tools[{i}]",
                f"expected {{'type': 'function', 'function': {{'name': ...}}}}, got {brief(tool)}",
            )
        checked.append(dict(tool))
    return checked


def _message(entry: object, where: str) -> Message:
    if not isinstance(entry, Mapping):
        _refuse(where, f"expected an object with role and content, got {brief(entry)}")
    role = _ROLES.get(str(entry.get("role")))
    if role is None:
        _refuse(
            f"{where}.role",
            f"no template knows the role {entry.get('role')!r}; use one of {', '.join(_ROLES)}"
            + (" ('tool' answers a call)" if entry.get("role") == "function" else ""),
        )
    if entry.get("function_call") is not None:
        _refuse(f"{where}.function_call", "the old form of a call; send tool_calls instead")
    calls = _tool_calls(entry.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        _refuse(f"{where}.tool_calls", f"only the assistant makes calls, and the role is {role!r}")
    return Message(
        role=role,
        content=_content(entry.get("content"), role, f"{where}.content"),
        tool_calls=calls,
        reasoning=_reasoning(entry, where) if role == "assistant" else None,
        tool_call_id=_optional_text(entry, "tool_call_id", where),
        name=_optional_text(entry, "name", where),
    )


def _content(content: object, role: Role, where: str) -> str:
    if isinstance(content, str):
        return _sound(content, where)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        _refuse(where, f"expected text or a list of parts, got {brief(content)}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            _refuse(
                f"{where}[{i}]",
                f"expected a part of type 'text', got {kind or brief(part)!r}; this model reads "
                "text only, so describe or leave out images, audio and files",
            )
        texts.append(_sound(text, f"{where}[{i}].text"))
    # One line per part, as vLLM joins them: an agent that moves between the two sees one prompt.
    return "\n".join(texts)


def _reasoning(entry: Mapping[str, Any], where: str) -> str | None:
    for key in ("reasoning_content", "reasoning"):
        text = _optional_text(entry, key, where)
        if text:
            return text
    return None


def _tool_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(where, f"expected a list of calls, got {brief(calls)}")
    checked: list[ToolCall] = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _refuse(
                f"{where}[{i}].function",
                f"expected an object with name and arguments, got {brief(function)}",
            )
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        checked.append(ToolCall(function["name"], arguments, str(call.get("id") or "")))
    return tuple(checked)


def _arguments(arguments: object, where: str) -> str:
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    # A function without parameters: several clients send nothing at all for it.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}"
    if not isinstance(arguments, str):
        _refuse(where, f"expected the JSON text of an object, got {brief(arguments)}")
    try:
        load_object(arguments)
    except ValueError as error:
        _refuse(where, f"{error} in {brief(arguments)}; send the JSON text of an object")
    return arguments


def _optional_text(entry: Mapping[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        _refuse(f"{where}.{key}", f"expected text, got {brief(value)}")
    return value if value is None else _sound(value, f"{where}.{key}")


def _sound(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _refuse(
            where, f"half of a surrogate pair at character {error.start}; send whole characters"
        )
    return text


def _without_float_integers(value: object) -> object:
    """A JSON value with 1.0 as 1: JavaScript and some frameworks write either."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _without_float_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_float_integers(item) for item in value]
    return value


def _refuse(where: str, what: str) -> NoReturn:
    raise TemplateError(f"{where}: {what}")
