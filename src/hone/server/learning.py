"""What a job does with its learner: train, and save the next step.

In:   a job, its packed groups, the checkpoint it starts from
Out:  the learner's StepResult, as a mapping; the checkpoint of the next step

A learner loads a checkpoint with its optimizer's state before each job: the result of a job does
not depend on the jobs before it.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hone
from hone.errors import StateError
from hone.learner.worker import LearnerProcess
from hone.server.engine_choice import EngineChoice
from hone.server.learners import LearnerGpu, dtype_name
from hone.server.settings import Settings
from hone.server.tokenizer import BaseTokenizer
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.jobs import JobStore, Pin
from hone.types import JobInfo, ModelKey, ModelSpec

PROGRESS_S = 0.1
"""Shortest time between two progress events of a phase."""


def save_first(checkpoints: Checkpoints, spec: ModelSpec, tokenizer: BaseTokenizer) -> Checkpoint:
    """Step 0: a fresh adapter, which changes nothing yet, and an optimizer without moments."""

    def fill(directory: Path) -> str:
        # Here, because torch takes seconds to load and `hone serve` is up without it.
        from hone.learner.optim import AdamW
        from hone.models.lora import Lora
        from hone.models.shape import restricted, shape_of

        files = tokenizer.files
        shape = shape_of(files.config, where=str(files.path / "config.json"))
        layout = restricted(shape.layout, spec.target_modules)
        lora = Lora.init(layout, rank=spec.rank, alpha=spec.alpha, seed=spec.seed)
        lora.save(directory, base_model=spec.base_model)
        AdamW.save_fresh(lora.parameters(), directory)
        return lora.sha256

    return checkpoints.write(
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


def pin(
    newest: Checkpoint,
    spec: ModelSpec,
    tokenizer: BaseTokenizer,
    settings: Settings,
    choice: EngineChoice,
) -> Pin:
    """The checkpoint that a job starts from, and the settings on which its exact result depends."""
    from hone.models.fit import row_tokens  # here, as in save_first
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    gpu = LearnerGpu.of(choice, tokenizer.name)
    most = row_tokens(
        tokenizer.files.config,
        dtype_bytes=dtype.itemsize,
        rank=spec.rank,
        device=device if gpu.number is None else f"cuda:{gpu.number}",
        learner=gpu.memory,
    )
    return Pin(newest.step, newest.sha256, dtype=dtype_name(dtype), row_tokens=most)


def learn(
    learner: LearnerProcess,
    job: JobInfo,
    base: Checkpoint,
    jobs: JobStore,
    check_cancelled: Callable[[], None],
) -> dict[str, Any]:
    """Train the job from its base; `check_cancelled` raises before any micro-batch to end it."""
    check_cancelled()
    sha256 = learner.load(base.path)
    if sha256 != base.sha256:
        raise StateError(
            f"{base.path}: the learner read an adapter with hash {sha256[:16]}, the manifest says "
            f"{base.sha256[:16]}. Delete this checkpoint; the one before it is used then."
        )
    progress = Progress(partial(jobs.progress, job.id))

    def on_progress(at: dict[str, Any]) -> None:
        check_cancelled()
        progress.tell(at)

    result = learner.train(
        jobs.packed_groups(job.id),
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
    learned = {"metrics": metrics, "reason": result["reason"], "notes": notes}
    jobs.emit(job.id, "learned", learned)
    return {**result, "metrics": metrics}


def save(
    checkpoints: Checkpoints,
    jobs: JobStore,
    learner: LearnerProcess,
    job: JobInfo,
    result: dict[str, Any],
    tokenizer: BaseTokenizer,
    key: ModelKey,
) -> Checkpoint:
    """Save the learner's step, with what is needed to prove it and to train from it."""
    assert job.base_step is not None and learner.info is not None, (job, learner.info)

    def fill(directory: Path) -> str:
        sha256 = learner.save(directory, picture=job.plot_tensors)
        assert sha256 == result["sha256"], (sha256, result["sha256"])
        return sha256

    checkpoint = checkpoints.write(
        key,
        job.base_step + 1,
        fill,
        proved=False,
        job=job.id,
        base_model=tokenizer.name,
        base_step=job.base_step,
        base_sha256=job.base_sha256,
        weights_sha256=tokenizer.weights_sha256,
        fingerprint=tokenizer.fingerprint,
        config=job.config.model_dump(),
        seed=job.seed,
        metrics=result["metrics"],
        reason=result["reason"],
        movement=result["movement"],
        learner=learner.info.model_dump(),
        hone=hone.__version__,
    )
    jobs.emit(job.id, "saved", {"step": checkpoint.step, "sha256": checkpoint.sha256})
    return checkpoint


class Progress:
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
