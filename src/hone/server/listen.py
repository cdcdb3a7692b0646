"""Listening sockets and the HTTP server, with limits on connections.

In:   an ASGI app and an address
Out:  a bound socket; AppServer, which signals when it accepts; the URL of an app while it is served

A server that runs out of file descriptors can neither accept nor open its own files. So the limit
of the process is raised, connections beyond `max_connections` are refused when they are accepted,
and a connection whose request does not arrive completely is closed.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from ipaddress import IPv4Network, IPv6Network
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.errors import ServerError
from hone.logs import say

GRACE_S = 5
"""Seconds that requests have to end when the server stops; then they are cut off."""
BACKLOG = 2048
HEADER_TIMEOUT_S = 30.0
RESERVED = 256
"""File descriptors that connections leave to files, SQLite, engines and learners."""

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
_FULL = (
    b'{"error":{"message":"too many connections are open (max_connections); try again in a second"'
    b',"type":"server_error","param":null,"code":null}}'
)


def raise_descriptor_limit() -> int:
    """Raise the limit of open files to the hard limit; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def max_connections(descriptors: int, ports: int) -> int:
    """Connections of each port, so that all ports together leave descriptors for files."""
    reserved = min(RESERVED, descriptors // 2)
    return max(1, (descriptors - reserved) // ports)


class Listener(socket.socket):
    """A listening socket that refuses connections beyond `max_connections` with 503."""

    max_connections: int | None = None
    connections = 0
    _logged_at = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if self.max_connections is not None and self.connections >= self.max_connections:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.send(_REFUSAL % (len(_FULL), _FULL))
            connection.close()
            self._log()
            # asyncio goes on with its loop after this one, which has ended.
            raise ConnectionAbortedError
        self.connections += 1
        return _Accepted(self, connection), address

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged_at > 1:  # one line a second, however many are refused
            self._logged_at = now
            open_now = {"open": self.connections, "max_connections": self.max_connections}
            say("connections are refused: too many are open", level=logging.WARNING, **open_now)


class _Accepted(socket.socket):
    """A connection, counted by its listener until it is closed."""

    def __init__(self, listener: Listener, plain: socket.socket) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._listener: Listener | None = listener

    def close(self) -> None:
        if self._listener is not None:
            self._listener.connections -= 1
            self._listener = None
        super().close()


def bind(host: str = "127.0.0.1", port: int = 0, *, option: str = "--port") -> Listener:
    """A socket at that address; port 0 takes a free one. `option` is what the user would change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol, or asyncio leaves Nagle on and every answer takes 40 ms longer.
    bound = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ServerError(
            f"{option} {port}: cannot listen on {host}:{port} ({error.strerror}). "
            "Stop what uses it, or choose another port."
        ) from None
    return bound


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


class _TimedProtocol(H11Protocol):
    """Closes a connection whose next request has not arrived within `header_timeout_s`.

    uvicorn has a timeout only for connections on which nothing at all is sent after a response.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[
            0
        ]:  # the next request has begun; else uvicorn's own timeout runs
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock while headers are missing, or a body that nobody reads."""
        state = self.conn.their_state
        unread = state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        if state is not h11.IDLE and not unread:
            self._unwatch()
        elif self._overdue is None:  # more bytes of the same request do not start it again
            self._overdue = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _unwatch(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing():
            self.transport.close()


class AppServer(uvicorn.Server):
    """A uvicorn server that signals when it accepts, and installs no signal handlers."""

    def __init__(
        self,
        app: Any,
        *,
        grace_s: int = GRACE_S,
        proxies: Sequence[IPv4Network | IPv6Network] = (),
        header_timeout_s: float = HEADER_TIMEOUT_S,
    ) -> None:
        """`proxies`: networks whose X-Forwarded headers are believed; uvicorn trusts 127.0.0.1."""
        config = uvicorn.Config(
            app,
            http=type("_Http", (_TimedProtocol,), {"header_timeout_s": header_timeout_s}),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=grace_s,
            timeout_keep_alive=75,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=[str(network) for network in proxies],
        )
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def serving(app: Any, *, grace_s: int = GRACE_S) -> AsyncIterator[str]:
    """The app's address on this machine, while it is served."""
    bound = bind()
    server = AppServer(app, grace_s=grace_s)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not ready.done():  # it ended instead: say why
            ready.cancel()
            await task
        yield f"http://127.0.0.1:{port_of(bound)}"
    finally:
        server.should_exit = True
        await task
