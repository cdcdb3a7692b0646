"""Check the messages and tools of a chat request.

In:   `messages` and `tools` of a chat request, as JSON gave them
Out:  Messages, which can be rendered and compared; or a TemplateError naming the field

Messages are compared by their meaning, as everywhere in hone (wire/conversation.py).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from hone.errors import TemplateError
from hone.wire.conversation import meaning_of_parts, text_of, text_of_part
from hone.wire.errors import brief, first_problem
from hone.wire.json import load_object, object_or_none
from hone.wire.openai.chat import TOOLS, tool_call

Role = Literal["system", "user", "assistant", "tool"]
Tools = Sequence[Mapping[str, Any]]


def _whole_characters(text: str) -> str:
    text.encode()  # raises for a lone surrogate
    return text


_Text = Annotated[str, AfterValidator(_whole_characters)]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant message."""

    name: str
    arguments: _Text = "{}"
    """A JSON object as text, as it was sent or returned; or the text of one that a model did not
    finish."""
    id: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_wire(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if not isinstance(function := value.get("function"), Mapping):
            raise ValueError(f"expected a function with name and arguments, got {brief(function)}")
        return {**function, "id": str(value.get("id") or "")}

    @field_validator("arguments", mode="before")
    @classmethod
    def _json(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        # For a function without parameters, several clients send nothing at all.
        if value is None or (isinstance(value, str) and not value.strip()):
            return "{}"
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            load_object(value)  # raises; an object that a model wrote incorrectly is accepted
        return value

    @property
    def values(self) -> dict[str, Any] | str:
        """The arguments; as text if the model's JSON does not parse."""
        values = object_or_none(self.arguments)
        return self.arguments if values is None else values

    def plain(self, arguments: str | dict[str, Any]) -> dict[str, Any]:
        """The call as it appears in messages, with the arguments as JSON text or as an object."""
        return tool_call(self.id, self.name, arguments)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as text."""

    role: Role
    content: _Text = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: _Text | None = None
    tool_call_id: _Text | None = None
    name: _Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_wire(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if value.get("function_call") is not None:
            raise ValueError("got function_call, the old form of a call; send tool_calls instead")
        sent = {key: item for key, item in value.items() if item is not None}
        role = {"developer": "system"}.get(str(value.get("role")), value.get("role"))
        reasoning = value.get("reasoning_content") or value.get("reasoning") or None
        if role != "assistant":
            sent, reasoning = {"content": None} | sent, None
        return sent | {"role": role, "reasoning": reasoning}

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            if text_of_part(part) is None:
                raise ValueError(
                    f"expected parts of type 'text', got {brief(part)}; this model reads text only, "
                    "so describe or leave out images, audio and files"
                )
        return text_of(value)

    @field_validator("tool_calls")
    @classmethod
    def _by_assistant(
        cls, value: tuple[ToolCall, ...], info: ValidationInfo
    ) -> tuple[ToolCall, ...]:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only the assistant makes calls")
        return value

    @property
    def meaning(self) -> str:
        """Equal for messages that mean the same; does not include the reasoning."""
        calls = [(call.name, call.arguments) for call in self.tool_calls]
        return meaning_of_parts(self.role, self.content, calls)

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: arguments are objects if they are valid JSON."""
        optional = {
            "tool_calls": [call.plain(call.values) for call in self.tool_calls] or None,
            "reasoning_content": self.reasoning,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": self.content, **present}


_MESSAGES = TypeAdapter(list[Message])


def check_messages(messages: object) -> list[Message]:
    """The messages; raises TemplateError for messages that no template could render."""
    checked = _validated(_MESSAGES, messages, "messages")
    if not checked:
        raise TemplateError("messages: expected a list of at least one message, got []")
    return checked


def check_tools(tools: Tools | None) -> list[dict[str, Any]]:
    """The tools; an empty list when there are none."""
    if tools is None:
        return []
    _validated(TOOLS, tools, "tools")
    return [dict(tool) for tool in tools]


def _validated(adapter: TypeAdapter[Any], value: object, where: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        path, message = first_problem(error)
        raise TemplateError(f"{where}{path}: {message}") from None
