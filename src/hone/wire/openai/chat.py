"""Requests of the OpenAI API for chat completions and completions, checked.

In:   the body of /v1/chat/completions or /v1/completions
Out:  ChatRequest or CompletionRequest; BadRequest names the first wrong key

IGNORED lists keys without effect, with the reason; a response names those that its request had.
_REFUSED lists keys that are not supported, with what to do instead and the values that request
nothing. Both have the keys of OpenAI's API and of vLLM's.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
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
from hone.wire.errors import brief, invalid_value
from hone.wire.json import load_object
from hone.wire.openai.output_format import OutputFormat, output_format
from hone.wire.request_body import GenerationBody, Refused

IGNORED = {
    "user": "names the end user; there are no accounts here",
    "metadata": "labels for OpenAI's dashboard",
    "store": "whether OpenAI stores the response; every call is recorded here",
    "service_tier": "there is one tier",
    "verbosity": "no chat template has such an argument; ask for it in the messages",
    "prompt_cache_key": "prefixes are cached by their tokens",
    "prompt_cache_options": "prefixes are cached by their tokens",
    "prompt_cache_retention": "prefixes are cached by their tokens",
    "safety_identifier": "names the end user; there are no accounts here",
    "priority": "vLLM's key; requests are answered in the order in which they arrive",
    "request_id": "vLLM's key; the server makes the id",
    "cache_salt": "vLLM's key; prefixes are cached by their tokens alone",
    "media_io_kwargs": "vLLM's key for images and sound, of which there are none here",
    "mm_processor_kwargs": "vLLM's key for images and sound, of which there are none here",
    "spaces_between_special_tokens": "vLLM's key; the text is that of the sampled tokens",
    "guided_decoding_backend": "vLLM's key; there is one library for constraints, llguidance",
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
    "moderation": ("leave it out",),
    "extra_body": ("its keys belong at the top level of the request",),
    # vLLM's keys
    "ignore_eos": ("the end token always ends the answer; send min_tokens", False),
    "use_beam_search": ("answers are sampled; send n for several", False),
    "length_penalty": ("it is for beam search, and answers are sampled", 1.0, 1),
    "include_stop_str_in_output": ("the ids of the stop string are in token_ids", False),
    "truncate_prompt_tokens": ("shorten the prompt; what is too long is refused",),
    "prompt_logprobs": ("only the answer's log-probabilities are returned",),
    "allowed_token_ids": ("send structured_outputs, or a logit_bias",),
    "bad_words": ("send a logit_bias of -100 for their tokens", []),
    "prompt_embeds": ("send the prompt as text or token ids",),
    "guided_whitespace_pattern": ("send a regex or a grammar",),
    "thinking_token_budget": ("send max_tokens",),
    "repetition_detection": ("send max_tokens, or a repetition_penalty",),
    "kv_transfer_params": ("the engine has a KV cache of its own",),
    "vllm_xargs": ("leave it out",),
}
_REFUSED_IN_CHATS: Refused = {
    "include_reasoning": ("leave reasoning_content out in the client", True),
    "add_generation_prompt": ("the answer is a new message of the assistant", True),
    "continue_final_message": ("end with a message of the user", False),
    "add_special_tokens": ("the chat template writes them", False),
    "chat_template": ("the model's own is used, so that training sees the same prompts",),
    "documents": ("send chat_template_kwargs: {'documents': [...]}",),
}
_REFUSED_IN_COMPLETIONS: Refused = {
    "add_special_tokens": ("send the prompt as token ids", True),
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
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    """vLLM's key: further ids that end the answer. The last one is no part of its text."""
    min_tokens: int | None = Field(default=None, ge=0)
    """vLLM's key: the answer does not end before it has so many tokens. Until then the ids that end
    it are excluded, so these tokens have a log-probability after masking as well. Not together with
    stop or a required format."""
    skip_special_tokens: bool | None = None
    """vLLM's key. The text has every token but the one that ended it, as if this were false; true has
    no effect."""
    return_token_ids: bool | None = None
    """vLLM's key; the ids are always returned."""
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
    def unused_keys(self) -> tuple[str, ...]:
        return (*self._unused, *(("skip_special_tokens",) if self.skip_special_tokens else ()))

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
        output = request.output_format  # raises
        if request.min_tokens:
            if request.limit is not None and request.min_tokens > request.limit:
                raise invalid_value(
                    "min_tokens", f"{request.min_tokens} is more than the limit of {request.limit}"
                )
            if request.stop or output is not None:
                other = "stop" if output is None else output.param
                raise BadRequest(
                    f"min_tokens: not together with {other} in this version; leave one out",
                    param="min_tokens",
                    code="unsupported_parameter",
                )
        return request


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    kind = "a chat completion"
    refused = MappingProxyType({**_REFUSED, **_REFUSED_IN_CHATS})

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
    reasoning_effort: str | None = Field(default=None, min_length=1, max_length=32)
    """The template's argument of that name; none also sets enable_thinking to false. Named in
    not_applicable if the template has neither."""

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

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template; of those of the effort it may have one, or none."""
        return {**self._effort_kwargs, **(self.chat_template_kwargs or {})}

    @property
    def _effort_kwargs(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        if effort is None:
            return {}
        return {"reasoning_effort": effort} | (
            {"enable_thinking": False} if effort == "none" else {}
        )

    def unused_in_template(self, ignored: Collection[str]) -> list[str]:
        """Keys without effect, if the template has no arguments of the names in `ignored`."""
        sent = self.chat_template_kwargs or {}
        names = [f"chat_template_kwargs.{key}" for key in ignored if key in sent]
        effort = self._effort_kwargs
        return [*names, "reasoning_effort"] if effort and effort.keys() <= set(ignored) else names


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    kind = "a completion"
    refused = MappingProxyType({**_REFUSED, **_REFUSED_IN_COMPLETIONS})

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
