"""ART's wire protocol, for its clients as they are.

In:   what `openpipe-art` 0.3 to 0.5.17, and NAT's plugin through it, send to an ART server
Out:  the answers they expect, from the same functions that training.py calls
Used: app.py mounts it on the control plane; nothing else knows that it exists

Registering and asking for the step load nothing: those clients wait five seconds for them. A
training call is answered when its job ends, one JSON line per gradient step; the stream begins as
late as it can, because until then a failure still has a status and a reason, and afterwards only a
broken body. A client that leaves does not take its job with it.
"""

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.errors import (
    Conflict,
    NotFound,
    NotInThisVersion,
    TrainingFailed,
    Unavailable,
    Unprocessable,
)
from hone.server import art_log
from hone.server.art_config import ArtModel, job_config, model_spec, server_keys
from hone.server.art_log import ArtGroup
from hone.server.auth import inference_key
from hone.server.jobs import FINAL
from hone.server.models import ModelRecord
from hone.server.telemetry import say
from hone.server.training import inference_url, registered, submit
from hone.trajectory import JobRequest, means
from hone.types import FieldError, JobEvent, JobInfo, ModelKey, Name

if TYPE_CHECKING:
    from hone.server.app import State

WAIT_S = 60.0
"""The stream looks so often whether an event came without waking it; none should."""

NAMES = {
    "learn/loss": "loss/train",
    "learn/entropy": "loss/entropy",
    "learn/kl": "loss/kl_div",
    "learn/grad_norm": "loss/grad_norm",
    "learn/learning_rate": "loss/learning_rate",
    "learn/logical_tokens": "data/step_trainer_tokens",
    "learn/step_s": "time/step_trainer_s",
}
"""Ours on the left, and what ART's clients call the same quantity."""

HISTORY = {
    "loss": "learn/loss",
    "entropy": "learn/entropy",
    "kl_div": "learn/kl",
    "grad_norm": "learn/grad_norm",
    "learning_rate": "learn/learning_rate",
}
"""What ART's server writes into history.jsonl under `train/`, and ours."""


class _Request(BaseModel):
    """A body that carries the model object under `model`, or is one."""

    model_config = ConfigDict(extra="ignore")

    model: ArtModel

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" in data and "model" not in data:
            return {"model": data}
        return data


class PrepareRequest(_Request):
    """What ART starts its OpenAI server with; ours runs already."""

    config: dict[str, Any] | None = None


class TrainRequest(_Request):
    """A training call."""

    trajectory_groups: list[ArtGroup]
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    verbose: bool | None = None


class LogRequest(_Request):
    """Trajectories to be kept, and averaged."""

    trajectory_groups: list[ArtGroup]
    split: Name = "val"


class KeepRequest(_Request):
    """The checkpoints to be kept."""

    steps_to_keep: list[Annotated[int, Field(ge=0, lt=2**31)]]


def routes(state: "State") -> APIRouter:
    """Every route of ART's server, of all its versions that have one."""
    router = APIRouter(tags=["ART"])

    @router.post("/register")
    async def register(model: ArtModel) -> None:
        """Remember a model; nothing is loaded."""
        if model.base_model is not None:
            record = await _record(state, model)
            ignored = record.spec.not_applicable
            say("ART: model registered", model=str(record.key), not_applicable=ignored)
        await asyncio.to_thread(_write_model, state, model)

    @router.post("/_get_step")
    async def get_step(model: ArtModel) -> int:
        """The newest step of a model."""
        return await asyncio.to_thread(_step, state, model.key)

    @router.post("/_prepare_backend_for_training")
    async def prepare(body: PrepareRequest, request: Request) -> tuple[str, str]:
        """Load the model, serve its newest step, start its learner; where, and with which key."""
        asked = (body.config or {}).get("server_args") or {}
        if ignored := server_keys(body.config):
            say("ART: keys that mean nothing here", model=str(body.model.key), keys=ignored)
        record = await _record(state, body.model)
        await state.service.prepare(record)
        key = inference_key(state.settings) or asked.get("api_key") or "default"
        host, scheme = request.headers.get("host", ""), request.url.scheme
        return inference_url(state.settings, host, scheme), str(key)

    @router.post("/_train_model", response_class=StreamingResponse)
    async def train(body: TrainRequest) -> StreamingResponse:
        """Train on the groups; one JSON line per gradient step, ending when the step is served."""
        job = await _submit(state, body)
        lines = _lines(state, job, body.trajectory_groups)
        first = await anext(lines)
        return StreamingResponse(_from(first, lines), media_type="application/x-ndjson")

    @router.post("/_log")
    async def log(body: LogRequest) -> None:
        """Keep trajectories, and add their means to the model's history."""
        await asyncio.to_thread(_log, state, body.model.key, body.split, body.trajectory_groups)

    @router.post("/_delete_checkpoints")
    async def delete_checkpoints(
        model: ArtModel,
        benchmark: Annotated[str, Query(max_length=500)] = "val/reward",
        benchmark_smoothing: Annotated[float, Query(gt=0, le=1)] = 1.0,
    ) -> None:
        """Delete all but the newest checkpoint and the best by a metric."""
        record = await asyncio.to_thread(state.models.get, model.key)
        await asyncio.to_thread(
            state.checkpoints.keep,
            record.key,
            last=1,
            best=benchmark,
            smoothing=benchmark_smoothing,
        )

    @router.post("/_delete_checkpoint_files")
    async def delete_checkpoint_files(body: KeepRequest) -> None:
        """Delete all checkpoints but these and the newest."""
        record = await asyncio.to_thread(state.models.get, body.model.key)
        await asyncio.to_thread(state.checkpoints.keep, record.key, steps=body.steps_to_keep)

    @router.post("/close")
    async def close() -> None:
        """Nothing: others use this server too."""

    for name in ("pull_from_s3", "push_to_s3", "deploy", "fork_checkpoint"):
        router.post(f"/_experimental_{name}", status_code=501)(_absent(name))
    return router


