"""Real servers for the SDK: any app on a free port, and a whole hone server over a tiny model."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from tests.inference.conftest import build_tokenizer
from tests.server.conftest import write_model

from hone import LocalBackend

Serve = Callable[[Any], Awaitable[str]]


class _Server(uvicorn.Server):
    """Says when it accepts, and leaves signals to pytest."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The app's base URL, while it is served."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, ws="none"
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await asyncio.wait_for(server.ready.wait(), 20)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Call it with an ASGI app; it answers at the URL until the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda app: stack.enter_async_context(serving(app))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template, small enough to train in a blink."""
    return write_model(
        tmp_path_factory.mktemp("models") / "tiny-chat", build_tokenizer("qwen2.5-instruct")
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    """One server for a whole file of tests; each uses models of its own."""
    with LocalBackend(tmp_path_factory.mktemp("hone")) as backend:
        backend.start()
        yield backend
