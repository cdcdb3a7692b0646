"""What a job does with its learner: launch it, put it at a step, train, save the next step.

In:   a job, its packed groups, the checkpoint it goes on from
Out:  the learner's StepResult, as a mapping; the checkpoint of the next step

A learner is kept between jobs and put back to a checkpoint with its optimizer's state before each,
so that what a job gives does not depend on the jobs before it.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hone
from hone.errors import StateError
from hone.learner.worker import LearnerProcess, LearnerSpec
from hone.server.language import Language
from hone.server.settings import Settings
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.jobs import Pin
from hone.types import JobInfo, ModelKey, ModelSpec

PROGRESS_S = 0.1
"""Progress is told at most so often; the last of each phase always."""
PATIENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Threads of the learner that wait must not spin: they would take the engine's cores."""
AHEAD_SHARE = 8
"""A learner has room ahead of its first job if its weights take less than 1 / this of the memory
that is free: the engine, which may load at the same time, takes two to three times as much."""

Tell = Callable[[dict[str, Any]], object]
StartLearner = Callable[..., LearnerProcess]
"""LearnerProcess.launch, or what a test puts in its place."""


def save_first(checkpoints: Checkpoints, spec: ModelSpec, language: Language) -> Checkpoint:
    """Step 0: a fresh adapter, which changes nothing yet, and an optimizer without moments."""

    def fill(directory: Path) -> str:
        # Here, because torch takes seconds to load and `hone serve` is up without it.
        from hone.learner.optim import AdamW
        from hone.models.architecture import DecoderConfig
        from hone.models.lora import Lora

        config = DecoderConfig.read(language.files.path)
        lora = Lora.init(config, rank=spec.rank, alpha=spec.alpha, seed=spec.seed)
        lora.save(directory, base_model=spec.base_model)
        AdamW.save_fresh(lora.parameters(), directory)
        return lora.sha256

    return checkpoints.write(
        spec.key,
        0,
        fill,
        job=None,
        base_model=language.name,
        weights_sha256=language.weights_sha256,
        fingerprint=language.fingerprint,
        metrics={},
        hone=hone.__version__,
    )


def usable_cores() -> int:
    """Cores this process may run on; a container or `taskset` often leaves fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(
    start_learner: StartLearner,
    language: Language,
    settings: Settings,
    *,
    gives_way: bool,
) -> LearnerProcess:
    """A learner over a base model, which has begun to load it."""
    from hone.models.machine import choose  # here, as in save_first

    device, dtype = choose(settings.device)
    spec = LearnerSpec(
        model_dir=language.files.path,
        base_model=language.name,
        threads=settings.learner_threads or usable_cores(),
        device=device,
        dtype=_name(dtype),
    )
    return start_learner(spec, gives_way=gives_way, env=PATIENT)


def pin(newest: Checkpoint, spec: ModelSpec, language: Language, settings: Settings) -> Pin:
    """What a job that starts now goes on from, and what decides its bits on this machine."""
    from hone.models.fit import row_tokens  # here, as in save_first
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    most = row_tokens(
        language.files.config, dtype_bytes=dtype.itemsize, rank=spec.rank, device=device
    )
    return Pin(newest.step, newest.sha256, dtype=_name(dtype), row_tokens=most)


def _name(dtype: Any) -> Any:
    """A torch dtype as LearnerSpec and a job write it."""
    return str(dtype).removeprefix("torch.")


def has_room_ahead(language: Language, settings: Settings) -> bool:
    """Whether a learner that has no job yet leaves the engine what that needs.

    Not on a GPU, which the two share, nor where memory is short.
    """
    from hone.models.fit import available_memory, estimate
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    if device != "cpu":
        return False
    config = language.files.config
    weights = estimate(config, dtype_bytes=dtype.itemsize, kv_tokens=0).weights
    return weights < available_memory() // AHEAD_SHARE


def learn(
    learner: LearnerProcess,
    job: JobInfo,
    groups: bytes,
    base: Checkpoint,
    *,
    tell: Tell,
    stop_if_asked: Callable[[], None],
) -> dict[str, Any]:
    """Train the job from its base; `stop_if_asked` raises before any micro-batch to end it.

    The groups are packed, and stay so in this process.
    """
    stop_if_asked()
    found = learner.load(base.path)
    if found != base.sha256:
        raise StateError(
            f"{base.path}: the learner read an adapter with hash {found[:16]}, the manifest says "
            f"{base.sha256[:16]}. Delete this checkpoint; the one before it is used then."
        )
    progress = Progress(tell)

    def on_progress(at: dict[str, Any]) -> None:
        stop_if_asked()
        progress.tell(at)

    result = learner.train(
        groups,
        job.config,
        job_id=job.id,
        base_step=base.step,
        on_progress=on_progress,
        label_logprobs=job.plot_tensors,
    )
    progress.close()
    stop_if_asked()
    # Metrics go through JSON, which has no NaN; what is not a number is left out.
    metrics = {name: value for name, value in result["metrics"].items() if math.isfinite(value)}
    if "learn/oldest_call_step" in metrics:
        metrics["learn/staleness"] = base.step - metrics["learn/oldest_call_step"]
    return {**result, "metrics": metrics}


def save(
    checkpoints: Checkpoints,
    learner: LearnerProcess,
    job: JobInfo,
    result: dict[str, Any],
    language: Language,
    key: ModelKey,
) -> Checkpoint:
    """The step the learner stands at, with all that is needed to prove it and to go on from it."""
    assert job.base_step is not None and learner.info is not None, (job, learner.info)

    def fill(directory: Path) -> str:
        sha256 = learner.save(directory, picture=job.plot_tensors)
        assert sha256 == result["sha256"], (sha256, result["sha256"])
        return sha256

    return checkpoints.write(
        key,
        job.base_step + 1,
        fill,
        proved=False,
        job=job.id,
        base_model=language.name,
        base_step=job.base_step,
        base_sha256=job.base_sha256,
        weights_sha256=language.weights_sha256,
        fingerprint=language.fingerprint,
        config=job.config.model_dump(),
        seed=job.seed,
        metrics=result["metrics"],
        reason=result["reason"],
        movement=result["movement"],
        learner=learner.info.model_dump(),
        hone=hone.__version__,
    )


class Progress:
    """Tells now and then where a job stands."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._held: dict[str, Any] | None = None
        self._next = 0.0

    def tell(self, at: dict[str, Any]) -> None:
        if self._held is not None and self._held["phase"] != at["phase"]:
            self.close()
        self._held = at
        if time.monotonic() >= self._next:
            self.close()
            self._next = time.monotonic() + PROGRESS_S

    def close(self) -> None:
        """Tell what was held back."""
        if self._held is not None:
            self._tell(self._held)
            self._held = None
