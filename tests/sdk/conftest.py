"""Real servers for the SDK: any app on a free port, and a whole hone server over a tiny model."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from hone import LocalBackend
from hone.server.http import listen

Serve = Callable[[Any], Awaitable[str]]


def serving(app: Any) -> AbstractAsyncContextManager[str]:
    """The app's base URL, while it is served."""
    return listen.serving(app, grace_s=1)


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Call it with an ASGI app; it answers at the URL until the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda app: stack.enter_async_context(serving(app))


@pytest.fixture
def local(shared_server: LocalBackend) -> LocalBackend:
    return shared_server
