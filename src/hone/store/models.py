"""Registered models: names for adapters of a base model.

In:   ModelSpecs, from POST /v1/training/models and ART's register
Out:  ModelRecords, by key or by the name a client used

No registration changes what PROJECT/NAME means: the model of that key answers to it, whatever other
models are called.

Base model, rank, alpha and seed of a key are those of its first registration, because its
checkpoints depend on them; other settings may be changed by registering again. A base model has one
canonical name, whatever spelling a client uses, so that it is loaded once. rename.py renames
models, deletion.py deletes them.
"""

import json
import threading
import time
from dataclasses import dataclass
from sqlite3 import Row

from hone.errors import AmbiguousModel, Conflict, NotFound, did_you_mean, near_names
from hone.models.find import canonical
from hone.store.database import Store
from hone.store.rows import read_row, readable
from hone.types import ModelKey, ModelSpec, stored_name

SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    base_model TEXT NOT NULL,
    spec TEXT NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS registrations (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    UNIQUE (project, name)
);
CREATE TABLE IF NOT EXISTS renames (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    new_name TEXT NOT NULL,
    at REAL NOT NULL,
    done INTEGER NOT NULL,
    PRIMARY KEY (project, name, new_name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deletions (
    id TEXT PRIMARY KEY,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    at REAL NOT NULL,
    moved INTEGER NOT NULL
) WITHOUT ROWID;
"""

FIXED = ("base_model", "rank", "alpha", "seed")
"""Fields that cannot change after the first registration."""


@dataclass(frozen=True)
class ModelRecord:
    """A registered model."""

    key: ModelKey
    spec: ModelSpec
    created_at: float


Records = list[ModelRecord]  # named here because `list` is a method below


class _Index:
    """The records by key and by name, so that no request reads all of them."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.by_key = {record.key: record for record in records}
        self.by_name: dict[str, Records] = {}
        for record in records:
            self.by_name.setdefault(record.key.name, []).append(record)
        self.bases = {record.spec.base_model for record in records}


class ModelStore:
    """Registered models, in the order of their keys. In memory, because every request reads them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: _Index | None = None

    def register(self, spec: ModelSpec) -> ModelRecord:
        """Register a model. Idempotent. Raises Conflict if a fixed field changed."""
        with self._store.transaction(durable=True) as db:
            spec, before = self.check(spec)
            created_at = time.time() if before is None else before.created_at
            db.execute(
                "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, ?)",
                (spec.project, spec.name, spec.base_model, spec.model_dump_json(), created_at),
            )
            db.execute(
                "INSERT OR REPLACE INTO registrations (project, name) VALUES (?, ?)",
                (spec.project, spec.name),
            )
        self.read_again()
        return ModelRecord(spec.key, spec, created_at)

    def check(self, spec: ModelSpec) -> tuple[ModelSpec, ModelRecord | None]:
        """The spec as `register` would store it, and the record that it would replace.

        Raises Conflict if `register` would, and StateError if the record cannot be read.
        """
        spec = spec.model_copy(update={"base_model": canonical(spec.base_model)})
        self._check_not_being_deleted(spec.key)
        known = self.list()
        before = next((record for record in known if record.key == spec.key), None)
        if before is None:
            self._check_readable(str(spec.key))
            check_name(spec, known)
        else:
            _check_same(before.spec, spec)
        return spec, before

    def get(self, key: ModelKey) -> ModelRecord:
        """The model of this key, whatever others are called. Raises NotFound."""
        record = self._index().by_key.get(key)
        if record is None:
            self._check_readable(str(key))
            raise NotFound(self._unknown(str(key)))
        return record

    def find(self, name: str, project: str | None = None) -> ModelRecord:
        """By NAME or PROJECT/NAME; a NAME that several projects have is a Conflict.

        With `project`, that project's own model of the NAME comes first. A NAME may contain spaces
        and slashes, as its user wrote it; without `project` such a spelling comes last, after every
        PROJECT/NAME and every base model in use.
        """
        record = self.find_or_none(name, project)
        if record is None:
            self._check_readable(name, stored_name(name))
            raise NotFound(self._unknown(name))
        return record

    def find_or_none(self, name: str, project: str | None = None) -> ModelRecord | None:
        """As `find`; None if there is none of that name."""
        index, stored = self._index(), stored_name(name)
        if project is not None:
            own = index.by_key.get(ModelKey(stored_name(project), stored))
            if own is not None:
                return own
        exact = index.by_key.get(ModelKey(*name.split("/"))) if name.count("/") == 1 else None
        if exact is not None:
            return exact
        if stored != name and name in index.bases:
            return None
        matches = index.by_name.get(stored, [])
        if len(matches) > 1:
            candidates = " or ".join(repr(str(record.key)) for record in matches)
            raise AmbiguousModel(f"model {name!r} exists in several projects; use {candidates}")
        return matches[0] if matches else None

    def short_name(self, key: ModelKey) -> str:
        """NAME, if no other project has a model of that name; otherwise PROJECT/NAME."""
        return key.name if len(self._index().by_name.get(key.name, [])) <= 1 else str(key)

    def _check_not_being_deleted(self, key: ModelKey) -> None:
        query = "SELECT 1 FROM deletions WHERE project = ? AND name = ? AND moved = 0"
        if self._store.query(query, (key.project, key.name)):
            raise Conflict(
                f"model {str(key)!r} was deleted, and its directory is not removed yet. Try again; if "
                "that does not help, look at the server's log and restart it."
            )

    def _check_readable(self, *names: str) -> None:
        """Raise StateError if a model of such a name is stored and cannot be read."""
        rows = self._store.query(
            "SELECT models.* FROM models JOIN json_each(?) "
            "ON value IN (name, project || '/' || name)",
            (json.dumps(names),),
        )
        for row in rows:
            _record(row)

    def list(self) -> Records:
        return self._index().records.copy()

    def _index(self) -> _Index:
        with self._lock:
            if self._known is None:
                rows = self._store.query("SELECT * FROM models ORDER BY project, name")
                self._known = _Index(readable(self._store, rows, _record))
            return self._known

    def _unknown(self, name: str) -> str:
        keys = [record.key for record in self.list()]
        known = [str(key) for key in keys]
        guess = did_you_mean(name[:200], [*known, *(key.name for key in keys)])
        return (
            f"no model called {name[:200]!r} is registered.{guess} Registered: "
            f"{near_names(name, known)}. GET /v1/training/models lists them."
        )

    def read_again(self) -> None:
        """Call it after every commit that changed a model."""
        with self._lock:
            self._known = None

    def on_base(self, base_model: str) -> Records:
        return [record for record in self.list() if record.spec.base_model == base_model]

    def last_on_base(self, base_model: str) -> ModelSpec | None:
        """The model of a base model that was registered last, or again with other settings."""
        # Models of a root that has no order of registrations yet have no place: the newest of them.
        rows = self._store.query(
            "SELECT models.* FROM models LEFT JOIN registrations USING (project, name) "
            "WHERE base_model = ? ORDER BY place DESC, created_at DESC",
            (base_model,),
        )
        records = readable(self._store, rows, _record)
        return records[0].spec if records else None


def _record(row: Row) -> ModelRecord:
    key = ModelKey(row["project"], row["name"])
    return ModelRecord(key, read_row(ModelSpec, row["spec"], f"model {key}"), row["created_at"])


def _check_same(before: ModelSpec, now: ModelSpec) -> None:
    for field in FIXED:
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            raise Conflict(
                f"model {str(now.key)!r} is registered with {field} {old!r} and cannot become one "
                f"with {new!r}: its checkpoints have that shape. Register it under another name."
            )


def check_name(spec: ModelSpec, known: Records) -> None:
    """A name means one thing: a registered model or a base model, never both.

    Raises Conflict. Names that differ only in case would share a directory on some file systems.
    """
    bases = {spec.base_model, *(record.spec.base_model for record in known)}
    for name in (spec.name, str(spec.key)):
        if name in bases:
            raise Conflict(
                f"model {str(spec.key)!r}: {name!r} is the name of a base model in use, and a "
                "request for it would not say which is meant. Choose another name."
            )
    for record in known:
        if str(record.key).casefold() == str(spec.key).casefold():
            raise Conflict(
                f"model {str(spec.key)!r}: {str(record.key)!r} exists, and some file systems do not "
                "distinguish names by case. Choose another name, or write it as it is registered."
            )
        if spec.base_model in (record.key.name, str(record.key)):
            raise Conflict(
                f"model {str(spec.key)!r}: its base_model {spec.base_model!r} is the name of a "
                "registered model. Name the base model of that one, or weights of another name."
            )
