"""THE SERVER LOOP: take job, learn, save, publish, prove, mark done.

In:   queued jobs
Out:  proved checkpoints, served; jobs in a final state, each with its result

One job at a time per base model; jobs of different base models run side by side, unless their
learners share a GPU: then they learn one after the other. The result of a job is a function of its
checkpoint, groups and configuration: the learner, which is kept between jobs, loads the pinned
checkpoint with its optimizer's state before each. So a job that a crash interrupted gives the same
adapter, bit for bit, when it runs again. What was saved before the crash is not learned again: the
checkpoint's manifest names the job, and holds what the proof needs. stages.py decides what happens
to a job that fails.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    suppress,
)
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from hone.errors import Cancelled, EngineError, NotProved, OutOfMemory, StorageError
from hone.files.logs import say
from hone.inference.background import in_own_thread
from hone.inference.base import AdapterRef, Probe
from hone.server.serve.policies import Base, Serving
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.settings import Settings
from hone.server.supervision import Part, until
from hone.server.telemetry import Metrics
from hone.server.train.learners import Learners, StartLearner
from hone.server.train.proof import UNPROVED, beginnings, probed, prove
from hone.server.train.stages import JobStages
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.failpoints import failpoint
from hone.store.jobs import JobStore
from hone.store.models import ModelRecord, ModelStore
from hone.types import JobInfo

FAILPOINTS = (
    "job/before-learn",
    "job/after-learn",
    "job/after-save",
    "job/before-publish",
    "job/after-publish",
    "job/after-prove",
    "job/after-promote",
    "job/before-done",
    "job/after-done",
)

CLOSE_S = 20.0
"""Time for a job to end, or to return to the queue, when the server stops."""
LOAD_S = 30.0
"""How long saving a synced step waits for the engine to load it."""


@dataclass(slots=True, eq=False)
class _Loop:
    """The training loop of one base model."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    job: str | None = None
    """Id of the running job."""
    waits_for: str | None = None
    """Why that job does not run yet: another learner uses its GPU."""
    part: Part = field(default_factory=lambda: Part("training loop"))
    retry_at: dict[str, float] = field(default_factory=dict)
    """By job id: when a job that could not run is tried again. Other models' jobs run meanwhile."""


