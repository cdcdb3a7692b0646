"""A hone server over HTTP, as a Backend.

In:   models and groups; the server's address and key
Out:  the step that was published; every refusal of the server as the exception it stands for

A job is known by its id as soon as `submit` returns, and then belongs to the server: who waits for
it may be cancelled, or be another process, and the job goes on. `train` is the one that takes its
job back when it is cancelled, because nobody else has the id.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from hone import errors
from hone.backends.base import Named, Trainable, TrainResult
from hone.backends.http import FINAL, Server
from hone.errors import ConfigError, HoneError, TrainingFailed
from hone.progress import Progress
from hone.trajectory import JobRequest, TrajectoryGroup
from hone.types import (
    CheckpointInfo,
    JobEvent,
    JobInfo,
    ModelInfo,
    RecordedCall,
    RunSpec,
    TrainConfig,
)

T = TypeVar("T", bound=BaseModel)

PREPARE_S = 1800.0
"""Loading a base model, and downloading it."""
HEALTH_S = 10.0
"""A server that is up says so at once."""
WITHDRAW_S = 10.0
"""How long a cancelled `train` tries to cancel its job."""
DAYS_S = 7 * 86400.0
"""No job takes longer."""

_ART_KEYS = {
    "loss_fn": "loss ('cispo', or 'grpo' where ART says 'ppo')",
    "packed_sequence_length": "row_tokens",
    "truncated_importance_sampling": "importance_cap",
}


class RemoteBackend(Server):
    """A hone server that somebody else started."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:7623",
        api_key: str | None = None,
        *,
        patience_s: float = 300.0,
    ) -> None:
        """Contacts nobody yet.

        Args:
            base_url: of the server's training API (`hone serve` prints it).
            api_key: what the server asks for, by default $HONE_API_KEY; on its own machine it
                asks for none unless it was started with one.
            patience_s: how long a server that has answered before may be out of reach.
        """
        super().__init__(base_url, api_key, patience_s)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Nothing is held open between requests."""

    # ---- Backend --------------------------------------------------------------------------

    async def register(self, model: Trainable) -> ModelInfo:
        body = model.spec().model_dump_json()
        return _read(ModelInfo, await self.ask("POST", "/v1/training/models", body))

    async def prepare(self, model: Named) -> tuple[str, str]:
        await self.ask("POST", f"{_path(model)}/prepare", read_s=PREPARE_S)
        # The OpenAI API on the port that just answered, not the one the server names: behind a
        # tunnel or a proxy only this one is known to be reachable from here.
        return f"{self.base_url}/v1", self.api_key or "default"

    async def step(self, model: Named) -> int:
        return (await self.model_info(model)).step

    async def train(
        self,
        model: Named,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        seed: int = 0,
        plot_tensors: bool = False,
        timeout_s: float = DAYS_S,
        **keys: Any,
    ) -> TrainResult:
        """Train on the groups and wait until the new step is served.

        Args:
            model: a registered one.
            trajectory_groups: each the rollouts of one input, compared with each other.
            config: how; keys left out come from the model's `defaults`, then from hone's.
            verbose: show progress also where stderr is not a terminal.
            seed: of whatever the job draws.
            plot_tensors: draw what was trained, beside the checkpoint.
            timeout_s: the job is cancelled after so long.
            **keys: keys of TrainConfig, which go before those of `config`.
        """
        request = JobRequest(
            model=f"{model.project}/{model.name}",
            groups=_finished(trajectory_groups),
            config=chosen_keys(config, keys),
            idempotency_key=uuid.uuid4().hex,
            seed=seed,
            plot_tensors=plot_tensors,
        )
        submitting = asyncio.create_task(self.submit(request))
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                # Shielded: a job whose answer is still on its way must be known to be cancelled.
                job = await asyncio.shield(submitting)
                with Progress(f"train {job.model}", lines=verbose) as bar:
                    job = await self.wait(job.id, on_event=lambda event: _show(event, bar))
        except asyncio.CancelledError:
            await _uninterrupted(self._withdraw(submitting))
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            await _uninterrupted(self._withdraw(submitting))
            raise TrainingFailed(
                f"{model.name!r}: its job did not end within timeout_s={timeout_s:g} and was "
                f"cancelled. Its log: {self.log_place}"
            ) from None
        return self._result(job)

    async def checkpoints(self, model: Named) -> list[CheckpointInfo]:
        found = await self.ask("GET", f"{_path(model)}/checkpoints")
        return [_read(CheckpointInfo, item) for item in found]

    async def delete_checkpoints(
        self, model: Named, best_checkpoint_metric: str = "val/reward", *, keep_last: int = 1
    ) -> list[int]:
        query = f"keep_last={keep_last}&keep_best={quote(best_checkpoint_metric, safe='')}"
        return await self.ask("DELETE", f"{_path(model)}/checkpoints?{query}")

    async def log(
        self,
        model: Named,
        metrics: Mapping[str, float],
        *,
        split: str,
        step: int | None,
        replace: bool = False,
    ) -> None:
        """`replace`: what was logged of this step before no longer counts."""
        sent = {"split": split, "step": step, "metrics": dict(metrics)}
        # Left out where it says nothing: an older server refuses keys that it does not know.
        body = json.dumps(sent | ({"replace": True} if replace else {}))
        await self.ask("POST", f"{_path(model)}/metrics", body)

    # ---- what else a hone server can tell ---------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """Whether it lives, and what it does."""
        return await self.ask("GET", "/health", read_s=HEALTH_S)

    async def model_info(self, model: Named) -> ModelInfo:
        """A registered model as the server sees it."""
        return _read(ModelInfo, await self.ask("GET", _path(model)))

    async def served_models(self, base_url: str | None = None) -> list[str]:
        """The names an OpenAI client may ask for at this address (ends in /v1) of the server."""
        address = None if base_url is None else base_url.rstrip("/").removesuffix("/v1")
        found = await self.ask("GET", "/v1/models", read_s=HEALTH_S, base_url=address)
        return [str(item["id"]) for item in found["data"]]

    async def rename(self, model: Named, to: str) -> ModelInfo:
        """Give a model, its steps and its history another name; its old one is free again."""
        body = json.dumps({"to": to})
        return _read(ModelInfo, await self.ask("POST", f"{_path(model)}/rename", body))

    async def open_run(self, run: RunSpec) -> None:
        """Keep the calls of this run's rollouts; opening it again goes on with it."""
        await self.ask("POST", "/v1/runs", run.model_dump_json())

    async def close_run(self, run_id: str) -> None:
        """From now on its calls may be pruned."""
        await self.ask("POST", f"/v1/runs/{quote(run_id, safe='')}/close")

    async def unmarked(self, run_id: str) -> dict[str, int]:
        """Requests to the run's model and to its base model that named no rollout, by model."""
        found = await self.ask("GET", f"/v1/runs/{quote(run_id, safe='')}")
        return found.get("unmarked", {})

    async def calls(self, rollout: str) -> list[RecordedCall]:
        """What the server recorded of a rollout."""
        found = await self.ask("GET", f"/v1/rollouts/{quote(rollout, safe=':~')}")
        return [_read(RecordedCall, item) for item in found["calls"]]

    # ---- jobs -----------------------------------------------------------------------------

    async def submit(self, request: JobRequest) -> JobInfo:
        """The job the server made of it, or made of the same request and key before."""
        body = request.model_dump_json()
        answer = await self.ask("POST", "/v1/training/jobs", body, read_s=PREPARE_S)
        return _read(JobInfo, answer)

    async def wait(
        self,
        job_id: str,
        *,
        on_event: Callable[[JobEvent], None] | None = None,
        timeout_s: float = DAYS_S,
    ) -> JobInfo:
        """Follow the job's events to its end. TimeoutError after `timeout_s`; the job goes on."""
        async with asyncio.timeout(timeout_s), aclosing(self.job_events(job_id)) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event)
                if event.type in FINAL:
                    break
        return await self.job(job_id)

    async def job(self, job_id: str) -> JobInfo:
        """Where a job stands, and what came of it."""
        return _read(JobInfo, await self.ask("GET", f"/v1/training/jobs/{job_id}"))

    async def cancel(self, job_id: str) -> JobInfo:
        """Take a queued job back, or stop a running one within a micro-batch."""
        return _read(JobInfo, await self.ask("POST", f"/v1/training/jobs/{job_id}/cancel"))

    async def _withdraw(self, submitting: "asyncio.Task[JobInfo]") -> None:
        """Cancel the job of a `train` that was cancelled, if it came to be; never raises."""
        try:
            async with asyncio.timeout(WITHDRAW_S):
                job = await submitting
                await self.cancel(job.id)
        except (HoneError, TimeoutError):
            submitting.cancel()  # out of reach or refused: there is nothing left to cancel

    def _result(self, job: JobInfo) -> TrainResult:
        if job.state == "cancelled":
            raise errors.Cancelled(f"job {job.id} of {job.model} was cancelled by somebody else")
        if job.state != "done":
            said = f"{job.failure.type}: {job.failure.message}" if job.failure else job.state
            raise TrainingFailed(
                f"job {job.id} of {job.model} failed: {said}\nIts log: {self.log_place}"
            )
        # A job without a gradient step publishes none: what it started from is still served.
        step = job.base_step if job.step is None else job.step
        assert step is not None, job
        return TrainResult(
            step=step, metrics=job.metrics, job=job.id, counts=job.counts, reason=job.reason
        )


