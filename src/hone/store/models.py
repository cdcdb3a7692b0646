"""Registered models: names for adapters of a base model.

In:   ModelSpecs, from POST /v1/training/models and ART's register
Out:  ModelRecords, by key or by the name a client used

Base model, rank, alpha and seed of a key are those of its first registration, because its
checkpoints depend on them; other settings may be changed by registering again. A base model has one
canonical name, whatever spelling a client uses, so that it is loaded once. rename.py renames
models.
"""

import threading
import time
from dataclasses import dataclass

from hone.errors import Conflict, NotFound, did_you_mean
from hone.models.find import canonical
from hone.store.database import Store
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


class ModelStore:
    """Registered models, in the order of their keys. In memory, because every request reads them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: Records | None = None

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

        Raises Conflict if `register` would.
        """
        spec = spec.model_copy(update={"base_model": canonical(spec.base_model)})
        known = self.list()
        before = next((record for record in known if record.key == spec.key), None)
        if before is None:
            check_name(spec, known)
        else:
            _check_same(before.spec, spec)
        return spec, before

    def get(self, key: ModelKey) -> ModelRecord:
        return self.find(str(key))

    def find(self, name: str, project: str | None = None) -> ModelRecord:
        """By NAME or PROJECT/NAME; a NAME that several projects have is a Conflict.

        With `project`, that project's own model of the NAME comes first. A NAME may contain spaces
        and slashes, as its user wrote it.
        """
        record = self.find_or_none(name, project)
        if record is None:
            raise NotFound(_unknown(name, self.list()))
        return record

    def find_or_none(self, name: str, project: str | None = None) -> ModelRecord | None:
        """As `find`; None if there is none of that name."""
        known = self.list()
        names = {name, stored_name(name)}
        matches = [r for r in known if r.key.project == project and r.key.name in names]
        matches = matches or [r for r in known if names & {r.key.name, str(r.key)}]
        if len(matches) > 1:
            candidates = " or ".join(repr(str(record.key)) for record in matches)
            raise Conflict(f"model {name!r} exists in several projects; say {candidates}")
        return matches[0] if matches else None

    def list(self) -> Records:
        with self._lock:
            if self._known is None:
                rows = self._store.query("SELECT * FROM models ORDER BY project, name")
                self._known = [
                    ModelRecord(
                        ModelKey(row["project"], row["name"]),
                        ModelSpec.model_validate_json(row["spec"]),
                        row["created_at"],
                    )
                    for row in rows
                ]
            return self._known.copy()

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
            "SELECT spec FROM models LEFT JOIN registrations USING (project, name) "
            "WHERE base_model = ? ORDER BY place DESC, created_at DESC LIMIT 1",
            (base_model,),
        )
        return ModelSpec.model_validate_json(rows[0]["spec"]) if rows else None


def _check_same(before: ModelSpec, now: ModelSpec) -> None:
    for field in FIXED:
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            raise Conflict(
                f"model {str(now.key)!r} is registered with {field} {old!r} and cannot become one "
                f"with {new!r}: its checkpoints have that shape. Register it under another name."
            )


def check_name(spec: ModelSpec, known: Records) -> None:
    """A name means one thing: a registered model or a base model, never both."""
    bases = {spec.base_model, *(record.spec.base_model for record in known)}
    for name in (spec.name, str(spec.key)):
        if name in bases:
            raise Conflict(
                f"model {str(spec.key)!r}: {name!r} is the name of a base model in use, and a "
                "request for it would not say which is meant. Choose another name."
            )
    for record in known:
        if spec.base_model in (record.key.name, str(record.key)):
            raise Conflict(
                f"model {str(spec.key)!r}: its base_model {spec.base_model!r} is the name of a "
                "registered model. Name the base model of that one, or weights of another name."
            )


def _unknown(name: str, known: Records) -> str:
    names = [str(record.key) for record in known]
    guess = did_you_mean(name, [*names, *(r.key.name for r in known)])
    registered = ", ".join(names) or "none yet"
    return f"no model called {name!r} is registered.{guess} Registered: {registered}."
