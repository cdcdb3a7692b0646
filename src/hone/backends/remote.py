"""A hone server over HTTP, as a Backend.

In:   models and groups; the server's address and key
Out:  the step that was published; every error of the server as an exception

A job has an id as soon as `submit` returns, and then belongs to the server: it continues even if
the waiting client is cancelled. Only `train` cancels its job when it is cancelled, because no other
code has the id.
"""

import asyncio
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel

from hone import errors, options
from hone.backends.base import Named, Trainable, TrainResult
from hone.backends.http import CONNECT_S, FINAL, Server
from hone.errors import ConfigError, HoneError, TrainingFailed
from hone.tasks.progress import Progress
from hone.train_config import TrainSFTConfig
from hone.trajectory import SHORT_LOGPROBS, JobRequest, Trajectory, TrajectoryGroup
from hone.types import (
    DEFAULT_URL,
    CallSummary,
    CheckpointInfo,
    JobEvent,
    JobInfo,
    ModelInfo,
    ModelKey,
    RecordedCall,
    RunSpec,
    TrainConfig,
    stored_name,
)

T = TypeVar("T", bound=BaseModel)
log = logging.getLogger("hone")

PREPARE_S = 1800.0
"""Timeout for downloading and loading a base model."""
HEALTH_S = 10.0
"""Timeout for requests that a running server answers at once."""
WITHDRAW_S = 10.0
"""How long a cancelled `train` tries to cancel its job."""
HELD_S = 60.0
"""How long a request for a rollout's held time waits while a call is held."""
DAYS_S = 7 * 86400.0
"""Default timeout of a job, longer than any job takes."""


