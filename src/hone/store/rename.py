"""Give a model another name, with its checkpoints, history, jobs and runs.

In:   the key of a registered model, and a name that is free
Out:  everything in the store under the new name; the old name may be registered again

A directory and a database cannot change in one transaction. So the intent is written first, and
every step after it can be repeated: start-up does so for each rename that is not marked as done.
Recorded calls keep the name they were answered under: they belong to the rollouts of that time, and
a new model under the old name refuses them, because it never had the adapter that answered.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from hone.errors import Conflict, NotFound
from hone.files.disk import move, storage
from hone.files.logs import say
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints
from hone.store.database import Store
from hone.store.failpoints import failpoint
from hone.store.jobs import JobStore
from hone.store.models import ModelRecord, ModelStore, check_name
from hone.types import ModelKey

FAILPOINTS = ("rename/after-intent", "rename/after-move", "rename/after-commit")

_DONE = (
    "SELECT 1 FROM renames WHERE project = :project AND name = :name AND new_name = :new_name "
    "AND done = 1"
)
UPDATES = (
    "UPDATE models SET name = :new_name, spec = json_set(spec, '$.name', :new_name) "
    "WHERE project = :project AND name = :name",
    "UPDATE registrations SET name = :new_name WHERE project = :project AND name = :name",
    "UPDATE jobs SET model = :new, info = CASE json_valid(info) "
    "WHEN 1 THEN json_set(info, '$.model', :new) ELSE info END WHERE model = :old",
    "UPDATE runs SET spec = json_set(spec, '$.model', :new) "
    "WHERE CASE json_valid(spec) WHEN 1 THEN json_extract(spec, '$.model') END = :old",
    "UPDATE renames SET done = 1 "
    "WHERE project = :project AND name = :name AND new_name = :new_name",
)


@dataclass(frozen=True, slots=True)
class Renames:
    """Renames models in the stores of one server. Blocking."""

    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints

    def rename(self, key: ModelKey, new: ModelKey) -> bool:
        """Rename a model; False if an earlier request has already done it."""
        self.jobs.write_pending()  # otherwise these jobs would get the old name back
        if not self._write_intent(key, new):
            return False
        failpoint("rename/after-intent")
        self._carry_out(key, new)
        failpoint("rename/after-commit")
        self.calls.read_runs()
        return True

    def finish(self) -> None:
        """At start-up: carry out the renames that were intended and not done."""
        rows = self.store.query("SELECT project, name, new_name FROM renames WHERE done = 0")
        for project, name, new_name in rows:
            self._carry_out(ModelKey(project, name), ModelKey(project, new_name))
        if rows:
            self.calls.read_runs()

    def _write_intent(self, key: ModelKey, new: ModelKey) -> bool:
        with self.store.transaction(durable=True) as db:
            try:
                record = self.models.get(key)
            except NotFound:
                done = db.execute(
                    "SELECT 1 FROM renames WHERE project = ? AND name = ? AND new_name = ?",
                    (key.project, key.name, new.name),
                ).fetchone()
                if done is None:
                    raise
                return False
            self._check_free(record, new)
            self._check_idle(key)
            # One that was refused, and not repeated, must not be finished after this one.
            db.execute(
                "DELETE FROM renames WHERE project = ? AND name = ? AND done = 0",
                (key.project, key.name),
            )
            db.execute(
                "INSERT OR REPLACE INTO renames VALUES (?, ?, ?, ?, 0)",
                (key.project, key.name, new.name, time.time()),
            )
        return True

    def _check_free(self, record: ModelRecord, new: ModelKey) -> None:
        directory, known = self.checkpoints.model_dir(new), self.models.list()
        if any(other.key == new for other in known) or directory.exists():
            raise Conflict(
                f"model {str(record.key)!r}: {str(new)!r} exists already, or its directory "
                f"{directory} does. Choose another name."
            )
        others = [other for other in known if other.key != record.key]
        check_name(record.spec.model_copy(update={"name": new.name}), others)

    def _check_idle(self, key: ModelKey) -> None:
        for job_state in ("queued", "running"):
            for job in self.jobs.list(model=key, state=job_state, limit=1):
                raise Conflict(
                    f"model {str(key)!r}: job {job.id!r} is {job_state}. Wait for its end, or "
                    "cancel it, and rename the model then."
                )

    def _carry_out(self, key: ModelKey, new: ModelKey) -> None:
        """Everything after the intent; can be repeated from any point."""
        old_dir, new_dir = self.checkpoints.model_dir(key), self.checkpoints.model_dir(new)
        names = {
            "old": str(key),
            "new": str(new),
            "project": key.project,
            "name": key.name,
            "new_name": new.name,
        }
        # The directory is moved inside the transaction: if another process has locked the database,
        # the transaction does not begin, and the directory stays where the database says it is.
        moved = False
        try:
            with self.store.transaction(durable=True) as db:
                if old_dir.exists() and not new_dir.exists():
                    with storage(new_dir):
                        move(old_dir, new_dir)
                    moved = True
                failpoint("rename/after-move")
                for statement in UPDATES:
                    db.execute(statement, names)
        except BaseException:  # a commit that fails may have happened
            if moved and not self.store.query(_DONE, names):
                with suppress(OSError):
                    move(new_dir, old_dir)
            raise
        self.models.read_again()
        say("model renamed", model=str(key), to=str(new))
