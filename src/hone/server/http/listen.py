"""Listening sockets and the HTTP server, with limits on connections.

In:   an ASGI app and an address
Out:  a bound socket; AppServer, which signals when it accepts; the URL of an app while it is served

A server without free file descriptors can neither accept connections nor open its own files. So the
process's limit is raised, connections beyond `max_connections` are closed as soon as they are
accepted, and a connection whose request does not arrive completely, or whose client does not read the
response, is closed after a timeout.
"""

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import uvicorn

from hone.errors import ServerError
from hone.files.logs import say
from hone.server.settings import Settings
from hone.wire.limits import TimedProtocol

GRACE_S = 5
"""Seconds that running requests get to finish when the server stops."""
BACKLOG = 2048
RESERVED = 256
"""File descriptors reserved for files, SQLite, engines and learners."""

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
        with suppress(OSError, ValueError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def max_connections(descriptors: int, ports: int) -> int:
    """Connections of each port, so that all ports together leave descriptors for files."""
    reserved = min(RESERVED, descriptors // 2)
    return max(1, (descriptors - reserved) // ports)


def bind(host: str = "127.0.0.1", port: int = 0, *, option: str = "--port") -> socket.socket:
    """A socket bound to that address; port 0 picks a free port. Errors name `option`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol set, or asyncio leaves Nagle's algorithm on and every answer takes 40 ms
    # longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Now, because two sockets may be bound to one port until one of them listens.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ServerError(
                f"--host {host}: this machine cannot listen there ({error.strerror}). Name one of its "
                "own addresses: 127.0.0.1 for this machine alone, 0.0.0.0 for all networks."
            ) from None
        raise ServerError(
            f"{option} {port}: cannot listen on {host}:{port} ({error.strerror}). "
            "Stop what uses it, or choose another port."
        ) from None
    return bound


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


class _Protocol(TimedProtocol):
    """Also refuses connections above the limit."""

    max_connections: int | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        limit = self.max_connections
        if limit is not None and len(self.connections) > limit:
            say("a connection is refused: too many are open", max_connections=limit)
            transport.write(_REFUSAL % (len(_FULL), _FULL))
            transport.close()

    def stop_writing(self, unread: int) -> None:
        say(
            "a connection is closed: its client does not read the response",
            write_timeout_s=self.write_timeout_s,
            unread_bytes=unread,
        )
        super().stop_writing(unread)


class AppServer(uvicorn.Server):
    """A uvicorn server that signals when it accepts, and installs no signal handlers."""

    def __init__(self, app: Any, settings: Settings, *, grace_s: int = GRACE_S) -> None:
        proxies = settings.forwarded_allow_ips
        limits = {
            "header_timeout_s": settings.header_timeout_s,
            "write_timeout_s": settings.write_timeout_s,
            "max_connections": settings.max_connections,
        }
        config = uvicorn.Config(
            app,
            http=type("_Http", (_Protocol,), limits),
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
    server = AppServer(app, Settings(), grace_s=grace_s)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await server.ready.wait()
    try:
        yield f"http://127.0.0.1:{port_of(bound)}"
    finally:
        server.should_exit = True
        await task
