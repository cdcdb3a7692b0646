"""The calls of any httpx or httpx2 client to an OpenAI API: mark them with their scope, see them.

In:   the scope that is open where a request is sent
Out:  X-Hone-Rollout (and X-Hone-Function) on POSTs to .../chat/completions, .../completions and
      .../responses; those calls in the scope's recorder, if it has one

The one seam all clients of the two libraries pass, whatever their transport, is `send`: it is
replaced on the four client classes and put back. openai 2 speaks httpx, openai 3 speaks httpx2,
so both are watched; under httpx2's alias they are one library, and its classes are taken once.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from hone.capture.base import Scope, current, host_of
from hone.capture.branches import Branch
from hone.capture.openai import Exchange

LIBRARIES = ("httpx", "httpx2")
_PATHS = ("/chat/completions", "/completions", "/responses")
_RETRIES = "x-stainless-retry-count"
"""Where the openai client counts how often it has sent a request before."""


class HttpxTap:
    """Marks and sees requests of httpx and httpx2, sync and async."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []

    def attach(self) -> None:
        for kind in _clients():
            original = kind.__dict__["send"]
            tapped = _tapped(original)
            kind.send = tapped
            self._replaced.append((kind, original, tapped))

    def detach(self) -> None:
        for kind, original, tapped in self._replaced:
            # Somebody who patched `send` over us calls ours, which outside scopes does nothing;
            # taking ours away would take theirs away too.
            if kind.__dict__["send"] is tapped:
                kind.send = original
        self._replaced.clear()


@functools.cache
def _clients() -> frozenset[Any]:
    """The client classes there are."""
    # Imported although the agent may not have done so yet: it may do it inside the scope.
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    libraries = [importlib.import_module(name) for name in found]
    return frozenset(kind for lib in libraries for kind in (lib.Client, lib.AsyncClient))


def _tapped(send: Callable[..., Any]) -> Callable[..., Any]:
    # Not a coroutine function even over an async `send`: it returns what that returns.
    @functools.wraps(send)
    def sending(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is None or not _is_call(request):
            return send(self, request, *args, **kwargs)
        _mark(scope, request)
        exchange = _exchange(scope, request)
        if exchange is None:
            return send(self, request, *args, **kwargs)
        recorder = scope.recorder
        assert recorder is not None, "it made the exchange"
        branch = Branch.here(recorder.trunk)

        def answered(response: Any) -> Any:
            recorder.add_answer(exchange.index, branch)
            exchange.answered(response, streamed=bool(kwargs.get("stream")))
            return response

        try:
            answer = send(self, request, *args, **kwargs)
            if inspect.isawaitable(answer):
                return _awaited(answer, exchange, answered)
        except BaseException as error:
            exchange.ended(error)
            raise
        return answered(answer)

    return sending


async def _awaited(
    answer: Awaitable[Any], exchange: Exchange, answered: Callable[[Any], Any]
) -> Any:
    try:
        response = await answer
    except BaseException as error:
        exchange.ended(error)
        raise
    return answered(response)


def _is_call(request: Any) -> bool:
    return request.method == "POST" and request.url.path.rstrip("/").endswith(_PATHS)


def _mark(scope: Scope, request: Any) -> None:
    if scope.host is not None and host_of(request.url.host) != scope.host:
        return
    if scope.recorder is not None and scope.recorder.closed:
        # Nothing an agent retries on: the rollout was scored without this call, and the server
        # would record it as part of it.
        raise asyncio.CancelledError(f"rollout {scope.rollout!r} is over; it makes no more calls")
    for name, value in scope.headers.items():
        # What the agent set itself wins: it may name another rollout on purpose.
        request.headers.setdefault(name, value)


def _exchange(scope: Scope, request: Any) -> Exchange | None:
    """The entry in the scope's recorder that this request belongs to."""
    recorder, function = scope.recorder, scope.function
    if recorder is None or recorder.closed:
        return None
    try:
        sent = request.content
    except RuntimeError:  # a body that is read as it is sent
        sent = b""
    if request.headers.get(_RETRIES, "0") != "0":
        held = recorder.resume(lambda e: isinstance(e, Exchange) and e.takes_up(function, sent))
        if isinstance(held, Exchange):
            return held
    host = host_of(request.url.host)
    return recorder.add_call(lambda index: Exchange(index, function, host, sent))
