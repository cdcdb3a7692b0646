"""The training API: models, jobs and their events, checkpoints.

In:   HTTP requests under /v1/training
Out:  ModelInfo, JobInfo, CheckpointInfo, events, tokens; jobs in the queue

Everything is checked before a job is accepted: an error names the path of the field. An accepted
job survives a crash of the server.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from hone.errors import Conflict, NotFound, Unprocessable
from hone.files.logs import say
from hone.server.access import check_path
from hone.server.limits import JsonRoute, raw_body_route
from hone.server.settings import Settings
from hone.server.state import State
from hone.server.train.model_args import check_base_model, checked_spec
from hone.server.train.submit import reading, submit
from hone.server.train.token_pages import TokenPage, token_page
from hone.store.models import ModelRecord
from hone.trajectory import JobRequest
from hone.types import (
    CheckpointInfo,
    FieldError,
    JobEvent,
    JobInfo,
    JobState,
    ModelInfo,
    ModelKey,
    ModelSpec,
    Name,
    Strict,
)

MAX_PAGE = 5000
"""Maximum number of tokens on one page."""

CANCEL_S = 60.0
"""Seconds for a cancelled job to end before its model is deleted."""

StepNumber = Annotated[int, Field(ge=0, lt=2**31)]

SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""X-Accel-Buffering keeps nginx from buffering events."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?")


class MetricsRequest(Strict):
    """Metrics of one step, measured by the client."""

    split: Name = "val"
    step: StepNumber | None = None
    """The step; None for the newest."""
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=1)
    """`val/reward` decides which step is the best."""
    replace: bool = False
    """Replace what was logged for this step under the same names, instead of averaging."""
    run: Name | None = None
    """The run that measured them. The best step is chosen by the values of the newest run."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=200)
    """A new one for each request: a request that is sent again with its key is logged once."""

    @property
    def identity(self) -> tuple[str, str] | None:
        """The key, and the hash of everything else; None without a key."""
        if self.idempotency_key is None:
            return None
        fields = json.dumps(self.model_dump(exclude={"idempotency_key"}), sort_keys=True)
        return self.idempotency_key, hashlib.sha256(fields.encode()).hexdigest()


class RenameRequest(Strict):
    """A new name for a model."""

    to: Name
    """A name in the same project that is neither registered nor a base model in use."""


class DeletedModel(Strict):
    """A model that was deleted."""

    model: str
    """PROJECT/NAME."""
    bytes: int
    """What this freed on disk."""


def routes(state: State) -> APIRouter:
    """Every route of the training API."""
    router = APIRouter(prefix="/v1/training", tags=["training"], route_class=JsonRoute)
    _model_routes(state, router)
    _job_routes(state, router)
    _checkpoint_routes(state, router)
    return router


# ---- models -----------------------------------------------------------------------------------


# Routes that are not coroutines run in a thread, because they read the database and the disk.


def _model_routes(state: State, router: APIRouter) -> None:
    @router.post("/models", status_code=201, responses={200: {"model": ModelInfo}})
    def register(spec: ModelSpec, request: Request, response: Response) -> ModelInfo:
        """Register a model; its base model must exist. 200 if registered already. Loads nothing."""
        record, is_new = registered(state, spec)
        if is_new:
            say("model registered", model=str(record.key), base_model=spec.base_model)
        else:
            response.status_code = 200
        return _info(state, record, request)

    @router.get("/models")
    def models(request: Request) -> list[ModelInfo]:
        """Every registered model."""
        return [_info(state, record, request) for record in state.models.list()]

    @router.get("/models/{project}/{name}")
    def model(project: Name, name: Name, request: Request) -> ModelInfo:
        """One model, and its newest and best step."""
        return _info(state, state.models.get(ModelKey(project, name)), request)

    @router.post("/models/{project}/{name}/prepare")
    async def prepare(project: Name, name: Name, request: Request) -> ModelInfo:
        """Load the engine, write step 0 if there is none, serve the newest, start the learner."""
        record = await asyncio.to_thread(state.models.get, ModelKey(project, name))
        await state.service.prepare(record)
        return await asyncio.to_thread(_info, state, record, request)

    @router.post("/models/{project}/{name}/rename")
    def rename_model(project: Name, name: Name, body: RenameRequest, request: Request) -> ModelInfo:
        """Rename a model, with its steps, history, jobs and runs; the old name becomes free."""
        key, new = ModelKey(project, name), ModelKey(project, body.to)
        if state.renames.rename(key, new):
            state.serving.rename(key, new)
        return _info(state, state.models.get(new), request)

    @router.delete("/models/{project}/{name}")
    async def delete_model(project: Name, name: Name, force: bool = False) -> DeletedModel:
        """Delete a model, with its steps, history, jobs and runs; its name becomes free.

        Refused while one of its jobs has not ended or one of its runs is open. With `force`, its jobs
        are cancelled and its runs closed first.
        """
        key = ModelKey(project, name)
        if force:
            await _cancel_jobs(state, key)
        try:
            num_bytes = await asyncio.to_thread(state.deletions.delete, key, force=force)
        finally:  # its rows are gone, too, if only its files could not be removed
            if all(record.key != key for record in state.models.list()):
                await state.serving.forget(key)
        with suppress(KeyError):  # it has trained nothing since the server started
            state.metrics.step.remove(str(key))
        return DeletedModel(model=str(key), bytes=num_bytes)

    @router.post("/models/{project}/{name}/metrics")
    def log(project: Name, name: Name, body: MetricsRequest) -> dict[str, int]:
        """Log a client's metrics of a step; `val/reward` decides which step is the best.

        Without `idempotency_key`, a request that is sent twice is logged twice.
        """
        record = state.models.get(ModelKey(project, name))
        step = state.serving.newest(record)[0] if body.step is None else body.step
        step = state.checkpoints.log(
            record.key,
            step,
            body.metrics,
            body.split,
            replace=body.replace,
            run=body.run,
            request=body.identity,
        )
        return {"step": step}


