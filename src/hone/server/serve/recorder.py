"""Record the calls of requests that end at about the same time in one transaction.

In:   requests whose answers are sampled
Out:  their calls, committed; each request continues when its own calls are

A thread and a transaction per request would cost more than writing its rows. So one thread at a
time records all requests that have ended, and those that end meanwhile form the next batch. If a
transaction fails, its requests are recorded one by one, so that none fails because of another.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from hone.store.calls import CallStore
from hone.types import RecordedCall

NewCalls = tuple[Sequence[RecordedCall], RecordedCall | None]
"""The choices of one request, and the call that they continue."""


class Unrecorded(Protocol):
    """A request that was answered. Both methods are called in a thread."""

    def make_calls(self) -> NewCalls: ...

    def committed(self, calls: Sequence[RecordedCall]) -> None:
        """Called when the calls are committed. Must not raise."""
        ...


class Recorder:
    """Records requests in the order in which they end. For one event loop."""

    def __init__(self, calls: CallStore) -> None:
        self._calls = calls
        self._waiting: list[tuple[Unrecorded, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, request: Unrecorded) -> None:
        """Return when the calls are committed, which happens even if the caller is cancelled."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, committed))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await committed

    async def drain(self) -> None:
        """Wait until everything is recorded."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                errors = await asyncio.to_thread(self._record, [request for request, _ in batch])
                for (_, committed), error in zip(batch, errors, strict=True):
                    if committed.done():  # cancelled: its client disconnected
                        continue
                    if error is None:
                        committed.set_result(None)
                    else:
                        committed.set_exception(error)
        finally:
            self._writing = None

    def _record(self, requests: Sequence[Unrecorded]) -> list[Exception | None]:
        """Why each request could not be recorded; None where it was."""
        try:
            recorded = [request.make_calls() for request in requests]
            self._calls.add_all(recorded)
        except Exception as error:  # noqa: BLE001  any error is the answer to the request
            if len(requests) == 1:
                return [error]
            return [self._record([request])[0] for request in requests]
        for request, (calls, _) in zip(requests, recorded, strict=True):
            request.committed(calls)
        return [None] * len(requests)
