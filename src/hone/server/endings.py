"""How jobs end: done, failed, cancelled, or queued again with the reason.

In:   a job, and its result or its failure
Out:  its new state

A job fails only for a cause of its own. When the disk is full or fails, the job goes back to the
queue, and the attempt is not counted. When a learner or an engine dies, it is replaced and the job
is retried. A change of state that the disk refuses is kept in memory and written as soon as the
disk works again, so that a job is never stuck in a state that nobody works on.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.disk import storage
from hone.errors import (
    Cancelled,
    DiskFull,
    EngineFailed,
    LearnerDied,
    Unavailable,
    Unreachable,
)
from hone.logs import log, say
from hone.server.supervision import Part, backoff_s
from hone.server.telemetry import Metrics
from hone.store.checkpoints import Checkpoint
from hone.store.failpoints import failpoint
from hone.store.jobs import FINAL, JobStore
from hone.types import Failure, JobInfo, JobState

TRIES = 3
"""Deaths of the learner or the engine during a job after which the job fails."""
SPARE_BYTES = 2**20
"""Bytes that must be free in addition to one and a half times the size of the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Endings:
    """Moves jobs to their final state, or back to the queue. Blocking."""

    jobs: JobStore
    metrics: Metrics

    def finish(
        self, job: JobInfo, checkpoint: Checkpoint | None, result: Mapping[str, Any]
    ) -> None:
        """Mark a job as done; without a checkpoint if there was nothing to learn."""
        step = None if checkpoint is None else checkpoint.step
        failpoint("job/before-done")
        reason = result["reason"] or None
        metrics = {**job.metrics, **result["metrics"]}
        self._end(job, "done", step=step, metrics=metrics, reason=reason)
        failpoint("job/after-done")
        if step is not None:
            self.metrics.step.labels(job.model).set(step)

    def fail_or_requeue(
        self, part: Part, job: JobInfo | None, error: Exception, *, closing: bool
    ) -> float:
        """Fail a job or queue it again; returns how long to wait before the next attempt.

        The step before it stays served, and the job holds the reason.
        """
        try:
            if job is None:
                return part.fail(error)
            return self._fail_or_requeue(part, self.jobs.get(job.id), error, closing=closing)
        except Exception as another:  # noqa: BLE001  the loop must go on; the job is retried
            return part.fail(another)

    def _fail_or_requeue(
        self, part: Part, job: JobInfo, error: Exception, *, closing: bool
    ) -> float:
        if job.state in FINAL:  # cancelled while it was being taken
            return 0.0
        uncounted = {"attempts": job.attempts - (job.state == "running")}
        cancelled = isinstance(error, Cancelled) or job.cancel_requested
        if closing:  # its learner was closed; what it saved is used at the next start
            self.jobs.move(job.id, "queued", remember=True, **uncounted)
            return 0.0
        if isinstance(error, Unavailable) and not isinstance(error, Unreachable) and not cancelled:
            wait_s = part.fail(error)
            self.jobs.move(job.id, "queued", remember=True, waiting_for=str(error), **uncounted)
            return wait_s
        may_retry = job.retries + 1 < TRIES and not cancelled
        if may_retry and isinstance(error, LearnerDied | EngineFailed):
            log.warning("a job is retried", exc_info=error, extra={"fields": {"job": job.id}})
            again = {"waiting_for": str(error), "retries": job.retries + 1}
            self.jobs.move(job.id, "queued", remember=True, **again)
            return backoff_s(job.retries) if job.retries else 0.0
        part.recover()
        if cancelled:
            self._end(job, "cancelled", remember=True)
            return 0.0
        # The trace goes to the log and not into the job, which any client may read.
        log.error("a job failed", exc_info=error, extra={"fields": {"job": job.id}})
        failure = Failure(type=type(error).__name__, message=str(error))
        self._end(job, "failed", remember=True, failure=failure)
        return 0.0

    def _end(self, job: JobInfo, state: JobState, **fields: Any) -> None:
        job = self.jobs.move(job.id, state, **fields)
        took_s = (job.ended_at or 0.0) - (job.started_at or job.created_at)
        self.metrics.jobs.labels(state).inc()
        self.metrics.queued.set(sum(self.jobs.waiting().values()))
        self.metrics.job_s.observe(took_s)
        say(f"job {state}", job=job.id, step=job.step, took_s=took_s)


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
