"""Requests to a hone server, retried while it is unreachable, and the events of a job.

In:   method, path and body; the server's address and key
Out:  JSON, or the exception that the server raised; every event of a job once

Requests are idempotent, so one whose response was lost is sent again: jobs and logged metrics have an
idempotency key, and the server answers with what it has. A wait follows the job's events and resumes after the
last one seen when the connection breaks; no job is polled.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hone import errors
from hone.capture.base import host_of
from hone.errors import ConfigError, HoneError, ServerError, Unavailable, Unreachable
from hone.tasks.retries import backoff_s
from hone.types import FieldError, JobEvent
from hone.wire.errors import RETRY_HEADER

log = logging.getLogger("hone")

FIRST_S = 5.0
"""How long to wait for a server that has never answered: the address may be wrong."""
CONNECT_S = 10.0
ANSWER_S = 120.0
SILENCE_S = 60.0
"""Time without data after which an event stream is reopened; there is a comment every 15 s."""
FINAL = frozenset({"done", "failed", "cancelled"})
"""Types of a job's last event."""
LONGEST_PAUSE_S = 5.0
"""Pause between two attempts."""
LOOK_S = 1.0
"""Time between two requests for the progress of an engine that starts."""
_RETRIED = frozenset({429, 502, 503, 504})
"""HTTP statuses after which the same request may succeed, unless the response says otherwise."""

_BY_STATUS: dict[int, type[HoneError]] = {
    400: ConfigError,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: ConfigError,
    429: Unavailable,
    501: errors.NotInThisVersion,
    503: Unavailable,
}


@dataclass(slots=True)
class _Outage:
    """A series of attempts that failed."""

    failures: int = 0
    since: float | None = None
    """When the first of them failed."""


