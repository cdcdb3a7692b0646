"""Events of jobs: durable ones are on disk before a listener sees them, progress is in memory.

In:   events of jobs, inside the transaction that changes the job; progress, outside of any
Out:  JobEvents by ascending ids; listeners are woken and need not poll

A listener never sees a change that a crash could undo. Progress changes nothing and is never
written. Ids count up from the server's start time in microseconds or, if the clock went back, from
far above the last written id: an id that a crash lost is never reused, so a client that saw it
misses none of the events that follow.
"""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from sqlite3 import Connection
from typing import Any

from hone.store.database import Store
from hone.types import JobEvent, JobInfo, JobState

EVENTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS job_events (
    job TEXT NOT NULL REFERENCES jobs (id),
    id INTEGER NOT NULL,
    type TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, id)
) WITHOUT ROWID;
"""

ENDED_AT = "CASE json_valid(info) WHEN 1 THEN json_extract(info, '$.ended_at') END"
"""SQL for when a job ended; null if it has not, or if its row cannot be read."""
LOST = 2**24
"""More ids than a server can have sent since it wrote its last event."""


class JobEvents:
    """Blocking, except `wait_event`; safe from any thread."""

    def __init__(self, store: Store, *, keep_progress: int) -> None:
        self._store = store
        self.stopping = False
        """Whether the server is stopping; `wait_event` then returns at once."""
        self.lock = threading.RLock()
        """Held from choosing an event's id to storing it, so that ids appear in order."""
        (row,) = store.query("SELECT coalesce(max(id), 0) AS id FROM job_events")
        self._last = max(row["id"] + LOST, int(time.time() * 1e6))
        self._progress: deque[JobEvent] = deque(maxlen=keep_progress)
        self.unwritten: list[JobEvent] = []
        """Durable events that could not be written because the disk failed."""
        self._listeners: set[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def new_event(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        with self.lock:
            self._last += 1
            return JobEvent(id=self._last, job=job_id, type=type, at=time.time(), data=data)

    def progress(self, job_id: str, data: dict[str, Any]) -> None:
        """Emit the progress of a job."""
        with self.lock:
            self._progress.append(self.new_event(job_id, "progress", data))
        self.wake(job_id)

    def write_event(self, db: Connection, event: JobEvent) -> None:
        values = (event.job, event.id, event.type, event.at, json.dumps(event.data))
        # Replaced: a commit that raised an I/O error may have happened, and is then repeated.
        db.execute("INSERT OR REPLACE INTO job_events VALUES (?, ?, ?, ?, ?)", values)

    def prune_events(self, *, max_age_s: float) -> int:
        """Delete the events of jobs that ended too long ago, except the last of each."""
        with self._store.transaction() as db:
            cursor = db.execute(
                "DELETE FROM job_events WHERE job IN "
                f"(SELECT id FROM jobs WHERE {ENDED_AT} < ?) AND id < "
                "(SELECT max(id) FROM job_events AS others WHERE others.job = job_events.job)",
                (time.time() - max_age_s,),
            )
            return cursor.rowcount

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Events with a larger id than `after`, in order."""
        # Memory first: an event that is written meanwhile is then read twice instead of being
        # missed.
        with self.lock:
            memory = (*self._progress, *self.unwritten)
        events = {event.id: event for event in memory if event.job == job_id and event.id > after}
        rows = self._store.query(
            "SELECT * FROM job_events WHERE job = ? AND id > ? ORDER BY id LIMIT ?",
            (job_id, after, limit),
        )
        events |= {
            row["id"]: JobEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in rows
        }
        ordered = [events[id] for id in sorted(events)]
        return ordered if limit < 0 else ordered[:limit]

    async def wait_event(self, job_id: str, after: int, deadline_s: float) -> bool:
        """Whether there is an event after that one, now or within the deadline."""
        # Listen first, then read: an event between the two is not missed.
        with self.listening(job_id) as woken:
            if await asyncio.to_thread(self.events, job_id, after, 1):
                return True
            try:
                if not self.stopping:
                    await asyncio.wait_for(woken.wait(), deadline_s)
                return not self.stopping
            except TimeoutError:
                return False

    @contextmanager
    def listening(self, job_id: str) -> Iterator[asyncio.Event]:
        """An asyncio.Event that is set after every event of the job while the block runs."""
        woken = asyncio.Event()
        listener = (job_id, asyncio.get_running_loop(), woken)
        self._listeners.add(listener)
        try:
            yield woken
        finally:
            self._listeners.discard(listener)

    def stop_waiting(self) -> None:
        """Wake all waiters; later calls of `wait_event` return at once. Callable from any thread."""
        self.stopping = True
        self.wake(None)

    def wake(self, job_id: str | None) -> None:
        """Wake the listeners of a job, or all."""
        for job, loop, woken in tuple(self._listeners):
            if job_id in (None, job) and not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)


def event_of_move(job: JobInfo) -> tuple[str, dict[str, Any]]:
    """Type and data of the event for a job's new state."""
    events: dict[JobState, tuple[str, dict[str, Any]]] = {
        "queued": ("queued", {"waiting_for": job.waiting_for} if job.waiting_for else {}),
        "running": ("started", {"attempt": job.attempts, "base_step": job.base_step}),
        "done": ("done", {"step": job.step, "metrics": job.metrics, "reason": job.reason}),
        "failed": ("failed", {"failure": job.failure.model_dump() if job.failure else None}),
        "cancelled": ("cancelled", {}),
    }
    return events[job.state]
