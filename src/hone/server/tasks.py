"""What worker processes do with large request bodies: parse, validate, render, tokenize.

In:   the bytes of a body; a Match to render; which template and tokenizer to use
Out:  checked requests and token ids, small enough for the event loop to take over

Everything here runs in a process of workers.py. What a request returns is bounded by the number of
tokens that the server accepts, never by the size of the body: to unpickle a million values stops
the event loop as parsing them would.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

from hone.chat.bridge import Asked, Bridged, Match
from hone.chat.jinja import TextTooLong, encoding_at_most
from hone.chat.messages import check_messages
from hone.chat.reply import byte_pieces
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, Conflict
from hone.models.files import ModelFiles, load_tokenizer
from hone.server.openai import ChatRequest, CompletionRequest, read_json

VALUES_PER_TOKEN = 16
"""JSON values of a chat request for each token of the longest prompt; a real one has fewer than 2."""
MIN_VALUES = 2**16


@dataclass(frozen=True, slots=True)
class TemplateRef:
    """A chat template of the server, by what another process needs to load the same."""

    files: ModelFiles
    name: str
    kwargs: dict[str, Any]
    today: date
    fingerprint: str

    @classmethod
    def of(cls, template: ChatTemplate, files: ModelFiles) -> "TemplateRef":
        plain = ModelFiles(files.name, files.path, files.source)  # without what it has read
        return cls(plain, template.name, template.kwargs, template.today, template.fingerprint)

    def load(self) -> ChatTemplate:
        template = _template(self.files, self.name, self.today).with_kwargs(self.kwargs)
        if template.fingerprint != self.fingerprint:
            raise Conflict(
                f"{self.files.path}: the tokenizer or the chat template is not the one this server "
                "loaded; put the old files back, or restart the server"
            )
        return template


@dataclass(frozen=True, slots=True)
class Invalid:
    """The body of a job that does not validate, with pydantic's errors."""

    errors: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A chat request whose messages are checked."""

    request: ChatRequest
    asked: Asked


# ---- requests ----------------------------------------------------------------------------------


def read_chat(body: bytes, *, max_n: int, max_seq_length: int) -> ReadChat:
    """Raises BadRequest or TemplateError, naming the field."""
    request = ChatRequest.parse(read_json(body), max_n=max_n)
    most = max(MIN_VALUES, VALUES_PER_TOKEN * max_seq_length)
    if more_values(request.__dict__.values(), most):
        raise BadRequest(
            f"messages: the request has more than {most} values, and {max_seq_length} tokens "
            "(max_seq_length) cannot hold so many; shorten the conversation",
            param="messages",
            code="context_length_exceeded",
        )
    return ReadChat(request, Asked.read(check_messages(request.messages)))


def read_completion(body: bytes, *, max_n: int, max_seq_length: int) -> CompletionRequest:
    """Raises BadRequest, also for more token ids than the server accepts."""
    request = CompletionRequest.parse(read_json(body), max_n=max_n)
    prompt = request.text_or_ids
    if isinstance(prompt, list) and len(prompt) > max_seq_length:
        raise BadRequest(
            f"prompt: {len(prompt)} tokens are more than the {max_seq_length} of this server "
            "(max_seq_length); shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    return request.model_copy(update={"prompt": prompt})


def more_values(values: Iterable[Any], most: int) -> bool:
    """Whether there are more than `most` values, those inside lists and objects counted."""
    count, level = 0, list(values)
    while level:
        count += len(level)
        if count > most:
            return True
        inner = (v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list))
        level = [value for items in inner for value in items]
    return False


# ---- prompts -----------------------------------------------------------------------------------


def render(ref: TemplateRef, match: Match, limit: int) -> tuple[Bridged, int]:
    """The prompt and its length; without its ids where they are more than `limit`."""
    template = ref.load()
    with _bounded(template, limit, "messages"):
        bridged = match.render(template)
    if len(bridged.ids) > limit:
        return Bridged(ids=[], outcome=bridged.outcome, reasons=bridged.reasons), len(bridged.ids)
    return bridged, len(bridged.ids)


def tokenize(ref: TemplateRef, text: str, limit: int) -> tuple[list[int], int]:
    """Token ids of a text and their number; no ids where they are more than `limit`."""
    template = ref.load()
    most = max_characters(template.tokenizer, limit)
    if most is not None and len(text) > most:
        raise _too_long("prompt", len(text), limit)
    ids = template.tokenizer.encode(text)
    return (ids if len(ids) <= limit else []), len(ids)


def max_characters(tokenizer: Any, tokens: int) -> int | None:
    """No longer text has at most so many tokens. None: this cannot be told of this tokenizer."""
    most = _bytes_of_a_token(tokenizer)
    return None if most is None else most * tokens


def _bytes_of_a_token(tokenizer: Any) -> int | None:
    """The most bytes of text that one token stands for; None where there is no such bound."""
    pieces = byte_pieces(tokenizer)
    if pieces is None or not {bytes([byte]) for byte in range(256)} <= set(pieces):
        return None  # characters outside the vocabulary may become one token, or none
    if any(t.lstrip or t.rstrip for t in tokenizer.added_tokens_decoder.values()):
        return None  # such a token takes any number of spaces with it
    normalizer = tokenizer.backend_tokenizer.normalizer
    # NFC composes at most four characters into one, in at most a third of the bytes.
    shrinks = {"NoneType": 1, "NFC": 4}.get(type(normalizer).__name__)
    return None if shrinks is None else shrinks * max(map(len, pieces))


@contextmanager
def _bounded(template: ChatTemplate, limit: int, param: str) -> Iterator[None]:
    """Refuse texts that cannot fit before they are tokenized."""
    try:
        with encoding_at_most(max_characters(template.tokenizer, limit)):
            yield
    except TextTooLong as error:
        raise _too_long(param, error.characters, limit) from None


def _too_long(param: str, characters: int, limit: int) -> BadRequest:
    return BadRequest(
        f"{param}: {characters} characters are more than {limit} tokens can hold, the most of this "
        "model and server (max_seq_length); shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


@lru_cache(maxsize=4)
def _template(files: ModelFiles, name: str, today: date) -> ChatTemplate:
    return ChatTemplate.load(load_tokenizer(files), name, today=today, end_ids=files.end_ids)
