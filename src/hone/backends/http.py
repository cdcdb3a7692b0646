"""Requests to a hone server: sent again while it is out of reach, its events followed to the end.

In:   method, path and body; the server's address and key
Out:  JSON, or the exception that the server's refusal stands for; every event of a job once

Every request may be sent twice, so one whose answer was lost is simply sent again: a job carries
an idempotency key, and the server gives back the job it made. A wait follows the job's events and
goes on from the last one seen when the connection breaks; nothing polls.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hone.backends.refusal import refusal, retry_after_s
from hone.capture.base import host_of
from hone.errors import ConfigError, HoneError, Unavailable, Unreachable
from hone.types import JobEvent

log = logging.getLogger("hone")

FIRST_S = 5.0
"""A server that never answered yet is given up after so long: the address may be wrong."""
CONNECT_S = 10.0
ANSWER_S = 120.0
SILENCE_S = 60.0
"""An event stream says every 15 s that it is there; after so much silence it is opened again."""
FINAL = frozenset({"done", "failed", "cancelled"})
"""Events after which a job has none."""
_LATER = frozenset({429, 502, 503, 504})


class Server:
    """A hone server, as somebody who sends it requests sees it."""

    def __init__(self, base_url: str, api_key: str | None, patience_s: float) -> None:
        self.base_url = _checked_url(base_url)
        self.api_key = api_key or os.environ.get("HONE_API_KEY") or None
        self.patience_s = patience_s
        self._met = False
        self._missed = False
        """It is out of reach, and somebody was told."""

    async def connect(self) -> None:
        """Called before every request: the place to start what is not there yet."""

    def lost(self) -> HoneError | None:
        """Why it is hopeless to go on asking; None while it is not."""
        return None

    @property
    def log_place(self) -> str:
        """Where the server's log is, for messages."""
        return f"logs/server.log under the root of the server at {self.base_url}"

    async def ask(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        read_s: float = ANSWER_S,
        base_url: str | None = None,
    ) -> Any:
        """One request, sent again while the server is out of reach or says `later`.

        `base_url` is another address of the same server.
        """
        pause, give_up_at = 0.1, None
        await self.connect()
        while True:
            url = (base_url or self.base_url) + path
            try:
                async with self._client(read_s, url) as client:
                    response = await client.request(method, url, content=body)
            except httpx2.TransportError as error:
                failure = self.unreachable(error, base_url)
            else:
                self._met, self._missed = True, False
                if response.is_success:
                    return response.json() if response.content else None
                failure = refusal(response, self.log_place)
                if response.status_code not in _LATER:
                    raise failure
                pause = max(pause, retry_after_s(response))
            patience_s = self.patience_s if self._met and base_url is None else FIRST_S
            if self._met:
                self._miss(failure)
            give_up_at = give_up_at or time.monotonic() + patience_s
            gone = self.lost()  # asked now: a process that was killed ends after its connections
            if gone or time.monotonic() + pause > give_up_at:
                raise gone or failure from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def job_events(self, job_id: str) -> AsyncGenerator[JobEvent, None]:
        """Every event of the job once, over as many connections as it takes."""
        seen, pause, lost_at = 0, 0.1, None
        url = f"{self.base_url}/v1/training/jobs/{job_id}/events"
        while True:
            try:
                headers = {"Last-Event-ID": str(seen)}
                client = self._client(SILENCE_S, url)
                async with client, client.sse(url, headers=headers) as stream:
                    if stream.response.status_code != HTTPStatus.OK:
                        await stream.response.aread()
                        raise refusal(stream.response, self.log_place)
                    lost_at = None
                    async for message in stream:
                        event = JobEvent.model_validate_json(message.data, extra="ignore")
                        seen, pause = event.id, 0.1
                        yield event
                if (await self.ask("GET", f"/v1/training/jobs/{job_id}"))["state"] in FINAL:
                    return
            except (httpx2.TransportError, Unavailable) as error:
                lost_at = lost_at or time.monotonic()
                self._miss(self.unreachable(error))
                gone = self.lost()
                if gone or time.monotonic() - lost_at > self.patience_s:
                    failure = gone or self.unreachable(error)
                    failure.add_note(f"Job {job_id} was accepted and goes on when its server does.")
                    raise failure from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _miss(self, error: Exception) -> None:
        """Say once that it is waited for, so that a silent wait is not taken for a hang."""
        if not self._missed and self.lost() is None:
            self._missed = True
            log.warning("%s Waiting up to %g s for it to come back.", error, self.patience_s)

    def unreachable(self, error: Exception, base_url: str | None = None) -> HoneError:
        """What to say when nobody answers."""
        said = str(error) or type(error).__name__
        return self.lost() or Unreachable(
            f"{base_url or self.base_url}: no hone server answers there ({said}). Start one with "
            "`hone serve`, name its address, or let hone.LocalBackend() start one."
        )

    def _client(self, read_s: float, url: str) -> httpx2.AsyncClient:
        """One per request: usable from any event loop, and there is nothing to close at the end."""
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
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"base_url {base_url!r}: expected http://HOST:PORT")
    url = base_url.rstrip("/").removesuffix("/v1")
    # 0.0.0.0 is where one listens, not where one calls.
    return url.replace("//0.0.0.0", "//127.0.0.1", 1)
