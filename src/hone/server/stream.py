"""Answer a request for as long as its client is there.

In:   a coroutine that answers by sending
Out:  WhileConnected, a response that runs it and cancels it when the client leaves;
      EventStream, which sends server-sent events and begins with the first of them

Nothing is sent before there is something to send: until the first event an error still becomes an
HTTP status. After it, an error becomes an event of its own and the stream ends without [DONE].
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hone.errors import HoneError
from hone.server.openai import event

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream would undo it
]


class WhileConnected(Response):
    """Runs `answer(scope, receive, send)`; when the client leaves, it is cancelled."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            left = not answering.done()
            if left:
                answering.cancel()
            with suppress(
                asyncio.CancelledError, ClientDisconnect, *((HoneError,) if left else ())
            ):
                await answering


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events over one ASGI response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def say(self, *events: dict[str, Any] | bytes) -> None:
        if not self.begun:
            self.begun = True
            start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            await self._send(start)
        body = b"".join(e if isinstance(e, bytes) else event(e) for e in events)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def done(self) -> None:
        await self.say(event("[DONE]"))
        await self.end()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
