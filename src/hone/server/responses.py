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
    """Writes sampled tokens as entries of `logprobs`."""

    def __init__(self, piece: Callable[[int], bytes], *, as_ids: bool) -> None:
        """`piece` gives the bytes of a token; `as_ids` names tokens `token_id:N`."""
        self._piece = piece
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """`logprobs` of a chat completion."""
        content = [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(other, logprob) for other, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def text(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
        """`logprobs` of a completion; `offset` is where the text of these tokens begins."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._piece(token.id).decode(errors="replace"))
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._name(other): finite(logprob) for other, logprob in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return self._piece(token).decode(errors="replace")

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = list(self._piece(token))
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": spelling}


class CompletionResponse:
    """The response to one request; subclasses write its choices."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, generation: Generation, logprobs: LogprobWriter | None) -> None:
        """Without a writer the response has no log-probabilities."""
        self._generation = generation
        self._logprobs = logprobs
        self._streamed: dict[int, int] = {}
        """Characters that were sent of each choice."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece becomes."""
        raise NotImplementedError

    def last_chunk(self, choice: Choice) -> dict[str, Any]:
        """The end of a streamed choice."""
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        """Generate, and return the response as one object."""
        await self._generation.run()
        return {
            **self._head(self.kind),
            "choices": [
                {"index": choice.index, **self.choice(choice), **self._recorded(choice)}
                for choice in self._generation.choices
            ],
            "usage": self._usage(),
            **self._prompt(),
        }

    async def stream(self, out: EventStream, *, include_usage: bool) -> None:
        """Generate, sending chunks; the last one of each choice follows when all are recorded."""
        head = self._head(self.chunk_kind)
        no_usage: dict[str, Any] = {"usage": None} if include_usage else {}

        async def send(piece: Piece) -> None:
            if choices := self.chunks(piece):
                await out.send(*({**head, "choices": [c], **no_usage} for c in choices))

        await self._generation.run(send)
        ends = [
            {"index": choice.index, **self.last_chunk(choice), **self._recorded(choice)}
            for choice in self._generation.choices
        ]
        await out.send(*({**head, "choices": [c], **no_usage, **self._prompt()} for c in ends))
        usage_chunk = {**head, "choices": [], "usage": self._usage()}
        await out.send(*([usage_chunk] if include_usage else []), done=True)

    def _head(self, kind: str) -> dict[str, Any]:
        generation, policy = self._generation, self._generation.context.policy
        fingerprint = policy.adapter.sha256 if policy.adapter else generation.fingerprint
        return {
            "id": self.id_prefix + generation.id,
            "object": kind,
            "created": int(generation.created_at),
            "model": policy.asked,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    def _recorded(self, choice: Choice) -> dict[str, Any]:
        """What hone adds to every choice: its ids, the step that answered, and its recorded call."""
        step = self._generation.context.policy.step
        return {"token_ids": choice.ids, "policy_step": step, "call_id": choice.id}

    def _prompt(self) -> dict[str, Any]:
        generation = self._generation
        step, ignored = generation.context.policy.step, generation.not_applicable
        prompt = {"prompt_token_ids": generation.prompt.ids, "policy_step": step}
        return prompt | ({"not_applicable": ignored} if ignored else {})

    def _usage(self) -> dict[str, int]:
        return usage(len(self._generation.prompt.ids), self._generation.num_sampled)


class ChatResponse(CompletionResponse):
    """chat.completion and chat.completion.chunk."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        index = piece.choice.index
        deltas = list(piece.deltas)
        if index not in self._streamed:
            self._streamed[index] = 0
            deltas.insert(0, {"role": "assistant", "content": ""})
        if not deltas and self._logprobs is not None:
            deltas = [{}]
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if self._logprobs is not None and piece.tokens:
            choices[-1]["logprobs"] = self._logprobs.chat(piece.tokens)
        return choices

    def last_chunk(self, choice: Choice) -> dict[str, Any]:
        finish = choice.reply().finish
        return {"delta": {}, "logprobs": None, "finish_reason": finish} | _malformed(choice)

    def choice(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply()
        return {
            "message": {**reply.message, "refusal": None},
            "logprobs": None if self._logprobs is None else self._logprobs.chat(choice.tokens),
            "finish_reason": reply.finish,
        } | _malformed(choice)


class TextResponse(CompletionResponse):
    """text_completion, streamed or not."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        index = piece.choice.index
        text = "".join(delta.get("content", "") for delta in piece.deltas)
        if not text and self._logprobs is None:
            return []
        offset = self._streamed.get(index, 0)
        self._streamed[index] = offset + len(text)
        logprobs = self._write_logprobs(piece.tokens, offset)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]

    def last_chunk(self, choice: Choice) -> dict[str, Any]:
        return {"text": "", "logprobs": None, "finish_reason": choice.reply().finish}

    def choice(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply()
        logprobs = self._write_logprobs(choice.tokens, 0)
        return {"text": reply.content, "logprobs": logprobs, "finish_reason": reply.finish}

    def _write_logprobs(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.text(tokens, offset)


def _malformed(choice: Choice) -> dict[str, Any]:
    """Tool calls that do not parse; their text is in the content."""
    malformed = choice.reply().malformed
    return {"malformed": list(malformed)} if malformed else {}
