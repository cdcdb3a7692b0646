"""ART's wire protocol, for unmodified clients.

In:   requests of `openpipe-art` 0.3 to 0.5.17, and of NAT's plugin through it
Out:  the responses they expect, from the same functions that training_routes.py calls

Registering a model and asking for its step load nothing, because ART's clients time out after five
seconds. A training call is answered while its job runs, one JSON line per gradient step; the stream
starts as late as possible, because until then a failure still has a status and a message, and
afterwards only a broken body. A job goes on when its client disconnects.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from hone.errors import (
    Conflict,
    NotFound,
    NotInThisVersion,
    TrainingFailed,
    Unavailable,
    Unprocessable,
)
from hone.files.disk import write_atomic
from hone.files.logs import say
from hone.inference.background import in_own_thread
from hone.server.http.auth import inference_key
from hone.server.http.training_routes import inference_url, registered
from hone.server.limits import JsonRoute, raw_body_route
from hone.server.state import State
from hone.server.train import tasks
from hone.server.train.art_requests import (
    ART_DEFAULTS,
    ArtModel,
    KeepRequest,
    LogRequest,
    PrepareRequest,
    TrainRequest,
    job_config,
    model_spec,
    server_keys,
)
from hone.server.train.submit import Run, reading, submit
from hone.store.models import ModelRecord
from hone.trajectory import JobRequest
from hone.types import FieldError, JobInfo, ModelKey
from hone.wire.metric_names import ART_NAMES

HISTORY = {
    "loss": "learn/loss",
    "entropy": "learn/entropy",
    "kl_div": "learn/kl",
    "grad_norm": "learn/grad_norm",
    "learning_rate": "learn/learning_rate",
}
"""ART's metric names in history.jsonl (under `train/`), and hone's."""


def routes(state: State) -> APIRouter:
    """The routes of ART's server, in all its versions."""
    router = APIRouter(tags=["ART"], route_class=JsonRoute)

    @router.post("/register")
    def register(model: ArtModel) -> None:
        """Remember a model; nothing is loaded."""
        if model.base_model is not None:
            record = _record(state, model)
            say(
                "ART: model registered",
                model=str(record.key),
                not_applicable=record.spec.not_applicable,
            )
        _write_model(state, model)

    @router.post("/_get_step")
    def get_step(model: ArtModel) -> int:
        """The newest step of a model."""
        return _step(state, model.key)

    @router.post("/_prepare_backend_for_training")
    async def prepare(body: PrepareRequest, request: Request) -> tuple[str, str]:
        """Load the model, serve its newest step, start its learner; returns address and key."""
        server_args = (body.config or {}).get("server_args") or {}
        if ignored := server_keys(body.config):
            say("ART: keys without effect", model=str(body.model.key), keys=ignored)
        record = await in_own_thread(_record, state, body.model)
        await state.service.prepare(record)
        key = inference_key(state.settings) or server_args.get("api_key") or "default"
        host, scheme = request.headers.get("host", ""), request.url.scheme
        # With the project: these clients send only the model's name, which another project may use
        # as well.
        url = inference_url(state.settings, host, scheme, project=record.key.project)
        return url, str(key)

    _group_routes(state, router)

    @router.post("/_delete_checkpoints")
    def delete_checkpoints(
        model: ArtModel,
        benchmark: Annotated[str, Query(max_length=500)] = "val/reward",
        benchmark_smoothing: Annotated[float, Query(gt=0, le=1)] = 1.0,
    ) -> None:
        """Delete all but the newest checkpoint and the best by a metric."""
        state.checkpoints.keep(
            state.models.get(model.key).key,
            last=1,
            best=benchmark,
            smoothing=benchmark_smoothing,
        )

    @router.post("/_delete_checkpoint_files")
    def delete_checkpoint_files(body: KeepRequest) -> None:
        """Delete all checkpoints but these and the newest."""
        state.checkpoints.keep(state.models.get(body.model.key).key, steps=body.steps_to_keep)

    @router.post("/close")
    async def close() -> None:
        """Does nothing: other clients may use this server."""

    for name in ("pull_from_s3", "push_to_s3", "deploy", "fork_checkpoint"):
        router.post(f"/_experimental_{name}", status_code=501)(_absent(name))
    return router