class RemoteBackend(Server):
    """A running hone server."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        patience_s: float = 300.0,
    ) -> None:
        """Sends nothing yet.

        Args:
            base_url: of the server's training API (`hone serve` prints it).
            api_key: the server's API key, by default $HONE_API_KEY; not needed on the server's own
                machine, unless the server was started with one.
            patience_s: how long to retry while a server that has answered before is unreachable.
        """
        super().__init__(base_url, api_key, patience_s)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Does nothing: no connection stays open between requests."""

    # ---- Backend --------------------------------------------------------------------------

    async def register(self, model: Trainable) -> ModelInfo:
        body = model.spec().model_dump_json()
        return _read(ModelInfo, await self.ask("POST", "/v1/training/models", body))

    async def prepare(self, model: Named) -> tuple[str, str]:
        # An engine that cannot start would take minutes for every further attempt.
        final = (errors.EngineFailed,)
        async with self.telling_start():
            await self.ask("POST", f"{_path(model)}/prepare", read_s=PREPARE_S, final=final)
        # The OpenAI API on the port that just answered, not the one that the server names: behind
        # a tunnel or a proxy only this one is known to be reachable.
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
        plot_tensors: bool = False,
        save_checkpoint: bool = True,
        advance_when_flat: bool = False,
        timeout_s: float = DAYS_S,
        **keys: Any,
    ) -> TrainResult:
        """Train on the groups and wait until the new step is served.

        Args:
            model: a registered one.
            trajectory_groups: each the rollouts of one input, compared with each other.
            config: settings of the job; missing keys come from the model's `defaults`, then
                from hone's.
            verbose: show progress even if stderr is not a terminal.
            plot_tensors: plot the trained tokens, beside the checkpoint.
            save_checkpoint: False leaves `checkpoint_path` out of the result. Every step is saved,
                because a server serves saved steps; `delete_checkpoints` removes old ones.
            advance_when_flat: publish the next step, with the same adapter, even if there was
                nothing to learn.
            timeout_s: the job is cancelled after this time.
            **keys: keys of TrainConfig or options of ART (`loss_fn`, `normalize_advantages` and
                those of `hone.art.dev.TrainConfig`), which override those of `config`.
        """
        request = JobRequest(
            model=str(_key(model)),
            groups=_finished(trajectory_groups),
            config=chosen_keys(config, keys),
            idempotency_key=uuid.uuid4().hex,
            plot_tensors=plot_tensors,
            advance_when_flat=advance_when_flat,
        )
        submitting = asyncio.create_task(self.submit(request))
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                # Shielded: to cancel a job, its id must be known.
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
        result = self._result(job)
        path = self._checkpoint_path(model, result.step) if save_checkpoint else None
        return dataclasses.replace(result, checkpoint_path=path)

    def _checkpoint_path(self, model: Named, step: int) -> str | None:
        """Directory of a step, where this process can read the server's files."""
        return None

    async def train_sft(
        self,
        model: Named,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the assistant messages of the conversations, and wait for the new step.

        Args:
            model: a registered one.
            trajectories: conversations (`messages_and_choices`, `tools`); rewards do not matter. A
                message with `weight: 0` is context.
            config: learning rate and batch size.
            verbose: show progress also where stderr is not a terminal.
            **keys: further keys of TrainConfig, and the options of `train`.
        """
        groups = [TrajectoryGroup([trajectory]) for trajectory in trajectories]
        sft = (config or TrainSFTConfig()).job_keys()
        return await self.train(model, groups, verbose=verbose, **sft | keys)

    async def checkpoints(self, model: Named) -> list[CheckpointInfo]:
        items = await self.ask("GET", f"{_path(model)}/checkpoints")
        return [_read(CheckpointInfo, item) for item in items]

    async def delete_checkpoints(
        self,
        model: Named,
        best_checkpoint_metric: str = "val/reward",
        *,
        keep_last: int = 1,
        keep: Iterable[int] = (),
    ) -> list[int]:
        """`keep_last`: number of newest steps to keep; `keep`: other steps to keep."""
        query = f"keep_last={keep_last}&keep_best={quote(best_checkpoint_metric, safe='')}"
        query += "".join(f"&keep={step}" for step in sorted(keep))
        return await self.ask("DELETE", f"{_path(model)}/checkpoints?{query}")

    async def log(
        self,
        model: Named,
        metrics: Mapping[str, float],
        *,
        split: str,
        step: int | None,
        replace: bool = False,
        run: str | None = None,
    ) -> None:
        """`replace`: replaces what was logged for this step before. `run`: the run that measured it."""
        sent: dict[str, Any] = {"split": split, "step": step, "metrics": dict(metrics)}
        sent["idempotency_key"] = uuid.uuid4().hex
        sent |= {"replace": True} if replace else {}
        body = json.dumps(sent | ({} if run is None else {"run": run}))
        await self.ask("POST", f"{_path(model)}/metrics", body)

    # ---- beyond Backend ---------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """The server's status."""
        return await self.ask("GET", "/health", read_s=HEALTH_S)

    async def model_info(self, model: Named) -> ModelInfo:
        """A registered model as the server sees it."""
        return _read(ModelInfo, await self.ask("GET", _path(model)))

    async def served_models(self, base_url: str | None = None) -> list[str]:
        """The model names that OpenAI clients may use at this address (ends in /v1) of the server."""
        address = None if base_url is None else base_url.rstrip("/").removesuffix("/v1")
        models = await self.ask("GET", "/v1/models", read_s=HEALTH_S, base_url=address)
        return [str(item["id"]) for item in models["data"]]

    async def check_host(self, url: str) -> None:
        """Raise Forbidden unless the server answers to the host name of this URL."""
        host = {"Host": urlsplit(url).netloc.rpartition("@")[2]}
        await self.ask("GET", "/health", read_s=HEALTH_S, headers=host)

    async def rename(self, model: Named, to: str) -> ModelInfo:
        """Rename a model with its steps and its history; the old name can be registered again."""
        body = json.dumps({"to": to})
        return _read(ModelInfo, await self.ask("POST", f"{_path(model)}/rename", body))

    async def open_run(self, run: RunSpec) -> None:
        """Keep the calls of this run's rollouts; an open or closed run may be opened again."""
        await self.ask("POST", "/v1/runs", run.model_dump_json())

    async def close_run(self, run_id: str) -> None:
        """Close a run, so that its calls can be pruned."""
        await self.ask("POST", f"/v1/runs/{quote(run_id, safe='')}/close")

    async def unmarked(self, run_id: str) -> dict[str, int]:
        """Requests to the run's model and to its base model that named no rollout, by model."""
        run = await self.ask("GET", f"/v1/runs/{quote(run_id, safe='')}")
        return run.get("unmarked", {})

    async def calls(self, rollout: str) -> list[RecordedCall]:
        """The recorded calls of a rollout."""
        rollout_calls = await self.ask("GET", f"/v1/rollouts/{quote(rollout, safe=':~')}")
        return [_read(RecordedCall, item) for item in rollout_calls["calls"]]

    async def held_s(self, rollout: str, since: float) -> float:
        """For how long since this time (of the monotonic clock) the server held a rollout's calls.

        Returns when no call is held any longer. Raises HoneError or TimeoutError if the server does
        not answer; it is not asked again.
        """
        while True:
            async with asyncio.timeout(HELD_S + CONNECT_S):
                query = f"within_s={time.monotonic() - since:.6f}&wait_s={HELD_S:g}"
                path = f"/v1/rollouts/{quote(rollout, safe=':~')}/held?{query}"
                held = await self.ask("GET", path, patience_s=0.0)
            if not held["holding"]:
                return float(held["held_s"])

    async def call_summaries(self, rollout: str) -> list[CallSummary]:
        """The recorded calls of a rollout, without their text and tokens."""
        path = f"/v1/rollouts/{quote(rollout, safe=':~')}/summary"
        return [_read(CallSummary, item) for item in (await self.ask("GET", path))["calls"]]

    # ---- jobs -----------------------------------------------------------------------------

    async def submit(self, request: JobRequest) -> JobInfo:
        """Create a job, or return the one that the same request and key created before."""
        body = request.model_dump_json(context=SHORT_LOGPROBS)
        answer = await self.ask("POST", "/v1/training/jobs", body, read_s=PREPARE_S)
        return _read(JobInfo, answer)

    async def wait(
        self,
        job_id: str,
        *,
        on_event: Callable[[JobEvent], None] | None = None,
        timeout_s: float = DAYS_S,
    ) -> JobInfo:
        """Follow the job's events to its end. TimeoutError after `timeout_s`; the job goes on.

        Why the server does not run it is logged: on a full disk, it looks like a hang otherwise.
        """
        logged = None
        async with asyncio.timeout(timeout_s), aclosing(self.job_events(job_id)) as events:
            async for event in events:
                why = event.data.get("waiting_for") if event.type == "queued" else None
                if why is not None and why != logged:
                    log.warning("Job %s waits in the queue: %s", job_id, why)
                    logged = why
                if on_event is not None:
                    on_event(event)
                if event.type in FINAL:
                    break
        return await self.job(job_id)

    async def job(self, job_id: str) -> JobInfo:
        """The state of a job, and its result."""
        return _read(JobInfo, await self.ask("GET", f"/v1/training/jobs/{job_id}"))

    async def cancel(self, job_id: str) -> JobInfo:
        """Cancel a queued job, or stop a running one within a micro-batch."""
        return _read(JobInfo, await self.ask("POST", f"/v1/training/jobs/{job_id}/cancel"))

    async def _withdraw(self, submitting: "asyncio.Task[JobInfo]") -> None:
        """Cancel the job of a cancelled `train`, if it was created; never raises."""
        try:
            async with asyncio.timeout(WITHDRAW_S):
                job = await submitting
                await self.cancel(job.id)
        except (HoneError, TimeoutError):
            submitting.cancel()  # unreachable or refused: there is no job to cancel

    def _result(self, job: JobInfo) -> TrainResult:
        if job.state == "cancelled":
            raise errors.Cancelled(f"job {job.id} of {job.model} was cancelled by another client")
        if job.state != "done":
            reason = f"{job.failure.type}: {job.failure.message}" if job.failure else job.state
            raise TrainingFailed(
                f"job {job.id} of {job.model} failed: {reason}\nIts log: {self.log_place}"
            )
        # A job without a gradient step publishes nothing: the step before it is still served.
        step = job.base_step if job.step is None else job.step
        assert step is not None, job
        return TrainResult(
            step=step, metrics=job.metrics, job=job.id, counts=job.counts, reason=job.reason
        )


def chosen_keys(config: TrainConfig | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the caller set, and no others, so that the server's defaults apply to the rest."""
    known = TrainConfig.model_fields
    keys = options.train_keys(keys)
    for key in keys:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"train({key}=...): no such key.{hint} Known: {', '.join(known)}.")
    written = {} if config is None else config.model_dump(exclude_unset=True)
    both = written | keys
    TrainConfig(**both)  # raises for wrong values at the caller's line
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
    if event.type == "progress":  # sent when a micro-batch starts, all counted from 0
        note = f"{at['phase']} step {at['step'] + 1}/{at['steps']}"
        bar.update(done=at["row"], total=at["rows"], note=note)
    elif event.type in {"queued", "started"}:
        bar.update(note=event.type)
    else:
        bar.update(done=bar.total, note=event.type)


def _read(kind: type[T], answer: Any) -> T:
    """Read a response; fields that a newer server adds are ignored."""
    return kind.model_validate(answer, extra="ignore")


def _key(model: Named) -> ModelKey:
    return ModelKey(stored_name(model.project), stored_name(model.name))


def _path(model: Named) -> str:
    return f"/v1/training/models/{_key(model)}"


async def _uninterrupted(coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait for it even if the caller is cancelled again."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
