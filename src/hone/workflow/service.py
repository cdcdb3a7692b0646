"""Call an agent that is a service: the HTTP client, the deadline, and how a failure is recorded.

In:   the service's URL; a request, and its timeout
Out:  the response; AgentTimeout or AgentCrashed, each with a reason to count by
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hone.capture.base import host_of
from hone.errors import AgentCrashed, AgentTimeout
from hone.model import CONNECT_S
from hone.workflow.deadline import Deadline

DETAILS = 16 * 1024
"""Number of characters recorded from the beginning of an error response."""
_LATER = (408, 409, 425, 429)
"""Statuses below 500 for which a retry may succeed: they are caused by the service's state."""


def service_client(url: str, **options: Any) -> httpx2.AsyncClient:
    """A client without a limit on the number of connections."""
    is_local = host_of(urlsplit(url).hostname or "") == "localhost"
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        limits=httpx2.Limits(max_connections=None),
        trust_env=not is_local,  # no proxy to this machine, whatever the environment says
        **options,
    )


@asynccontextmanager
async def answered_within(name: str, seconds: float | None, setting: str) -> AsyncIterator[None]:
    """Raise AgentTimeout after this time, and AgentCrashed if there is no response.

    The time that the server held the rollout's calls is added to it.
    `setting` is the key or option of the timeout, up to its value: `timeout_s=`.
    """
    deadline = Deadline(seconds)
    try:
        async with deadline.limit():
            yield
    except TimeoutError:
        raise AgentTimeout(
            f"{name} was not answered within {setting}{seconds:g}{deadline.extension()}"
        ) from None
    except httpx2.RequestError as error:
        why = str(error) or type(error).__name__
        message = f"{name} failed: {why}"
        raise AgentCrashed(message, reason="connection", is_outside=True) from error


def refusal(name: str, status: int, details: str) -> AgentCrashed:
    """The failure that a response with an error status means; `details` is its body.

    Web frameworks answer 500 for an exception of the agent, so it counts like one; the other
    statuses from 500 on come from gateways and from services that are overloaded or restarting.
    """
    first = details.strip().partition("\n")[0][:500]
    is_outside = status > 500 or status in _LATER
    return AgentCrashed(
        f"{name} answered with status {status}" + (f": {first}" if first else ""),
        reason="server_error" if is_outside else "agent_error",
        details=details,
        is_outside=is_outside,
    )
