"""Events of jobs: durable ones are on disk before a listener sees them, progress is in memory.

In:   events of jobs, inside the transaction that changes the job; progress, outside of any
Out:  JobEvents by ascending ids; listeners are woken, nobody polls

A listener never sees a change that a crash could undo. Progress changes nothing, so it is sent from
memory and written at most every WRITE_S, the newest of each phase. A durable event writes the
progress before it in its own transaction, so that ids on disk are in the order they were sent. Ids
that a crash undid are not used again: a client that saw them would miss what follows.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from sqlite3 import Connection
from typing import Any

from hone.errors import StorageError
from hone.store.database import Store
from hone.types import JobEvent, JobInfo, JobState

SCHEMA = """
CREATE TABLE IF NOT EXISTS job_events (
    job TEXT NOT NULL REFERENCES jobs (id),
    id INTEGER NOT NULL,
    type TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, id)
) WITHOUT ROWID;
"""

PROGRESS = "progress"
WRITE_S = 3.0
"""Shortest time between two writes of a job's progress."""
MAX_UNWRITTEN = 1000
"""Events of a job kept in memory; there are more only while the disk fails."""

Events = list[JobEvent]
Emit = Callable[[str, dict[str, Any]], JobEvent]


class JobEvents:
    """Blocking, except `wait`; safe from any thread."""

    def __init__(self, store: Store, *, keep_progress: int) -> None:
        self._store = store
        self._keep_progress = keep_progress
        self.stopping = False
        """The server stops; nobody waits for an event any more."""
        self._emitting = threading.RLock()
        """Held from choosing an event's id to storing it, so that ids appear in order."""
        self._last: dict[str, int] = {}
        self._unwritten: dict[str, Events] = {}
        self._written_at: dict[str, float] = {}
        self._listening = threading.Lock()
        self._listeners: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    # ---- writing ----------------------------------------------------------------------------

    @contextmanager
    def writing(self, job_id: str) -> Iterator[tuple[Connection, Emit]]:
        """A durable transaction, and a function that adds an event of the job to it."""
        with self._emitting:
            with self._store.transaction(durable=True) as db:
                unwritten = self._unwritten.get(job_id, [])

                def emit(type: str, data: dict[str, Any]) -> JobEvent:
                    event = self._new(job_id, type, data)
                    _insert(db, event)
                    return event

                self._write(db, unwritten)
                yield db, emit
            self._forget(job_id, unwritten)
        self.wake(job_id)

    def remember(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        """Emit an event that is written with the next durable one."""
        with self._emitting:
            event = self._new(job_id, type, data)
            events = self._unwritten.setdefault(job_id, [])
            events.append(event)
            del events[:-MAX_UNWRITTEN]
        self.wake(job_id)
        return event

    def progress(self, job_id: str, data: dict[str, Any]) -> None:
        """Emit how far a job is; written within some seconds, unless the disk fails."""
        self.remember(job_id, PROGRESS, data)
        now = time.monotonic()
        if now < self._written_at.setdefault(job_id, now) + WRITE_S:
            return
        self._written_at[job_id] = now
        with self._emitting, suppress(StorageError):
            unwritten = self._unwritten.get(job_id, [])
            with self._store.transaction() as db:
                self._write(db, unwritten)
            self._forget(job_id, unwritten)

    def skip_lost(self, job_id: str) -> None:
        """After a crash: continue after every id that may have been sent and not written."""
        with self._emitting:
            self._last[job_id] = self._newest(job_id) + MAX_UNWRITTEN

    def close(self, job_id: str) -> None:
        """The job has ended: forget what is in memory."""
        with self._emitting:
            if not self._unwritten.get(job_id):
                for by_job in (self._last, self._unwritten, self._written_at):
                    by_job.pop(job_id, None)

    def prune(self, states: Sequence[str], ended_before: float) -> int:
        """Delete the events of jobs that ended before a time, except the last of each."""
        marks = ", ".join("?" * len(states))
        with self._store.transaction() as db:
            cursor = db.execute(
                "DELETE FROM job_events WHERE job IN (SELECT id FROM jobs WHERE state IN "
                f"({marks}) AND json_extract(info, '$.ended_at') < ?) AND id < "
                "(SELECT max(id) FROM job_events AS others WHERE others.job = job_events.job)",
                (*states, ended_before),
            )
            return cursor.rowcount

    # ---- reading ----------------------------------------------------------------------------

    def read(self, job_id: str, after: int = 0, limit: int = 1000) -> Events:
        """Events with a larger id than `after`, in order."""
        # Memory first: an event that is written meanwhile is then read twice, and not never.
        with self._emitting:
            unwritten = [e for e in self._unwritten.get(job_id, ()) if e.id > after]
        rows = self._store.query(
            "SELECT * FROM job_events WHERE job = ? AND id > ? ORDER BY id LIMIT ?",
            (job_id, after, limit),
        )
        events = [JobEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]
        if limit >= 0 and len(events) == limit:
            return events
        known = {event.id for event in events}
        events += [event for event in unwritten if event.id not in known]
        events.sort(key=lambda event: event.id)
        return events if limit < 0 else events[:limit]

    async def wait(self, job_id: str, after: int, deadline_s: float) -> bool:
        """Whether there is an event after that one, now or within the deadline."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        # Listen first, then read: an event between the two is not missed.
        with self._listening:
            self._listeners.setdefault(job_id, set()).add(listener)
        try:
            if await asyncio.to_thread(self.read, job_id, after, 1):
                return True
            if self.stopping:
                return False
            await asyncio.wait_for(listener[1].wait(), deadline_s)
            return True
        except TimeoutError:
            return False
        finally:
            with self._listening:
                self._listeners[job_id].discard(listener)
                if not self._listeners[job_id]:
                    del self._listeners[job_id]

    def stop_waiting(self) -> None:
        """Wake all waiters, and let nobody wait again. Callable from any thread."""
        self.stopping = True
        for job_id in list(self._listeners):
            self.wake(job_id)

    def wake(self, job_id: str) -> None:
        with self._listening:
            for loop, event in self._listeners.get(job_id, ()):
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    # ---- one event --------------------------------------------------------------------------

    def _new(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        if job_id not in self._last:
            self._last[job_id] = self._newest(job_id)
        self._last[job_id] += 1
        return JobEvent(id=self._last[job_id], job=job_id, type=type, at=time.time(), data=data)

    def _newest(self, job_id: str) -> int:
        rows = self._store.query(
            "SELECT coalesce(max(id), 0) AS n FROM job_events WHERE job = ?", (job_id,)
        )
        return rows[0]["n"]

    def _write(self, db: Connection, events: Events) -> None:
        """Write events that are in memory: only the newest progress of each phase."""
        for event, following in zip_longest(events, events[1:]):
            superseded = (
                event.type == PROGRESS
                and following is not None
                and following.type == PROGRESS
                and following.data.get("phase") == event.data.get("phase")
            )
            if not superseded:
                _insert(db, event)
        if events:
            job = events[0].job
            db.execute(
                "DELETE FROM job_events WHERE job = ? AND type = ? AND id <= (SELECT id FROM "
                "job_events WHERE job = ? AND type = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (job, PROGRESS, job, PROGRESS, self._keep_progress),
            )

    def _forget(self, job_id: str, written: Events) -> None:
        """Forget events that are on disk now."""
        ids = {event.id for event in written}
        left = [event for event in self._unwritten.get(job_id, ()) if event.id not in ids]
        if left:
            self._unwritten[job_id] = left
        else:
            self._unwritten.pop(job_id, None)


def _insert(db: Connection, event: JobEvent) -> None:
    db.execute(
        "INSERT INTO job_events VALUES (?, ?, ?, ?, ?)",
        (event.job, event.id, event.type, event.at, json.dumps(event.data)),
    )


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