class Server:
    """A hone server, as its clients see it."""

    def __init__(self, base_url: str, api_key: str | None, patience_s: float) -> None:
        self.base_url = _checked_url(base_url)
        self.api_key = api_key or os.environ.get("HONE_API_KEY") or None
        self.patience_s = patience_s
        self._answered = False
        self._warned = False
        """Whether it was already logged that the server is unreachable."""

    async def connect(self) -> None:
        """Called before every request: a subclass may start the server here."""

    def lost(self) -> HoneError | None:
        """Why a retry is pointless; None if it is not."""
        return None

    async def ended(self) -> HoneError:
        """Wait until the server has ended for good, and return why. Never returns if it may come back."""
        return await asyncio.get_running_loop().create_future()  # never done

    @property
    def log_place(self) -> str:
        """Where the server's log is, for messages."""
        return f"logs/server.log under the root of the server at {self.base_url}"

    @asynccontextmanager
    async def telling_start(self) -> AsyncIterator[None]:
        """Log the progress of an engine that starts, inside the block: vLLM takes minutes."""
        telling = asyncio.create_task(self._tell_start())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_start(self) -> None:
        logged = set[str]()
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(HoneError):  # the request that waits for the engine reports it
                health = await self.ask("GET", "/health")
                lines = health.get("parts", {}).get("engine", {}).get("starting", [])
                for line in lines:
                    if line not in logged:
                        log.info("%s", line)
                logged.update(lines)

    async def ask(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        read_s: float = ANSWER_S,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        final: tuple[type[HoneError], ...] = (),
        patience_s: float | None = None,
    ) -> Any:
        """Send one request and return its JSON; retried while the server is unreachable or busy.

        `base_url` is another address of the same server; errors of the `final` kinds are not retried.
        `patience_s` replaces how long it is retried.
        """
        await self.connect()
        outage = _Outage()
        while True:
            url = (base_url or self.base_url) + path
            retry_after_s = 0.0
            try:
                async with self._client(read_s, url) as client:
                    response = await client.request(method, url, content=body, headers=headers)
            except httpx2.TransportError as error:
                failure = self.unreachable(error, base_url)
            else:
                self._answered, self._warned = True, False
                if response.is_success:
                    return response.json() if response.content else None
                failure = refusal(response, self.log_place)
                if not _is_retried(response) or isinstance(failure, final):
                    raise failure
                retry_after_s = _retry_after_s(response)
            if self._answered:
                self._warn(failure)
            usual_s = self.patience_s if self._answered and base_url is None else FIRST_S
            wait_s = usual_s if patience_s is None else patience_s
            await self._pause(failure, outage, wait_s, retry_after_s)

    async def job_events(self, job_id: str) -> AsyncGenerator[JobEvent, None]:
        """Every event of the job once, over as many connections as it takes."""
        seen, outage = 0, _Outage()
        url = f"{self.base_url}/v1/training/jobs/{job_id}/events"
        while True:
            failure: HoneError | None = None
            try:
                headers = {"Last-Event-ID": str(seen)}
                client = self._client(SILENCE_S, url)
                async with client, client.sse(url, headers=headers) as stream:
                    if stream.response.status_code != HTTPStatus.OK:
                        await stream.response.aread()
                        raise refusal(stream.response, self.log_place)
                    outage.since = None
                    async for message in stream:
                        event = JobEvent.model_validate_json(message.data, extra="ignore")
                        seen, outage = event.id, _Outage()
                        yield event
                if (await self.ask("GET", f"/v1/training/jobs/{job_id}"))["state"] in FINAL:
                    return
            except (httpx2.TransportError, Unavailable) as error:
                failure = self.unreachable(error)
                self._warn(failure)
            try:
                await self._pause(failure, outage, self.patience_s)
            except HoneError as error:
                error.add_note(f"Job {job_id} was accepted and continues when its server is back.")
                raise

    async def _pause(
        self,
        failure: HoneError | None,
        outage: "_Outage",
        patience_s: float,
        at_least_s: float = 0.0,
    ) -> None:
        """Wait before the next attempt; raises the failure if a retry is pointless."""
        outage.failures += 1
        pause_s = max(at_least_s, backoff_s(outage.failures, 0.1, LONGEST_PAUSE_S))
        if failure is not None:
            outage.since = outage.since or time.monotonic()
            # Checked only now: a killed process's connections end before the process does.
            gone = self.lost()
            if gone or time.monotonic() + pause_s > outage.since + patience_s:
                raise gone or failure from None
        await asyncio.sleep(pause_s)

    def _warn(self, error: Exception) -> None:
        """Log once per outage that the client is waiting."""
        if not self._warned and self.lost() is None:
            self._warned = True
            log.warning("%s Waiting up to %g s for it to come back.", error, self.patience_s)

    def unreachable(self, error: Exception, base_url: str | None = None) -> HoneError:
        """The error for a server that does not answer."""
        reason = str(error) or type(error).__name__
        return self.lost() or Unreachable(
            f"{base_url or self.base_url}: no hone server answers there ({reason}). Start one with "
            "`hone serve`, name its address, or let hone.LocalBackend() start one."
        )

    def _client(self, read_s: float, url: str) -> httpx2.AsyncClient:
        """A client per request, so that any event loop can use it and nothing needs to be closed."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(
            headers={"Content-Type": "application/json", **key},
            timeout=httpx2.Timeout(read_s, connect=CONNECT_S),
            verify=self._certificates if url.startswith("https:") else False,
            trust_env=host_of(urlsplit(url).hostname or "") != "localhost",
        )

    @cached_property
    def _certificates(self) -> Any:
        # Reading the certificate store takes 50 ms, and plain HTTP uses none.
        return httpx2.create_ssl_context()


def _checked_url(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        _ = parts.port
        valid = parts.scheme in {"http", "https"} and parts.hostname
    except ValueError:  # a port that is not a number or too large, half of an IPv6 address
        valid = False
    if not valid:
        raise ConfigError(f"{base_url!r} is not the address of a server: expected http://HOST:PORT")
    url = base_url.rstrip("/").removesuffix("/v1")
    # 0.0.0.0 is an address to listen on, not to connect to.
    return url.replace("//0.0.0.0", "//127.0.0.1", 1)


def refusal(response: httpx2.Response, log_place: str) -> HoneError:
    """The exception for an error response: by its class name if known, otherwise by status."""
    url = response.request.url
    try:
        body = response.json()
        fields = body.get("detail")
        if isinstance(fields, list):
            return errors.Unprocessable([_field(item) for item in fields])
        message, kind = str(body["error"]["message"]), str(body.get("exception"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _by_status(response)(
            f"{response.request.method} {url} was answered {response.status_code} "
            f"{response.text[:200]!r}. Is it a hone server of this version?"
        )
    named = getattr(errors, kind, None)
    if not (isinstance(named, type) and issubclass(named, HoneError)):
        named = _by_status(response)
    if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        message += f"\nIts log: {log_place}"
    return named(message)


def _is_retried(response: httpx2.Response) -> bool:
    final = response.headers.get(RETRY_HEADER) == "false"
    return response.status_code in _RETRIED and not final


def _retry_after_s(response: httpx2.Response) -> float:
    """The delay that the server requests in Retry-After."""
    value = response.headers.get("retry-after", "")
    return min(float(value), 60.0) if value.isdigit() else 0.0


def _by_status(response: httpx2.Response) -> type[HoneError]:
    return _BY_STATUS.get(response.status_code, ServerError)


def _field(item: Mapping[str, Any]) -> FieldError:
    path = tuple(item.get("loc", ()))
    return FieldError(path[1:] if path[:1] == ("body",) else path, str(item.get("msg", "")))