# ---- models -----------------------------------------------------------------------------------


async def _record(state: "State", model: ArtModel) -> ModelRecord:
    """The model, registered as this request describes it."""
    if model.base_model is None:
        raise Unprocessable(
            [FieldError(("model", "base_model"), "a model without one cannot be trained; name one")]
        )
    await asyncio.to_thread(_check_name, state, model.key)
    record, _ = await registered(state, model_spec(model))
    return record


def _check_name(state: "State", key: ModelKey) -> None:
    """ART's clients ask for the bare name: two projects that share one could not be told apart."""
    known = [record.key for record in state.models.list()]
    same = [str(other) for other in known if other.name == key.name]
    if same and key not in known:
        raise Conflict(
            f"model {str(key)!r}: {same[0]!r} has the same name, and ART's clients ask for a model "
            "by its name without the project. Choose another name."
        )


def _step(state: "State", key: ModelKey) -> int:
    try:
        return state.serving.newest(state.models.get(key))[0]
    except NotFound:  # somebody else's model, or one nobody has registered yet
        return 0


def _write_model(state: "State", model: ArtModel) -> None:
    """ART's model.json, without the keys and tokens a client's model object may hold."""
    directory = state.checkpoints.model_dir(model.key)
    directory.mkdir(parents=True, exist_ok=True)
    said = {
        "name": model.name,
        "project": model.project,
        "entity": model.entity,
        "trainable": model.base_model is not None,
        "base_model": model.base_model,
    }
    partial = directory / f".model.json.{os.getpid()}"
    partial.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / "model.json")


# ---- training ---------------------------------------------------------------------------------


async def _submit(state: "State", body: TrainRequest) -> JobInfo:
    """An accepted job; its trajectories are logged as ART's server does."""
    record = await _record(state, body.model)
    asked = job_config(body.config, body.dev_config, record.spec)
    # ART has no such bound: its clients may send what was sampled a step ago, and the metric tells.
    config = {"max_staleness": None, **record.spec.defaults, **asked.config}
    if asked.not_applicable:
        say("ART: keys that mean nothing here", model=str(record.key), keys=asked.not_applicable)

    def request() -> JobRequest:
        return JobRequest(
            model=str(record.key),
            groups=[group.to_hone() for group in body.trajectory_groups],
            config=config,
            plot_tensors=asked.plot_tensors,
            advance_when_flat=True,
        )

    step = await asyncio.to_thread(_step, state, record.key)
    try:
        job = await submit(state, await asyncio.to_thread(request))
    except Unprocessable as wrong:
        renamed = {"groups": "trajectory_groups"}
        raise Unprocessable(
            [
                FieldError((renamed.get(str(f.path[0]), f.path[0]), *f.path[1:]), f.message)
                for f in wrong.fields
            ]
        ) from None
    await asyncio.to_thread(_log, state, record.key, "train", body.trajectory_groups, step)
    return job