def _group_routes(state: State, router: APIRouter) -> None:
    """Routes whose bodies hold trajectories, and may be large."""

    async def answer_train(body: bytes, release: Callable[[], None]) -> Response:
        async with reading(state, TrainRequest, body, release) as (run, head):
            job = await _submit(state, run, head)
        return await streamed(state, job, head)

    async def answer_log(body: bytes, release: Callable[[], None]) -> Response:
        async with reading(state, LogRequest, body, release) as (run, head):
            step = await asyncio.to_thread(_step, state, head.request.model.key)
            await _log(state, run, head.request.model.key, head.request.split, step)
        return JSONResponse(None)

    async def train(body: TrainRequest) -> StreamingResponse:
        """Train on the groups; one JSON line per gradient step, ending when the step is served."""
        raise NotImplementedError  # `answer_train` does it

    async def log(body: LogRequest) -> None:
        """Log trajectories, and add their means to the model's history.

        ART's clients send no idempotency key and do not retry: each request is logged.
        """
        raise NotImplementedError  # `answer_log` does it

    raw_train, raw_log = raw_body_route(answer_train), raw_body_route(answer_log)
    router.add_api_route(
        "/_train_model",
        train,
        methods=["POST"],
        response_class=StreamingResponse,
        route_class_override=raw_train,
    )
    router.add_api_route("/_log", log, methods=["POST"], route_class_override=raw_log)


# ---- models -----------------------------------------------------------------------------------


def _record(state: State, model: ArtModel) -> ModelRecord:
    """The model, registered as this request describes it. Blocking."""
    if model.base_model is None:
        raise Unprocessable(
            [FieldError(("model", "base_model"), "a model without one cannot be trained; name one")]
        )
    record, _ = registered(state, model_spec(model, state.serving.choice.check_arg()))
    return record


def _step(state: State, key: ModelKey) -> int:
    try:
        return state.serving.newest(state.models.get(key))[0]
    except NotFound:  # no base model, or not registered yet
        return 0


def _write_model(state: State, model: ArtModel) -> None:
    """Write ART's model.json, without the keys and tokens that a model object may hold."""
    content = {
        "name": model.name,
        "project": model.project,
        "entity": model.entity,
        "trainable": model.base_model is not None,
        "base_model": model.base_model,
    }
    write_atomic(
        state.checkpoints.model_dir(model.key) / "model.json", json.dumps(content, indent=2) + "\n"
    )


# ---- groups -----------------------------------------------------------------------------------


async def _submit(state: State, run: Run, head: tasks.Head) -> JobInfo:
    """An accepted job; its trajectories are logged as ART's server does."""
    record = await in_own_thread(_record, state, head.request.model)
    sent = job_config(head.request.config, head.request.dev_config, head.request.model)
    if sent.not_applicable:
        say("ART: keys without effect", model=str(record.key), keys=sent.not_applicable)
    request = JobRequest(
        model=str(record.key),
        groups=[],
        # A key of the request takes precedence over the model's defaults, which `submit` adds.
        config={k: v for k, v in ART_DEFAULTS.items() if k not in record.spec.defaults}
        | sent.config,
        plot_tensors=sent.plot_tensors,
        advance_when_flat=True,
    )
    step = await asyncio.to_thread(_step, state, record.key)
    job = await submit(state, run, request, head.sha256)
    with _warning("the trajectories of a job, or their means, were not logged", job):
        await _log(state, run, record.key, "train", step)
    return job


