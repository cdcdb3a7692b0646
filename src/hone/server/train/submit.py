"""Read a body with trajectories, check the training job, and queue it.

In:   the body of a request, hone's or ART's
Out:  the JobInfo of an accepted job, which is on disk; or the error that says why it is refused
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from fastapi.exceptions import RequestValidationError

from hone.files.logs import say
from hone.inference.background import in_own_thread
from hone.server.serve.policies import Serving
from hone.server.settings import Settings
from hone.server.train import tasks
from hone.server.train.choice_calls import Start
from hone.server.train.loop import TrainingService
from hone.server.train.model_args import train_config
from hone.server.workers import WorkerPool
from hone.store.calls import CallStore
from hone.store.jobs import JobStore, check_queue
from hone.store.models import ModelStore
from hone.trajectory import JobRequest
from hone.types import JobInfo

Run = Callable[..., Awaitable[Any]]
"""Runs a task of tasks.py on the body that was read."""


class TrainingState(Protocol):
    """The parts of the server's State that accept jobs."""

    settings: Settings
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    serving: Serving
    service: TrainingService
    workers: WorkerPool


@asynccontextmanager
async def reading(
    state: TrainingState, kind: type[Any], body: bytes, release: Callable[[], None]
) -> AsyncIterator[tuple[Run, tasks.Head]]:
    """Read a body, in a worker process if it is large; that process is reserved for the block.

    `release` is called when the body is no longer needed.
    """
    async with AsyncExitStack() as reserved:
        if len(body) <= state.settings.large_body_bytes:
            # Its own thread: the job may be rendered by a slow template.
            run: Any = partial(in_own_thread, tasks.call, tasks.Parsed())
        else:
            worker = await reserved.enter_async_context(state.workers.worker())
            run = partial(worker.run, tasks.call, None)
        head = await run(tasks.read, kind, body)
        if isinstance(head, tasks.Invalid):
            raise RequestValidationError(head.errors)
        release()
        yield run, head


async def submit(state: TrainingState, run: Run, request: JobRequest, sha256: str) -> JobInfo:
    """Queue a job, or return the one that this idempotency key and request created before.

    `request` has no groups: `run` knows them.
    """
    record = await asyncio.to_thread(state.models.find, request.model)
    # Counted before the key is looked up: a job that fills the queue meanwhile may be this one.
    queued = sum((await asyncio.to_thread(state.jobs.waiting)).values())
    repeated = await asyncio.to_thread(
        state.jobs.repeated, record.key, request.idempotency_key, sha256
    )
    if repeated is not None:
        state.service.wake()  # the request that queued it may have failed before it did
        return repeated
    config = train_config(record.spec.defaults, request.config, "config")
    max_queued = state.settings.max_queued_jobs
    check_queue(queued, max_queued)  # `add` decides; this spares the work until then
    tokenizer = await state.serving.engines.tokenizer(record.spec.base_model)
    step, adapter = await asyncio.to_thread(state.serving.newest, record)
    sha = None if adapter is None else adapter.sha256
    start = Start(record, config, step, sha, request.advance_when_flat)
    groups, packed = await run(tasks.pack, tokenizer, state.calls, start)
    job = await asyncio.to_thread(
        state.jobs.add,
        model=record,
        config=config,
        request_sha256=sha256,
        plot_tensors=request.plot_tensors,
        advance_when_flat=request.advance_when_flat,
        idempotency_key=request.idempotency_key,
        max_queued=max_queued,
        **packed,
    )
    state.service.wake()
    say("job accepted", job=job.id, model=job.model, groups=groups, **job.counts)
    return job