async def _lines(state: "State", job: JobInfo, groups: list[ArtGroup]) -> AsyncIterator[str]:
    """One line per gradient step, each when the next one begins; the last has all the metrics."""
    told = 0
    rate = {"loss/learning_rate": job.config.learning_rate}
    async for event in _events(state, job.id):
        if event.type == "progress" and event.data["phase"] == "train":
            while told < event.data["step"]:
                told += 1
                yield _line(event.data["steps"], rate)
        elif event.type == "done":
            ended = await asyncio.to_thread(state.jobs.get, job.id)
            steps = int(ended.metrics.get("learn/optimizer_steps", 0))
            await asyncio.to_thread(_log_job, state, ended, groups)
            _say_if_stale(ended)
            for _ in range(told, steps - 1):
                yield _line(steps, rate)
            yield _line(steps, rate | _metrics(ended, groups))
        elif event.type == "failed":
            failure = event.data["failure"] or {}
            raise TrainingFailed(
                f"job {job.id!r} failed: {failure.get('type')}: {failure.get('message')}\n"
                f"Its trace is in {state.settings.log_file}"
            )
        elif event.type == "cancelled":
            raise Conflict(f"job {job.id!r} was cancelled; the step before it is still served")


def _say_if_stale(job: JobInfo) -> None:
    """The commonest mistake of ART's users: rollouts that ask for the base model by its name."""
    if job.metrics.get("learn/staleness", 0) > 0:
        say(
            "ART: trained on answers of an older step; let the rollouts ask for the model's name",
            level=logging.WARNING,
            job=job.id,
            name=job.model.partition("/")[2],
            answered_by_step=job.metrics["learn/oldest_call_step"],
            trained_from_step=job.base_step,
        )


async def _events(state: "State", job_id: str) -> AsyncIterator[JobEvent]:
    after = 0
    while True:
        batch = await asyncio.to_thread(state.jobs.events, job_id, after)
        for event in batch:
            after = event.id
            yield event
            if event.type in FINAL:
                return
        woken = bool(batch) or await state.jobs.wait_event(job_id, after, WAIT_S)
        if not woken and state.jobs.stopping:
            # Broken off, not ended: these clients would take an end for the end of the training.
            raise Unavailable(
                f"job {job_id!r}: this server stops. The job goes back to the queue, and goes on "
                "when the server is started again."
            )


async def _from(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for line in rest:
        yield line


def _line(steps: int, metrics: Mapping[str, float]) -> str:
    """Old clients pop the first key and die without it; newer ones want the second in all lines."""
    counts = {"num_gradient_steps": steps, "data/step_num_gradient_steps": float(steps)}
    return json.dumps(counts | dict(metrics), allow_nan=False) + "\n"


def _metrics(job: JobInfo, groups: list[ArtGroup]) -> dict[str, float]:
    """Under ART's names and under ours; only finite numbers."""
    counted = {
        "data/step_num_scenarios": float(len(groups)),
        "data/step_num_groups_submitted": float(len(groups)),
        "data/step_num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "data/step_num_trajectories": float(sum(len(group.trajectories) for group in groups)),
    }
    theirs = {NAMES[name]: value for name, value in job.metrics.items() if name in NAMES}
    resolved = {f"resolve/{name}": float(count) for name, count in job.counts.items()}
    every = {**resolved, **job.metrics, **theirs, **counted}
    return {name: float(value) for name, value in every.items() if math.isfinite(value)}


# ---- logs -------------------------------------------------------------------------------------


def _log_job(state: "State", job: JobInfo, groups: list[ArtGroup]) -> None:
    """A line of the model's history, under the names that ART's server gave these numbers."""
    assert job.step is not None, "jobs of ART's clients always make a step"
    metrics = {
        "num_groups_submitted": float(len(groups)),
        "num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "num_gradient_steps": job.metrics.get("learn/optimizer_steps", 0.0),
    }
    for theirs, ours in HISTORY.items():
        if ours in job.metrics:
            metrics[theirs] = job.metrics[ours]
    project, _, name = job.model.partition("/")
    state.checkpoints.log(ModelKey(project, name), job.step, metrics, "train")


def _log(
    state: "State", key: ModelKey, split: str, groups: list[ArtGroup], step: int | None = None
) -> None:
    step = _step(state, key) if step is None else step
    art_log.write(state.checkpoints.model_dir(key), split, step, groups)
    if metrics := means(groups):
        state.checkpoints.log(key, step, metrics, split)


def _absent(name: str) -> Any:
    async def refuse() -> None:
        raise NotInThisVersion(
            f"/_experimental_{name} is not in this version. Checkpoints are directories under the "
            "server's root, and `hone export NAME DIR` writes one out."
        )

    refuse.__name__ = name
    return refuse
