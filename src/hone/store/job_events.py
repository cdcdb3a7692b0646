"""The events of jobs: durable ones on disk before anybody hears of them, progress mostly in memory.

In:   events of jobs, inside the transaction that changes the job, or progress outside of any
Out:  JobEvents by ascending ids; listeners are woken, nobody polls

A listener never hears of a change that a crash could take back. Progress changes nothing, so it is
told from memory and written at most every WRITE_S, the newest of each phase. A durable event
writes the progress before it in its own transaction, so ids on disk never overtake those told.
Ids that a crash took back are not used again: a client that saw them would miss what follows.
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
"""Progress of a job is written at most so often."""
MOST_UNWRITTEN = 1000
"""Events of a job that are kept in memory; more are there only while the disk takes none."""

Events = list[JobEvent]
Tell = Callable[[str, dict[str, Any]], JobEvent]


class JobEvents:
    """Blocking, except `wait`; safe from any thread."""

    def __init__(self, store: Store, *, keep_progress: int) -> None:
        self._store = store
        self._keep_progress = keep_progress
        self.stopping = False
        """Nobody waits for an event any more: the server stops."""
        self._telling = threading.RLock()
        """Held from an event's id to its place on disk or in memory, so that ids appear in order."""
        self._last: dict[str, int] = {}
        self._unwritten: dict[str, Events] = {}
        self._written_at: dict[str, float] = {}
        self._listening = threading.Lock()
        self._listeners: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    # ---- telling ----------------------------------------------------------------------------

    @contextmanager
    def writing(self, job_id: str) -> Iterator[tuple[Connection, Tell]]:
        """A durable transaction, and a function that adds an event of the job to it."""
        with self._telling:
            with self._store.transaction(durable=True) as db:
                told = self._unwritten.get(job_id, [])

                def tell(type: str, data: dict[str, Any]) -> JobEvent:
                    event = self._new(job_id, type, data)
                    _insert(db, event)
                    return event

                self._write(db, told)
                yield db, tell
            self._forget(job_id, told)
        self.wake(job_id)

    def remember(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        """Tell an event that is written with the next durable one."""
        with self._telling:
            event = self._new(job_id, type, data)
            events = self._unwritten.setdefault(job_id, [])
            events.append(event)
            del events[:-MOST_UNWRITTEN]
        self.wake(job_id)
        return event

    def progress(self, job_id: str, data: dict[str, Any]) -> None:
        """Tell how far a job is; on disk within some seconds, where the disk takes it."""
        self.remember(job_id, PROGRESS, data)
        now = time.monotonic()
        if now < self._written_at.setdefault(job_id, now) + WRITE_S:
            return
        self._written_at[job_id] = now
        with self._telling, suppress(StorageError):
            told = self._unwritten.get(job_id, [])
            with self._store.transaction() as db:
                self._write(db, told)
            self._forget(job_id, told)

    def skip_lost(self, job_id: str) -> None:
        """After a crash: go on behind every id that may have been told and not written."""
        with self._telling:
            self._last[job_id] = self._newest(job_id) + MOST_UNWRITTEN

    def close(self, job_id: str) -> None:
        """The job is over; nothing of it stays in memory."""
        with self._telling:
            if not self._unwritten.get(job_id):
                for kept in (self._last, self._unwritten, self._written_at):
                    kept.pop(job_id, None)

    def prune(self, states: Sequence[str], ended_before: float) -> int:
        """Forget the events of jobs that ended before a time, all but the last of each."""
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
        """In order, those with a larger id than `after`."""
        with (
            self._telling
        ):  # memory first: what is written meanwhile is then found twice, not never
            told = [e for e in self._unwritten.get(job_id, ()) if e.id > after]
        rows = self._store.query(
            "SELECT * FROM job_events WHERE job = ? AND id > ? ORDER BY id LIMIT ?",
            (job_id, after, limit),
        )
        events = [JobEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]
        if limit >= 0 and len(events) == limit:
            return events
        known = {event.id for event in events}
        events += [event for event in told if event.id not in known]
        events.sort(key=lambda event: event.id)
        return events if limit < 0 else events[:limit]

    async def wait(self, job_id: str, after: int, deadline_s: float) -> bool:
        """Whether there is, or comes within the deadline, an event after that one."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        # Listen first, then look: what comes between the two is heard.
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
        """Wake all who wait for an event, and let nobody wait again. From any thread."""
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

    def _write(self, db: Connection, told: Events) -> None:
        """Write what was told from memory: of the progress in each phase only the newest."""
        for event, following in zip_longest(told, told[1:]):
            superseded = (
                event.type == PROGRESS
                and following is not None
                and following.type == PROGRESS
                and following.data.get("phase") == event.data.get("phase")
            )
            if not superseded:
                _insert(db, event)
        if told:
            job = told[0].job
            db.execute(
                "DELETE FROM job_events WHERE job = ? AND type = ? AND id <= (SELECT id FROM "
                "job_events WHERE job = ? AND type = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (job, PROGRESS, job, PROGRESS, self._keep_progress),
            )

    def _forget(self, job_id: str, written: Events) -> None:
        """What is on disk now need not be in memory."""
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
    """The event that tells of a job's new state: its type and its data."""
    told: dict[JobState, tuple[str, dict[str, Any]]] = {
        "queued": ("queued", {"waiting_for": job.waiting_for} if job.waiting_for else {}),
        "running": ("started", {"attempt": job.attempts, "base_step": job.base_step}),
        "done": ("done", {"step": job.step, "metrics": job.metrics, "reason": job.reason}),
        "failed": ("failed", {"failure": job.failure.model_dump() if job.failure else None}),
        "cancelled": ("cancelled", {}),
    }
    return told[job.state]
