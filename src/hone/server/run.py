"""Run a server until a signal stops it: lock the root, bind the ports, serve, shut down.

In:   Settings
Out:  two ports that answer; on SIGTERM or Ctrl-C a running job goes back to the queue

Ports are bound first, so that a port in use fails immediately. A root belongs to one server: a
second one is refused, because both would run the same jobs.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hone.errors import ServerError
from hone.files.disk import storage, write_atomic
from hone.files.lock import LockFile, LockHeld
from hone.files.logs import OUTPUTS, say
from hone.inference.background import in_own_thread
from hone.inference.base import Engine
from hone.server.http.app import create_apps
from hone.server.http.auth import check_advertised, check_networks, ensure_key
from hone.server.http.listen import (
    AppServer,
    bind,
    max_connections,
    port_of,
    raise_descriptor_limit,
)
from hone.server.serve.gpus import check_device, unused_gpu
from hone.server.settings import Settings
from hone.server.state import State
from hone.server.telemetry import start_logging, stop_logging
from hone.store.database import make_root
from hone.types import SERVER_ADDRESS
from hone.wire.peers import own_users

GC_THRESHOLD = 20_000
"""Garbage collector threshold. Every answer creates hundreds of objects, and almost none is part of a
cycle; with Python's default of 700, the collector takes 7% of the server's time."""
TAKE_OVER_S = 60.0
"""How long to wait for a server whose owner was killed; it is putting its job back into the
queue."""


def serve(settings: Settings, *, echo: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or, for an owned server, the end of stdin."""
    check_device(settings.device)
    settings = settings.model_copy(update={"root": settings.root.resolve()})
    with storage(settings.root):
        make_root(settings.root)
    owned = os.environ.get("HONE_OWNED") == "1"
    owner = settings.root / "server.owner"
    try:
        with storage(settings.root):
            wait_s = TAKE_OVER_S if owned and _is_orphan(owner) else 0.0
            lock = LockFile(settings.root / "server.lock", wait_s=wait_s)
    except LockHeld:
        raise ServerError(_root_in_use(settings.root, owned=owned)) from None
    with storage(settings.root):
        owner.write_text(str(os.getppid()) if owned else "", encoding="utf-8")
        settings, fresh_key = ensure_key(settings)
    check_advertised(settings)
    check_networks(settings)
    descriptors = raise_descriptor_limit()
    control = bind(settings.host, settings.port)
    inference = None
    if settings.inference_port is not None:
        inference = bind(settings.host, settings.inference_port, option="--inference-port")
    most = max_connections(descriptors, ports=2 if inference else 1)
    settings = settings.model_copy(
        update={
            "port": port_of(control),
            "inference_port": inference and port_of(inference),
            "max_connections": min(most, settings.max_connections or most),
        }
    )
    with storage(settings.log_file):
        start_logging(settings)
    gc.set_threshold(GC_THRESHOLD, 20, 10)
    # For every Python that it starts, multiprocessing's too: others may be able to write to the
    # working directory, and Python would import from it.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        asyncio.run(_serve(settings, control, inference, fresh_key, echo))
    finally:
        (settings.root / SERVER_ADDRESS).unlink(missing_ok=True)
        stop_logging()
        lock.release()


def _root_in_use(root: Path, *, owned: bool) -> str:
    """The error if another server uses the root; `owned`: this server was started by a client."""
    address = remedy = ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        server = json.loads((root / SERVER_ADDRESS).read_text(encoding="utf-8"))
        host, port, pid = str(server["host"]), int(server["port"]), int(server["pid"])
        address = f" ({host}:{port}, process {pid})"
        remedy = f" To use that one, connect to it: `ip: {host}` and `port: {port}` under `backend` in a YAML."
    return (
        f"--root {root}: another server uses it{address}. Stop that one, or name another root."
        f"{remedy if owned else ''}"
    )


def _is_orphan(owner: Path) -> bool:
    """Whether the server that uses the root belongs to a process that is gone."""
    import psutil  # imported here: starting a server does not need it

    try:
        pid = int(owner.read_text(encoding="utf-8"))
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except (OSError, ValueError):  # nobody owns it
        return False
    except psutil.NoSuchProcess:
        return True


