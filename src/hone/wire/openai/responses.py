"""Requests of the OpenAI Responses API, checked.

In:   the body of /v1/responses
Out:  ResponsesRequest, with the same request as a chat completion; BadRequest names the first wrong
      key

Keys of a chat completion that this API lacks (seed, top_k, stop, ...) work here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from hone.wire.errors import brief, invalid_value, unknown_key
from hone.wire.openai.chat import ChatRequest
from hone.wire.openai.response_items import read_input
from hone.wire.request_body import GenerationBody, Refused

IGNORED = {
    "user": "names the end user; there are no accounts here",
    "safety_identifier": "names the end user; there are no accounts here",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prefixes are cached by their tokens",
    "prompt_cache_options": "prefixes are cached by their tokens",
    "prompt_cache_retention": "prefixes are cached by their tokens",
    "max_tool_calls": "limits OpenAI's own tools, of which there are none here",
}
"""Keys that many clients send, accepted with any value, and why they change nothing."""

_REFUSED: Refused = {
    "background": ("leave it out, and stream the response if it takes long", False),
    "conversation": ("send previous_response_id, or the conversation as input items",),
    "prompt": ("send its text as instructions and input",),
    "context_management": ("leave it out, and shorten the input",),
    "moderation": ("leave it out",),
    "access_programs": ("leave it out",),
    "image": ("leave it out",),
    "messages": ("send them as input",),
    "n": ("a response has one answer; send several requests",),
    "max_tokens": ("send max_output_tokens",),
    "max_completion_tokens": ("send max_output_tokens",),
    "logprobs": ("send include: ['message.output_text.logprobs']",),
    "response_format": ("send text: {'format': ...}",),
    "extra_body": ("its keys belong at the top level of the request",),
}

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDES = (
    LOGPROBS,
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""All but the first two belong to items that no response has here."""


def check_includes(names: list[str]) -> list[str]:
    """The names of an `include`; raises ValueError for one that does not exist."""
    for name in names:
        if name not in _INCLUDES:
            raise ValueError(f"{name[:80]!r} cannot be included; known: {', '.join(_INCLUDES)}")
    return names


CHAT_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
}
"""Keys of the chat completion, as clients of this API know them."""


