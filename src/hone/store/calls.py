"""Every answered call, with its tokens, by rollout and by its sampled ids.

In:   RecordedCalls as the chat routes answer them; runs as they open and close
Out:  the same values, bit for bit, until they are pruned

To store a conversation of t turns once and not t times, a call is stored as a reference to its
parent and what it adds: how many leading ids of the parent's prompt and completion it repeats, and
the ids that follow; likewise for its messages. Before a parent is pruned, its children are stored
whole, so that no call depends on a deleted one. Log-probabilities are stored exactly, because a
client sends its copy back as JSON and the two are compared.
"""

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from hone.errors import Conflict, NotFound, StateError
from hone.store.call_rows import (
    SUMMARY_COLUMNS,
    Row,
    digest,
    held_s,
    insert,
    ints,
    read_calls,
    summary_of,
    without_request_fields,
)
from hone.store.database import Store
from hone.store.rows import read_row, readable
from hone.types import CallSummary, RecordedCall, RunSpec

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, spec TEXT NOT NULL, opened_at REAL NOT NULL, closed_at REAL
);
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    rollout TEXT NOT NULL,
    run TEXT,
    place INTEGER NOT NULL,
    choice INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    digest BLOB NOT NULL,
    created_at REAL NOT NULL,
    size INTEGER NOT NULL,
    parent INTEGER,
    ids_kept INTEGER NOT NULL,
    turns_kept INTEGER NOT NULL,
    ids BLOB NOT NULL,
    completion BLOB NOT NULL,
    logprobs BLOB,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS calls_by_rollout ON calls (rollout, place, choice);
