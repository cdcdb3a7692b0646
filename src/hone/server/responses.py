"""Responses of the OpenAI API, whole or streamed, sent for as long as the client is connected.

In:   a Generation, before it runs
Out:  the JSON of chat completions and completions, or their chunks as server-sent events

Every sampled token has its log-probability in the response, the end token too, streamed or not, also
while the text of a tool call is held back: a chunk carries the log-probabilities of all tokens
since the last one, even where its delta is empty. `token_ids`, `prompt_token_ids` and `policy_step`
are always there; in a stream they come with the last chunk of each choice.

Nothing is sent before there is something to send: until the first event an error still becomes an
HTTP status. After it, an error becomes an event and the stream ends without [DONE].
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hone.errors import HoneError
from hone.inference.base import SampledToken
from hone.server.generation import Choice, Generation, Piece
from hone.wire.openai_chat import finite, usage
from hone.wire.stream import write_event

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers the stream would undo it
]


class UntilDisconnect(Response):
    """Runs `answer(scope, receive, send)`, and cancels it when the client disconnects."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_disconnect(receive))
        leaving.add_done_callback(lambda _: answering.cancel())
        try:
            await answering
        except (asyncio.CancelledError, HoneError):
            if not leaving.done():
                raise
        finally:
            leaving.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events over one ASGI response; the first event starts it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, *events: dict[str, Any], done: bool = False) -> None:
        """`done` ends the stream with [DONE]."""
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            await self._send(start)
        body = b"".join(map(write_event, events)) + (write_event("[DONE]") if done else b"")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if done:
            await self.end()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class LogprobWriter:
    """Writes sampled tokens as `logprobs` of a chat completion or a completion."""

    def __init__(self, piece: Callable[[int], bytes], *, as_ids: bool) -> None:
        """`piece` gives the bytes of a token; `as_ids` names tokens `token_id:N`."""
        self._piece = piece
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        content = [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(other, logprob) for other, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def text(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
        """`offset` is where the text of these tokens begins."""
        lengths = [len(self._piece(token.id).decode(errors="replace")) for token in tokens]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._name(other): finite(logprob) for other, logprob in token.top}
                for token in tokens
            ],
            "text_offset": list(accumulate(lengths[:-1], initial=offset)),
        }

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return self._piece(token).decode(errors="replace")

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = list(self._piece(token))
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": spelling}


class CompletionResponse:
    """The response to one request: a chat completion, or the completion of a text."""

    def __init__(
        self, generation: Generation, logprobs: LogprobWriter | None, *, chat: bool
    ) -> None:
        """Without a writer the response has no log-probabilities."""
        self._generation = generation
        self._logprobs = logprobs
        self._chat = chat
        self._streamed: dict[int, int] = {}
        """Characters that were sent of each choice, once it has begun."""

    async def whole(self) -> dict[str, Any]:
        """Generate, and return the response as one object."""
        await self._generation.run()
        choices: list[dict[str, Any]] = []
        for choice in self._generation.choices:
            reply = choice.reply()
            content = {"message": {**reply.message, "refusal": None}}
            choices.append(
                self._end(choice, content if self._chat else {"text": reply.content}, choice.tokens)
            )
        head = self._head("chat.completion" if self._chat else "text_completion")
        return {**head, "choices": choices, "usage": self._usage(), **self._prompt()}

    async def stream(self, out: EventStream, *, include_usage: bool) -> None:
        """Generate, sending chunks; the last one of each choice follows when all are recorded."""
        head = self._head("chat.completion.chunk" if self._chat else "text_completion")
        no_usage: dict[str, Any] = {"usage": None} if include_usage else {}

        async def send(piece: Piece) -> None:
            if choices := self._chunks(piece):
                await out.send(*({**head, "choices": [c], **no_usage} for c in choices))

        await self._generation.run(send)
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        ends = [self._end(choice, empty, ()) for choice in self._generation.choices]
        await out.send(*({**head, "choices": [c], **no_usage, **self._prompt()} for c in ends))
        usage_chunk = {**head, "choices": [], "usage": self._usage()}
        await out.send(*([usage_chunk] if include_usage else []), done=True)

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece becomes; the last has all its log-probabilities."""
        index, text = piece.choice.index, "".join(d.get("content", "") for d in piece.deltas)
        opening = [] if index in self._streamed else [{"role": "assistant", "content": ""}]
        offset = self._streamed.get(index, 0)
        self._streamed[index] = offset + len(text)
        contents: list[dict[str, Any]] = [{"text": text}] if text or self._logprobs else []
        if self._chat:
            contents = [{"delta": delta} for delta in (*opening, *piece.deltas)]
            contents = contents or ([{"delta": {}}] if self._logprobs else [])
        last = len(contents) - 1
        return [
            self._choice(index, content, piece.tokens if i == last else (), offset)
            for i, content in enumerate(contents)
        ]

    def _end(
        self, choice: Choice, content: dict[str, Any], tokens: Sequence[SampledToken]
    ) -> dict[str, Any]:
        """A whole choice, or its last chunk, with what hone adds."""
        reply, step = choice.reply(), self._generation.context.policy.step
        # Tool calls that do not parse; their text is in the content.
        malformed = {"malformed": list(reply.malformed)} if reply.malformed else {}
        recorded = {"token_ids": choice.ids, "policy_step": step, "call_id": choice.id}
        written = self._choice(choice.index, content, tokens, 0)
        return {**written, "finish_reason": reply.finish, **recorded, **malformed}

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[SampledToken], offset: int
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and tokens:
            writer = self._logprobs
            logprobs = writer.chat(tokens) if self._chat else writer.text(tokens, offset)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def _head(self, kind: str) -> dict[str, Any]:
        generation, policy = self._generation, self._generation.context.policy
        fingerprint = policy.adapter.sha256 if policy.adapter else generation.fingerprint
        return {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + generation.id,
            "object": kind,
            "created": int(generation.created_at),
            "model": policy.asked,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    def _prompt(self) -> dict[str, Any]:
        generation = self._generation
        step, ignored = generation.context.policy.step, generation.not_applicable
        prompt = {"prompt_token_ids": generation.prompt.ids, "policy_step": step}
        return prompt | ({"not_applicable": ignored} if ignored else {})

    def _usage(self) -> dict[str, int]:
        return usage(len(self._generation.prompt.ids), self._generation.num_sampled)
