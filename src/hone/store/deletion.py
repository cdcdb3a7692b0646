"""Delete a model, with its checkpoints, history, jobs and runs.

In:   the key of a registered model that no job trains and no open run uses
Out:  nothing of it in the store; its name may be registered again

A directory and a database cannot change in one transaction. So one transaction removes the rows and
writes the intent to remove the directory. Then the directory is renamed to `.NAME.ID.deleted`, which
no model can be called, and removed. Start-up finishes what a crash or a failing disk prevented. Until
the directory is renamed, its name cannot be registered: the new model would get the old checkpoints.

Recorded calls stay until they are pruned: they belong to rollouts, not to the model.
"""

import logging
import secrets
import shutil
import time
from dataclasses import dataclass
from typing import Any

from hone.errors import Conflict, NotFound, StorageError
from hone.files.disk import storage
from hone.files.logs import say
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints
from hone.store.database import Store
from hone.store.failpoints import failpoint
from hone.store.jobs import JobStore
from hone.store.models import ModelStore
from hone.types import ModelKey

FAILPOINTS = ("delete/after-rows", "delete/after-move", "delete/after-remove")

_RUN_MODEL = "CASE json_valid(spec) WHEN 1 THEN json_extract(spec, '$.model') END"
_DELETES = (
    "DELETE FROM job_events WHERE job IN (SELECT id FROM jobs WHERE model = :key)",
    "DELETE FROM call_refs WHERE job IN (SELECT id FROM jobs WHERE model = :key)",
    "DELETE FROM jobs WHERE model = :key",
    f"DELETE FROM runs WHERE {_RUN_MODEL} IN (:key, :bare)",
    "DELETE FROM registrations WHERE project = :project AND name = :name",
    "DELETE FROM models WHERE project = :project AND name = :name",
    "DELETE FROM renames WHERE project = :project AND :name IN (name, new_name)",
    "INSERT INTO deletions VALUES (:id, :project, :name, :at, 0)",
)


@dataclass(frozen=True, slots=True)
class Deletions:
    """Deletes models from the stores of one server. Blocking."""

    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints

    def delete(self, key: ModelKey, *, force: bool = False) -> int:
        """Delete a model; returns the bytes that this frees on disk.

        Raises Conflict while one of its jobs has not ended or, without `force`, while one of its
        runs is open.
        """
        self.jobs.write_pending()  # on disk, a job that has ended may still be running
        same_name = [known for known in self.models.list() if known.key.name == key.name]
        names: dict[str, Any] = {
            "key": str(key),
            "project": key.project,
            "name": key.name,
            # Runs may call a model by its name alone, if that means no other.
            "bare": key.name if len(same_name) < 2 else str(key),
            "id": secrets.token_hex(4),
            "at": time.time(),
        }
        with self.store.transaction(durable=True) as db:
            query = "SELECT 1 FROM models WHERE project = :project AND name = :name"
            if db.execute(query, names).fetchone() is None:
                self.models.read_again()
                raise NotFound(f"no model called {str(key)!r} is registered")
            self._check_idle(names, force=force)
            for statement in _DELETES:
                db.execute(statement, names)
        self.models.read_again()
        self.calls.read_runs()
        failpoint("delete/after-rows")
        num_bytes = self._remove(key, names["id"], moved=False)
        say("model deleted", model=str(key), bytes=num_bytes)
        return num_bytes

    def finish(self) -> None:
        """At start-up: remove the directories that were to be removed.

        One that cannot be removed is logged: it must not keep the server from starting.
        """
        for row in self.store.query("SELECT * FROM deletions"):
            key = ModelKey(row["project"], row["name"])
            try:
                self._remove(key, row["id"], moved=bool(row["moved"]))
            except StorageError as error:  # the next start tries it again
                reason = str(error)
                say("deletion not finished", level=logging.ERROR, model=str(key), reason=reason)
            else:
                say("deletion of a model finished", model=str(key))

    def _check_idle(self, names: dict[str, Any], *, force: bool) -> None:
        key = names["key"]
        rows = self.store.query(
            "SELECT id, state FROM jobs WHERE model = :key AND state IN ('queued', 'running')",
            names,
        )
        for row in rows:
            raise Conflict(
                f"model {key!r}: job {row['id']!r} is {row['state']}. Wait for its end, or delete the "
                "model with force, which cancels its jobs."
            )
        runs = self.store.query(
            f"SELECT id FROM runs WHERE closed_at IS NULL AND {_RUN_MODEL} IN (:key, :bare)", names
        )
        if runs and not force:
            raise Conflict(
                f"model {key!r}: run {runs[0]['id']!r} is open. Wait until it has ended and is closed, "
                "or delete the model with force."
            )

    def _remove(self, key: ModelKey, id: str, *, moved: bool) -> int:
        """Remove the directory of a model whose rows are gone; returns its size."""
        path = self.checkpoints.model_dir(key)
        aside = path.with_name(f".{key.name}.{id}.deleted")
        if not moved:
            self.checkpoints.move_aside(key, aside)
            failpoint("delete/after-move")
            with self.store.transaction(durable=True) as db:
                db.execute("UPDATE deletions SET moved = 1 WHERE id = ?", (id,))
        num_bytes = 0
        with storage(aside):
            if aside.exists():
                files = (file for file in aside.rglob("*") if file.is_file())
                num_bytes = sum(file.lstat().st_size for file in files)
                shutil.rmtree(aside)
        failpoint("delete/after-remove")
        with self.store.transaction(durable=True) as db:
            db.execute("DELETE FROM deletions WHERE id = ?", (id,))
        return num_bytes
