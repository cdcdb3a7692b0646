"""Learner processes, one for each base model, and what a job does with its learner.

In:   a base model that is about to be trained; a job, its packed groups, the checkpoint it starts from
Out:  a loaded LearnerProcess; the learner's StepResult, as a mapping; the checkpoint of the next step

A learner takes seconds to load, so it is launched when its model is prepared, beside the engine and
at a low priority. It is kept between jobs, and loads a checkpoint with its optimizer's state before
each: the result of a job does not depend on the jobs before it. A learner that dies without a job
is replaced at once; one that has had no job for long is closed.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hone
from hone.errors import LearnerDied, StateError
from hone.learner.worker import LearnerProcess, LearnerSpec
from hone.logs import log, say
from hone.server.settings import Settings
from hone.server.tokenizer import BaseTokenizer
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.jobs import Pin
from hone.types import JobInfo, ModelKey, ModelSpec

PROGRESS_S = 0.1
"""Shortest time between two progress events of a phase."""
PATIENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Waiting threads of the learner must not spin: they would take the engine's cores."""
AHEAD_SHARE = 8
"""A learner is launched ahead of its first job if its weights take less than 1 / this of the free
memory: the engine, which may load at the same time, takes two to three times as much."""

Tell = Callable[[dict[str, Any]], object]
StartLearner = Callable[..., LearnerProcess]
"""LearnerProcess.launch, or what a test puts in its place."""
REPLACED = 3
"""Learners in a row that may die without a job and are replaced; then the next job launches one."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The learner of one base model."""

    learner: LearnerProcess | None = None
    launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is checked whether there is a learner, and one is launched if not."""
    ahead: "asyncio.Task[None] | None" = None
    """Launches it before there is a job; once, whether or not it succeeds."""
    busy: bool = False
    """A job uses it."""
    used_at: float = field(default_factory=time.monotonic)
    """When the last job released it."""
    died: str | None = None
    """Why there is none, if the last one died; until the next has loaded."""
    deaths: int = 0
    """How many in a row died without a job."""
    noted: LearnerProcess | None = None
    """The learner whose notes are in the log."""


class Learners:
    """Learners by base model, at most one for each."""

    def __init__(self, settings: Settings, start_learner: StartLearner) -> None:
        self._settings = settings
        self._start_learner = start_learner
        self._slots: dict[str, _Slot] = {}
        self._closed = False

    def launch_ahead(self, tokenizer: BaseTokenizer) -> None:
        """Begin to load it where memory allows, once; returns at once."""
        slot = self._slot(tokenizer)
        if slot.ahead is None and not self._closed:
            self._start_ahead(slot, tokenizer)

    @asynccontextmanager
    async def borrow(self, tokenizer: BaseTokenizer) -> AsyncIterator[LearnerProcess]:
        """A loaded learner while the block runs; launched now if there is none.

        One that dies while a job uses it is dropped, and the next job gets another.
        """
        slot = self._slot(tokenizer)
        slot.busy = True
        try:
            learner = await self._launched(slot, tokenizer, gives_way=False)
            info = await asyncio.to_thread(learner.ready)
            slot.died, slot.deaths = None, 0
            for note in info.notes if learner is not slot.noted else ():
                say(note, base_model=tokenizer.name)
            slot.noted = learner
            yield learner
        except LearnerDied as error:
            slot.died = str(error).partition("\n")[0]
            await self._drop(slot)
            raise
        finally:
            slot.busy, slot.used_at = False, time.monotonic()

    async def close_idle(self, idle_s: float) -> None:
        """Close learners that no job has used for so long; the next job launches another."""
        for name, slot in list(self._slots.items()):
            if slot.busy or slot.learner is None or time.monotonic() < slot.used_at + idle_s:
                continue
            async with slot.launching:
                slot.ahead = None
                await self._drop(slot, deadline_s=10.0)
            say("learner closed: it was idle", base_model=name, idle_s=idle_s)

    def status(self) -> dict[str, Any]:
        """Whether the learner of every base model that has one lives."""
        dead = {name: slot.died for name, slot in self._slots.items() if slot.died}
        if dead:
            reason = "; ".join(f"{name}: {why}" for name, why in dead.items())
            return {"status": "restarting", "reason": reason}
        loaded = any(slot.learner is not None for slot in self._slots.values())
        return {"status": "ok", "loaded": loaded}

    async def close(self) -> None:
        """End them all; the job that one of them runs gets LearnerDied. May be called twice."""
        self._closed = True
        for slot in self._slots.values():
            if slot.learner is not None:
                await asyncio.to_thread(slot.learner.close)
        ahead = [slot.ahead for slot in self._slots.values() if slot.ahead is not None]
        await asyncio.gather(*ahead, return_exceptions=True)  # which close what they launch now

    def _slot(self, tokenizer: BaseTokenizer) -> _Slot:
        return self._slots.setdefault(tokenizer.name, _Slot())

    def _start_ahead(self, slot: _Slot, tokenizer: BaseTokenizer) -> None:
        slot.ahead = asyncio.create_task(self._load_ahead(slot, tokenizer))
        slot.ahead.add_done_callback(_log_if_failed)

    async def _load_ahead(self, slot: _Slot, tokenizer: BaseTokenizer) -> None:
        if await asyncio.to_thread(fits_beside_engine, tokenizer, self._settings):
            learner = await self._launched(slot, tokenizer, gives_way=True)
            say("its learner loads ahead of the first job", base_model=tokenizer.name)
            await asyncio.to_thread(learner.ready)
            slot.died = None

    async def _launched(
        self, slot: _Slot, tokenizer: BaseTokenizer, *, gives_way: bool
    ) -> LearnerProcess:
        """The learner, which may still be loading."""
        async with slot.launching:
            if slot.learner is not None and not slot.learner.alive:
                await self._drop(slot)
            if slot.learner is None:
                start = (launch, self._start_learner, tokenizer, self._settings)
                slot.learner = learner = await asyncio.to_thread(*start, gives_way=gives_way)
                slot.used_at = time.monotonic()
                self._watch(slot, learner, tokenizer)
                if self._closed:  # which did not see it
                    await asyncio.to_thread(slot.learner.close)
            return slot.learner

    def _watch(self, slot: _Slot, learner: LearnerProcess, tokenizer: BaseTokenizer) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(self._on_end, slot, learner, tokenizer)

        learner.when_ended(ended)

    def _on_end(self, slot: _Slot, learner: LearnerProcess, tokenizer: BaseTokenizer) -> None:
        """A learner ended. The job that uses one handles that itself; without a job it is replaced."""
        if slot.learner is not learner or slot.busy or self._closed:
            return
        slot.died = f"learner process {learner.pid} ended while it had no job"
        log.warning(
            "a learner died while it had no job and is replaced",
            extra={"fields": {"base_model": tokenizer.name, "pid": learner.pid}},
        )
        slot.deaths += 1
        if slot.deaths <= REPLACED:
            self._start_ahead(slot, tokenizer)

    async def _drop(self, slot: _Slot, deadline_s: float = 0.0) -> None:
        learner, slot.learner = slot.learner, None
        if learner is not None:
            await asyncio.to_thread(learner.close, deadline_s=deadline_s)


def _log_if_failed(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no learner could be launched ahead; the first job tries it", exc_info=error)


def usable_cores() -> int:
    """Cores this process may run on; in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(
    start_learner: StartLearner,
    tokenizer: BaseTokenizer,
    settings: Settings,
    *,
    gives_way: bool,
) -> LearnerProcess:
    """A learner process that has begun to load the base model."""
    from hone.models.machine import choose  # here, as in save_first

    device, dtype = choose(settings.device)
    spec = LearnerSpec(
        model_dir=tokenizer.files.path,
        base_model=tokenizer.name,
        threads=settings.learner_threads or usable_cores(),
        device=device,
        dtype=_name(dtype),
    )
    return start_learner(spec, gives_way=gives_way, env=PATIENT)


