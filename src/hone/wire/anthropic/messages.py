"""Requests of the Anthropic Messages API, checked and turned into chat requests.

In:   the body of /v1/messages or /v1/messages/count_tokens
Out:  MessagesRequest, and the same request as a ChatRequest; BadRequest names the first wrong key
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from hone.errors import BadRequest
from hone.wire.anthropic.blocks import chat_messages
from hone.wire.errors import brief
from hone.wire.openai.chat import ChatRequest
from hone.wire.request_body import GenerationBody, Refused

IGNORED = {
    "metadata": "names the end user; there are no accounts here",
    "cache_control": "prefixes are cached by their tokens; also in blocks and tools",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "answers come from this server",
    "context_management": "the prompt holds every message that was sent; nothing is cleared",
    "diagnostics": "explains misses of Anthropic's prompt cache",
    "user_profile_id": "there are no accounts here",
    "workspace_id": "there are no accounts here",
    "betas": "the header anthropic-beta; betas change nothing here",
}
"""Keys that clients send, accepted with any value, and why they have no effect.

The same holds for `effort` in `output_config`, `budget_tokens` in `thinking`, and every key of a
block or a tool that is not read, such as `citations` or `eager_input_streaming`.
"""

_REFUSED: Refused = {
    "container": ("there is no code execution",),
    "mcp_servers": ("call MCP servers in the agent, and send their tools as tools",),
    "fallbacks": ("name one model",),
    "fallback_credit_token": ("there are no accounts here",),
    "compaction": ("shorten the messages in the agent",),
    "thread": ("send all messages of the conversation",),
}

CHAT_NAMES = {"response_format.json_schema.schema": "output_config.format.schema"}
"""Keys of a chat completion, and their names in this API."""

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Part(BaseModel):
    """An object inside the request. Keys that are not read are ignored."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, use_attribute_docstrings=True
    )


class Tool(_Part):
    """A tool that the agent runs itself."""

    name: str = Field(min_length=1)
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """Whether the arguments must match the schema."""

    @model_validator(mode="before")
    @classmethod
    def _by_client(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"got a tool of type {brief(kind)}; this server runs no tools, and knows those of "
                "Anthropic only with a name and an input_schema"
            )
        return value


class ToolChoice(_Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """With type tool: the tool that must be called."""
    disable_parallel_tool_use: bool | None = None
    """If true, the answer ends after its first call."""


class Thinking(_Part):
    type: Literal["enabled", "disabled", "adaptive"]
    """Sets the template's enable_thinking, if it has one."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: thinking blocks are empty; the recorded ids still contain the reasoning."""


class OutputFormat(_Part):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    format: OutputFormat | None = None
    """The JSON schema of the answer's text."""


class _FittedRequest(ChatRequest):
    """Clients of this API must send max_tokens, and many send a constant for every model."""

    fitted: ClassVar[bool] = True


class CountRequest(GenerationBody):
    """Body of POST /v1/messages/count_tokens."""

    kind = "a message"
    ignored = IGNORED
    refused = _REFUSED

    messages: list[Any] = Field(min_length=1)
    """The conversation so far, as text or as content blocks; it ends with the user's."""
    system: str | list[Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """What does not fit into the context is cut off."""
    stop_sequences: list[_Stop] = Field(default=[], max_length=16)
    """Up to 16 strings that end the answer."""
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 keep every token."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """auto (default), any, tool with a name, or none."""
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older form of output_config.format."""

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        request = super().parse(body)
        request.chat  # noqa: B018 - checks what is left to check
        return request

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request as a chat completion. Raises BadRequest."""
        messages = chat_messages(self.system, self.messages)
        if messages[-1]["role"] == "assistant":
            raise BadRequest(
                "messages: the last one is the assistant's, and answers that continue it (prefill) "
                "are not in this version; end with a message of the user",
                param="messages",
            )
        config, thinking = self.output_config, self.thinking
        form = (config.format if config else None) or self.output_format
        written = None if form is None else _response_format(form.json_schema)
        kwargs = None if thinking is None else {"enable_thinking": thinking.type != "disabled"}
        return _FittedRequest.parse(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "stream": self.stream,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "tools": None if self.tools is None else list(map(_chat_tool, self.tools)),
                **_chat_tool_choice(self.tool_choice),
                "chat_template_kwargs": kwargs,
                "response_format": written,
            }
        )


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: int | None = Field(ge=1)


def read_request(
    body: Mapping[str, Any],
) -> tuple[list[dict[str, Any]] | None, list[Any] | None]:
    """Messages and tools of a request to any server, as those of a chat.

    If they contain what only Anthropic's own models accept, such as images, they are left
    unchanged.
    """
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list):
        with suppress(BadRequest):
            messages = chat_messages(body.get("system"), messages)
    if isinstance(tools, list):
        with suppress(ValidationError):
            tools = [_chat_tool(Tool.model_validate(tool)) for tool in tools]
    lists = [value if isinstance(value, list) else None for value in (messages, tools)]
    return lists[0], lists[1] or None


def request_schema(body: type[CountRequest]) -> dict[str, Any]:
    """The JSON schema of a body."""
    schema = body.model_json_schema()
    parts = {f"#/$defs/{name}": part for name, part in schema.pop("$defs").items()}

    def inline(value: Any) -> Any:
        # In /openapi.json a reference would be looked up at the top of that document.
        if isinstance(value, dict):
            value = parts.get(value.get("$ref", ""), value)
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    return inline(schema)


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    present = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def _chat_tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    chosen: Any = {"any": "required"}.get(choice.type, choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest(
                "tool_choice.name: missing; type tool needs it", param="tool_choice.name"
            )
        chosen = {"type": "function", "function": {"name": choice.name}}
    single = choice.disable_parallel_tool_use
    return {"tool_choice": chosen, "parallel_tool_calls": None if single is None else not single}
