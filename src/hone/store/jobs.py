"""Training jobs: a durable queue, the allowed changes of state, and the events of a job.

In:   resolved trajectory groups and a TrainConfig
Out:  JobInfos, JobEvents; listeners are woken and need not poll

A change and its event are one transaction, synced before a listener sees it: no listener sees what
a crash could undo. The exception is a state file that is locked, or a disk that fails: then the
changes and events of a job that was accepted happen in memory, for all readers, and on disk before
any other change (`write_pending`). A crash in between repeats them: a job that has its checkpoint is
done again, with the same step. A job is added, and started, only on disk.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sqlite3 import Connection, Row
from sqlite3 import Error as SQLiteError
from typing import Any, get_args

from hone.errors import BadRequest, Busy, Conflict, NotFound, StateError, StorageError
from hone.files.redact import redact, redact_json
from hone.store.database import Store
from hone.store.failpoints import failpoint
from hone.store.job_events import ENDED_AT, EVENTS_SCHEMA, JobEvents, event_of_move
from hone.store.models import ModelRecord
from hone.store.rows import dump_row, read_row, readable, unknown_keys
from hone.types import Failure, JobEvent, JobInfo, JobState, ModelKey, TrainConfig

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS jobs (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    base_model TEXT NOT NULL,
    state TEXT NOT NULL,
    info TEXT NOT NULL,
    groups BLOB NOT NULL,
    calls TEXT NOT NULL,
    idempotency_key TEXT,
    request_sha256 TEXT NOT NULL,
    UNIQUE (model, idempotency_key)
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, base_model, place);
"""
    + EVENTS_SCHEMA
)

NEXT: dict[JobState, tuple[JobState, ...]] = {
    "queued": ("queued", "running", "cancelled", "failed"),  # failed: its model cannot be loaded
    "running": ("done", "failed", "cancelled", "queued"),  # queued: it is retried
}
"""The states that may follow a state; the others are final."""
FINAL = tuple(state for state in get_args(JobState) if state not in NEXT)

ATTEMPTS = 3
"""A job that was running in this many consecutive crashes of the server is taken as their cause."""
HEARTBEAT_S = 15.0
"""Seconds of silence after which an event stream sends a heartbeat."""
_REFUSED = (StorageError, SQLiteError)
"""Raised by a transaction that the disk or SQLite refuses."""
FAILPOINTS = ("job/before-take", "job/after-take", "job/before-move", "job/after-move")


@dataclass(frozen=True, slots=True)
class Pin:
    """The checkpoint that a job starts from, and the settings that determine its exact result."""

    step: int
    sha256: str
    dtype: str
    row_tokens: int
    """The row size for jobs that set none; a job that was pinned before keeps its own."""


# Named here because `list` is a method below.
Jobs = list[JobInfo]