async def _serve(
    settings: Settings,
    control: socket.socket,
    inference: socket.socket | None,
    fresh_key: str | None,
    echo: Callable[[str], None],
) -> None:
    state = State(settings, around_open=without_gc_pauses)
    choice = state.serving.choice
    if settings.engine == "vllm":  # fail now, not at the first use, if something is missing
        say("engine", engine=choice.describe())
    apps = create_apps(state)
    sockets = [control, *([inference] if inference else [])]
    servers = [AppServer(app, settings) for app, _ in zip(apps, sockets, strict=False)]

    closing: list[asyncio.Task[None]] = []

    def stop() -> None:
        # End streams that wait for a job: the server would wait for them.
        state.jobs.stop_waiting()
        closing.append(asyncio.create_task(state.service.close()))
        closing.append(asyncio.create_task(in_own_thread(choice.close)))
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if os.environ.get("HONE_OWNED") == "1":
        loop.add_reader(sys.stdin.fileno(), _watch_owner, loop, stop)
    async with state.running():
        if reason := unused_gpu(settings.device):
            say(reason, level=logging.WARNING)
        say("server started", root=settings.root, port=settings.port, pid=os.getpid())
        tasks = [
            asyncio.create_task(server.serve(sockets=[bound]))
            for server, bound in zip(servers, sockets, strict=True)
        ]
        for server in servers:
            await server.ready.wait()
        for line in banner(state, fresh_key):
            echo(line)
        _announce(settings)
        await asyncio.gather(*tasks)
        say("server stopping")


def without_gc_pauses(open_engine: Callable[[str], Engine]) -> Callable[[str], Engine]:
    """`open_engine`, wrapped so that the garbage collector skips the objects that loading creates.

    Torch and other libraries create a quarter of a million objects that live as long as the server.
    Traversing them takes 140 ms, during which no request is answered.
    """

    def open_frozen(base_model: str) -> Engine:
        gc.unfreeze()  # objects of a closed engine can be freed now
        gc.collect()
        engine = open_engine(base_model)
        gc.collect()  # otherwise existing garbage would be frozen too
        gc.freeze()
        return engine

    return open_frozen


def banner(state: State, fresh_key: str | None) -> list[str]:
    """The lines printed at start: addresses, models, how to try it."""
    settings = state.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    control = f"http://{host}:{settings.port}"
    openai = f"http://{host}:{settings.inference_port or settings.port}/v1"
    records = state.models.list()
    names = ", ".join(f"{r.key.name} (on {r.spec.base_model})" for r in records)
    key = '-H "Authorization: Bearer $HONE_API_KEY" ' if settings.api_key else ""
    allowed = [name for name in settings.allow_base_models or () if name != "*"]
    model = [*(r.key.name for r in records), *allowed, "smollm2-135m-instruct"][0]
    # Clients of the inference port may not load a base model that the operator has not allowed.
    closed = settings.api_key is not None and settings.allow_base_models is None and not records
    example_url = f"{control}/v1" if closed else openai
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}]})
    lines = [
        f"training API  {control}",
        f"OpenAI API    {openai}",
        *([f"for agents    {settings.advertise_url}/v1"] if settings.advertise_url else []),
        f"state         {settings.root}",
        f"log           {settings.log_file}",
        f"output        {settings.log_file.parent}/{{{','.join(OUTPUTS)}}}.log",
        f"models        {names or 'none registered yet; base models answer by their name'}"
        + (" on the training API" if closed else ""),
    ]
    if reason := unused_gpu(settings.device):
        lines.append(f"device        cpu: {reason}")
    if fresh_key is not None:
        lines.append(
            f"API key       {fresh_key}   (shown once; kept in {settings.root / 'api_key'})"
        )
    if settings.api_key is None:
        lines.append(f"accepts       {own_users()}, without a key")
    where = ", on the training API" if settings.api_key else ""
    lines += [f"trusts        {network} without a key{where}" for network in settings.trust_network]
    return [
        *lines,
        "",
        "Try it:",
        f"  curl {example_url}/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
    ]


def _announce(settings: Settings) -> None:
    """Write where this server listens, for other commands that use the same root.

    The process that started it reads the same information as a line of JSON, so it need not poll.
    """
    address = {
        "host": settings.host,
        "port": settings.port,
        "inference_port": settings.inference_port,
        "pid": os.getpid(),
        "log": str(settings.log_file),
    }
    write_atomic(settings.root / SERVER_ADDRESS, json.dumps(address))
    if descriptor := os.environ.get("HONE_READY_FD"):
        with os.fdopen(int(descriptor), "w") as out:
            out.write(json.dumps(address) + "\n")


def _watch_owner(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop()
