"""An OpenAI API with scripted replies, over real HTTP.

In:   replies, in order; without any, each is "ok"
Out:  chat completions, completions and responses, whole or streamed as they are asked for
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from hone.server.http import listen


@dataclass
class Reply:
    """One answer."""

    text: str = "ok"
    tools: list[tuple[str, str]] = field(default_factory=list)
    """Tool calls: name and arguments."""
    finish: str = ""
    status: int = 200
    error: dict[str, Any] | None = None
    """The body of a refusal."""
    cut_after: int | None = None
    """The connection breaks after so many chunks of a stream."""
    compressed: bool = False
    usage: bool = True
    """A stream ends with the counts of its tokens, as one that was asked for them."""
    gate: asyncio.Event | None = None
    """It is answered when this is set."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of each choice."""
    top: dict[str, Any] = field(default_factory=dict)
    """Further keys of the answer."""


class Endpoint:
    """Remembers what it was asked."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.app = FastAPI()
        self.app.post("/{path:path}")(self._answer)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def header(self, name: str) -> list[str | None]:
        return [headers.get(name.lower()) for headers, _ in self.requests]

    def reply_to(self, body: dict[str, Any]) -> Reply:
        return self.replies.pop(0) if self.replies else Reply()

    async def _answer(self, request: Request, path: str) -> Response:
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        reply = self.reply_to(body)
        if reply.gate is not None:
            await reply.gate.wait()
        if reply.status >= 400:
            return JSONResponse(reply.error or {"error": {"message": "no"}}, reply.status)
        if body.get("stream"):
            return _stream(reply)
        if path.endswith("responses"):
            return JSONResponse(_responses(reply))
        return JSONResponse(_whole(reply, chat="chat" in path))


def _whole(reply: Reply, *, chat: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tools:
        message["tool_calls"] = [
            {"id": f"t{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(reply.tools)
        ]
    content = {"message": message} if chat else {"text": reply.text}
    finish = reply.finish or ("tool_calls" if reply.tools else "stop")
    return {
        "id": "answer-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, **content, "finish_reason": finish, **reply.more}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        **reply.top,
    }


def _responses(reply: Reply) -> dict[str, Any]:
    content = {"type": "output_text", "text": reply.text, "annotations": []}
    output: list[dict[str, Any]] = [{"type": "message", "role": "assistant", "content": [content]}]
    for i, (name, arguments) in enumerate(reply.tools):
        call = {"type": "function_call", "call_id": f"t{i}", "name": name, "arguments": arguments}
        output.append(call)
    cut = {"reason": "max_output_tokens"} if reply.finish == "length" else None
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "output": output,
        "incomplete_details": cut,
        "usage": {"input_tokens": 4, "output_tokens": 6, "total_tokens": 10},
        **reply.top,
    }


def _chunks(reply: Reply) -> list[dict[str, Any]]:
    head = {"id": "answer-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": letter} for letter in reply.text]
    for i, (name, arguments) in enumerate(reply.tools):
        call = {"index": i, "id": f"t{i}", "type": "function"}
        deltas.append({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": i, "function": {"arguments": part}}]} for part in arguments
        ]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": d, "logprobs": None, "finish_reason": None}]}
        for d in deltas
    ]
    finish = reply.finish or ("tool_calls" if reply.tools else "stop")
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish, **reply.more}
    chunks.append({**head, "choices": [end], **reply.top})
    if reply.usage:
        spent = {"prompt_tokens": 3, "completion_tokens": 2}
        chunks.append({**head, "choices": [], "usage": spent})
    return chunks


def _stream(reply: Reply) -> Response:
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in _chunks(reply)]
    events.append(b"data: [DONE]\n\n")
    if reply.compressed:
        headers = {"content-encoding": "gzip"}
        body = gzip.compress(b"".join(events))
        return Response(body, media_type="text/event-stream", headers=headers)

    async def pieces() -> AsyncIterator[bytes]:
        for i, event in enumerate(events):
            if i == reply.cut_after:
                raise ConnectionAbortedError("cut, as the test asked")
            yield event
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="text/event-stream")


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[str]:
    """Its base URL, ending in /v1, while it is served."""
    async with listen.serving(endpoint.app, grace_s=1) as url:
        yield f"{url}/v1"
