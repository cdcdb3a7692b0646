"""The response to ART's training call: one JSON line per gradient step.

In:   an accepted job, and how much was sent for it
Out:  a stream of lines with ART's metric names, which ends when the step is served; a history line
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping

from fastapi.responses import StreamingResponse

from hone.errors import Conflict, TrainingFailed, Unavailable
from hone.logs import say
from hone.server.events import follow
from hone.server.job_tasks import Head
from hone.server.state import State
from hone.types import JobInfo

NAMES = {
    "learn/loss": "loss/train",
    "learn/entropy": "loss/entropy",
    "learn/kl": "loss/kl_div",
    "learn/grad_norm": "loss/grad_norm",
    "learn/learning_rate": "loss/learning_rate",
    "learn/logical_tokens": "data/step_trainer_tokens",
    "learn/step_s": "time/step_trainer_s",
}
"""Hone's metrics, and the names that ART's clients know them by."""

HISTORY = {
    "loss": "learn/loss",
    "entropy": "learn/entropy",
    "kl_div": "learn/kl",
    "grad_norm": "learn/grad_norm",
    "learning_rate": "learn/learning_rate",
}
"""What ART's server writes into history.jsonl under `train/`, and hone's metrics."""


async def streamed(state: State, job: JobInfo, sent: Head) -> StreamingResponse:
    """One JSON line per gradient step; starts when the first is known, ends with the job."""
    lines = _lines(state, job, sent)
    first = await anext(lines)
    return StreamingResponse(_from(first, lines), media_type="application/x-ndjson")


async def _lines(state: State, job: JobInfo, sent: Head) -> AsyncIterator[str]:
    """One line per gradient step, each when the next one starts; the last has all the metrics."""
    sent_lines = 0
    rate = {"loss/learning_rate": job.config.learning_rate}
    async for event in follow(state.jobs, job.id):
        if event is None:
            continue
        if event.type == "progress" and event.data["phase"] == "train":
            while sent_lines < event.data["step"]:
                sent_lines += 1
                yield _line(event.data["steps"], rate)
        elif event.type == "done":
            ended = await asyncio.to_thread(state.jobs.get, job.id)
            steps = int(ended.metrics.get("learn/optimizer_steps", 0))
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
        f"job {job.id!r}: this server stops. The job goes back to the queue, and goes on when the "
        "server is started again."
    )


def _warn_if_stale(job: JobInfo) -> None:
    """The commonest mistake of ART's users: rollouts that ask for the base model by its name."""
    if job.metrics.get("learn/staleness", 0) > 0:
        say(
            "ART: trained on answers of an older step; let the rollouts ask for the model's name",
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
    """Old clients fail without the first key; newer ones need the second in every line."""
    counts = {"num_gradient_steps": steps, "data/step_num_gradient_steps": float(steps)}
    return json.dumps(counts | dict(metrics), allow_nan=False) + "\n"


def _metrics(job: JobInfo, sent: Head) -> dict[str, float]:
    """Under ART's names and under hone's; only finite numbers."""
    counted = {
        "data/step_num_scenarios": float(sent.groups),
        "data/step_num_groups_submitted": float(sent.groups),
        "data/step_num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "data/step_num_trajectories": float(sent.trajectories),
    }
    theirs = {NAMES[name]: value for name, value in job.metrics.items() if name in NAMES}
    resolved = {f"resolve/{name}": float(count) for name, count in job.counts.items()}
    every = {**resolved, **job.metrics, **theirs, **counted}
    return {name: float(value) for name, value in every.items() if math.isfinite(value)}


def _log_job(state: State, job: JobInfo, sent: Head) -> None:
    """Add a line to the model's history, with the names that ART's server uses."""
    assert job.step is not None, "jobs of ART's clients always make a step"
    metrics = {
        "num_groups_submitted": float(sent.groups),
        "num_groups_trainable": job.metrics.get("learn/groups", 0.0),
        "num_gradient_steps": job.metrics.get("learn/optimizer_steps", 0.0),
    }
    for theirs, ours in HISTORY.items():
        if ours in job.metrics:
            metrics[theirs] = job.metrics[ours]
    state.checkpoints.log(job.key, job.step, metrics, "train")
