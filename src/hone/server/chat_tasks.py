"""Tasks of worker processes for large chat requests: parse, render, tokenize.

In:   the bytes of a body; a prompt to render; the template and tokenizer to use
Out:  checked requests and token ids, small enough for the event loop

These functions run in the processes of workers.py. Their results are bounded by the number of tokens
that the server accepts, never by the size of the body: unpickling a million values stops the event
loop as parsing them would.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from typing import Any

from hone.chat.bridge import HashedMessages, NextPrompt, UnrenderedPrompt
from hone.chat.jinja import TextTooLong, encoding_at_most
from hone.chat.messages import check_messages
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, Conflict
from hone.models.files import ModelFiles, load_tokenizer
from hone.wire.openai_chat import ChatRequest, CompletionRequest, read_json

VALUES_PER_TOKEN = 16
"""JSON values of a chat request for each token of the longest prompt; a real one has fewer than 2."""
MIN_VALUES = 2**16


@dataclass(frozen=True, slots=True)
class TemplateRef:
    """What another process needs to load the same chat template."""

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


# ---- requests ----------------------------------------------------------------------------------


def parse_chat(
    body: bytes, *, max_n: int, max_seq_length: int
) -> tuple[ChatRequest, HashedMessages]:
    """Raises BadRequest or TemplateError, naming the field."""
    request = ChatRequest.parse(read_json(body), max_n=max_n)
    limit = max(MIN_VALUES, VALUES_PER_TOKEN * max_seq_length)
    if more_values(request.__dict__.values(), limit):
        raise BadRequest(
            f"messages: the request has more than {limit} values, and {max_seq_length} tokens "
            "(max_seq_length) cannot hold so many; shorten the conversation",
            param="messages",
            code="context_length_exceeded",
        )
    return request, HashedMessages.of(check_messages(request.messages))


def parse_completion(body: bytes, *, max_n: int, max_seq_length: int) -> CompletionRequest:
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


def more_values(values: Iterable[Any], limit: int) -> bool:
    """Whether there are more than `limit` values, those inside lists and objects counted."""
    count, level = 0, list(values)
    while level:
        count += len(level)
        if count > limit:
            return True
        inner = (v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list))
        level = [value for items in inner for value in items]
    return False


# ---- prompts -----------------------------------------------------------------------------------


def render(ref: TemplateRef, prompt: UnrenderedPrompt, limit: int) -> tuple[NextPrompt, int]:
    """The prompt and its length; without its ids where they are more than `limit`."""
    template = ref.load()
    try:
        with encoding_at_most(max_characters(template, limit)):
            rendered = prompt.render(template)
    except TextTooLong as error:
        raise _too_long("messages", error.characters, limit) from None
    tokens = len(rendered.ids)
    return (rendered if tokens <= limit else replace(rendered, ids=[])), tokens


def tokenize(ref: TemplateRef, text: str, limit: int) -> tuple[list[int], int]:
    """Token ids of a text and their number; no ids where they are more than `limit`."""
    template = ref.load()
    longest = max_characters(template, limit)
    if longest is not None and len(text) > longest:
        raise _too_long("prompt", len(text), limit)
    ids = template.tokenizer.encode(text)
    return (ids if len(ids) <= limit else []), len(ids)


def max_characters(template: ChatTemplate, tokens: int) -> int | None:
    """The longest text of at most so many tokens; None where the tokenizer sets no such bound."""
    longest = _max_token_bytes(template)
    return None if longest is None else longest * tokens


def _max_token_bytes(template: ChatTemplate) -> int | None:
    """The most bytes of text that one token encodes; None where there is no such bound."""
    tokenizer, pieces = template.tokenizer, template.pieces
    if pieces is None or not {bytes([byte]) for byte in range(256)} <= set(pieces):
        return None  # characters outside the vocabulary may become one token, or none
    if any(t.lstrip or t.rstrip for t in tokenizer.added_tokens_decoder.values()):
        return None  # such a token takes any number of spaces with it
    normalizer = tokenizer.backend_tokenizer.normalizer
    # NFC composes at most four characters into one, in at most a third of the bytes.
    shrinks = {"NoneType": 1, "NFC": 4}.get(type(normalizer).__name__)
    return None if shrinks is None else shrinks * max(map(len, pieces))


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
