"""Give a model another name, with all that is kept of it.

In:   the key of a registered model, and a name that is free
Out:  checkpoints, history, jobs and runs under the new name; the old one may be registered anew

A directory and a database cannot change in one stroke. So what is meant is written down first, and
whatever follows can be done again: start-up does so for every rename that is not marked as done.
Recorded calls keep the name they were answered under: they belong to the rollouts of that time, and
a new model under the old name refuses them, because it never had the adapter that answered.
"""

import asyncio
import time
from dataclasses import replace
from typing import Protocol

from hone.disk import move
from hone.errors import Conflict, NotFound
from hone.logs import say
from hone.server.serving import Serving
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints
from hone.store.database import Store
from hone.store.failpoints import failpoint
from hone.store.jobs import JobStore
from hone.store.models import ModelRecord, ModelStore
from hone.types import ModelKey

FAILPOINTS = ("rename/after-intent", "rename/after-move", "rename/after-commit")


class State(Protocol):
    """The parts of a server's state that hold a model's name."""

    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints
    serving: Serving


async def rename(state: State, key: ModelKey, to: str) -> ModelRecord:
    """The model under its new name. Sent again, it is the same answer again."""
    new = replace(key, name=to)
    if await asyncio.to_thread(_intend, state, key, new):
        failpoint("rename/after-intent")
        await asyncio.to_thread(_carry_out, state, key, new)
        failpoint("rename/after-commit")
        state.calls.read_runs()
        state.serving.rename(key, new)
        say("model renamed", model=str(key), to=str(new))
    return await asyncio.to_thread(state.models.get, new)


def finish_renames(state: State) -> None:
    """At start-up: carry out what was written down and not done."""
    rows = state.store.query("SELECT project, name, new_name FROM renames WHERE done = 0")
    for project, name, new_name in rows:
        key, new = ModelKey(project, name), ModelKey(project, new_name)
        _carry_out(state, key, new)
        say("model renamed", model=str(key), to=str(new))
    if rows:
        state.calls.read_runs()


def _intend(state: State, key: ModelKey, new: ModelKey) -> bool:
    """Write the rename down; False where it was done before and only the answer was lost."""
    with state.store.transaction(durable=True) as db:
        try:
            record = state.models.get(key)
        except NotFound:
            done = db.execute(
                "SELECT 1 FROM renames WHERE project = ? AND name = ? AND new_name = ?",
                (key.project, key.name, new.name),
            ).fetchone()
            if done is None:
                raise
            return False
        _check_free(state, record, new)
        _check_idle(state, key)
        db.execute(
            "INSERT OR REPLACE INTO renames VALUES (?, ?, ?, ?, 0)",
            (key.project, key.name, new.name, time.time()),
        )
    return True


def _check_free(state: State, record: ModelRecord, new: ModelKey) -> None:
    directory = state.checkpoints.model_dir(new)
    if any(known.key == new for known in state.models.list()) or directory.exists():
        raise Conflict(
            f"model {str(record.key)!r}: {str(new)!r} exists already, or its directory "
            f"{directory} does. Choose another name."
        )
    state.models.check_name(record.spec.model_copy(update={"name": new.name}))


def _check_idle(state: State, key: ModelKey) -> None:
    for job_state in ("queued", "running"):
        for job in state.jobs.list(model=key, state=job_state, limit=1):
            raise Conflict(
                f"model {str(key)!r}: job {job.id!r} is {job_state}. Wait for its end, or cancel "
                "it, and rename the model then."
            )


def _carry_out(state: State, key: ModelKey, new: ModelKey) -> None:
    """Everything after the intent; may be repeated from any point of it."""
    old_dir, new_dir = state.checkpoints.model_dir(key), state.checkpoints.model_dir(new)
    if old_dir.exists() and not new_dir.exists():
        move(old_dir, new_dir)
    failpoint("rename/after-move")
    with state.store.transaction(durable=True) as db:
        bare = sum(known.key.name == key.name for known in state.models.list()) == 1
        state.models.rename(db, key, new)
        state.jobs.rename(db, key, new)
        state.calls.rename(db, key, new, bare=bare)
        db.execute(
            "UPDATE renames SET done = 1 WHERE project = ? AND name = ? AND new_name = ?",
            (key.project, key.name, new.name),
        )
