"""Give a model another name, with its checkpoints, history, jobs and runs.

In:   the key of a registered model, and a name that is free
Out:  everything the store holds of it under the new name; the old one may be registered anew

A directory and a database cannot change in one transaction. So the intent is written first, and
every step after it can be repeated: start-up does so for each rename that is not marked as done.
Recorded calls keep the name they were answered under: they belong to the rollouts of that time, and
a new model under the old name refuses them, because it never had the adapter that answered.
"""

import time
from dataclasses import dataclass

from hone.disk import move
from hone.errors import Conflict, NotFound
from hone.logs import say
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints
from hone.store.database import Store
from hone.store.failpoints import failpoint
from hone.store.jobs import JobStore
from hone.store.models import ModelRecord, ModelStore
from hone.types import ModelKey

FAILPOINTS = ("rename/after-intent", "rename/after-move", "rename/after-commit")


@dataclass(frozen=True, slots=True)
class Renames:
    """Renames models in the stores of one server. Blocking."""

    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints

    def rename(self, key: ModelKey, new: ModelKey) -> bool:
        """Rename a model; False if that was done before and only the answer was lost."""
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
            db.execute(
                "INSERT OR REPLACE INTO renames VALUES (?, ?, ?, ?, 0)",
                (key.project, key.name, new.name, time.time()),
            )
        return True

    def _check_free(self, record: ModelRecord, new: ModelKey) -> None:
        directory = self.checkpoints.model_dir(new)
        if any(known.key == new for known in self.models.list()) or directory.exists():
            raise Conflict(
                f"model {str(record.key)!r}: {str(new)!r} exists already, or its directory "
                f"{directory} does. Choose another name."
            )
        self.models.check_name(record.spec.model_copy(update={"name": new.name}))

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
        if old_dir.exists() and not new_dir.exists():
            move(old_dir, new_dir)
        failpoint("rename/after-move")
        with self.store.transaction(durable=True) as db:
            bare = sum(known.key.name == key.name for known in self.models.list()) == 1
            self.models.rename(db, key, new)
            self.jobs.rename(db, key, new)
            self.calls.rename(db, key, new, bare=bare)
            db.execute(
                "UPDATE renames SET done = 1 WHERE project = ? AND name = ? AND new_name = ?",
                (key.project, key.name, new.name),
            )
        say("model renamed", model=str(key), to=str(new))
