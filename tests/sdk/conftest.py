"""Real servers for the SDK: any app on a free port, and a whole hone server over a tiny model."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.inference.conftest import build_tokenizer
from tests.server.conftest import write_model

from hone import LocalBackend
from hone.server import listen

Serve = Callable[[Any], Awaitable[str]]


def serving(app: Any) -> AbstractAsyncContextManager[str]:
    """The app's base URL, while it is served."""
    return listen.serving(app, grace_s=1)


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
