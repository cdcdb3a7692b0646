"""Requests of the OpenAI API, checked; and what is said back.

In:   the body of /v1/chat/completions or /v1/completions
Out:  ChatRequest, CompletionRequest; the JSON of answers and of their chunks

Every key is honoured, refused by name, or listed in IGNORED, which says why it changes nothing.
Keys that are known and not built yet pass only with the value that means nothing.
"""

import difflib
import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hone.chat.choice_tokens import brief
from hone.errors import BadRequest
from hone.inference.base import SampledToken
from hone.server.language import Language

IGNORED = {
    "user": "names who asks; there are no accounts here",
    "metadata": "labels for a dashboard of OpenAI's",
    "store": "whether OpenAI keeps the answer; every call is recorded here",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prefixes are cached by their tokens",
    "safety_identifier": "names who asks; there are no accounts here",
}
"""Keys that clients send by habit, accepted whatever they hold, and why they change nothing."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Keys that are not in this version, each with the values besides null that ask for nothing."""

_INSTEAD = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "best_of": "send n instead",
    "echo": "the prompt's ids are returned as prompt_token_ids",
    "extra_body": "its keys belong at the top level of the request",
}

GREEDY_BELOW = 1e-3
"""A temperature below this is greedy: scores divided by it would overflow."""
SMALLEST_TOP_P = 1e-9
"""A `top_p` below this is greedy: no more than the likeliest token can be left."""

_MAX_DEPTH = 100
"""Of a body: what is nested deeper would overrun the stack of whoever writes it again."""

FLOOR = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot say; OpenAI's number for it."""