CREATE INDEX IF NOT EXISTS calls_by_digest ON calls (digest);
CREATE INDEX IF NOT EXISTS calls_by_parent ON calls (parent) WHERE parent IS NOT NULL;
CREATE INDEX IF NOT EXISTS calls_by_run ON calls (run, created_at) WHERE run IS NOT NULL;
CREATE INDEX IF NOT EXISTS calls_by_age ON calls (created_at, size);
CREATE TABLE IF NOT EXISTS call_refs (
    job TEXT NOT NULL, call TEXT NOT NULL, PRIMARY KEY (job, call)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS call_refs_by_call ON call_refs (call);
"""

_FREE = """
    NOT EXISTS (SELECT 1 FROM runs WHERE runs.id = calls.run AND runs.closed_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM call_refs WHERE call_refs.call = calls.id)
"""
"""SQL condition for calls that belong to no open run and that no job refers to."""
_PRUNED_AT_ONCE = 200
"""Calls deleted in one transaction; requests that record a call wait for it."""


@lru_cache(maxsize=1)
def _reading(path: Path) -> "CallStore":
    return CallStore(Store(path, None))


class CallStore:
    """Recorded calls and runs. Blocking: call from a thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RunSpec, float]] = {}
        """Open runs, in memory because every request of a rollout reads them."""
        self._opened: dict[str, float] = {}
        """When each run was last opened by a client of this server."""
        self._unmarked: Counter[str] = Counter()
        """Requests outside any rollout, by the model that answered, since this server started."""
        self.read_runs()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the same file."""
        return _reading, (self._store.path,)

    # ---- runs -------------------------------------------------------------------------------

    def read_runs(self) -> None:
        """Read from the database which runs are open."""
        with self._lock:
            rows = self._store.query("SELECT id, spec, opened_at FROM runs WHERE closed_at IS NULL")
            specs = readable(self._store, rows, _run)
            opened_at = {row["id"]: row["opened_at"] for row in rows}
            self._open = {spec.id: (spec, opened_at[spec.id]) for spec in specs}

    def open_run(self, spec: RunSpec) -> None:
        """Open a run: its calls are kept until it is closed.

        It may be opened again with other aliases, but not with another model or seed.
        """
        with self._lock:
            with self._store.transaction() as db:
                query = "SELECT id, spec, opened_at FROM runs WHERE id = ?"
                row = db.execute(query, (spec.id,)).fetchone()
                opened_at = time.time() if row is None else row["opened_at"]
                known = None if row is None else _run(row)
                if known is not None and (known.model, known.seed) != (spec.model, spec.seed):
                    raise Conflict(
                        f"run {spec.id!r} exists with model {known.model!r} and seed {known.seed}, "
                        f"not {spec.model!r} and {spec.seed}; choose another id, or open it as it was"
                    )
                db.execute(
                    "INSERT INTO runs (id, spec, opened_at) VALUES (?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET closed_at = NULL, spec = excluded.spec",
                    (spec.id, spec.model_dump_json(), opened_at),
                )
            self._open[spec.id] = spec, opened_at
            self._opened[spec.id] = time.time()

    def close_run(self, run: str) -> None:
        """Close a run, so that its calls can be pruned. Closing twice changes nothing."""
        with self._lock:
            with self._store.transaction() as db:
                if db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is None:
                    raise NotFound(f"no run is called {run!r}; POST /v1/runs opens one")
                db.execute(
                    "UPDATE runs SET closed_at = ? WHERE id = ? AND closed_at IS NULL",
                    (time.time(), run),
                )
            self._open.pop(run, None)
            self._opened.pop(run, None)

    def close_idle_runs(self, idle_s: float, *, busy: Collection[str] = ()) -> list[str]:
        """Close runs that were not opened and made no call for `idle_s`; returns their ids.

        Runs of the models in `busy` (PROJECT/NAME) stay open: their clients wait for a job.
        """
        before = time.time() - idle_s
        names = {*busy, *(key.partition("/")[2] for key in busy)}
        rows = self._store.query(
            "SELECT id FROM runs WHERE closed_at IS NULL AND opened_at < ? AND NOT EXISTS "
            "(SELECT 1 FROM calls WHERE calls.run = runs.id AND calls.created_at >= ?)",
            (before, before),
        )
        # A run that was reopened since is newer than its row.
        idle = [
            row["id"]
            for row in rows
            if self._opened.get(row["id"], 0.0) < before
            and (row["id"] not in self._open or self._open[row["id"]][0].model not in names)
        ]
        for run in idle:
            self.close_run(run)
        return idle

    def runs(self, *, limit: int) -> list[str]:
        """Ids of runs: the open ones first, then by the time they were closed, newest first.

        Without those whose row cannot be read.
        """
        rows = self._store.query(
            "SELECT id, spec FROM runs ORDER BY closed_at IS NOT NULL, "
            "coalesce(closed_at, opened_at) DESC LIMIT ?",
            (limit,),
        )
        return [spec.id for spec in readable(self._store, rows, _run)]

    def run(self, run: str) -> tuple[RunSpec, bool, int]:
        """A run, whether it is open, and the number of its calls."""
        rows = self._store.query("SELECT id, spec, closed_at FROM runs WHERE id = ?", (run,))
        if not rows:
            raise NotFound(f"no run is called {run!r}; POST /v1/runs opens one")
        (count,) = self._store.query("SELECT count(*) AS n FROM calls WHERE run = ?", (run,))
        return _run(rows[0]), rows[0]["closed_at"] is None, count["n"]

    def run_of(self, rollout: str | None) -> RunSpec | None:
        """The open run a rollout belongs to; None where it belongs to none."""
        name, colon, _ = (rollout or "").partition(":")
        if not colon:
            return None
        if name not in self._open:
            raise Conflict(
                f"rollout {rollout!r} belongs to run {name!r}, which is not open; "
                f'POST /v1/runs {{"id": "{name}"}} opens it'
            )
        return self._open[name][0]

    def open_since(self, model: str) -> list[float]:
        """When each open run of a model (PROJECT/NAME) was first opened."""
        return [at for spec, at in list(self._open.values()) if spec.model == model]

    def opened_on(self, run: RunSpec) -> date | None:
        """The day on which an open run was first opened: the date that its templates print."""
        _, opened_at = self._open.get(run.id, (run, None))
        return None if opened_at is None else datetime.fromtimestamp(opened_at, UTC).date()

    def unmarked(self, models: Iterable[str]) -> dict[str, int]:
        """Requests to these models that named neither a rollout nor a function."""
        with self._lock:
            return {model: n for model in models if (n := self._unmarked[model])}

    # ---- calls ------------------------------------------------------------------------------

    def add(self, calls: Sequence[RecordedCall], *, parent: RecordedCall | None = None) -> None:
        """Record the choices of one request, all or none. `parent` is the call they continue."""
        self.add_all([(calls, parent)])

    def add_all(
        self, requests: Sequence[tuple[Sequence[RecordedCall], RecordedCall | None]]
    ) -> None:
        """Record the choices of several requests, each with the call it continues, all or none."""
        rows: list[Row] = []
        for (first, *others), parent in requests:
            rows += [Row(first, parent), *(Row(call, first) for call in others)]
        with self._store.transaction() as db:
            for row in rows:
                seq = None
                if row.parent is not None:
                    (seq,) = db.execute(
                        "SELECT seq FROM calls WHERE id = ?", (row.parent.id,)
                    ).fetchone() or (None,)
                    if seq is None:  # pruned since
                        row = Row(row.call, None)
                insert(db, row.values(seq))
        unmarked = (calls[0] for calls, _ in requests if not calls[0].rollout)
        with self._lock:
            self._unmarked.update(call.model for call in unmarked if not call.call.function)

    def has_rollout(self, rollout: str) -> bool:
        """Whether a call of this rollout is recorded. Reads only an index."""
        query = "SELECT 1 FROM calls WHERE rollout = ? LIMIT 1"
        return bool(self._store.query(query, (rollout,)))

    def rollout(self, rollout: str) -> list[RecordedCall]:
        """A rollout's calls in the order of their requests; empty if there are none."""
        seqs = self._store.query(
            "SELECT seq FROM calls WHERE rollout = ? ORDER BY place, choice, seq", (rollout,)
        )
        return read_calls(self._store.query, [row["seq"] for row in seqs])

    def summaries(self, rollout: str) -> list[CallSummary]:
        """The same calls without text and prompts, which are not read either."""
        rows = self._store.query(
            f"SELECT {SUMMARY_COLUMNS} FROM calls WHERE rollout = ? ORDER BY place, choice, seq",
            (rollout,),
        )
        return list(map(summary_of, rows))

    def held(self, rollout: str, *, before: float) -> list[tuple[float, float]]:
        """When requests of a rollout that were answered before this time were held.

        Begin and end in seconds since 1970, as if each had been held until its prompt was built.
        """
        rows = self._store.query(
            "SELECT created_at, body FROM calls WHERE rollout = ? AND choice = 0 AND created_at < ?",
            (rollout, before),
        )
        ends = [(row["created_at"], held_s(row["body"])) for row in rows]
        return [(end - seconds, end) for end, seconds in ends if seconds]

    def get(self, call_ids: Iterable[str]) -> list[RecordedCall]:
        """Calls by id, in this order. Raises NotFound."""
        ids = list(call_ids)
        rows = self._store.query(
            "SELECT id, seq FROM calls WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(ids),),
        )
        seqs = {row["id"]: row["seq"] for row in rows}
        missing = [call for call in ids if call not in seqs]
        if missing:
            raise NotFound(f"no call is recorded as {missing[0]!r} ({len(missing)} not found)")
        return read_calls(self._store.query, [seqs[call] for call in ids])

    def drop_request_fields(self, call_id: str) -> None:
        """Delete the request fields of a call; the call itself stays."""
        (call,) = self.get([call_id])
        with self._store.transaction() as db:
            row = db.execute("SELECT body FROM calls WHERE id = ?", (call.id,)).fetchone()
            if row is not None:  # it may have been pruned since
                body = without_request_fields(row["body"])
                db.execute("UPDATE calls SET body = ? WHERE id = ?", (body, call.id))

    def match(
        self, base_model: str, completion_ids: Sequence[int], *, limit: int = 200
    ) -> list[RecordedCall]:
        """Calls of a base model that sampled exactly these ids, newest first."""
        rows = self._store.query(
            "SELECT seq, completion FROM calls WHERE digest = ? AND base_model = ? "
            "ORDER BY seq DESC LIMIT ?",
            (digest(packed := ints(completion_ids)), base_model, limit),
        )
        return read_calls(
            self._store.query, [row["seq"] for row in rows if row["completion"] == packed]
        )

    # ---- keeping and pruning ----------------------------------------------------------------

    def prune(self, *, max_age_s: float, max_bytes: int) -> int:
        """Delete calls that are too old, then the oldest beyond `max_bytes`; keep those in use."""
        before, pruned, oldest = time.time() - max_age_s, 0, 0.0
        (row,) = self._store.query("SELECT coalesce(sum(size), 0) AS n FROM calls")
        excess = row["n"] - max_bytes
        while deleted := self._prune_some(oldest, before, excess):
            pruned += len(deleted)
            excess -= sum(row["size"] for row in deleted)
            oldest = deleted[-1]["created_at"]  # where the next batch starts
        return pruned

    def prune_runs(self, *, max_age_s: float) -> int:
        """Delete runs that were closed too long ago and have no calls left."""
        with self._store.transaction() as db:
            cursor = db.execute(
                "DELETE FROM runs WHERE closed_at < ? "
                "AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.run = runs.id)",
                (time.time() - max_age_s,),
            )
            return cursor.rowcount

    def _prune_some(self, oldest: float, before: float, excess: int) -> list[sqlite3.Row]:
        """Delete a few of the oldest calls from this time on; returns their time and size."""
        to_delete: list[sqlite3.Row] = []
        with self._store.transaction() as db:
            rows = db.execute(
                "SELECT seq, size, created_at FROM calls WHERE created_at >= ? AND created_at < ? "
                f"AND {_FREE} ORDER BY created_at LIMIT ?",
                (oldest, float("inf") if excess > 0 else before, _PRUNED_AT_ONCE),
            ).fetchall()
            for row in rows:
                if row["created_at"] >= before and excess <= 0:
                    break
                to_delete.append(row)
                excess -= row["size"]
            seqs = [row["seq"] for row in to_delete]
            self._make_children_whole(db, seqs)
            seqs_json = (json.dumps(seqs),)
            db.execute("DELETE FROM calls WHERE seq IN (SELECT value FROM json_each(?))", seqs_json)
        return to_delete

    def _make_children_whole(self, db: sqlite3.Connection, seqs: list[int]) -> None:
        children = db.execute(
            "SELECT seq FROM calls WHERE parent IN (SELECT value FROM json_each(:gone)) "
            "AND seq NOT IN (SELECT value FROM json_each(:gone))",
            {"gone": json.dumps(seqs)},
        ).fetchall()
        for (seq,) in children:
            try:
                (call,) = read_calls(db.execute, [seq])
            except StateError:  # it stays as it is, until it is old enough itself
                continue
            row = Row(call, None)
            db.execute(
                "UPDATE calls SET parent = NULL, ids_kept = 0, turns_kept = 0, ids = ?, body = ?, "
                "size = ? WHERE seq = ?",
                (row.ids, row.body, row.size, seq),
            )


def _run(row: sqlite3.Row) -> RunSpec:
    return read_row(RunSpec, row["spec"], f"run {row['id']!r}")
