"""Run a server until it is told to stop.

In:   Settings
Out:  two ports that answer; on SIGTERM or Ctrl-C a running job goes back to the queue
Used: `hone serve`, and LocalBackend in a child process

Ports are bound before anything else, so that one in use is an error at once. One server owns a
root: a second one is refused, because two would take each other's jobs.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import uvicorn
from filelock import FileLock, Timeout

from hone.errors import ServerError
from hone.server.app import State, create_apps
from hone.server.auth import settle_key
from hone.server.settings import Settings
from hone.server.telemetry import say, start_logging, stop_logging


def serve(settings: Settings, *, echo: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or, for an owned server, the end of stdin."""
    settings = settings.model_copy(update={"root": settings.root.resolve()})
    settings.root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(settings.root / "server.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ServerError(
            f"--root {settings.root}: another server uses it. Stop that one, or name another root."
        ) from None
    settings, fresh_key = settle_key(settings)
    control = _bind(settings.host, settings.port, "--port")
    inference = None
    if settings.inference_port is not None:
        inference = _bind(settings.host, settings.inference_port, "--inference-port")
    settings = settings.model_copy(
        update={"port": _port(control), "inference_port": inference and _port(inference)}
    )
    start_logging(settings)
    try:
        asyncio.run(_serve(settings, control, inference, fresh_key, echo))
    finally:
        stop_logging()
        lock.release()


async def _serve(
    settings: Settings,
    control: socket.socket,
    inference: socket.socket | None,
    fresh_key: str | None,
    echo: Callable[[str], None],
) -> None:
    state = State.open(settings)
    apps = create_apps(state)
    sockets = [control, *([inference] if inference else [])]
    servers = [_server(app) for app, _ in zip(apps, sockets, strict=False)]

    closing: list[asyncio.Task[None]] = []

    def stop() -> None:
        # The job goes back to the queue first; streams that wait for it then have little to wait for.
        closing.append(asyncio.create_task(state.service.close()))
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if os.environ.get("HONE_OWNED") == "1":
        loop.add_reader(sys.stdin.fileno(), _watch_owner, loop, stop)
    async with state.running():
        say("server started", root=settings.root, port=settings.port, pid=os.getpid())
        tasks = [
            asyncio.create_task(server.serve(sockets=[bound]))
            for server, bound in zip(servers, sockets, strict=True)
        ]
        for server in servers:
            await server.ready.wait()
        for line in banner(state, fresh_key):
            echo(line)
        _tell_owner(settings)
        await asyncio.gather(*tasks)
        say("server stopping")


class _Server(uvicorn.Server):
    """A uvicorn server that says when it accepts, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def capture_signals(self) -> Any:
        return nullcontext()


def _server(app: Any) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    return _Server(config)


def banner(state: State, fresh_key: str | None) -> list[str]:
    """Where it listens, what it serves, how to try it."""
    settings = state.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    control = f"http://{host}:{settings.port}"
    openai = f"http://{host}:{settings.inference_port or settings.port}/v1"
    records = state.models.list()
    names = ", ".join(f"{r.key.name} (on {r.spec.base_model})" for r in records)
    key = '-H "Authorization: Bearer $HONE_API_KEY" ' if settings.api_key else ""
    model = records[0].key.name if records else "smollm2-135m-instruct"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}]})
    lines = [
        f"training API  {control}",
        f"OpenAI API    {openai}",
        f"state         {settings.root}",
        f"log           {settings.log_file}",
        f"models        {names or 'none registered yet; base models answer by their name'}",
    ]
    if fresh_key is not None:
        lines.append(
            f"API key       {fresh_key}   (shown once; kept in {settings.root / 'api_key'})"
        )
    lines += [
        f"trusts        {network} without a key, on the training API"
        for network in settings.trust_network
    ]
    return [
        *lines,
        "",
        "Try it:",
        f"  curl {openai}/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
    ]


def _bind(host: str, port: int, option: str) -> socket.socket:
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


def _port(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def _tell_owner(settings: Settings) -> None:
    """One JSON line to whoever waits for this server, and no polling on their side."""
    descriptor = os.environ.get("HONE_READY_FD")
    if descriptor is None:
        return
    line = {
        "host": settings.host,
        "port": settings.port,
        "inference_port": settings.inference_port,
        "pid": os.getpid(),
        "log": str(settings.log_file),
    }
    with os.fdopen(int(descriptor), "w") as out:
        out.write(json.dumps(line) + "\n")


def _watch_owner(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop()
