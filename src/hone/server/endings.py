"""How jobs end: done, failed, cancelled, or queued again with the reason.

In:   a job, and its result or its failure
Out:  its new state; its unproved checkpoint set aside

A job fails only for a cause of its own. When the disk is full or fails, the job goes back to the
queue, and the attempt is not counted. When a learner or an engine dies, it is replaced and the job
is retried. A change of state that the disk refuses is kept in memory and written as soon as the disk
works again, so that a job is never stuck in a state that nobody works on.
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
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.failpoints import failpoint
from hone.store.jobs import FINAL, JobStore
from hone.store.models import ModelStore
from hone.types import Failure, JobInfo

TRIES = 3
"""A job fails after the learner or the engine died so often while it ran."""
SPARE_BYTES = 2**20
"""Bytes that must be free in addition to one and a half times the size of the newest checkpoint."""


class Endings:
    """Moves jobs to their final state, or back to the queue."""

    def __init__(
        self,
        jobs: JobStore,
        models: ModelStore,
        checkpoints: Checkpoints,
        metrics: Metrics,
    ) -> None:
        self._jobs = jobs
        self._models = models
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._unreleased: dict[str, JobInfo] = {}
        """Jobs that ended while the disk failed: what they hold is still to be released."""

    async def finish(
        self, job: JobInfo, checkpoint: Checkpoint | None, result: Mapping[str, Any]
    ) -> None:
        """Mark a job as done; without a checkpoint if there was nothing to learn."""
        failpoint("job/before-done")
        job = await asyncio.to_thread(
            self._jobs.move,
            job.id,
            "done",
            step=None if checkpoint is None else checkpoint.step,
            metrics=result["metrics"],
            reason=result["reason"] or None,
        )
        failpoint("job/after-done")
        if checkpoint is not None:
            self._metrics.step.labels(job.model).set(checkpoint.step)
        self._count(job)

    async def fail_or_requeue(
        self, part: Part, job: JobInfo | None, error: Exception, *, closing: bool
    ) -> float:
        """Fail a job or queue it again; returns how long to wait before the next attempt.

        The step before it stays served, and the job holds the reason.
        """
        try:
            if job is None:
                return part.fail(error)
            return await self._end_job(part, job, error, closing=closing)
        except Exception as another:  # noqa: BLE001  the loop must go on; the job is retried
            return part.fail(another)

    async def _end_job(self, part: Part, job: JobInfo, error: Exception, *, closing: bool) -> float:
        job = await asyncio.to_thread(self._jobs.get, job.id)
        if job.state in FINAL:  # cancelled while it was being taken
            return 0.0
        uncounted = {"attempts": job.attempts - (job.state == "running")}
        if closing:  # its learner was closed; what it saved is used at the next start
            if job.state == "running":
                back = (self._jobs.move, job.id, "queued")
                await asyncio.to_thread(*back, remember=True, **uncounted)
            return 0.0
        if isinstance(error, Cancelled) or job.cancel_requested:
            part.recover()
            await self.release(job)
            move = (self._jobs.move, job.id, "cancelled")
            self._count(await asyncio.to_thread(*move, remember=True))
            return 0.0
        if isinstance(error, Unavailable) and not isinstance(error, Unreachable):
            wait_s = part.fail(error)
            await self._requeue(job, error, **uncounted)
            return wait_s
        if isinstance(error, LearnerDied | EngineFailed) and job.retries + 1 < TRIES:
            log.warning("a job is retried", exc_info=error, extra={"fields": {"job": job.id}})
            await self._requeue(job, error, retries=job.retries + 1)
            return backoff_s(job.retries) if job.retries else 0.0
        part.recover()
        # The trace goes to the log and not into the job, which any client may read.
        log.error("a job failed", exc_info=error, extra={"fields": {"job": job.id}})
        failure = Failure(type=type(error).__name__, message=str(error))
        await self.release(job)
        move = (self._jobs.move, job.id, "failed")
        self._count(await asyncio.to_thread(*move, remember=True, failure=failure))
        return 0.0

    async def _requeue(self, job: JobInfo, error: Exception, **fields: int) -> None:
        move = (self._jobs.move, job.id, "queued")
        await asyncio.to_thread(*move, remember=True, waiting_for=str(error), **fields)

    def _count(self, job: JobInfo) -> None:
        self._metrics.jobs.labels(job.state).inc()
        self._metrics.queued.set(sum(self._jobs.waiting().values()))
        took_s = (job.ended_at or 0.0) - (job.started_at or job.created_at)
        self._metrics.job_s.observe(took_s)
        say(f"job {job.state}", job=job.id, step=job.step, took_s=took_s)

    def has_checkpoint(self, job: JobInfo) -> bool:
        try:
            return self._checkpoints.of_job(self._models.find(job.model).key, job.id) is not None
        except StorageError:  # unknown just now: assume that there is one
            return True

    async def release(self, job: JobInfo) -> None:
        """Release what a failed or cancelled job holds, now or when the disk works again."""
        try:
            await asyncio.to_thread(self._release, job)
        except StorageError:
            self._unreleased[job.id] = job

    def release_pending(self) -> None:
        """Release what could not be released before; StorageError if the disk still fails."""
        for job in list(self._unreleased.values()):
            self._release(job)
            del self._unreleased[job.id]

    def _release(self, job: JobInfo) -> None:
        """Set aside what the job saved, so that it is never served."""
        saved = self._checkpoints.of_job(self._models.find(job.model).key, job.id)
        if saved is not None and not saved.proved:
            self._checkpoints.reject(saved)


def check_disk_space(newest: Checkpoint) -> None:
    """Raise DiskFull if the next step, about as large as the newest, could not be saved."""
    with storage(newest.path):
        needed = SPARE_BYTES + sum(file.stat().st_size for file in newest.path.iterdir()) * 3 // 2
        free = shutil.disk_usage(newest.path).free
    if free < needed:
        raise DiskFull(
            f"{newest.path.parent}: the disk is full ({free / 2**20:.1f} MiB are free, the next "
            f"step needs {needed / 2**20:.1f} MiB). Free some space; the job goes on by itself."
        )