async def _cancel_jobs(state: State, key: ModelKey) -> None:
    """Cancel the jobs of a model, and wait until they have ended."""
    cancelled = []
    for job_state in ("running", "queued"):
        jobs = await asyncio.to_thread(state.jobs.list, model=key, state=job_state, limit=-1)
        for job in jobs:
            cancelled.append(await asyncio.to_thread(state.jobs.request_cancel, job.id))
    for job in cancelled:
        try:
            async with asyncio.timeout(CANCEL_S):
                async for _ in state.jobs.follow(job.id):
                    pass
        except TimeoutError:
            raise Conflict(
                f"model {str(key)!r}: job {job.id!r} was cancelled and has not ended after "
                f"{CANCEL_S:g} s. Send the request again when it has."
            ) from None


def registered(state: State, spec: ModelSpec) -> tuple[ModelRecord, bool]:
    """Check and register a model; returns it, and whether it is new. Blocking.

    Clients register before every job: if nothing changed, the engine stays as it is.
    """
    spec, before = state.models.check(checked_spec(spec, state.serving.choice.check_arg()))
    if before is None:
        check_path(spec)
        check_base_model(spec)
    elif before.spec == spec:
        return before, False
    state.serving.register(spec)
    return state.models.register(spec), before is None


def _info(state: State, record: ModelRecord, request: Request) -> ModelInfo:
    spec = record.spec
    return ModelInfo(
        project=spec.project,
        name=spec.name,
        base_model=spec.base_model,
        step=state.serving.newest(record)[0],
        best_step=state.checkpoints.best(record.key),
        rank=spec.rank,
        alpha=spec.alpha,
        seed=spec.seed,
        inference_base_url=inference_url(
            state.settings, request.headers.get("host", ""), request.url.scheme
        ),
        inference_name=state.models.short_name(record.key),
        advertised_url=state.settings.advertise_url,
        concurrency=state.serving.choice.concurrency(spec),
        not_applicable=spec.not_applicable,
        created_at=record.created_at,
    )


def inference_url(
    settings: Settings, host: str, scheme: str = "http", *, project: str | None = None
) -> str:
    """The address of the OpenAI API, with the host name that the caller used.

    With `project`, the address under which model names refer to models of that project.
    """
    match = _HOST.fullmatch(host)
    name = match[1] if match else settings.host
    if name in ("0.0.0.0", "[::]", "::"):  # clients cannot connect to a wildcard address
        name = "127.0.0.1"
    path = "/v1" if project is None else f"/project/{project}/v1"
    return f"{scheme}://{name}:{settings.inference_port or settings.port}{path}"


# ---- jobs -------------------------------------------------------------------------------------


