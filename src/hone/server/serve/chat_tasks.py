"""Read requests of any dialect and tokenize their prompts, in this process or in a worker.

In:   the bytes of a body; a prompt to render, and the tokenizer to use
Out:  checked requests and token ids

The result of a worker process is bounded by the number of tokens that the server accepts, not by
the size of the body: unpickling a million values would block the event loop just as parsing them
would.
"""

from collections.abc import Callable
from typing import Any

from hone.chat.bridge import HashedMessages, NextPrompt, UnrenderedPrompt
from hone.chat.messages import check_messages
from hone.errors import BadRequest
from hone.server.serve.tokenizer import BaseTokenizer
from hone.wire.openai.chat import ChatRequest, CompletionRequest, read_json
from hone.wire.openai.dialect import Request

ParsedRequest = Request | CompletionRequest

BYTES_PER_TOKEN = 256
"""Maximum bytes of a body per token of the longest prompt; real ones have about 5."""
VALUES_PER_TOKEN = 16
"""Maximum commas and brackets per token; real bodies have fewer than 2."""
MIN_TOKENS = 4096


def max_bytes(max_seq_length: int) -> int:
    """Size of the longest body whose prompt can fit into `max_seq_length` tokens."""
    return BYTES_PER_TOKEN * max(MIN_TOKENS, max_seq_length)


def read_request(
    parse: Callable[[dict[str, Any]], ParsedRequest],
    param: str,
    body: bytes,
    *,
    max_n: int,
    max_seq_length: int,
) -> tuple[ParsedRequest, HashedMessages | None]:
    """The request, and the messages of a chat. Raises BadRequest or TemplateError.

    `parse` is that of the dialect, `param` its key of the prompt.
    """
    tokens, values = max(MIN_TOKENS, max_seq_length), sum(map(body.count, (b",", b"[", b"{")))
    if len(body) > max_bytes(max_seq_length) or values > VALUES_PER_TOKEN * tokens:
        raise BadRequest(
            f"{param}: the body has {len(body)} bytes and about {values} values, more than "
            f"{max_seq_length} tokens (max_seq_length) can hold; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    request = parse(read_json(body))
    answers = sampling_request(request).n or 1
    if answers > max_n:
        raise BadRequest(f"n: {answers} answers; this server gives at most {max_n}", param="n")
    return request, hashed_messages(request)


def sampling_request(request: ParsedRequest) -> ChatRequest | CompletionRequest:
    """The request in the form of the OpenAI API."""
    return request if isinstance(request, CompletionRequest) else request.chat


def hashed_messages(request: ParsedRequest) -> HashedMessages | None:
    """The messages of a chat, checked; None for a completion. Raises TemplateError."""
    if isinstance(request, CompletionRequest):
        return None
    return HashedMessages.of(check_messages(request.chat.messages))


def render(
    tokenizer: BaseTokenizer, prompt: UnrenderedPrompt | str, limit: int, prompt_key: str
) -> NextPrompt:
    """The ids of a prompt; BadRequest where they are more than `limit`. Blocking."""
    if isinstance(prompt, str):
        ids = tokenizer.template.tokenizer.encode(prompt, verbose=False)
        rendered = NextPrompt(ids=ids, outcome="first", reasons=())
    else:
        rendered = prompt.render(tokenizer.template)
    if len(rendered.ids) > limit:
        raise too_long(tokenizer, prompt_key, len(rendered.ids), 1, limit)
    return rendered


def too_long(
    tokenizer: BaseTokenizer, param: str, prompt: int, answer: int, limit: int
) -> BadRequest:
    whose = "the model" if limit == tokenizer.max_positions else "max_seq_length"
    return BadRequest(
        f"{param}: {prompt} tokens, and {answer} of answer, are more than the {limit} of {whose}; "
        "shorten the prompt or lower max_tokens",
        param=param,
        code="context_length_exceeded",
    )
