"""The stages of a job around its learner: where it starts, learning, saving, and how it ends.

In:   a job, the checkpoint it starts from, a learner
Out:  the learner's StepResult, as a mapping; the checkpoint of the next step; the job's new state

A learner loads a checkpoint with its optimizer's state before each job: the result of a job does
not depend on the jobs before it.

A job fails only because of its own contents. When the disk is full or fails, the job goes back to
the queue, and the attempt is not counted. When a learner or an engine dies, it is replaced and the
job is retried. A change of state or an event that the disk refuses, or that another process's lock on
the state file prevents, is kept in memory and written as soon as that works, so that no job is left
in a state in which it makes no progress, and none learns twice.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hone
from hone.errors import (
    Cancelled,
    DiskFull,
    EngineFailed,
    LearnerDied,
    NotFound,
    StateError,
    StorageError,
    Unavailable,
    Unreachable,
)
from hone.files.disk import storage
from hone.files.logs import log, say
from hone.learner.packed import unpack_groups
from hone.learner.process import LearnerProcess
from hone.server.serve.engine_choice import EngineChoice
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.supervision import Part, backoff_s
from hone.server.telemetry import Metrics
from hone.server.train.learners import LearnerGpu
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.failpoints import failpoint
from hone.store.jobs import FINAL, JobStore, Pin
from hone.store.models import ModelRecord, ModelStore
from hone.types import Failure, JobInfo, JobState, ModelSpec

PROGRESS_S = 0.1
"""Shortest time between two progress events of a phase."""
TRIES = 3
"""Deaths of the learner or the engine during a job after which the job fails."""
SPARE_BYTES = 2**20
"""Bytes that must be free in addition to one and a half times the size of the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class JobStages:
    """The blocking stages of a server's jobs. Call them from a thread."""

    jobs: JobStore
    models: ModelStore
    checkpoints: Checkpoints
    choice: EngineChoice
    metrics: Metrics
    _writing_first: threading.Lock = field(default_factory=threading.Lock)
    _taken: dict[str, float] = field(default_factory=dict[str, float])
    """When each running job was taken, by the monotonic clock."""

    # ---- start ------------------------------------------------------------------------------

    def newest(self, record: ModelRecord, tokenizer: BaseTokenizer) -> Checkpoint:
        """The newest step; if there is none, step 0, initialized from the model's seed.

        Raises NotFound if the model was deleted meanwhile: a new one of its name must not get its step.
        """
        with self._writing_first:
            newest = self.checkpoints.newest(record.key)
            return newest or self._save_first(self.models.get(record.key).spec, tokenizer)

    def _save_first(self, spec: ModelSpec, tokenizer: BaseTokenizer) -> Checkpoint:
        """Save step 0: a new adapter, which has no effect yet, and an empty optimizer state."""

        def fill(directory: Path) -> str:
            # Imported here: torch takes seconds to load, and `hone serve` starts without it.
            from hone.learner.optim import AdamW
            from hone.models.lora import Lora
            from hone.models.shape import check_targets, restricted, shape_of

            files = tokenizer.files
            check_targets(files.config, spec.target_modules, self.choice.machine()[0])
            shape = shape_of(files.config, where=str(files.path / "config.json"))
            layout = restricted(shape.layout, spec.target_modules)
            lora = Lora.init(layout, rank=spec.rank, alpha=spec.alpha, seed=spec.seed)
            lora.save(directory, base_model=spec.base_model)
            AdamW.save_fresh(lora.parameters(), directory)
            return lora.sha256

        return self.checkpoints.write(
            spec.key,
            0,
            fill,
            job=None,
            base_model=tokenizer.name,
            weights_sha256=tokenizer.weights_sha256,
            fingerprint=tokenizer.fingerprint,
            metrics={},
            hone=hone.__version__,
        )

    def pin(self, newest: Checkpoint, spec: ModelSpec, tokenizer: BaseTokenizer) -> Pin:
        """The checkpoint that a job starts from, and the settings on which its exact result depends.

        Raises DiskFull if the next step, about as large as the newest, could not be saved.
        """
        from hone.models.fit import row_tokens  # imported here, as in _save_first

        with storage(newest.path):
            size = sum(file.stat().st_size for file in newest.path.iterdir())
            free = shutil.disk_usage(newest.path).free
        if free < (needed := SPARE_BYTES + size * 3 // 2):
            raise DiskFull(
                f"{newest.path.parent}: the disk is full ({free / 2**20:.1f} MiB are free, the next "
                f"step needs {needed / 2**20:.1f} MiB). Free some space; the job then continues."
            )
        device, dtype, dtype_bytes = self.choice.machine()
        gpu = LearnerGpu.of(self.choice, tokenizer.name)
        most = row_tokens(
            tokenizer.files.config,
            dtype_bytes=dtype_bytes,
            rank=spec.rank,
            device=device if gpu.number is None else f"cuda:{gpu.number}",
            learner=gpu.memory,
        )
        return Pin(newest.step, newest.sha256, dtype=dtype, row_tokens=most)

    def take(self, job_id: str, pin: Pin | None) -> JobInfo:
        """Mark a job as running."""
        job = self.jobs.take(job_id, pin)
        self._taken[job_id] = time.monotonic()
        return job

    # ---- learn and save ---------------------------------------------------------------------

    def learn(
        self,
        learner: LearnerProcess,
        job: JobInfo,
        base: Checkpoint,
        check_cancelled: Callable[[], None],
    ) -> dict[str, Any]:
        """Train the job from its base; `check_cancelled` raises before any micro-batch to end it."""
        check_cancelled()
        sha256 = learner.load(base.path, optimizer=base.has_optimizer)
        if sha256 != base.sha256:
            raise StateError(
                f"{base.path}: the learner read an adapter with hash {sha256[:16]}, the manifest "
                f"says {base.sha256[:16]}. Delete this checkpoint; the one before it is used then."
            )
        progress = ThrottledProgress(partial(self.jobs.progress, job.id))

        def on_progress(at: dict[str, Any]) -> None:
            check_cancelled()
            progress.tell(at)

        result = learner.train(
            self.jobs.packed_groups(job.id),
            job.config,
            job_id=job.id,
            base_step=base.step,
            on_progress=on_progress,
            label_logprobs=job.plot_tensors,
        )
        check_cancelled()
        # Metrics go through JSON, which has no NaN; what is not a number is left out.
        metrics = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
        if "learn/oldest_call_step" in metrics:
            metrics["learn/staleness"] = base.step - metrics["learn/oldest_call_step"]
        notes = list(learner.info.notes) if learner.info else []
        if not base.has_optimizer:
            notes.append(
                f"step {base.step} had lost the state of its optimizer (keep_optimizer_steps), so this "
                "job began with a fresh one"
            )
            say(notes[-1], level=logging.WARNING, job=job.id, model=job.model)
        learned = {"metrics": metrics, "reason": result["reason"], "notes": notes}
        self.jobs.emit(job.id, "learned", learned)
        return {**result, "metrics": metrics}

    def release(self, learner: LearnerProcess, base_model: str) -> None:
        """Free the learner's share of a GPU that it shares with vLLM, as planned."""
        card = self.choice.card(base_model)
        if card is not None:
            with suppress(LearnerDied):  # frees its memory
                learner.release(weights=card.offloads)

    def less_memory(self, job: JobInfo) -> str:
        """What to do if a job's learner exhausted the memory of its GPU."""
        groups = unpack_groups(self.jobs.packed_groups(job.id))
        generations = max((len(group.trajectories) for group in groups), default=None)
        return self.choice.less_memory(job.base_model, generations)

    def save(
        self,
        learner: LearnerProcess,
        job: JobInfo,
        result: dict[str, Any],
        tokenizer: BaseTokenizer,
        record: ModelRecord,
        meanwhile: Callable[[Checkpoint], AbstractContextManager[None]],
    ) -> Checkpoint:
        """Save the learner's step, with everything needed to prove it and to continue training."""
        assert job.base_step is not None and learner.info is not None, (job, learner.info)

        def fill(directory: Path) -> str:
            sha256 = learner.save(directory, picture=job.plot_tensors)
            assert sha256 == result["sha256"], (sha256, result["sha256"])
            return sha256

        checkpoint = self.checkpoints.write(
            record.key,
            job.base_step + 1,
            fill,
            proved=False,
            meanwhile=meanwhile,
            job=job.id,
            base_model=tokenizer.name,
            base_step=job.base_step,
            base_sha256=job.base_sha256,
            weights_sha256=tokenizer.weights_sha256,
            fingerprint=tokenizer.fingerprint,
            config=job.config.model_dump(),
            metrics=result["metrics"],
            reason=result["reason"],
            movement=result["movement"],
            learner=learner.info.model_dump(),
            hone=hone.__version__,
        )
        self.jobs.emit(job.id, "saved", {"step": checkpoint.step, "sha256": checkpoint.sha256})
        return checkpoint

    # ---- end --------------------------------------------------------------------------------

    def finish(
        self, job: JobInfo, checkpoint: Checkpoint | None, result: Mapping[str, Any]
    ) -> None:
        """Mark a job as done. `checkpoint` is None if there was nothing to learn."""
        step = None if checkpoint is None else checkpoint.step
        failpoint("job/before-done")
        reason = result["reason"] or None
        metrics = {**job.metrics, **result["metrics"]}
        # Remembered: a crash before it is written does not undo it. The next start finds the step.
        self._end(job, "done", remember=True, step=step, metrics=metrics, reason=reason)
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
            try:
                job = self.jobs.get(job.id)
            except NotFound:  # deleted with its model
                return 0.0
            return self._fail_or_requeue(part, job, error, closing=closing)
        except Exception as another:  # noqa: BLE001  the loop must go on; the job is retried
            return part.fail(another)

    def _fail_or_requeue(
        self, part: Part, job: JobInfo, error: Exception, *, closing: bool
    ) -> float:
        if job.state in FINAL:  # cancelled while it was being taken
            return 0.0
        uncounted = {"attempts": job.attempts - (job.state == "running")}
        cancelled = isinstance(error, Cancelled) or job.cancel_requested
        if cancelled and self._is_promoted(job):  # its step is the newest: too late to cancel it
            cancelled = False
        if closing:  # its learner was closed; the next start uses what it saved
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
        # The traceback goes to the log, not into the job, which any client can read.
        log.error("a job failed", exc_info=error, extra={"fields": {"job": job.id}})
        failure = Failure(type=type(error).__name__, message=str(error))
        self._end(job, "failed", remember=True, failure=failure)
        return 0.0

    def _is_promoted(self, job: JobInfo) -> bool:
        if job.base_step is None:
            return False
        try:
            saved = self.checkpoints.of_job(job.key, job.id, job.base_step + 1)
        except StorageError:  # unknown for now: a later attempt decides
            return True
        return saved is not None and saved.proved

    def _end(self, job: JobInfo, state: JobState, **fields: Any) -> None:
        job = self.jobs.move(job.id, state, **fields)
        now = time.monotonic()
        took_s = now - self._taken.pop(job.id, now)
        self.metrics.jobs.labels(state).inc()
        self.metrics.queued.set(sum(self.jobs.waiting().values()))
        self.metrics.job_s.observe(took_s)
        say(f"job {state}", job=job.id, step=job.step, took_s=took_s)


class ThrottledProgress:
    """Forwards the progress of a job: each new phase, and otherwise one event per PROGRESS_S."""

    def __init__(self, tell: Callable[[dict[str, Any]], object]) -> None:
        self._tell = tell
        self._phase: str | None = None
        self._next = 0.0

    def tell(self, at: dict[str, Any]) -> None:
        now = time.monotonic()
        if at["phase"] != self._phase or now >= self._next:
            self._phase, self._next = at["phase"], now + PROGRESS_S
            self._tell(at)
