"""Limits on request bodies by route and in total memory; routes for large ones.

In:   the ASGI `receive` of a request, and its headers
Out:  BodyReader, a `receive` that raises HTTPException: 413 too large, 408 too slow, 429 too many;
      routes whose large bodies are not parsed on the event loop

HTTPException is the one kind that FastAPI lets through while it reads a body. A body is parsed on the
event loop, and limited to `max_small_body_bytes`, unless its route accepts large ones.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hone.server.settings import Settings
from hone.wire.limits import LimitedBody, too_large

AnswerRaw = Callable[[bytes, Callable[[], None]], Awaitable[Response]]
"""Handles a request body, and calls its second argument when the body is no longer in memory."""

_JSON = re.compile(r"application/([^/]*\+)?json")


class BodyBudget:
    """Bytes of large bodies that a server may hold at the same time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0

    def reserve(self, size: int) -> None:
        """Raise HTTPException if other bodies already use too much; a single body always fits."""
        if self.reserved and self.reserved + size > self.limit:
            raise HTTPException(
                429,
                f"large requests of {self.reserved} bytes are being read, and at most {self.limit} "
                "(max_bodies_bytes) at a time; try again in a second",
                headers={"Retry-After": "1"},
            )
        self.reserved += size

    def release(self, size: int) -> None:
        self.reserved -= size


class BodyReader(LimitedBody):
    """The `receive` of one request."""

    size_setting = "max_body_bytes"
    slow_remedy = "send it faster, or raise body_timeout_s of the server"

    def __init__(
        self,
        receive: Receive,
        headers: Mapping[str, str],
        settings: Settings,
        budget: BodyBudget,
    ) -> None:
        """Raises HTTPException if Content-Length already exceeds a limit."""
        self._small_bytes = settings.max_small_body_bytes
        self._large_bytes = settings.large_body_bytes
        self._budget = budget
        self._reserved = 0
        self.accepts_large = False
        """Set, before it is read, by a route that parses large bodies in another process."""
        super().__init__(
            receive, headers, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        self._reserve(self.announced)

    async def __call__(self) -> Message:
        was_complete, message = self.complete, await super().__call__()
        if not was_complete:
            self._reserve(self.received)
        return message

    def release(self) -> None:
        """The body is no longer in memory."""
        self._budget.release(self._reserved)
        self._reserved = 0

    def _reserve(self, size: int) -> None:
        if size > max(self._large_bytes, self._reserved):
            self._budget.reserve(size - self._reserved)
            self._reserved = size

    def check(self, size: int) -> None:
        super().check(size)
        if size > self._small_bytes and not self.accepts_large:
            raise too_large(self._small_bytes, "max_small_body_bytes")


def is_json(content_type: str) -> bool:
    """Whether FastAPI would parse the body. Web pages can send other types without preflight."""
    return _JSON.fullmatch(content_type.partition(";")[0].strip().lower()) is not None


class JsonRoute(APIRoute):
    """A route that refuses lone surrogates in its JSON body: they cannot be written as UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride] - a coroutine is awaitable
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return checked


class _JsonRequest(Request):
    async def json(self) -> Any:
        value = await super().json()
        if b"\\u" in await self.body():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                text = "the body holds half of a surrogate pair; send whole characters"
                raise HTTPException(422, text) from None
        return value


class PlainRoute(APIRoute):
    """A route that FastAPI documents, but that app.py calls directly.

    Its endpoint takes a Request and returns a Response, so FastAPI would only add a third of a
    millisecond.
    """

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def raw_body_route(answer: AnswerRaw) -> type[APIRoute]:
    """A route that FastAPI documents by its endpoint, and that leaves JSON bodies to `answer`."""

    class RawBodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride] - a coroutine is awaitable
            refuse = super().get_route_handler()

            async def handle(request: Request) -> Response:
                reader: BodyReader = request.scope["hone.body"]
                reader.accepts_large = True
                if not is_json(request.headers.get("content-type", "")):
                    return await refuse(request)
                # Not `request` itself: it would keep the body in memory until the response is sent.
                body = await Request(request.scope, request.receive).body()
                return await answer(body, reader.release)

            return handle

    return RawBodyRoute
