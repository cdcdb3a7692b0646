"""An app on a port: bound first, served then, and known to accept.

In:   an ASGI app and an address
Out:  a bound socket; AppServer, which says when it accepts; the URL of an app while it is served
Used: run.py for `hone serve`; tests and benchmarks for servers in their own process
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from ipaddress import IPv4Network, IPv6Network
from typing import Any

import uvicorn

from hone.errors import ServerError

GRACE_S = 5
"""Requests under way have so long to end when the server stops; then they are cut off."""
BACKLOG = 2048


def bind(host: str = "127.0.0.1", port: int = 0, *, option: str = "--port") -> socket.socket:
    """A socket at that address; port 0 takes a free one. `option` is what the user would change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol, or asyncio leaves Nagle on and every answer takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


class AppServer(uvicorn.Server):
    """A uvicorn server that says when it accepts, and leaves signals to others."""

    def __init__(
        self, app: Any, *, grace_s: int = GRACE_S, proxies: Sequence[IPv4Network | IPv6Network] = ()
    ) -> None:
        """`proxies`: who may say for whom they ask; by default uvicorn believes this machine."""
        config = uvicorn.Config(
            app,
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
