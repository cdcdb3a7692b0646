"""Requests of the OpenAI API for chat completions and completions, checked.

In:   the body of /v1/chat/completions or /v1/completions
Out:  ChatRequest or CompletionRequest; BadRequest names the first wrong key

IGNORED lists keys without effect, _REFUSED keys that are not supported in this version, each with
the reason.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)

from hone.errors import BadRequest
from hone.wire.errors import brief
from hone.wire.json import load_object
from hone.wire.output_format import OutputFormat, output_format
from hone.wire.request_body import GenerationBody, Refused

IGNORED = {
    "user": "names the end user; there are no accounts here",
    "metadata": "labels for OpenAI's dashboard",
    "store": "whether OpenAI stores the response; every call is recorded here",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prefixes are cached by their tokens",
    "safety_identifier": "names the end user; there are no accounts here",
    "return_token_ids": "vLLM's key; the ids are always returned",
}

_REFUSED: Refused = {
    "modalities": ('leave it out, or send ["text"]', ["text"]),
    "audio": ("leave it out",),
    "prediction": ("leave it out",),
    "web_search_options": ("leave it out",),
    "functions": ("send tools instead",),
    "function_call": ("send tool_choice instead",),
    "best_of": ("send n instead", 1),
    "echo": ("the prompt's ids are returned as prompt_token_ids", False),
    "suffix": ('leave it out, or send ""', ""),
    "extra_body": ("its keys belong at the top level of the request",),
}

GREEDY_BELOW = 1e-3
"""A temperature below this is greedy: scores divided by it would overflow."""
SMALLEST_TOP_P = 1e-9
"""A `top_p` below this is greedy: only the most likely token can remain."""

_Stops = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=256)]],
    Field(max_length=16),
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop,
        json_schema_input_type=str | list[str],
    ),
]


def _token_ids(bias: Any) -> Any:
    """The keys of logit_bias as numbers; JSON has them as text."""
    if not isinstance(bias, dict):
        return bias
    wrong = next((key for key in bias if not str(key).isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"expected token ids as keys, got {brief(wrong)}")
    return {int(key): value for key, value in bias.items()}


_LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    BeforeValidator(_token_ids, json_schema_input_type=dict[str, float]),
]


class _Request(GenerationBody):
    """The fields of both kinds of request."""

    ignored = IGNORED
    refused = _REFUSED
    fitted: ClassVar[bool] = False
    """Lower max_tokens to what fits beside the prompt, instead of refusing it."""

    n: int | None = Field(default=None, ge=1)
    """How many answers to sample."""
    max_tokens: int | None = Field(default=None, ge=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 keep every token."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Inside a rollout the server's own seed is used instead."""
    stop: _Stops = Field(default_factory=list)
    """Up to 16 strings that end the answer."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    """vLLM's key: divides the logits of tokens in prompt and answer; 1 changes nothing."""
    logit_bias: _LogitBias = Field(default_factory=dict)
    """Token ids as text, each with a number from -100 to 100 that is added to its logit."""
    response_format: dict[str, Any] | None = None
    """{type: text}, {type: json_object}, or {type: json_schema, json_schema: {name, schema}}. The
    answer's text matches it, strict or not, unless it is cut at its limit."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's key: an object with one of json, regex, choice, grammar, json_object. A grammar is Lark
    as the library llguidance reads it, or GBNF."""
    guided_json: Any = None
    """Like structured_outputs.json; so are the next three."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream_options: dict[str, Any] | None = None
    """include_usage: one last chunk with the usage."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens `token_id:N`; always so for models registered by ART."""

    @property
    def sampling_temperature(self) -> float:
        """The temperature to sample at; 0 is greedy."""
        if self.top_p is not None and self.top_p < SMALLEST_TOP_P:
            return 0.0
        return 1.0 if self.temperature is None else effective_temperature(self.temperature)

    @property
    def sampling_top_p(self) -> float:
        """1 masks nothing; greedy sampling needs no mask."""
        return 1.0 if self.top_p is None or self.top_p < SMALLEST_TOP_P else self.top_p

    @property
    def output_format(self) -> OutputFormat | None:
        """The required format of the answer's text; None for free text. Raises BadRequest."""
        return output_format(dict(self))

    @field_validator("stream_options")
    @classmethod
    def _known_options(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        unknown = set(value or ()) - {"include_usage", "include_obfuscation"}
        if unknown or not isinstance((value or {}).get("include_usage") or False, bool):
            raise ValueError("expected {'include_usage': true or false}")
        if (value or {}).get("include_obfuscation"):
            raise ValueError("include_obfuscation is not in this version")
        return value

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def limit(self) -> int | None:
        """Maximum tokens to generate."""
        return self.max_tokens

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        request = super().parse(body)
        _ = request.output_format  # raises
        return request


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    kind = "a chat completion"

    messages: list[Any] = Field(min_length=1)
    """The conversation so far, as OpenAI messages of text."""
    tools: list[Any] | None = None
    tool_choice: Any = None
    """auto (default), none, required, or one function by name. The arguments of a call that is
    required, or of a function with strict: true, match the schema of the function's parameters."""
    parallel_tool_calls: bool | None = None
    """If false, the answer ends after its first call."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    """If not set, answers of registered models have them too, except inside a rollout."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the model's chat template, e.g. enable_thinking."""

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("requested without logprobs; send logprobs: true too")
        return value

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0

    @property
    def chat(self) -> Self:
        return self


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    kind = "a completion"

    prompt: str | list[Any]
    """Text, or token ids; one prompt per request."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many alternatives to report beside each token's log-probability."""

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt, from any of the forms that OpenAI allows."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise BadRequest(
                    f"prompt: {len(prompt)} prompts; send one a request", param="prompt"
                )
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise BadRequest(
                f"prompt: expected text or token ids, at least one, got {brief(self.prompt)}",
                param="prompt",
            )
        return prompt


def effective_temperature(temperature: float) -> float:
    """The temperature to sample at: values below GREEDY_BELOW are greedy."""
    return temperature if temperature >= GREEDY_BELOW else 0.0


def read_json(body: bytes) -> dict[str, Any]:
    """The body of a request; raises BadRequest unless it is a JSON object."""
    try:
        return load_object(body)
    except ValueError as error:
        message = f"the body is not JSON: {error}; send a JSON object"
        raise BadRequest(message, code="invalid_json") from None


# ---- messages and responses ---------------------------------------------------------------------------------


class _Function(BaseModel):
    name: str


class _Tool(BaseModel):
    function: _Function


TOOLS = TypeAdapter(list[_Tool])
"""Checks the tools of a request: each has a function with a name; the rest is for the model."""


def content_text(content: Any) -> Any:
    """The content of a message as text; other parts, such as images, are only named."""
    if not isinstance(content, list):
        return content or ""
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
    return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)


def assistant_message(
    text: str, calls: list[dict[str, Any]], thoughts: Iterable[str]
) -> dict[str, Any]:
    """A message of the assistant, from the parts that other dialects have."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    if reasoning := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = reasoning
    return message


def tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


MIN_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON cannot express."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
