"""Check a training job and put it into the queue.

In:   a JobRequest, with its groups or with them in a worker process
Out:  the JobInfo of an accepted job, on disk; or the error that says why it is refused
"""

import asyncio
from collections.abc import Awaitable, Callable

from hone.errors import Busy
from hone.logs import say
from hone.server import job_tasks
from hone.server.job_tasks import digest
from hone.server.model_args import train_config
from hone.server.resolved_job import PackedJob, Start, pack_job
from hone.server.state import State
from hone.server.tokenizer import BaseTokenizer
from hone.server.workers import Worker
from hone.trajectory import JobRequest
from hone.types import JobInfo


async def submit(state: State, request: JobRequest) -> JobInfo:
    """Accept a job, or return the one that this idempotency key and request created before."""

    async def pack(tokenizer: BaseTokenizer, start: Start) -> PackedJob:
        return await asyncio.to_thread(pack_job, request, tokenizer, state.calls, start)

    return await _accept(state, request, await asyncio.to_thread(digest, request), pack)


async def submit_held(state: State, worker: Worker, request: JobRequest, sha256: str) -> JobInfo:
    """Accept a job whose groups are in a worker process; `request` has none."""

    async def pack(tokenizer: BaseTokenizer, start: Start) -> PackedJob:
        return await worker.run(job_tasks.resolve_job, tokenizer, state.store.path, start)

    return await _accept(state, request, sha256, pack)


async def _accept(
    state: State,
    request: JobRequest,
    sha256: str,
    pack: Callable[[BaseTokenizer, Start], Awaitable[PackedJob]],
) -> JobInfo:
    record = await asyncio.to_thread(state.models.find, request.model)
    repeated = await asyncio.to_thread(
        state.jobs.repeated, record.key, request.idempotency_key, sha256
    )
    if repeated is not None:
        return repeated
    config = train_config(record.spec.defaults, request.config, "config")
    waiting = sum((await asyncio.to_thread(state.jobs.waiting)).values())
    if waiting >= state.settings.max_queued_jobs:
        raise Busy(
            f"{waiting} jobs are queued, as many as this server keeps (max_queued_jobs); wait for "
            "one to end, or cancel one",
            retry_after_s=10,
        )
    tokenizer = await state.serving.template(record.spec.base_model)
    step, adapter = await asyncio.to_thread(state.serving.newest, record)
    start = Start(record, config, step, None if adapter is None else adapter.sha256)
    packed = await pack(tokenizer, start)
    job = await asyncio.to_thread(
        state.jobs.add,
        model=record,
        groups=packed.packed,
        config=config,
        counts=packed.counts,
        request_sha256=sha256,
        seed=request.seed,
        plot_tensors=request.plot_tensors,
        advance_when_flat=request.advance_when_flat,
        idempotency_key=request.idempotency_key,
        calls=packed.calls,
    )
    state.service.wake()
    say("job accepted", job=job.id, model=job.model, groups=packed.groups, **packed.counts)
    return job