def _job_routes(state: State, router: APIRouter) -> None:
    async def answer(body: bytes, release: Callable[[], None]) -> Response:
        async with reading(state, JobRequest, body, release) as (run, head):
            info = await submit(state, run, head.request, head.sha256)
        return Response(info.model_dump_json(), 202, media_type="application/json")

    async def post_job(request: JobRequest) -> JobInfo:
        """Queue a training job. The job is on disk when the response is sent."""
        raise NotImplementedError  # `answer` does it

    raw = raw_body_route(answer)
    router.add_api_route(
        "/jobs", post_job, methods=["POST"], status_code=202, route_class_override=raw
    )

    @router.get("/jobs")
    def jobs(
        model: Annotated[str | None, Query(max_length=300)] = None,
        job_state: Annotated[JobState | None, Query(alias="state")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[JobInfo]:
        """Jobs, the newest first; of one model (NAME or PROJECT/NAME), in one state."""
        key = None if model is None else state.models.find(model).key
        return state.jobs.list(model=key, state=job_state, limit=limit)

    @router.get("/jobs/{job_id}")
    def job(job_id: str) -> JobInfo:
        """The state of a job, and its result."""
        return state.jobs.get(job_id)

    @router.get("/jobs/{job_id}/events", response_class=StreamingResponse)
    def job_events(
        job_id: str,
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
    ) -> StreamingResponse:
        """The events of a job, as server-sent events until it ends; resumes after an event id.

        The Last-Event-ID header, which browsers send, comes before `after`.
        """
        state.jobs.get(job_id)  # a 404 must be sent before the stream starts
        stream = sse(state.jobs.follow(job_id, after if last_event_id is None else last_event_id))
        return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)

    @router.get("/jobs/{job_id}/samples", response_model=TokenPage)
    async def samples(
        job_id: str,
        offset: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 500,
    ) -> Response:
        """The tokens that a job trains on."""
        job, packed, picture_dir = await asyncio.to_thread(_trained_on, state, job_id)
        tokenizer = await state.serving.engines.tokenizer(job.base_model)
        text = await state.workers.run(
            token_page, tokenizer, job, packed, picture_dir, offset, limit
        )
        return Response(text, media_type="application/json")

    @router.post("/jobs/{job_id}/cancel")
    def cancel(job_id: str) -> JobInfo:
        """Cancel a queued job at once; a running one ends soon, unless its step is already proved."""
        return state.jobs.request_cancel(job_id)


async def sse(events: AsyncIterator[JobEvent | None]) -> AsyncIterator[str]:
    """Events as text/event-stream. The JSON of one is one line, as the format requires."""
    async for event in events:
        if event is None:  # proxies close silent connections
            yield ": still here\n\n"
        else:
            yield f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"


def _trained_on(state: State, job_id: str) -> tuple[JobInfo, bytes, FilePath | None]:
    """A job, its groups, and the checkpoint with its picture and logprobs, if there is one."""
    job, packed, picture_dir = state.jobs.get(job_id), state.jobs.packed_groups(job_id), None
    if job.plot_tensors and job.step is not None:
        with suppress(NotFound):  # deleted since
            picture_dir = state.checkpoints.get(job.key, job.step).path
    return job, packed, picture_dir


# ---- checkpoints ------------------------------------------------------------------------------


def _checkpoint_routes(state: State, router: APIRouter) -> None:
    at = "/models/{project}/{name}/checkpoints"

    @router.get(at)
    def checkpoints(project: Name, name: Name) -> list[CheckpointInfo]:
        """The retained steps of a model, ascending."""
        record = state.models.get(ModelKey(project, name))
        in_use = state.first_steps(record.key)
        return [
            CheckpointInfo(
                step=checkpoint.step,
                sha256=checkpoint.sha256,
                job=checkpoint.manifest.get("job"),
                created_at=checkpoint.manifest["created_at"],
                metrics=checkpoint.manifest.get("metrics") or {},
                bytes=checkpoint.bytes,
                optimizer=checkpoint.has_optimizer,
                in_use=checkpoint.step in in_use,
            )
            for checkpoint in state.checkpoints.list(record.key)
        ]

    @router.delete(at)
    def keep(
        project: Name,
        name: Name,
        keep_last: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
        keep_best: Annotated[str | None, Query(min_length=1, max_length=500)] = None,
        keep: Annotated[list[StepNumber] | None, Query(max_length=1000)] = None,
    ) -> list[int]:
        """Delete all steps except the selected ones and the newest; returns the deleted steps."""
        record = state.models.get(ModelKey(project, name))
        if keep_last is None and keep_best is None and keep is None:
            how = "keep_last=N, keep_best=val/reward or keep=STEP (several)"
            raise Unprocessable([FieldError(("keep_last",), f"say which steps to keep: {how}")])
        return state.checkpoints.keep(record.key, last=keep_last, best=keep_best, steps=keep or ())

    @router.delete(at + "/{step}")
    def delete(project: Name, name: Name, step: Annotated[int, Path(ge=0, lt=2**31)]) -> list[int]:
        """Delete one step; never the newest."""
        record = state.models.get(ModelKey(project, name))
        gone = state.checkpoints.delete(record.key, [step])
        if not gone:
            state.checkpoints.get(record.key, step)
            raise Conflict(
                f"step {step} of {str(record.key)!r} is the newest and is kept: it is what is "
                "served, and what the next job starts from"
            )
        return gone
