"""How jobs end: done, failed, cancelled, or queued again with the reason.

In:   a job, and what came of it or went wrong
Out:  its new state; nothing left behind that a later job would meet

A job fails only for what it is itself the cause of. On a disk that is full or fails it goes back to
the queue, uncounted, until there is room; a learner or an engine that died under it is replaced and
the job tried again. Where the disk takes no change, the change counts from memory and is written as
soon as there is room, so that a job is never stuck in a state that nobody works on.
"""

import asyncio
import shutil
from collections.abc import Mapping
from typing import Any

from hone.disk import storage
from hone.errors import (
    Cancelled,
    DiskFull,
    EngineFailed,
    LearnerDied,
    StorageError,
    Unavailable,
    Unreachable,
)
from hone.logs import log, say
from hone.server.supervision import Part, backoff_s
from hone.server.telemetry import Metrics
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.failpoints import failpoint
from hone.store.jobs import FINAL, JobStore
from hone.store.models import ModelStore
from hone.types import Failure, JobInfo

TRIES = 3
"""A job is given up when the learner or the engine has died so often under it."""
ROOM = 2**20
"""Bytes that must be free beside one and a half times the size of the newest checkpoint."""


class Endings:
    """Moves jobs to where they end, and clears away what they leave."""

    def __init__(
        self,
        jobs: JobStore,
        models: ModelStore,
        checkpoints: Checkpoints,
        calls: CallStore,
        metrics: Metrics,
    ) -> None:
        self._jobs = jobs
        self._models = models
        self._checkpoints = checkpoints
        self._calls = calls
        self._metrics = metrics
        self._left: dict[str, JobInfo] = {}
        """Jobs that ended while the disk did not let go of what they held."""

    async def finish(
        self, job: JobInfo, checkpoint: Checkpoint | None, said: Mapping[str, Any]
    ) -> None:
        """Done; without a checkpoint where there was nothing to learn and the step stays."""
        await asyncio.to_thread(self._calls.release, job.id)
        failpoint("job/before-done")
        job = await asyncio.to_thread(
            self._jobs.move,
            job.id,
            "done",
            step=None if checkpoint is None else checkpoint.step,
            metrics=said["metrics"],
            reason=said["reason"] or None,
        )
        failpoint("job/after-done")
        if checkpoint is not None:
            self._metrics.step.labels(job.model).set(checkpoint.step)
        self._count(job)

    async def end_badly(
        self, part: Part, job: JobInfo | None, error: Exception, *, closing: bool
    ) -> float:
        """The job fails or goes back to the queue; how long to wait before the next attempt.

        Whatever went wrong, the step before stays, and the job says why.
        """
        try:
            if job is None:
                return part.fail(error)
            return await self._end_job(part, job, error, closing=closing)
        except Exception as another:  # noqa: BLE001  the loop must go on; the job is tried again
            return part.fail(another)

    async def _end_job(self, part: Part, job: JobInfo, error: Exception, *, closing: bool) -> float:
        job = await asyncio.to_thread(self._jobs.get, job.id)
        if job.state in FINAL:  # cancelled while it was being taken
            return 0.0
        uncounted = {"attempts": job.attempts - (job.state == "running")}
        if closing:  # the learner was taken away; what was saved is found at the next start
            if job.state == "running":
                back = (self._jobs.move, job.id, "queued")
                await asyncio.to_thread(*back, remember=True, **uncounted)
            return 0.0
        if isinstance(error, Cancelled) or job.cancel_requested:
            part.recover()
            await self.clear_away(job)
            move = (self._jobs.move, job.id, "cancelled")
            self._count(await asyncio.to_thread(*move, remember=True))
            return 0.0
        if isinstance(error, Unavailable) and not isinstance(error, Unreachable):
            wait_s = part.fail(error)
            await asyncio.to_thread(self._jobs.put_back, job.id, str(error), **uncounted)
            return wait_s
        if isinstance(error, LearnerDied | EngineFailed) and job.retries + 1 < TRIES:
            log.warning("a job is tried again", exc_info=error, extra={"fields": {"job": job.id}})
            retries = {"retries": job.retries + 1}
            await asyncio.to_thread(self._jobs.put_back, job.id, str(error), **retries)
            return backoff_s(job.retries) if job.retries else 0.0
        part.recover()
        # The trace goes to the log and not into the job, which any client may read.
        log.error("a job failed", exc_info=error, extra={"fields": {"job": job.id}})
        failure = Failure(type=type(error).__name__, message=str(error))
        await self.clear_away(job)
        move = (self._jobs.move, job.id, "failed")
        self._count(await asyncio.to_thread(*move, remember=True, failure=failure))
        return 0.0

    def _count(self, job: JobInfo) -> None:
        self._metrics.jobs.labels(job.state).inc()
        self._metrics.queued.set(sum(self._jobs.waiting().values()))
        took_s = (job.ended_at or 0.0) - (job.started_at or job.created_at)
        self._metrics.job_s.observe(took_s)
        say(f"job {job.state}", job=job.id, step=job.step, took_s=took_s)

    def has_checkpoint(self, job: JobInfo) -> bool:
        try:
            return self._checkpoints.of_job(self._models.find(job.model).key, job.id) is not None
        except StorageError:  # not known just now: the job is given the benefit of the doubt
            return True

    async def clear_away(self, job: JobInfo) -> None:
        """Let go of what a job that ended badly holds, now or when the disk works again."""
        try:
            await asyncio.to_thread(self._let_go, job)
        except StorageError:
            self._left[job.id] = job

    def clear_left(self) -> None:
        """Clear away what the disk kept before; StorageError if it still does."""
        for job in list(self._left.values()):
            self._let_go(job)
            del self._left[job.id]

    def _let_go(self, job: JobInfo) -> None:
        """See to it that what a failed job saved is never served, and let its calls go."""
        saved = self._checkpoints.of_job(self._models.find(job.model).key, job.id)
        if saved is not None and not saved.proved:
            self._checkpoints.reject(saved)
        self._calls.release(job.id)


def require_room(newest: Checkpoint) -> None:
    """Refuse to learn what could not be saved: the next step is about as large as the newest."""
    with storage(newest.path):
        needed = ROOM + sum(file.stat().st_size for file in newest.path.iterdir()) * 3 // 2
        free = shutil.disk_usage(newest.path).free
    if free < needed:
        raise DiskFull(
            f"{newest.path.parent}: the disk is full ({free / 2**20:.1f} MiB are free, the next "
            f"step needs {needed / 2**20:.1f} MiB). Free some space; the job goes on by itself."
        )
