"""Put the scope on the wire: a header on the OpenAI calls of any httpx or httpx2 client.

In:   the scope that is open where a request is sent
Out:  X-Hone-Rollout (and X-Hone-Function) on POSTs to .../chat/completions, .../completions and
      .../responses
Used: capture/scope.py, while at least one scope is open

The one seam all clients of the two libraries pass, whatever their transport, is `send`: it is
replaced on the four client classes and put back. openai 2 speaks httpx, openai 3 speaks httpx2,
so both are watched; under httpx2's alias they are one library, and its classes are taken once.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from hone.capture.scope import current, host_of

LIBRARIES = ("httpx", "httpx2")
_PATHS = ("/chat/completions", "/completions", "/responses")


class HttpxTap:
    """Marks requests of httpx and httpx2, sync and async."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []

    def attach(self) -> None:
        for kind in _clients():
            original = kind.__dict__["send"]
            marked = _marking(original)
            kind.send = marked
            self._replaced.append((kind, original, marked))

    def detach(self) -> None:
        for kind, original, marked in self._replaced:
            # Somebody who patched `send` over us calls ours, which outside scopes does nothing;
            # taking ours away would take theirs away too.
            if kind.__dict__["send"] is marked:
                kind.send = original
        self._replaced.clear()


@functools.cache
def _clients() -> frozenset[Any]:
    """The client classes there are."""
    # Imported although the agent may not have done so yet: it may do it inside the scope.
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    libraries = [importlib.import_module(name) for name in found]
    return frozenset(kind for lib in libraries for kind in (lib.Client, lib.AsyncClient))


def _marking(send: Callable[..., Any]) -> Callable[..., Any]:
    # Not a coroutine function even over an async `send`: it returns what that returns.
    @functools.wraps(send)
    def sending(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _mark(request)
        return send(self, request, *args, **kwargs)

    return sending


def _mark(request: Any) -> None:
    scope = current()
    if scope is None or request.method != "POST":
        return
    if not request.url.path.rstrip("/").endswith(_PATHS):
        return
    if scope.host is not None and host_of(request.url.host) != scope.host:
        return
    for name, value in scope.headers.items():
        # What the agent set itself wins: it may name another rollout on purpose.
        request.headers.setdefault(name, value)