class TrainingService:
    """Turns queued jobs into served steps."""

    def __init__(
        self,
        *,
        jobs: JobStore,
        models: ModelStore,
        checkpoints: Checkpoints,
        serving: Serving,
        settings: Settings,
        metrics: Metrics,
        start_learner: StartLearner,
    ) -> None:
        self._jobs = jobs
        self._models = models
        self._checkpoints = checkpoints
        self._serving = serving
        self._settings = settings
        self._metrics = metrics
        self._learners = Learners(settings, start_learner, serving.choice)
        self.close_idle = self._learners.close_idle
        self._stages = JobStages(jobs, models, checkpoints, serving.choice, metrics)
        self._loops: dict[str, _Loop] = {}
        self._probing: dict[str, asyncio.Task[Probe]] = {}
        """By job id: the engine's probe of the previous step, for the proof."""
        self._closing = False

    # ---- for the routes ---------------------------------------------------------------------

    async def start(self) -> None:
        """Requeue the jobs that were running when the server stopped, then start the loops."""
        queued, failed = await asyncio.to_thread(self._jobs.recover, self._has_checkpoint)
        for job in failed:
            say("job failed", level=logging.ERROR, job=job.id, why="it brought the server down")
        for job in queued:
            say("job continues", job=job.id, attempts=job.attempts)
        self.wake()

    def wake(self) -> None:
        """A job was added: start or wake the loop of its base model."""
        waiting = self._jobs.waiting()
        self._metrics.queued.set(sum(waiting.values()))
        for base_model in () if self._closing else waiting:
            loop = self._loops.setdefault(base_model, _Loop())
            if loop.task is None or loop.task.done():
                loop.task = asyncio.create_task(self._work(base_model, loop))
            loop.woken.set()

    async def prepare(self, record: ModelRecord) -> Checkpoint:
        """Load the engine, write step 0 if there is no step yet, serve the newest.

        The learner begins to load at the same time, and may still be loading on return.
        """
        self._learners.launch_ahead(await self._serving.engines.tokenizer(record.spec.base_model))
        newest, _ = await self._newest(record)
        await self._serving.resolve(str(record.key))
        return newest

    async def close(self) -> None:
        """Stop: a running job goes back to the queue, and the attempt is not counted."""
        self._closing = True
        tasks = [loop.task for loop in self._loops.values() if loop.task is not None]
        for loop in self._loops.values():
            loop.woken.set()
        await self._learners.close()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            # Their jobs stay `running`, and are recovered at the next start.
            for task in late:
                task.cancel()
        try:
            await asyncio.to_thread(self._jobs.write_pending)
        except StorageError as error:  # on disk these jobs are running: the next start queues them
            say("changes of jobs were not written", level=logging.WARNING, reason=str(error))

    def status(self) -> dict[str, Any]:
        """What the service does now, for /health."""
        loops = list(self._loops.values())
        waiting = {loop.job: loop.waits_for for loop in loops if loop.job and loop.waits_for}
        running = [loop.job for loop in loops if loop.job is not None and loop.job not in waiting]
        waits = bool(waiting) or any(loop.part.reason for loop in loops)
        return {
            "state": "training" if running else "waiting" if waits else "idle",
            "jobs": running,
            **({"waiting": waiting} if waiting else {}),
            "queued": sum(self._jobs.waiting().values()),
        }

    def parts(self) -> dict[str, dict[str, Any]]:
        """Whether the training loops and the learners work, for /health."""
        failing = [loop.part for loop in self._loops.values() if loop.part.reason is not None]
        training = max(failing, key=lambda part: part.failures, default=Part("training loop"))
        return {"training": training.status(), "learner": self._learners.status()}

    # ---- the loop ---------------------------------------------------------------------------

    async def _work(self, base_model: str, loop: _Loop) -> None:
        """Run jobs one after another until the server stops; no failure ends the loop."""
        while not self._closing:
            loop.woken.clear()
            job, wait_s, now = None, 0.0, time.monotonic()
            loop.retry_at = {id: at for id, at in loop.retry_at.items() if at > now}
            try:
                job = await asyncio.to_thread(self._jobs.oldest, base_model, loop.retry_at)
                if job is not None:
                    loop.job = job.id
                    with self._serving.engines.using(base_model):
                        try:
                            await self._train(job)
                        finally:
                            if (probing := self._probing.pop(job.id, None)) is not None:
                                probing.cancel()
                            self._serving.release_unproved(base_model)
                if not loop.retry_at:
                    loop.part.recover()
            except Exception as error:  # noqa: BLE001  any error is recorded in the job
                ended = (self._stages.fail_or_requeue, loop.part, job, error)
                wait_s = await asyncio.to_thread(*ended, closing=self._closing)
            loop.job = None
            if job is None:
                wait_s = wait_s or min(loop.retry_at.values(), default=now) - now
                with suppress(TimeoutError):
                    await asyncio.wait_for(loop.woken.wait(), wait_s or None)
            elif wait_s:
                loop.retry_at[job.id] = time.monotonic() + wait_s

    async def _train(self, job: JobInfo) -> None:
        """One job, from the queue to its end."""
        jobs, serving = self._jobs, self._serving

        # Take the job: it starts from the newest step, or from what an earlier attempt saved.
        # Loading comes after it, so that a load that exhausts memory counts as an attempt.
        record = await asyncio.to_thread(self._models.get, job.key)
        newest, tokenizer = await self._newest(record)
        checkpoint = await asyncio.to_thread(self._saved, job, newest)
        pin = None
        async with AsyncExitStack() as learning:
            if checkpoint is None:
                await self._take_turn(learning, job)
                pin = await in_own_thread(self._stages.pin, newest, record.spec, tokenizer)
            job = await asyncio.to_thread(self._stages.take, job.id, pin)
            say("job started", job=job.id, model=job.model, base_step=job.base_step)
            if checkpoint is not None and checkpoint.proved:
                # The earlier attempt ended after it had promoted the step, on disk.
                after = AdapterRef(str(record.key), checkpoint.step, checkpoint.sha256)
                await self._promote_and_finish(job, record, newest, checkpoint, after)
                return
            async with self._until_cancelled(job):
                base = (await serving.resolve(str(record.key))).base

            if checkpoint is None:
                # Learn, and save.
                checkpoint, result = await self._learn_and_save(job, newest, base, record)
                if checkpoint is None:
                    await asyncio.to_thread(self._stages.finish, job, None, result)
                    return

        # Publish, beside the step that is served.
        if job.id not in self._probing:  # an earlier attempt saved the step
            self._probe_before(job, record, newest, checkpoint.manifest["movement"])
        failpoint("job/before-publish")
        async with self._until_cancelled(job):
            # Another engine, if the one from before learning failed meanwhile.
            base = await serving.engines.base(job.base_model)
            after = await serving.publish(record, checkpoint)
        failpoint("job/after-publish")
        held_s = base.engine.stats().held_s
        self._metrics.held_s.set(held_s)
        published = {"step": checkpoint.step, "held_s": held_s}
        await asyncio.to_thread(jobs.emit, job.id, "published", published)

        # Prove that the engine answers with what was learned.
        await self._prove(job, base, checkpoint, after)
        failpoint("job/after-prove")

        # Promote, and mark done.
        await self._promote_and_finish(job, record, newest, checkpoint, after)

    # ---- the stages of a job, in order ------------------------------------------------------

    def _saved(self, job: JobInfo, newest: Checkpoint | None = None) -> Checkpoint | None:
        """The step that an earlier attempt saved: the one after the step it started from.

        None if it was not proved and `newest`, of another job, has its number.
        """
        if job.base_step is None:  # it was never taken
            return None
        saved = self._checkpoints.of_job(job.key, job.id, job.base_step + 1)
        overtaken = saved and newest and not saved.proved and saved.step <= newest.step
        return None if overtaken else saved

    def _has_checkpoint(self, job: JobInfo) -> bool:
        try:
            return self._saved(job) is not None
        except StorageError:  # unknown for now: assume that there is one
            return True

    async def _newest(self, record: ModelRecord) -> tuple[Checkpoint, BaseTokenizer]:
        """The newest step, written if there is none, and the tokenizer it was made for."""
        tokenizer = await self._serving.engines.tokenizer(record.spec.base_model)
        newest = await in_own_thread(self._stages.newest, record, tokenizer)
        tokenizer.check_made_for(newest)
        return newest, tokenizer

    async def _take_turn(self, stack: AsyncExitStack, job: JobInfo) -> None:
        """Take the learner's GPU until the end of `stack`; until it is free, the job stays queued."""
        loop = self._loops[job.base_model]

        async def wait(reason: str) -> None:
            loop.waits_for = reason
            await asyncio.to_thread(self._jobs.move, job.id, "queued", waiting_for=reason)

        try:
            await stack.enter_async_context(self._learners.turn(job.base_model, wait))
        finally:
            loop.waits_for = None
        self._check_cancelled(job)

    async def _learn_and_save(
        self, job: JobInfo, newest: Checkpoint, base: Base, record: ModelRecord
    ) -> tuple[Checkpoint | None, dict[str, Any]]:
        """The next step, not served yet, and the learner's result; None if nothing was learned.

        The learner is free again before the job is marked as done.
        """
        async with AsyncExitStack() as loading:
            card = await in_own_thread(self._serving.choice.card, job.base_model)
            if card is not None and card.sleeps:  # only then does the learner have memory to load
                await self._pause(loading, job)
            try:
                return await self._learn_with(loading, job, newest, base, record)
            except OutOfMemory as error:
                advice = await in_own_thread(self._stages.less_memory, job)
                raise OutOfMemory(f"{error}\n{advice}") from None

    async def _learn_with(
        self,
        loading: AsyncExitStack,
        job: JobInfo,
        newest: Checkpoint,
        base: Base,
        record: ModelRecord,
    ) -> tuple[Checkpoint | None, dict[str, Any]]:
        async with self._learners.borrow(base, self._until_cancelled(job)) as learner:
            failpoint("job/before-learn")
            async with AsyncExitStack() as learning:
                pause_metrics = await self._pause(learning, job)
                await loading.aclose()  # pauses are counted: this one continues
                try:
                    result = await in_own_thread(
                        self._stages.learn,
                        learner,
                        job,
                        newest,
                        check_cancelled=partial(self._check_cancelled, job),
                    )
                finally:
                    # Before vLLM wakes: it needs the memory.
                    await in_own_thread(self._stages.release, learner, job.base_model)
            self._check_cancelled(job)  # the engine may have taken long to wake
            result["metrics"] |= pause_metrics
            failpoint("job/after-learn")
            if not result["steps"] and not job.advance_when_flat:
                return None, result
            # While the step is saved: requests that wait for it then wait for only half of the
            # proof.
            self._probe_before(job, record, newest, result["movement"])
            load = self._loading(record, asyncio.get_running_loop())
            saving = self._stages.save, learner, job, result, base, record, load
            try:
                checkpoint = await in_own_thread(*saving)
            except Exception:
                unsaved = AdapterRef(job.model, newest.step + 1, result["sha256"])
                with suppress(EngineError):
                    await self._serving.withdraw(record, unsaved)
                raise
            failpoint("job/after-save")
            return checkpoint, result

    def _loading(
        self, record: ModelRecord, loop: asyncio.AbstractEventLoop
    ) -> Callable[[Checkpoint], AbstractContextManager[None]]:
        """A function that loads a step into its engine while a thread hashes and syncs its files.

        This only saves time: the step is published, and errors are raised, once it is on disk. An
        engine that is asleep, hangs or is reopened loads it then.
        """

        @contextmanager
        def load(checkpoint: Checkpoint) -> Iterator[None]:
            publishing = self._serving.publish(record, checkpoint)
            loaded = asyncio.run_coroutine_threadsafe(publishing, loop)
            try:
                yield
            finally:
                futures.wait([loaded], timeout=LOAD_S)  # the engine may still read the files
                loaded.cancel()

        return load

    async def _pause(self, stack: AsyncExitStack, job: JobInfo) -> dict[str, float]:
        """Pause serving until the end of `stack`; returns the pause's metrics, filled in then."""
        async with self._until_cancelled(job):
            pause = self._serving.paused_for_training(job.base_model)
            return await stack.enter_async_context(pause)

    def _until_cancelled(self, job: JobInfo) -> AbstractAsyncContextManager[None]:
        """End the block with Cancelled as soon as the job is cancelled."""
        return until(partial(self._jobs.wait_cancel, job.id), partial(self._check_cancelled, job))

    def _check_cancelled(self, job: JobInfo) -> None:
        if self._closing or job.id in self._jobs.cancelling:
            raise Cancelled(f"job {job.id!r} was cancelled; step {job.base_step} stays served")

    def _probe_before(
        self, job: JobInfo, record: ModelRecord, newest: Checkpoint, movement: Mapping[str, Any]
    ) -> None:
        """Start the engine's probe of the previous step; does not wait for it."""

        async def probe() -> Probe:
            base = await self._serving.engines.base(job.base_model)
            before = None if newest.step == 0 else await self._serving.publish(record, newest)
            sequences = beginnings(movement, base.engine.max_length)
            return await base.engine.probe(sequences, before, with_hash=False)

        self._probing[job.id] = task = asyncio.create_task(probe())
        # If the job fails first, the task's error is never read.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _prove(
        self, job: JobInfo, base: Base, checkpoint: Checkpoint, after: AdapterRef
    ) -> None:
        movement = checkpoint.manifest["movement"]
        sequences = beginnings(movement, base.engine.max_length)
        probing = self._probing[job.id], base.engine.probe(sequences, after)
        async with self._until_cancelled(job):
            old, new = await probed(*probing, pause_s=self._settings.pause_s)
        try:
            proof = prove(movement, old, new, checkpoint.sha256)
        except NotProved:
            self._metrics.publishes.labels("not proved").inc()
            await base.adapters.withdraw(after)
            raise
        self._metrics.publishes.labels(proof.verdict).inc()
        if proof.verdict == "unproved":
            say(UNPROVED, level=logging.WARNING, job=job.id, model=job.model)
        await asyncio.to_thread(self._jobs.emit, job.id, "proved", asdict(proof))

    async def _promote_and_finish(
        self,
        job: JobInfo,
        record: ModelRecord,
        newest: Checkpoint,
        checkpoint: Checkpoint,
        after: AdapterRef,
    ) -> None:
        """Make a proved step the newest, on disk and in the engine; then the job is done.

        It is done even if it is cancelled now. A later attempt may repeat this from any point.
        """
        checkpoint = await asyncio.to_thread(self._checkpoints.promote, checkpoint)
        if checkpoint.step >= newest.step:
            self._serving.promote(record, after, checkpoint.step)
        failpoint("job/after-promote")
        await asyncio.to_thread(self._stages.finish, job, checkpoint, checkpoint.manifest)