def _name(dtype: Any) -> Any:
    """A torch dtype as LearnerSpec and a job write it."""
    return str(dtype).removeprefix("torch.")


def fits_beside_engine(tokenizer: BaseTokenizer, settings: Settings) -> bool:
    """Whether a learner without a job leaves enough memory for the engine; never on a shared GPU."""
    from hone.models.fit import available_memory, estimate
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    if device != "cpu":
        return False
    config = tokenizer.files.config
    weights = estimate(config, dtype_bytes=dtype.itemsize, kv_tokens=0).weights
    return weights < available_memory() // AHEAD_SHARE


# ---- one job --------------------------------------------------------------------------------


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


def pin(newest: Checkpoint, spec: ModelSpec, tokenizer: BaseTokenizer, settings: Settings) -> Pin:
    """What a job that starts now starts from, and what decides its bits on this machine."""
    from hone.models.fit import row_tokens  # here, as in save_first
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    most = row_tokens(
        tokenizer.files.config, dtype_bytes=dtype.itemsize, rank=spec.rank, device=device
    )
    return Pin(newest.step, newest.sha256, dtype=_name(dtype), row_tokens=most)


def learn(
    learner: LearnerProcess,
    job: JobInfo,
    groups: bytes,
    base: Checkpoint,
    *,
    tell: Tell,
    check_cancelled: Callable[[], None],
) -> dict[str, Any]:
    """Train the job from its base; `check_cancelled` raises before any micro-batch to end it.

    The groups are packed; this process does not unpack them.
    """
    check_cancelled()
    sha256 = learner.load(base.path)
    if sha256 != base.sha256:
        raise StateError(
            f"{base.path}: the learner read an adapter with hash {sha256[:16]}, the manifest says "
            f"{base.sha256[:16]}. Delete this checkpoint; the one before it is used then."
        )
    progress = Progress(tell)

    def on_progress(at: dict[str, Any]) -> None:
        check_cancelled()
        progress.tell(at)

    result = learner.train(
        groups,
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
    return {**result, "metrics": metrics}


def save(
    checkpoints: Checkpoints,
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

    return checkpoints.write(
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


class Progress:
    """Passes on the progress of a job: every new phase, and at most one in PROGRESS_S."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._phase: str | None = None
        self._next = 0.0

    def tell(self, at: dict[str, Any]) -> None:
        now = time.monotonic()
        if at["phase"] != self._phase or now >= self._next:
            self._phase, self._next = at["phase"], now + PROGRESS_S
            self._tell(at)