class _Request(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
    _kind: ClassVar[str]

    model: str = Field(min_length=1, max_length=512)
    """NAME, NAME@STEP, NAME@latest, NAME@best, PROJECT/NAME, or a base model."""
    n: int | None = Field(default=None, ge=1)
    """How many answers to sample."""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """0 is greedy: the call is recorded at temperature 0, as context that is never trained on. So is
    every value below 0.001, at which scores would overflow."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """0 is greedy, like temperature 0."""
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 keep every token."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Inside a rollout the server's own seed is used instead."""
    stop: str | list[str] | None = None
    """Up to 16 strings that end the answer."""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    """include_usage: one last chunk with the usage."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens `token_id:N`; always so for models registered by ART."""

    @property
    def sampling_temperature(self) -> float:
        """What the request is sampled at; 0 is greedy."""
        if self.top_p is not None and self.top_p < SMALLEST_TOP_P:
            return 0.0
        return 1.0 if self.temperature is None else effective_temperature(self.temperature)

    @property
    def sampling_top_p(self) -> float:
        """What the request is sampled with; 1 is no mask, which greedy does not need."""
        return 1.0 if self.top_p is None or self.top_p < SMALLEST_TOP_P else self.top_p

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or any(not 0 < len(stop) <= 256 for stop in stops):
            raise ValueError("expected up to 16 strings of 1 to 256 characters")
        return value

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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @classmethod
    def parse(cls, body: dict[str, Any], *, max_n: int) -> Self:
        """The request; raises BadRequest naming the first key that is wrong."""
        # Clients write null for a key they leave out.
        sent = {k: v for k, v in body.items() if v is not None and k not in IGNORED}
        kept = {k: v for k, v in sent.items() if not cls._says_nothing(k, v)}
        try:
            request = cls.model_validate(kept)
        except ValidationError as error:
            cls._refuse(error)
        if (request.n or 1) > max_n:
            raise BadRequest(
                f"n: {request.n} answers; this server gives at most {max_n}", param="n"
            )
        return request

    @classmethod
    def _says_nothing(cls, key: str, value: Any) -> bool:
        if key.startswith("guided_") or key in _NEUTRAL:
            neutral = _NEUTRAL.get(key, ())
            # In Python 0 == False and 1 == True; in JSON they are not.
            boolean = isinstance(value, bool)
            if any(value == other and boolean == isinstance(other, bool) for other in neutral):
                return True
            instead = _INSTEAD.get(key) or (
                f"leave it out, or send {json.dumps(neutral[0])}" if neutral else "leave it out"
            )
            raise BadRequest(
                f"{key}: {brief(value)} is not in this version; {instead}",
                param=key,
                code="unsupported_parameter",
            )
        return False

    @classmethod
    def _refuse(cls, error: ValidationError) -> NoReturn:
        first = error.errors(include_url=False)[0]
        key, *rest = first["loc"]
        where = str(key) + "".join(f"[{part}]" for part in rest if isinstance(part, int))
        if first["type"] == "extra_forbidden":
            known = [*cls.model_fields, *IGNORED]
            close = difflib.get_close_matches(str(key), known, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            what = _INSTEAD.get(str(key)) or f"{cls._kind} has no such key.{guess}"
            raise BadRequest(
                f"{brief(key)}: {what}", param=str(key)[:100], code="unknown_parameter"
            )
        if first["type"] == "missing":
            raise BadRequest(
                f"{where}: missing; {cls._kind} needs it", param=where, code="missing_parameter"
            )
        message = first["msg"].removeprefix("Value error, ")
        raise BadRequest(
            f"{where}: {message}, got {brief(first['input'])}", param=where, code="invalid_value"
        )


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    _kind = "a chat completion"

    messages: list[Any] = Field(min_length=1)
    """The conversation so far, as OpenAI messages of text."""
    tools: list[Any] | None = None
    tool_choice: Any = None
    """auto (default), none, required, or one function by name."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first call."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    """Left out, answers of registered models carry them too, except inside a rollout."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the model's chat template, e.g. enable_thinking."""

    @classmethod
    def parse(cls, body: dict[str, Any], *, max_n: int) -> Self:
        request = super().parse(body, max_n=max_n)
        if request.top_logprobs and not request.logprobs:
            raise BadRequest(
                "top_logprobs: asked for without logprobs; send logprobs: true too",
                param="top_logprobs",
            )
        return request

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    _kind = "a completion"

    prompt: str | list[Any]
    """Text, or token ids; one prompt a request."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many alternatives to report beside each token's log-probability."""

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt, out of the forms OpenAI allows."""
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
    """The temperature that is used for the one that was sent."""
    return temperature if temperature >= GREEDY_BELOW else 0.0


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body; raises BadRequest where it is no JSON object that can be written again."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body is {brief(value)}; send a JSON object", code="invalid_json")
    if body.count(b"{") + body.count(b"[") > _MAX_DEPTH:
        _check_depth(value)
    if b"\\u" in body:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest(
                "the body holds half of a surrogate pair; send whole characters",
                code="invalid_json",
            ) from None
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise BadRequest(f"the body is nested deeper than {_MAX_DEPTH}", code="invalid_json")


# ---- answers ----------------------------------------------------------------------------------


class LogprobWriter:
    """Sampled tokens as entries of `logprobs`."""

    def __init__(self, language: Language, *, as_ids: bool) -> None:
        """`as_ids`: tokens are named `token_id:N`."""
        self._language = language
        self._as_ids = as_ids

    def entry(self, token: SampledToken) -> dict[str, Any]:
        """One element of a chat answer's `logprobs.content`."""
        others = [self._named(other, logprob) for other, logprob in token.top]
        return {**self._named(token.id, token.logprob), "top_logprobs": others}

    def name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return self._language.piece(token).decode(errors="replace")

    def legacy(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
        """`logprobs` of /v1/completions; `offset` is where the text of these tokens begins."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._language.piece(token.id).decode(errors="replace"))
        return {
            "tokens": [self.name(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self.name(other): _finite(logprob) for other, logprob in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        spelt = list(self._language.piece(token))
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": spelt}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(value: dict[str, Any] | Literal["[DONE]"]) -> bytes:
    """One server-sent event."""
    return b"data: " + (value.encode() if isinstance(value, str) else written(value)) + b"\n\n"


def written(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
