"""Training jobs: a durable queue, the moves a job may make, and what happened to it.

In:   resolved trajectory groups and a TrainConfig, from training.py and art.py
Out:  JobInfos, JobEvents; listeners are woken, nobody polls
Used: service.py takes jobs and moves them; training.py and events.py show them

Every change and the event that tells of it are one transaction, synced before anybody hears of
it: a listener never sees what a crash could take back.
"""

import asyncio
import itertools
import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, get_args

from hone.errors import BadRequest, Conflict, NotFound
from hone.server.failpoints import failpoint
from hone.server.models import ModelRecord
from hone.server.rows import marks
from hone.server.store import Store
from hone.trajectory import TrajectoryGroup
from hone.types import Failure, JobEvent, JobInfo, JobState, ModelKey, TrainConfig

SCHEMA = """
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
CREATE TABLE IF NOT EXISTS job_events (
    job TEXT NOT NULL REFERENCES jobs (id),
    id INTEGER NOT NULL,
    type TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, id)
) WITHOUT ROWID;
"""

NEXT: dict[JobState, tuple[JobState, ...]] = {
    "queued": ("running", "cancelled", "failed"),  # failed: its model cannot be loaded
    "running": ("done", "failed", "cancelled", "queued"),  # queued: the server stopped
}
"""Which state may follow which; the others are final."""
FINAL = tuple(state for state in get_args(JobState) if state not in NEXT)

ATTEMPTS = 3
"""A job that was running so often when the server went down is taken for the cause."""
FAILPOINTS = ("job/before-take", "job/after-take", "job/before-move", "job/after-move")