class JobStore(JobEvents):
    """Jobs and their events. Blocking, except `wait_event` and `wait_cancel`; safe from any thread."""

    def __init__(self, store: Store, *, keep_progress: int = 1000) -> None:
        super().__init__(store, keep_progress=keep_progress)
        self._pending: dict[str, JobInfo] = {}
        """Jobs whose last change is not on disk yet."""
        self._running: dict[str, JobInfo] = {}
        """Jobs that this process runs: they can end even if the disk cannot be read."""
        self.cancelling: set[str] = set()
        """Ids of jobs that were changed in this process, have not ended, and are to be
        cancelled."""

    # ---- reading ----------------------------------------------------------------------------

    def get(self, job_id: str) -> JobInfo:
        if (known := self._pending.get(job_id) or self._running.get(job_id)) is not None:
            return known
        rows = self._store.query("SELECT id, info FROM jobs WHERE id = ?", (job_id,))
        if not rows:
            raise NotFound(f"no job is called {job_id!r}; GET /v1/training/jobs lists them")
        return _job(rows[0])

    def packed_groups(self, job_id: str) -> bytes:
        """The groups of a job, packed as they are stored; the learner unpacks them."""
        job = self.get(job_id)
        row = self._store.query("SELECT groups FROM jobs WHERE id = ?", (job_id,))[0]
        if not row["groups"]:
            raise BadRequest(
                f"job {job_id!r} ended {job.state} and what it was trained on has been pruned "
                "(keep_calls_s, keep_calls_bytes); its metrics and its step are kept",
                code="pruned",
                status=410,
            )
        return row["groups"]

    def list(
        self, *, model: ModelKey | None = None, state: JobState | None = None, limit: int = 100
    ) -> Jobs:
        """Jobs, the newest first."""
        pending = dict(self._pending)  # their state on disk is outdated
        columns = {"model": None if model is None else str(model), "state": state}
        where = " AND ".join(["1", *(f"{name} = :{name}" for name, v in columns.items() if v)])
        rows = self._store.query(
            f"SELECT id, info FROM jobs WHERE {where} OR id IN (SELECT value FROM json_each(:pending)) "
            "ORDER BY place DESC LIMIT :limit",
            {
                **columns,
                "pending": json.dumps(list(pending)),
                "limit": limit if limit < 0 else limit + len(pending),
            },
        )
        stored = readable(self._store, rows, _job)
        current = [pending.get(job.id, job) for job in stored]
        jobs = [
            job
            for job in current
            if state in (None, job.state) and columns["model"] in (None, job.model)
        ]
        return jobs if limit < 0 else jobs[:limit]

    def waiting(self) -> dict[str, int]:
        """Number of queued jobs, by base model."""
        return dict(Counter(job.base_model for job in self.list(state="queued", limit=-1)))

    def oldest(self, base_model: str, waiting: Container[str] = ()) -> JobInfo | None:
        """The first queued job of a base model, after the writes that a failing disk refused.

        A job whose id is in `waiting` is passed over, with all later ones of its model.
        """
        self.write_pending()
        first: dict[str, JobInfo] = {}
        for job in reversed(self.list(state="queued", limit=-1)):
            if job.base_model == base_model:
                first.setdefault(job.model, job)
        return next((job for job in first.values() if job.id not in waiting), None)

    def repeated(
        self, model: ModelKey, idempotency_key: str | None, request_sha256: str
    ) -> JobInfo | None:
        """The job that this key and request created before. Raises Conflict for another request.

        `request_sha256` is VERSION:HASH. Hashes of two versions cannot be compared; then the key
        alone decides.
        """
        rows = self._store.query(
            "SELECT id, request_sha256 FROM jobs WHERE model = ? AND idempotency_key = ?",
            (str(model), idempotency_key),
        )
        if not rows:
            return None
        if _differ(rows[0]["request_sha256"], request_sha256):
            raise Conflict(
                f"idempotency_key {idempotency_key!r} was used for another request, which made "
                f"job {rows[0]['id']!r}. Send a new key with a new request."
            )
        return self.get(rows[0]["id"])

    async def follow(
        self, job_id: str, after: int = 0, *, heartbeat_s: float = HEARTBEAT_S
    ) -> AsyncGenerator[JobEvent | None, None]:
        """The job's events after `after`, to its last one or until the server stops.

        None whenever there was none for `heartbeat_s`.
        """
        while True:
            # The state first: a final one was written together with its event, so that the events
            # read next are complete.
            job = await asyncio.to_thread(self.get, job_id)
            batch = await asyncio.to_thread(self.events, job_id, after)
            for event in batch:
                after = event.id
                yield event
                if event.type in FINAL:
                    return
            if not batch and job.state in FINAL:
                return
            if not batch and not await self.wait_event(job_id, after, heartbeat_s):
                if self.stopping:  # the server would wait for this stream; the client reconnects
                    return
                yield None

    # ---- changing ---------------------------------------------------------------------------

    def add(
        self,
        *,
        model: ModelRecord,
        groups: bytes,
        config: TrainConfig,
        counts: dict[str, int],
        metrics: dict[str, float] | None = None,
        request_sha256: str,
        plot_tensors: bool = False,
        advance_when_flat: bool = False,
        idempotency_key: str | None = None,
        calls: Sequence[str] = (),
        max_queued: int | None = None,
    ) -> JobInfo:
        """A new job at the end of the queue, or the one that this key and request created before.

        `groups` are packed; `metrics` are known before it is trained. `calls`: ids of recorded calls to
        keep until its end. Raises Busy if `max_queued` jobs are queued.
        """
        job = JobInfo(
            id=f"job-{secrets.token_hex(10)}",
            model=str(model.key),
            base_model=model.spec.base_model,
            state="queued",
            created_at=time.time(),
            config=config,
            plot_tensors=plot_tensors,
            advance_when_flat=advance_when_flat,
            counts=counts,
            metrics=metrics or {},
        )
        with self._writing() as db:
            if known := self.repeated(model.key, idempotency_key, request_sha256):
                return known
            # Counted in the transaction that adds the job: no other can be added in between.
            (queued,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            check_queue(queued, max_queued)
            db.execute(
                "INSERT INTO jobs (id, model, base_model, state, info, groups, calls, "
                "idempotency_key, request_sha256) VALUES (?, ?, ?, ?, ?, ?, '[]', ?, ?)",
                (
                    *(job.id, job.model, job.base_model, job.state, job.model_dump_json()),
                    *(groups, idempotency_key, request_sha256),
                ),
            )
            db.executemany(
                "INSERT OR IGNORE INTO call_refs (job, call) VALUES (?, ?)",
                [(job.id, call) for call in calls],
            )
            self.write_event(db, self.new_event(job.id, "queued", {}))
        return job

    def prune(self, *, max_age_s: float, max_bytes: int) -> int:
        """Delete groups of jobs that ended too long ago, then of the oldest beyond `max_bytes`."""
        with self._store.transaction() as db:
            cursor = db.execute(
                "UPDATE jobs SET groups = x'' WHERE id IN (SELECT id FROM (SELECT id, ended, "
                "sum(size) OVER (ORDER BY ended DESC, place DESC) AS total FROM (SELECT id, place, "
                f"length(groups) AS size, {ENDED_AT} AS ended FROM jobs "
                "WHERE length(groups) > 0 AND ended IS NOT NULL)) WHERE ended < ? OR total > ?)",
                (time.time() - max_age_s, max_bytes),
            )
            return cursor.rowcount

    def take(self, job_id: str, pin: Pin | None) -> JobInfo:
        """Start a queued job from `pin`; None keeps the pin of an earlier attempt.

        Raises StateError if a newer version queued it with settings that this one does not know.
        """
        job, pinned = self.get(job_id), dict[str, Any]()
        self._check_settings_known(job)
        if pin is not None:
            rows = job.config.row_tokens or pin.row_tokens
            pinned = {
                "base_step": pin.step,
                "base_sha256": pin.sha256,
                "dtype": pin.dtype,
                "config": {**job.config.model_dump(), "row_tokens": rows},
            }
        failpoint("job/before-take")
        job = self.move(job_id, "running", attempts=job.attempts + 1, waiting_for=None, **pinned)
        failpoint("job/after-take")
        return job

    def _check_settings_known(self, job: JobInfo) -> None:
        (row,) = self._store.query("SELECT info FROM jobs WHERE id = ?", (job.id,))
        unknown = [path for path in unknown_keys(job, json.loads(row["info"])) if len(path) > 1]
        if unknown:
            raise StateError(
                f"job {job.id!r} was queued by a newer hone: this one does not know its "
                f"{'.'.join(unknown[0])} and would train something else. Upgrade hone and send the "
                "job again, or send it without that key."
            )

    def move(
        self, job_id: str, state: JobState, *, remember: bool = False, **fields: Any
    ) -> JobInfo:
        """Change a job's state and any other of its fields; texts are stored without secrets.

        `remember`: if the disk fails, keep the change in memory and write it later.
        """
        times = {"running": {"started_at": time.time()}, "queued": {"started_at": None}}
        fields = {"state": state, **times.get(state, {"ended_at": time.time()}), **fields}

        if failure := fields.get("failure"):
            fields["failure"] = redact_json(failure.model_dump())
        if waiting_for := fields.get("waiting_for"):
            fields["waiting_for"] = redact(waiting_for)

        def moved(job: JobInfo) -> dict[str, Any]:
            if state not in NEXT.get(job.state, ()):
                raise Conflict(f"job {job_id!r} is {job.state} and cannot become {state}")
            return fields

        failpoint("job/before-move")
        job = self._change(job_id, moved, remember=remember)
        failpoint("job/after-move")
        return job

    def write_pending(self) -> None:
        """Write the changes that are only in memory; StorageError if the disk still fails."""
        if self._pending or self.unwritten:
            with self._writing():
                pass

    def request_cancel(self, job_id: str) -> JobInfo:
        """Cancel a queued job at once; a running one is asked to stop; one that ended stays.

        A job that ran in a server that was killed is cancelled at once: nothing would end it.
        """

        def cancelled(job: JobInfo) -> dict[str, Any]:
            runs = job.state == "running" and job_id in self._running
            ended = {} if runs else {"state": "cancelled", "ended_at": time.time()}
            return {**ended, "cancel_requested": True} if job.state in NEXT else {}

        return self._change(job_id, cancelled, remember=True)

    async def wait_cancel(self, job_id: str) -> None:
        """Return once a running job is to be cancelled."""
        with self.listening(job_id) as woken:
            while job_id not in self.cancelling:
                woken.clear()
                await woken.wait()

    def emit(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        """An event of a running job; if the disk fails, it is kept in memory and written later."""
        with self.lock:
            event = self.new_event(job_id, type, data)
            try:
                with self._writing() as db:
                    self.write_event(db, event)
            except _REFUSED:
                self.unwritten.append(event)
        self.wake(job_id)
        return event

    def recover(self, has_checkpoint: Callable[[JobInfo], bool]) -> tuple[Jobs, Jobs]:
        """At start-up: queue running jobs again, or fail one that is the likely cause of the crash.

        A job fails if it was running at each of the last three deaths of the server. One that has
        its checkpoint has only to be published, and has three more attempts for that. Returns the
        jobs that were queued, and those that failed.
        """
        queued, failed = [], []
        with self._writing() as db:  # queued jobs were not running in this crash
            db.execute(
                "UPDATE jobs SET info = json_set(info, '$.server_deaths', 0) "
                "WHERE state = 'queued' AND CASE json_valid(info) WHEN 1 THEN 1 END"
            )
        for job in reversed(self.list(state="running", limit=-1)):
            deaths = job.server_deaths + 1
            if deaths < ATTEMPTS * (2 if has_checkpoint(job) else 1):
                queued.append(self.move(job.id, "queued", server_deaths=deaths))
                continue
            failure = Failure(
                type="ServerError",
                message=f"job {job.id!r} brought the server down {deaths} times and is not "
                "retried. Look at the end of the server's log for each of them; what exhausts "
                "memory needs a smaller row_tokens or fewer groups.",
            )
            failed.append(self.move(job.id, "failed", failure=failure, server_deaths=deaths))
        return queued, failed

    def _change(
        self, job_id: str, change: Callable[[JobInfo], dict[str, Any]], *, remember: bool = False
    ) -> JobInfo:
        """Update a job with the fields that `change` returns; no event if nothing changed."""
        with self.lock:
            before = self.get(job_id)
            job = JobInfo.model_validate({**before.model_dump(), **change(before)})
            if job == before:
                return job
            type, data = event_of_move(job)
            if job.state == before.state == "running":
                type, data = "cancelling", {}
            event = self.new_event(job_id, type, data)
            try:
                with self._writing() as db:
                    _update(db, job)
                    self.write_event(db, event)
            except _REFUSED:
                if not remember:
                    raise
                self._pending[job_id] = job
                self.unwritten.append(event)
            if job.state == "running":
                self._running[job_id] = job
            else:
                self._running.pop(job_id, None)
            if job.cancel_requested and job.state in NEXT:
                self.cancelling.add(job_id)
            else:
                self.cancelling.discard(job_id)
        self.wake(job_id)
        return job

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A durable transaction that first writes what an earlier disk failure delayed."""
        with self.lock:
            with self._store.transaction(durable=True) as db:
                for job in self._pending.values():
                    _update(db, job)
                for event in self.unwritten:
                    self.write_event(db, event)
                yield db
            self._pending.clear()
            self.unwritten.clear()


def check_queue(queued: int, max_queued: int | None) -> None:
    """Raise Busy if the queue is full."""
    if max_queued is not None and queued >= max_queued:
        raise Busy(
            f"{queued} jobs are queued, the maximum of this server (max_queued_jobs); wait for one to "
            "end, or cancel one",
            retry_after_s=10,
        )


def _differ(one: str, other: str) -> bool:
    """Whether two hashes of the same version differ."""
    return one != other and one.partition(":")[0] == other.partition(":")[0]


def _job(row: Row) -> JobInfo:
    return read_row(JobInfo, row["info"], f"job {row['id']!r}")


def _update(db: Connection, job: JobInfo) -> None:
    (before,) = db.execute("SELECT info FROM jobs WHERE id = ?", (job.id,)).fetchone() or (None,)
    db.execute(
        "UPDATE jobs SET state = ?, info = ? WHERE id = ?",
        (job.state, dump_row(job, before), job.id),
    )
    if job.state in FINAL:  # its calls may be pruned
        db.execute("DELETE FROM call_refs WHERE job = ?", (job.id,))
