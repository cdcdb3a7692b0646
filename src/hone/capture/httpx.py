"""Patch httpx and httpx2 to mark and record calls to an OpenAI or Anthropic API.

In:   the scope that is open where a request is sent
Out:  X-Hone-Rollout (and X-Hone-Function) on POSTs to .../chat/completions, .../completions,
      .../responses and .../v1/messages; those calls in the scope's recorder, if it has one

All clients of the two libraries call `send`, whatever their transport. It is replaced on the four
client classes while scopes are open, and restored afterwards. openai 2 uses httpx and openai 3
httpx2, so both are patched; where one is an alias of the other, their classes are patched once.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from hone.capture.base import Patch, Scope, current, host_of
from hone.capture.branches import Branch
from hone.capture.openai import Exchange
from hone.wire.rollout import FUNCTION_HEADER

LIBRARIES = ("httpx", "httpx2")
_PATHS = ("/chat/completions", "/completions", "/responses")
_MESSAGES = "/v1/messages"
_RETRIES = "x-stainless-retry-count"
"""The header in which the openai client counts its retries."""


@functools.cache
def client_patches() -> tuple[Patch, ...]:
    """`send` of the client classes of the installed libraries."""
    # Imported even if the agent has not done so yet: it may import them inside the scope.
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    libraries = [importlib.import_module(name) for name in installed]
    clients = {kind for lib in libraries for kind in (lib.Client, lib.AsyncClient)}
    return tuple((client, "send", _recording) for client in clients)


def _recording(send: Any) -> Callable[..., Any]:
    # Not a coroutine function, even for an async `send`: it returns what `send` returns.
    @functools.wraps(send)
    def sending(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # As a method: another patch may have put a descriptor there that has to be bound.
        original, scope = send.__get__(self, type(self)), current()
        if scope is None or not _is_call(request):
            return original(request, *args, **kwargs)
        scope = scope.at_caller()
        _mark(scope, request)
        exchange = _exchange(scope, request)
        if exchange is None:
            return original(request, *args, **kwargs)
        recorder = scope.recorder
        assert recorder is not None, "it created the exchange"
        branch = Branch.here(recorder.trunk)

        def answered(response: Any) -> Any:
            recorder.add_answer(exchange.index, branch)
            exchange.answered(response, streamed=bool(kwargs.get("stream")))
            return response

        try:
            answer = original(request, *args, **kwargs)
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
    path = request.url.path.rstrip("/")
    return request.method == "POST" and (path.endswith(_PATHS) or _is_message(request))


def _is_message(request: Any) -> bool:
    """Whether the request belongs to the Anthropic Messages API.

    The path alone is not enough: other services have a /messages route. Anthropic's clients also
    send the API version in a header.
    """
    path = request.url.path.rstrip("/")
    return path.endswith(_MESSAGES) and "anthropic-version" in request.headers


def _mark(scope: Scope, request: Any) -> None:
    if scope.host is not None and host_of(request.url.host) != scope.host:
        return
    if scope.recorder is not None and scope.recorder.closed:
        # Not an error that agents retry on: the rollout was scored without this call, and the
        # server would record it as part of the rollout.
        raise asyncio.CancelledError(f"rollout {scope.rollout!r} is over; it makes no more calls")
    for name, value in scope.headers.items():
        # A header that the agent set takes precedence: it may name another rollout on purpose.
        request.headers.setdefault(name, value)


def _exchange(scope: Scope, request: Any) -> Exchange | None:
    """The call in the scope's recorder that this request belongs to."""
    recorder = scope.recorder
    function = request.headers.get(FUNCTION_HEADER) or scope.function
    if recorder is None or recorder.closed:
        return None
    try:
        sent = request.content
    except RuntimeError:  # a streamed body
        sent = b""
    if request.headers.get(_RETRIES, "0") != "0":
        failed = recorder.resume(
            lambda e: isinstance(e, Exchange) and e.resume_if_retry(function, sent)
        )
        if isinstance(failed, Exchange):
            return failed
    host = host_of(request.url.host)
    is_message = _is_message(request)
    return recorder.add_call(
        lambda index: Exchange(index, function, host, sent, recorder, is_message=is_message)
    )
