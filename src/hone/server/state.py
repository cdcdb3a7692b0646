"""Everything one server holds: settings, stores, serving, training; opened, run and closed together.

In:   Settings
Out:  State, which the routes work on

Opening loads no model. Closing goes in reverse: jobs first, then requests in flight, then engines.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from hone.learner.worker import LearnerProcess
from hone.logs import say
from hone.server.bodies import BodyBudget
from hone.server.conversations import Conversations
from hone.server.learners import StartLearner
from hone.server.recorder import Recorder
from hone.server.service import TrainingService
from hone.server.serving import OpenEngine, Serving
from hone.server.settings import Settings
from hone.server.supervision import Part, repeat
from hone.server.telemetry import Metrics, rotate_output
from hone.server.workers import WorkerPool
from hone.store import calls, jobs, models
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints, prune_groups
from hone.store.database import Store, make_root
from hone.store.jobs import JobStore
from hone.store.models import ModelStore
from hone.store.rename import Renames
from hone.tally import cancel_all

PRUNE_S = 600.0
"""Seconds between two prunings of recorded calls and of the groups of ended jobs."""
LOG_S = 10.0
"""How often the engines' statistics are written to engine.log, if they changed, and the size of the
server's own output is checked."""
DRAIN_S = 5.0
"""Seconds that requests cut off by a stop have to be recorded."""


@dataclass(slots=True)
class State:
    """Everything one server holds."""

    settings: Settings
    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints
    serving: Serving
    service: TrainingService
    metrics: Metrics
    workers: WorkerPool
    """Processes that read large request bodies."""
    bodies: BodyBudget
    recorder: Recorder
    conversations: Conversations = field(default_factory=Conversations)
    pruner: Part = field(default_factory=lambda: Part("pruner"))
    logs: Part = field(default_factory=lambda: Part("logs"))
    started_at: float = field(default_factory=time.time)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        open_engine: OpenEngine | None = None,
        around_open: Callable[[OpenEngine], OpenEngine] = lambda open_engine: open_engine,
        start_learner: StartLearner = LearnerProcess.launch,
    ) -> Self:
        """Open or make the state under `settings.root`; loads no model."""
        make_root(settings.root)
        schemas = (models.SCHEMA, jobs.SCHEMA, calls.SCHEMA)
        store = Store(settings.root / "state.sqlite", schemas=schemas)
        model_store, call_store = ModelStore(store), CallStore(store)
        job_store = JobStore(store, keep_progress=settings.keep_progress)
        checkpoints, metrics = Checkpoints(settings.root), Metrics()
        serving = Serving(model_store, checkpoints, settings, open_engine, around_open)
        service = TrainingService(
            jobs=job_store,
            models=model_store,
            checkpoints=checkpoints,
            serving=serving,
            settings=settings,
            metrics=metrics,
            start_learner=start_learner,
        )
        Renames(store, model_store, job_store, call_store, checkpoints).finish()
        return cls(
            settings=settings,
            store=store,
            models=model_store,
            jobs=job_store,
            calls=call_store,
            checkpoints=checkpoints,
            serving=serving,
            service=service,
            metrics=metrics,
            # No project can have a name that begins with a dot.
            workers=WorkerPool(settings.body_processes, directory=settings.root / ".bodies"),
            bodies=BodyBudget(settings.max_bodies_bytes),
            recorder=Recorder(call_store),
        )

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
        await self.serving.log_stats()
        await asyncio.to_thread(rotate_output, self.settings)

    async def _prune(self) -> None:
        """Delete what is older or larger than the settings allow; close idle runs and engines."""
        settings, calls, jobs = self.settings, self.calls, self.jobs
        bounds = {"max_age_s": settings.keep_calls_s, "max_bytes": settings.keep_calls_bytes}
        for run in await asyncio.to_thread(calls.close_idle_runs, settings.idle_run_s):
            say("run closed: it was idle", run=run, idle_s=settings.idle_run_s)
        if gone := await asyncio.to_thread(calls.prune, **bounds):
            say("calls pruned", calls=gone)
        if gone := await asyncio.to_thread(jobs.prune, **bounds):
            say("groups of ended jobs pruned", jobs=gone)
        await asyncio.to_thread(jobs.prune_events, max_age_s=settings.keep_events_s)
        logged = (prune_groups, settings.root, settings.keep_trajectories_bytes)
        if gone := await asyncio.to_thread(*logged):
            say("logged trajectories pruned", files=gone)
        await self.serving.close_idle(settings.idle_engine_s)
        await self.service.close_idle()