def chosen_keys(config: TrainConfig | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What a job says about its training: only what was written, so that defaults stay defaults."""
    known = TrainConfig.model_fields
    for key in keys:
        if key in known:
            continue
        close = get_close_matches(key, known, n=1)
        guess = _ART_KEYS.get(key) or (close[0] if close else None)
        hint = f" Did you mean {guess}?" if guess else ""
        raise ConfigError(f"train({key}=...): no such key.{hint} Known: {', '.join(known)}.")
    written = {} if config is None else config.model_dump(exclude_unset=True)
    both = written | dict(keys)
    TrainConfig(**both)  # wrong values are refused here, where the caller sees the line
    return both


def _finished(groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
    finished = list(groups)
    for i, group in enumerate(finished):
        if not isinstance(group, TrajectoryGroup):
            raise ConfigError(
                f"trajectory_groups.{i} is a {type(group).__name__}; put trajectories of the same "
                "input into a hone.TrajectoryGroup"
            )
        if group.unfinished:
            raise ConfigError(
                f"trajectory_groups.{i} holds {group.unfinished} rollouts that were not run: await "
                "the group, or hand the groups to hone.gather_trajectory_groups"
            )
    return finished


def _show(event: JobEvent, bar: Progress) -> None:
    at = event.data
    if event.type == "progress":  # told when a micro-batch begins, all counted from 0
        note = f"{at['phase']} step {at['step'] + 1}/{at['steps']}"
        bar.update(done=at["row"], total=at["rows"], note=note)
    elif event.type in {"queued", "started"}:
        bar.update(note=event.type)
    else:
        bar.update(done=bar.total, note=event.type)


def _read(kind: type[T], answer: Any) -> T:
    """What the server said. Fields that a newer one adds are none of this client's business."""
    return kind.model_validate(answer, extra="ignore")


def _path(model: Named) -> str:
    return f"/v1/training/models/{model.project}/{model.name}"


async def _uninterrupted(coroutine: Coroutine[Any, Any, None]) -> None:
    """Finish it even if the caller is cancelled once more meanwhile."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