@dataclass(frozen=True, slots=True)
class Pin:
    """The checkpoint a job goes on from."""

    step: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of the jobs that were running when the server went down."""

    queued: tuple[JobInfo, ...]
    failed: tuple[JobInfo, ...]


# Named here because `list` is a method below.
Jobs = list[JobInfo]
Events = list[JobEvent]
Groups = list[TrajectoryGroup]


class JobStore:
    """Blocking, except `wait_event`; safe from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.stopping = False
        """Nobody waits for an event any more: the server stops."""
        self._listening = threading.Lock()
        self._listeners: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    # ---- what there is ----------------------------------------------------------------------

    def get(self, job_id: str) -> JobInfo:
        rows = self._store.query("SELECT info FROM jobs WHERE id = ?", (job_id,))
        if not rows:
            raise NotFound(f"no job is called {job_id!r}; GET /v1/training/jobs lists them")
        return JobInfo.model_validate_json(rows[0]["info"])

    def groups(self, job_id: str) -> Groups:
        """What it trains on: every trajectory carries its calls."""
        job = self.get(job_id)
        row = self._store.query("SELECT groups FROM jobs WHERE id = ?", (job_id,))[0]
        if not row["groups"]:
            raise BadRequest(
                f"job {job_id!r} ended {job.state} and what it was trained on has been pruned "
                "(keep_calls_s, keep_calls_bytes); its metrics and its step are kept",
                code="pruned",
                status=410,
            )
        return [TrajectoryGroup(**group) for group in json.loads(zlib.decompress(row["groups"]))]

    def calls(self, job_id: str) -> Sequence[str]:
        """Ids of the recorded calls it was resolved from."""
        self.get(job_id)
        row = self._store.query("SELECT calls FROM jobs WHERE id = ?", (job_id,))[0]
        return json.loads(row["calls"])

    def list(
        self, *, model: ModelKey | None = None, state: JobState | None = None, limit: int = 100
    ) -> Jobs:
        """The newest first."""
        wanted = {"model": None if model is None else str(model), "state": state}
        given = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(["1", *(f"{column} = ?" for column in given)])
        rows = self._store.query(
            f"SELECT info FROM jobs WHERE {where} ORDER BY place DESC LIMIT ?",
            (*given.values(), limit),
        )
        return [JobInfo.model_validate_json(row["info"]) for row in rows]

    def waiting(self) -> dict[str, int]:
        """How many jobs are queued, by base model."""
        rows = self._store.query(
            "SELECT base_model, count(*) AS n FROM jobs WHERE state = 'queued' GROUP BY base_model"
        )
        return {row["base_model"]: row["n"] for row in rows}

    def repeated(
        self, model: ModelKey, idempotency_key: str | None, request_sha256: str
    ) -> JobInfo | None:
        """The job this key and request made before; another request under the key is a Conflict."""
        rows = self._store.query(
            "SELECT id, info, request_sha256 FROM jobs WHERE model = ? AND idempotency_key = ?",
            (str(model), idempotency_key),
        )
        if not rows:
            return None
        if rows[0]["request_sha256"] != request_sha256:
            raise Conflict(
                f"idempotency_key {idempotency_key!r} was used for another request, which made "
                f"job {rows[0]['id']!r}. Send a new key with a new request."
            )
        return JobInfo.model_validate_json(rows[0]["info"])

    # ---- what changes it --------------------------------------------------------------------

    def add(
        self,
        *,
        model: ModelRecord,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        counts: dict[str, int],
        request_sha256: str,
        seed: int = 0,
        plot_tensors: bool = False,
        advance_when_flat: bool = False,
        idempotency_key: str | None = None,
        calls: Sequence[str] = (),
    ) -> JobInfo:
        """A new job at the end of the queue, or the one this key and request made before."""
        # Plain json and not pydantic's: a NaN must come back as one, for the learner to refuse.
        plain = json.dumps([group.model_dump() for group in groups])
        packed = zlib.compress(plain.encode(), 1)
        job = JobInfo(
            id=f"job-{secrets.token_hex(10)}",
            model=str(model.key),
            base_model=model.spec.base_model,
            state="queued",
            created_at=time.time(),
            config=config,
            seed=seed,
            plot_tensors=plot_tensors,
            advance_when_flat=advance_when_flat,
            counts=counts,
        )
        with self._store.transaction(durable=True) as db:
            known = self.repeated(model.key, idempotency_key, request_sha256)
            if known is not None:
                return known
            db.execute(
                "INSERT INTO jobs (id, model, base_model, state, info, groups, calls, "
                "idempotency_key, request_sha256) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    job.id,
                    job.model,
                    job.base_model,
                    job.state,
                    job.model_dump_json(),
                    packed,
                    json.dumps(list(calls)),
                    idempotency_key,
                    request_sha256,
                ),
            )
            _insert_event(db, job.id, "queued", {})
        return job

    def prune(self, *, max_age_s: float, max_bytes: int) -> int:
        """Forget the groups of jobs that ended too long ago, then of the oldest beyond the size."""
        before = time.time() - max_age_s
        rows = self._store.query(
            "SELECT id, length(groups) AS size, json_extract(info, '$.ended_at') AS ended FROM jobs "
            f"WHERE state IN ({marks(FINAL)}) AND length(groups) > 0 ORDER BY ended DESC",
            FINAL,
        )
        kept = itertools.accumulate(row["size"] for row in rows)
        both = zip(rows, kept, strict=True)
        doomed = [(row["id"],) for row, n in both if row["ended"] < before or n > max_bytes]
        with self._store.transaction() as db:
            db.executemany("UPDATE jobs SET groups = x'', calls = '[]' WHERE id = ?", doomed)
        return len(doomed)

    def oldest(self, base_model: str) -> JobInfo | None:
        """The job of a base model that is next, still queued."""
        rows = self._store.query(
            "SELECT info FROM jobs WHERE state = 'queued' AND base_model = ? ORDER BY place LIMIT 1",
            (base_model,),
        )
        return JobInfo.model_validate_json(rows[0]["info"]) if rows else None

    def take(self, job_id: str, pin: Pin | None) -> JobInfo:
        """A queued job, now running from `pin`; None leaves the pin of an earlier attempt."""
        attempts = self.get(job_id).attempts + 1
        base = {} if pin is None else {"base_step": pin.step, "base_sha256": pin.sha256}
        failpoint("job/before-take")
        job = self.move(job_id, "running", attempts=attempts, **base)
        failpoint("job/after-take")
        return job

    def move(self, job_id: str, state: JobState, **fields: Any) -> JobInfo:
        """Change a job's state and, with it, any other of its fields."""
        times = {"running": {"started_at": time.time()}, "queued": {"started_at": None}}
        fields = {"state": state, **times.get(state, {"ended_at": time.time()}), **fields}

        def moved(job: JobInfo) -> JobInfo:
            if state not in NEXT.get(job.state, ()):
                raise Conflict(f"job {job_id!r} is {job.state} and cannot become {state}")
            return JobInfo.model_validate({**job.model_dump(), **fields})

        failpoint("job/before-move")
        job = self._change(job_id, moved, _event_of_move)
        failpoint("job/after-move")
        return job

    def request_cancel(self, job_id: str) -> JobInfo:
        """A queued job is cancelled at once, a running one asked to stop; one that ended stays."""

        def asked(job: JobInfo) -> JobInfo:
            changes: dict[str, Any] = {}
            if job.state == "queued":
                changes = {"state": "cancelled", "ended_at": time.time()}
            if job.state in NEXT:
                changes |= {"cancel_requested": True}
            return JobInfo.model_validate({**job.model_dump(), **changes})

        def told(job: JobInfo) -> tuple[str, dict[str, Any]]:
            return ("cancelled", {}) if job.state == "cancelled" else ("cancelling", {})

        return self._change(job_id, asked, told)

    def emit(self, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
        """Write down something that happened to a job."""
        with self._store.transaction(durable=True) as db:
            event = _insert_event(db, job_id, type, data)
        self._wake(job_id)
        return event

    def rename(self, db: Connection, key: ModelKey, new: ModelKey) -> None:
        """Inside a transaction of the caller's: the jobs of a model are now another name's."""
        for row in db.execute("SELECT id, info FROM jobs WHERE model = ?", (str(key),)).fetchall():
            job = JobInfo.model_validate_json(row["info"]).model_copy(update={"model": str(new)})
            db.execute(
                "UPDATE jobs SET model = ?, info = ? WHERE id = ?",
                (job.model, job.model_dump_json(), job.id),
            )

    def recover(self, has_checkpoint: Callable[[JobInfo], bool]) -> Recovered:
        """At start-up: what was running goes back to the queue, or fails as the likely cause.

        A job that has its checkpoint is only to be published; that has three attempts of its own.
        """
        queued, failed = [], []
        for job in reversed(self.list(state="running", limit=-1)):
            limit = ATTEMPTS * (2 if has_checkpoint(job) else 1)
            if job.attempts < limit:
                queued.append(self.move(job.id, "queued"))
                continue
            failure = Failure(
                type="ServerError",
                message=f"job {job.id!r} brought the server down {job.attempts} times and is not "
                "tried again. Look at the end of the server's log for each of them; what exhausts "
                "memory needs a smaller row_tokens or fewer groups.",
            )
            failed.append(self.move(job.id, "failed", failure=failure))
        return Recovered(tuple(queued), tuple(failed))

    # ---- what happened ----------------------------------------------------------------------

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Events:
        """In order, those with a larger id than `after`."""
        rows = self._store.query(
            "SELECT * FROM job_events WHERE job = ? AND id > ? ORDER BY id LIMIT ?",
            (job_id, after, limit),
        )
        return [JobEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]

    async def wait_event(self, job_id: str, after: int, deadline_s: float) -> bool:
        """Whether there is, or comes within the deadline, an event after that one."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        # Listen first, then look: what comes between the two is heard.
        with self._listening:
            self._listeners.setdefault(job_id, set()).add(listener)
        try:
            if await asyncio.to_thread(self.events, job_id, after, 1):
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
            self._wake(job_id)

    def _change(
        self,
        job_id: str,
        change: Callable[[JobInfo], JobInfo],
        tell: Callable[[JobInfo], tuple[str, dict[str, Any]]],
    ) -> JobInfo:
        """Replace a job by what `change` makes of it; one that stays the same has no event."""
        with self._store.transaction(durable=True) as db:
            before = self.get(job_id)
            job = change(before)
            if job == before:
                return job
            db.execute(
                "UPDATE jobs SET state = ?, info = ? WHERE id = ?",
                (job.state, job.model_dump_json(), job_id),
            )
            _insert_event(db, job_id, *tell(job))
        self._wake(job_id)
        return job

    def _wake(self, job_id: str) -> None:
        with self._listening:
            for loop, event in self._listeners.get(job_id, ()):
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)


def _event_of_move(job: JobInfo) -> tuple[str, dict[str, Any]]:
    told: dict[JobState, tuple[str, dict[str, Any]]] = {
        "queued": ("queued", {}),
        "running": ("started", {"attempt": job.attempts, "base_step": job.base_step}),
        "done": ("done", {"step": job.step, "metrics": job.metrics, "reason": job.reason}),
        "failed": ("failed", {"failure": job.failure.model_dump() if job.failure else None}),
        "cancelled": ("cancelled", {}),
    }
    return told[job.state]


def _insert_event(db: Connection, job_id: str, type: str, data: dict[str, Any]) -> JobEvent:
    last = db.execute("SELECT max(id) FROM job_events WHERE job = ?", (job_id,)).fetchone()[0]
    event = JobEvent(id=(last or 0) + 1, job=job_id, type=type, at=time.time(), data=data)
    db.execute(
        "INSERT INTO job_events VALUES (?, ?, ?, ?, ?)",
        (job_id, event.id, type, event.at, json.dumps(data)),
    )
    return event
