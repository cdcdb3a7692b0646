"""The state of one server: settings, stores, serving, training; opened, run and closed together.

In:   Settings
Out:  State, which the routes work on

Opening loads no model. Closing goes in reverse order: jobs, then running requests, then engines.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hone.errors import StorageError
from hone.files.logs import say
from hone.learner.process import LearnerProcess
from hone.server.limits import BodyBudget
from hone.server.serve.conversations import Conversations
from hone.server.serve.holds import Holds
from hone.server.serve.policies import OpenEngine, Serving
from hone.server.serve.recorder import Recorder
from hone.server.settings import Settings
from hone.server.supervision import Part, repeat
from hone.server.telemetry import Metrics, rotate_output
from hone.server.train.learners import StartLearner
from hone.server.train.loop import TrainingService
from hone.server.workers import WorkerPool
from hone.store import calls, jobs, models
from hone.store.checkpoints import Checkpoints, prune_groups
from hone.store.database import STATE, Store, make_root
from hone.store.deletion import Deletions
from hone.store.rename import Renames
from hone.tasks.tally import cancel_all
from hone.types import ModelKey

PRUNE_S = 600.0
"""Seconds between two prunings of recorded calls and of the groups of ended jobs."""
LOG_S = 10.0
"""Seconds between two checks: of the engines, which are restarted if they failed; of their
statistics, written to engine.log if they changed; and of the size of server.out."""
DRAIN_S = 5.0
"""Seconds for recording requests that were cut off when the server stops."""


class State:
    """The state of one server. Opens or creates the files under `settings.root`; loads no model."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_engine: OpenEngine | None = None,
        around_open: Callable[[OpenEngine], OpenEngine] = lambda open_engine: open_engine,
        start_learner: StartLearner = LearnerProcess.launch,
    ) -> None:
        make_root(settings.root)
        self.settings = settings
        self.started_at = time.time()
        self.started = time.monotonic()
        schemas = (models.SCHEMA, jobs.SCHEMA, calls.SCHEMA)
        self.store = Store(settings.root / STATE, schemas=schemas)
        self.models, self.calls = models.ModelStore(self.store), calls.CallStore(self.store)
        self.jobs = jobs.JobStore(self.store, keep_progress=settings.keep_progress)
        self.checkpoints = Checkpoints(settings.root)
        self.metrics = Metrics()
        self.serving = Serving(self.models, self.checkpoints, settings, open_engine, around_open)
        self.service = TrainingService(
            jobs=self.jobs,
            models=self.models,
            checkpoints=self.checkpoints,
            serving=self.serving,
            settings=settings,
            metrics=self.metrics,
            start_learner=start_learner,
        )
        self.renames = Renames(self.store, self.models, self.jobs, self.calls, self.checkpoints)
        self.renames.finish()
        self.deletions = Deletions(self.store, self.models, self.jobs, self.calls, self.checkpoints)
        self.deletions.finish()
        self.workers = WorkerPool(settings.body_processes, directory=settings.root / ".bodies")
        """Processes that read large request bodies."""
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self.recorder = Recorder(self.calls)
        self.holds = Holds()
        self.conversations = Conversations()
        self.pruner, self.logs = Part("pruner"), Part("logs")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take jobs and prune calls until the block ends; then close everything in reverse."""
        try:
            await self.service.start()
            repeated = [
                asyncio.create_task(repeat(self.pruner, self._prune, PRUNE_S)),
                asyncio.create_task(repeat(self.logs, self._log, LOG_S)),
            ]
            try:
                yield
            finally:
                await cancel_all(repeated)
        finally:
            await self.service.close()
            await self.serving.drain(DRAIN_S)
            await self.recorder.drain()
            await self.serving.close()
            await asyncio.to_thread(self.workers.close)
            self.store.close()

    async def _log(self) -> None:
        self.serving.engines.replace_failed()
        await self.serving.engines.log_stats()
        await asyncio.to_thread(rotate_output, self.settings)

    async def _prune(self) -> None:
        """Delete what is older or larger than the settings allow; close idle runs and engines."""
        settings = self.settings
        bounds = {"max_age_s": settings.keep_calls_s, "max_bytes": settings.keep_calls_bytes}
        for run in await asyncio.to_thread(self._close_idle_runs):
            say("run closed: it was idle", run=run, idle_s=settings.idle_run_s)
        if deleted := await asyncio.to_thread(self.calls.prune, **bounds):
            say("calls pruned", calls=deleted)
        if deleted := await asyncio.to_thread(self.jobs.prune, **bounds):
            say("groups of ended jobs pruned", jobs=deleted)
        await asyncio.to_thread(self.jobs.prune_events, max_age_s=settings.keep_events_s)
        await asyncio.to_thread(self.calls.prune_runs, max_age_s=settings.keep_events_s)
        logged = (prune_groups, settings.root, settings.keep_trajectories_bytes)
        if deleted := await asyncio.to_thread(*logged):
            say("logged trajectories pruned", files=deleted)
        await asyncio.to_thread(self._prune_steps)
        if freed := await asyncio.to_thread(self.store.shrink):
            say("the state file was shortened", bytes=freed)
        await self.serving.engines.close_idle(settings.idle_engine_s)
        await self.service.close_idle(settings.idle_learner_s)

    def _close_idle_runs(self) -> list[str]:
        unfinished = [
            *self.jobs.list(state="queued", limit=-1),
            *self.jobs.list(state="running", limit=-1),
        ]
        busy = {job.model for job in unfinished}
        return self.calls.close_idle_runs(self.settings.idle_run_s, busy=busy)

    def _prune_steps(self) -> None:
        """Delete the steps, and the optimizer states of steps, that are not to be kept."""
        for record in self.models.list():
            try:
                self._prune_steps_of(record.key)
            except StorageError as error:  # the other models are pruned all the same
                say(
                    "steps not pruned", level=logging.WARNING, model=str(record.key), why=str(error)
                )

    def first_steps(self, key: ModelKey) -> set[int]:
        """The steps that open runs started from, which their last validation asks again."""
        return self.checkpoints.newest_at(key, self.calls.open_since(str(key)))

    def _prune_steps_of(self, key: ModelKey) -> None:
        settings = self.settings
        waiting = self.jobs.list(model=key, state="queued", limit=-1)
        running = self.jobs.list(model=key, state="running", limit=-1)
        spared = {0, *(job.base_step for job in (*waiting, *running) if job.base_step)}
        spared |= self.first_steps(key)
        if settings.keep_steps is not None:
            last, best = settings.keep_steps, "val/reward"
            if gone := self.checkpoints.keep(key, last=last, best=best, steps=spared):
                say("steps pruned", model=str(key), steps=gone)
        last = settings.keep_optimizer_steps
        if lost := self.checkpoints.drop_optimizers(key, last=last, steps=spared):
            say("optimizer states pruned", model=str(key), steps=lost)
