"""What happens to a job, as server-sent events.

In:   a job's events from JobStore; where a client left off
Out:  a text/event-stream that ends with the event that ends the job

Nothing is missed and nothing is sent twice: events are read from disk by their ascending ids, and
a client that lost its connection names the last one it saw. Nobody polls: the stream sleeps until
the store wakes it, and only says every so often that it is still there. It ends when the server
stops, which would else wait for it; its client asks again where it left off.
"""

import asyncio
from collections.abc import AsyncGenerator

from hone.errors import Unprocessable
from hone.store.jobs import FINAL, JobStore
from hone.types import FieldError, JobEvent

HEARTBEAT_S = 15.0
"""A comment is sent after so much silence, because proxies close what is silent for longer."""
BATCH = 500
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""The second keeps nginx from collecting events before it passes them on."""
_LARGEST = 2**63 - 1


async def stream(
    jobs: JobStore, job_id: str, after: int = 0, *, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[str, None]:
    """The job's events from the one after `after` on."""
    while True:
        # Its state first: a final one was written together with its event, so what is read next
        # is all there will ever be.
        job = await asyncio.to_thread(jobs.get, job_id)
        batch = await asyncio.to_thread(jobs.events, job_id, after, BATCH)
        for event in batch:
            after = event.id
            yield spelt(event)
            if event.type in FINAL:
                return
        if not batch and job.state in FINAL:
            return
        if not batch and not await jobs.wait_event(job_id, after, heartbeat_s):
            if jobs.stopping:
                return
            yield ": still here\n\n"


def spelt(event: JobEvent) -> str:
    """One event; its JSON is one line, as the format wants it."""
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"


def start_after(header: str | None, query: int | None) -> int:
    """Which event was seen last: by the Last-Event-ID header, which browsers send by themselves."""
    if header is None or not header.strip():
        return min(query or 0, _LARGEST)
    text = header.strip()
    if not (text.isascii() and text.isdigit()):
        message = f"expected the id of an event, which is a number, got {text[:40]!r}"
        raise Unprocessable([FieldError(("Last-Event-ID",), message)])
    return int(text) if len(text) < 19 else _LARGEST