class _Body(GenerationBody):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(extra="allow")
    kind = "a response"
    ignored = IGNORED
    refused = _REFUSED

    input: Any
    """Text, or items: message, function_call, function_call_output, reasoning, item_reference."""
    instructions: str | None = None
    """A system message before the input. A later response does not inherit it."""
    previous_response_id: str | None = None
    """A stored response that this request continues."""
    tools: list[Any] | None = None
    """Functions: {type: function, name, description, parameters, strict}."""
    tool_choice: Any = None
    """auto (default), none, required, {type: function, name}, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first call."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    """message.output_text.logprobs, and reasoning.encrypted_content."""
    text: dict[str, Any] | None = None
    """format: {type: text}, {type: json_object} or {type: json_schema, name, schema}."""
    reasoning: dict[str, Any] | None = None
    """effort is the template's argument reasoning_effort; none also sets enable_thinking to false."""
    truncation: Literal["disabled"] | None = None
    """An input that is too long is refused."""
    store: bool | None = None
    """False: the response cannot be retrieved or continued by its id. The call is recorded anyway."""
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    """Labels that are returned with the response."""
    stream_options: dict[str, Any] | None = None

    @field_validator("input")
    @classmethod
    def _text_or_items(cls, value: Any) -> Any:
        if not value or not isinstance(value, str | list):
            raise ValueError("expected text, or a list of at least one item")
        return value

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else check_includes(value)

    @field_validator("stream_options")
    @classmethod
    def _no_obfuscation(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if set(value or ()) - {"include_obfuscation"} or any((value or {}).values()):
            raise ValueError("expected {'include_obfuscation': false}")
        return value

    @field_validator("reasoning")
    @classmethod
    def _known_reasoning(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        known = ("effort", "summary", "generate_summary", "context", "mode")
        if unknown := [key for key in value or () if key not in known]:
            raise ValueError(f"no such key: {unknown[0][:80]!r}; known: {', '.join(known)}")
        effort = (value or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise ValueError("effort: expected a word such as 'low'")
        return value


@dataclass(frozen=True)
class ResponsesRequest:
    """A request of the Responses API, and the same request as a chat completion."""

    body: _Body
    chat: ChatRequest

    schema = _Body.model_json_schema()

    @classmethod
    def parse(cls, body: dict[str, Any]) -> "ResponsesRequest":
        checked = _Body.parse(body)
        return cls(checked, _chat_request(checked, read_input(checked.input)))

    def resumed(
        self,
        earlier: list[dict[str, Any]],
        items: Mapping[str, dict[str, Any] | None],
    ) -> "ResponsesRequest":
        """With the messages of the previous response, and with the items it refers to."""
        messages = [*earlier, *read_input(self.body.input, items)]
        return replace(self, chat=_chat_request(self.body, messages))

    @property
    def unused_keys(self) -> tuple[str, ...]:
        return (*self.body.unused_keys, *self.chat.unused_keys)

    def request_fields(self, not_applicable: list[str]) -> dict[str, Any] | None:
        """What a stored response returns again, without tools that are recorded with the call."""
        if self.body.store is False:
            return None
        recorded = {
            "encrypted": self.encrypted,
            "not_applicable": self.not_applicable(not_applicable),
        }
        hidden = self.body.tool_choice == "none" or isinstance(self.body.tool_choice, dict)
        return self.fields | recorded | ({} if hidden else {"tools": None})

    @property
    def encrypted(self) -> bool:
        """Whether reasoning items have `encrypted_content`."""
        return ENCRYPTED in (self.body.include or ())

    @property
    def fields(self) -> dict[str, Any]:
        """The request as its response repeats it, with defaults."""
        body = self.body
        return {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": [response_tool(chat_tool(tool, "tools")) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def not_applicable(self, ignored: list[str]) -> list[str]:
        """Keys of this request without effect; `ignored` are those of the chat completion."""
        body = self.body
        effort = (body.reasoning or {}).get("effort") is not None
        own = {"reasoning_effort": "reasoning.effort"} if effort else {}
        names = [own.get(name, name) for name in ignored]
        if (body.text or {}).get("verbosity") is not None:
            names.append("text.verbosity")
        reasoning = body.reasoning or {}
        names += [f"reasoning.{k}" for k, v in reasoning.items() if k != "effort" and v is not None]
        return names


def _chat_request(body: _Body, messages: list[dict[str, Any]]) -> ChatRequest:
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    tools, choice = _tools(body)
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    extras = _chat_extras(body)
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        extras["reasoning_effort"] = effort
    sent = {
        **extras,
        "model": body.model,
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs,
        "response_format": _response_format(body.text),
        "stream": body.stream,
    }
    return ChatRequest.parse(sent)


def _chat_extras(body: _Body) -> dict[str, Any]:
    """Keys of a chat completion that this API does not have."""
    extras = dict(body.model_extra or {})
    of_chats = {*ChatRequest.model_fields, *ChatRequest.ignored, *ChatRequest.refused}
    for key in extras:
        if key not in of_chats:
            known = [*_Body.model_fields, *IGNORED, *_REFUSED, *ChatRequest.model_fields]
            raise unknown_key(key, "a response", known)
    return extras


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as the response_format of a chat completion."""
    text = {key: value for key, value in (text or {}).items() if value is not None}
    if unknown := [key for key in text if key not in ("format", "verbosity")]:
        raise invalid_value(f"text.{unknown[0][:80]}", "known: text.format and text.verbosity")
    written = text.get("format")
    if written is None:
        return None
    kind = written.get("type") if isinstance(written, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid_value(
            "text.format",
            "expected {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'name': "
            f"..., 'schema': ...}}, got {brief(written)}",
        )
    fields = {key: value for key, value in written.items() if key != "type" and value is not None}
    return {"type": kind, "json_schema": fields}


# ---- tools -------------------------------------------------------------------------------------


def _tools(body: _Body) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools and the tool_choice of a chat completion."""
    tools = [chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    match body.tool_choice:
        case {"type": "allowed_tools", "tools": list(allowed), **choice}:
            names = {str(tool.get("name")) for tool in allowed if isinstance(tool, dict)}
            shown = [tool for tool in tools if tool["function"]["name"] in names]
            if not names or names != {tool["function"]["name"] for tool in shown}:
                message = f"expected names of tools, got {brief(allowed)}"
                raise invalid_value("tool_choice.tools", message)
            return shown, choice.get("mode")
        case {"type": "function", **choice}:
            return tools or None, {"type": "function", "function": {"name": choice.get("name")}}
        case dict(choice):
            raise invalid_value(
                "tool_choice",
                f"{brief(choice)} is not in this version; send 'auto', 'none', 'required', "
                "{'type': 'function', 'name': ...} or {'type': 'allowed_tools', 'mode': ..., "
                "'tools': [...]}",
            )
        case choice:
            return tools or None, choice


def chat_tool(tool: Any, where: str) -> dict[str, Any]:
    """A function as the tool of a chat completion; its keys keep their order, as prompts do."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise invalid_value(
            where,
            f"{brief(kind or tool)} is not in this version; only functions are: {{'type': "
            "'function', 'name': ..., 'parameters': ...}",
        )
    fields = {key: value for key, value in tool.items() if key != "type" and value is not None}
    known = ("name", "description", "parameters", "strict")
    for key in [key for key in fields if key not in known]:
        if fields.pop(key):
            raise invalid_value(f"{where}.{key[:80]}", "not in this version; leave it out")
    if not isinstance(name := fields.get("name"), str) or not name:
        raise invalid_value(f"{where}.name", f"expected the name of a function, got {brief(name)}")
    if fields.get("strict") is False:  # what a tool without the key means
        del fields["strict"]
    return {"type": "function", "function": fields}


def response_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool of a chat completion as this API writes it."""
    return {"type": "function", "strict": False, **tool["function"]}
