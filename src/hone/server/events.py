"""The events of a job as a stream: for Python, and as server-sent events.

In:   a job's events from JobStore; the last one a client has seen
Out:  a stream that ends with the job's last event, or when the server stops

No event is missed or sent twice: events are read by their ascending ids, and a client that lost its
connection names the last one it saw. Nothing polls: the stream sleeps until the store wakes it. It
ends when the server stops, which would otherwise wait for it; its client asks again later.
"""

import asyncio
from collections.abc import AsyncGenerator

from hone.errors import Unprocessable
from hone.store.jobs import FINAL, JobStore
from hone.types import FieldError, JobEvent

HEARTBEAT_S = 15.0
"""A comment is sent after so much silence, because proxies close silent connections."""
BATCH = 500
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""The second keeps nginx from buffering events."""
_LARGEST = 2**63 - 1


async def follow(
    jobs: JobStore, job_id: str, after: int = 0, *, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[JobEvent | None, None]:
    """The job's events after `after`; None whenever there was none for `heartbeat_s`."""
    while True:
        # The state first: a final one was written together with its event, so that the events
        # read next are complete.
        job = await asyncio.to_thread(jobs.get, job_id)
        batch = await asyncio.to_thread(jobs.events, job_id, after, BATCH)
        for event in batch:
            after = event.id
            yield event
            if event.type in FINAL:
                return
        if not batch and job.state in FINAL:
            return
        if not batch and not await jobs.wait_event(job_id, after, heartbeat_s):
            if jobs.stopping:
                return
            yield None


async def stream(
    jobs: JobStore, job_id: str, after: int = 0, *, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[str, None]:
    """The job's events after `after`, as text/event-stream."""
    async for event in follow(jobs, job_id, after, heartbeat_s=heartbeat_s):
        yield ": still here\n\n" if event is None else to_sse(event)


def to_sse(event: JobEvent) -> str:
    """One event; its JSON is one line, as the format requires."""
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"


def start_after(header: str | None, query: int | None) -> int:
    """The id of the last event seen; the Last-Event-ID header, which browsers send, comes first."""
    if header is None or not header.strip():
        return min(query or 0, _LARGEST)
    text = header.strip()
    if not (text.isascii() and text.isdigit()):
        message = f"expected the id of an event, which is a number, got {text[:40]!r}"
        raise Unprocessable([FieldError(("Last-Event-ID",), message)])
    return int(text) if len(text) < 19 else _LARGEST