@contextmanager
def _warning(what: str, job: JobInfo) -> Iterator[None]:
    """Log a failure inside the block as a warning: after an error, the client would train again."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is: the job is queued, or done
        reason = f"{type(error).__name__}: {error}"
        say(f"ART: {what}", level=logging.WARNING, job=job.id, model=job.model, reason=reason)


async def _log(state: State, run: Run, key: ModelKey, split: str, step: int) -> None:
    metrics = await run(tasks.log, state.checkpoints.model_dir(key), split, step)
    if metrics:
        await asyncio.to_thread(state.checkpoints.log, key, step, metrics, split)


# ---- the stream of a training call -----------------------------------------------------------


async def streamed(state: State, job: JobInfo, sent: tasks.Head) -> StreamingResponse:
    """One JSON line per gradient step; starts when the first is known, ends with the job."""
    lines = _lines(state, job, sent)
    first = await anext(lines)
    return StreamingResponse(_from(first, lines), media_type="application/x-ndjson")


async def _lines(state: State, job: JobInfo, sent: tasks.Head) -> AsyncIterator[str]:
    """One line per gradient step, each when the next one starts; the last has all the metrics."""
    sent_lines = 0
    rate = {"loss/learning_rate": job.config.learning_rate}
    async for event in state.jobs.follow(job.id):
        if event is None:
            continue
        if event.type == "progress" and event.data["phase"] == "train":
            while sent_lines < event.data["step"]:
                sent_lines += 1
                yield _line(event.data["steps"], rate)
        elif event.type == "done":
            ended = await asyncio.to_thread(state.jobs.get, job.id)
            steps = int(ended.metrics.get("learn/optimizer_steps", 0))
            with _warning("the metrics of a job were not logged", ended):
                await asyncio.to_thread(_log_job, state, ended, sent)
            _warn_if_stale(ended)
            for _ in range(sent_lines, steps - 1):
                yield _line(steps, rate)
            yield _line(steps, rate | _metrics(ended, sent))
            return
        elif event.type == "failed":
            failure = event.data["failure"] or {}
            raise TrainingFailed(
                f"job {job.id!r} failed: {failure.get('type')}: {failure.get('message')}\n"
                f"Its trace is in {state.settings.log_file}"
            )
        elif event.type == "cancelled":
            raise Conflict(f"job {job.id!r} was cancelled; the step before it is still served")
    # Raised, not ended: these clients would take the end of the stream for the end of training.
    raise Unavailable(
        f"job {job.id!r}: this server stops. The job goes back to the queue, and continues when the "
        "server is started again."
    )


def _warn_if_stale(job: JobInfo) -> None:
    """Warn about a common mistake of ART users: rollouts that request the base model by name."""
    if job.metrics.get("learn/staleness", 0) > 0:
        say(
            "ART: trained on answers of an older step; let the rollouts request the model's name",
            level=logging.WARNING,
            job=job.id,
            name=job.key.name,
            answered_by_step=job.metrics["learn/oldest_call_step"],
            trained_from_step=job.base_step,
        )


async def _from(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for line in rest:
        yield line


def _line(steps: int, metrics: Mapping[str, float]) -> str:
    """One line of the stream. Old clients require the first key, newer ones the second."""
    counts = {"num_gradient_steps": steps, "data/step_num_gradient_steps": float(steps)}
    return json.dumps(counts | dict(metrics), allow_nan=False) + "\n"


def _metrics(job: JobInfo, sent: tasks.Head) -> dict[str, float]:
    """The job's metrics under ART's names and hone's; only finite numbers."""
    counted = {
        "data/step_num_scenarios": float(sent.groups),
        "data/step_num_groups_submitted": float(sent.groups),
        "data/step_num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "data/step_num_trajectories": float(sent.trajectories),
    }
    theirs = {ART_NAMES[name]: value for name, value in job.metrics.items() if name in ART_NAMES}
    resolved = {f"resolve/{name}": float(count) for name, count in job.counts.items()}
    every = {**resolved, **job.metrics, **theirs, **counted}
    return {name: float(value) for name, value in every.items() if math.isfinite(value)}


def _log_job(state: State, job: JobInfo, sent: tasks.Head) -> None:
    """Add a line to the model's history, with the names that ART's server uses."""
    assert job.step is not None, "jobs of ART's clients always make a step"
    metrics = {
        "num_groups_submitted": float(sent.groups),
        "num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "num_gradient_steps": job.metrics.get("learn/optimizer_steps", 0.0),
        **{name: job.metrics[ours] for name, ours in HISTORY.items() if ours in job.metrics},
    }
    state.checkpoints.log(job.key, job.step, metrics, "train")


def _absent(name: str) -> Any:
    async def refuse() -> None:
        raise NotInThisVersion(
            f"/_experimental_{name} is not in this version. Checkpoints are directories under the "
            "server's root, and `hone export NAME DIR` writes one out."
        )

    refuse.__name__ = name
    return refuse
