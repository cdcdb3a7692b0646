"""A hone server over HTTP, as a Backend.

In:   models and groups; the server's address and key
Out:  the step that was published; every refusal of the server as the exception it stands for
Used: the user's training loop; local.py for the server it starts

Every request may be sent twice, so one whose answer was lost is simply sent again: a job carries
an idempotency key, and the server gives back the job it made. A wait follows the job's events and
goes on from the last one seen when the connection breaks; nothing polls.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import httpx2

from hone import errors
from hone.backends.base import TrainResult
from hone.backends.refusal import refusal, retry_after_s
from hone.capture.scope import host_of
from hone.errors import ConfigError, HoneError, TrainingFailed, Unavailable
from hone.progress import Progress
from hone.trajectory import JobRequest, TrajectoryGroup
from hone.types import (
    CheckpointInfo,
    JobEvent,
    JobInfo,
    ModelInfo,
    RecordedCall,
    TrainConfig,
)

if TYPE_CHECKING:
    from hone.model import TrainableModel

FIRST_S = 5.0
"""A server that never answered yet is given up after so long: the address may be wrong."""
CONNECT_S = 10.0
ANSWER_S = 120.0
PREPARE_S = 1800.0
"""Loading a base model, and downloading it."""
SILENCE_S = 60.0
"""An event stream says every 15 s that it is there; after so much silence it is opened again."""
WITHDRAW_S = 10.0
"""How long a cancelled `train` tries to cancel its job."""
_FINAL = frozenset({"done", "failed", "cancelled"})
_LATER = frozenset({429, 502, 503, 504})

_ART_KEYS = {
    "loss_fn": "loss ('cispo', or 'grpo' where ART says 'ppo')",
    "packed_sequence_length": "row_tokens",
    "truncated_importance_sampling": "importance_cap",
}


class RemoteBackend:
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
        self.base_url = _checked_url(base_url)
        self.api_key = api_key or os.environ.get("HONE_API_KEY") or None
        self.patience_s = patience_s
        self._met = False

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Called before every request: the place to start what is not there yet."""

    def lost(self) -> HoneError | None:
        """Why it is hopeless to go on asking; None while it is not."""
        return None

    @property
    def log_place(self) -> str:
        """Where the server's log is, for messages."""
        return f"logs/server.log under the root of the server at {self.base_url}"

    async def close(self) -> None:
        """Nothing is held open between requests."""

    # ---- Backend --------------------------------------------------------------------------

    async def register(self, model: "TrainableModel[Any]") -> ModelInfo:
        body = model.spec().model_dump_json()
        return ModelInfo.model_validate(await self._ask("POST", "/v1/training/models", body))

    async def prepare(self, model: "TrainableModel[Any]") -> tuple[str, str]:
        await self._ask("POST", f"{_path(model)}/prepare", read_s=PREPARE_S)
        # The OpenAI API on the port that just answered, not the one the server names: behind a
        # tunnel or a proxy only this one is known to be reachable from here.
        return f"{self.base_url}/v1", self.api_key or "default"

    async def step(self, model: "TrainableModel[Any]") -> int:
        return ModelInfo.model_validate(await self._ask("GET", _path(model))).step

    async def train(
        self,
        model: "TrainableModel[Any]",
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        seed: int = 0,
        plot_tensors: bool = False,
        timeout_s: float = 7 * 86400.0,
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
        submitting = asyncio.create_task(self._submit(request))
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                # Shielded: a job whose answer is still on its way must be known to be cancelled.
                job = await asyncio.shield(submitting)
                job = await self._wait(job, verbose=verbose)
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

    async def checkpoints(self, model: "TrainableModel[Any]") -> list[CheckpointInfo]:
        found = await self._ask("GET", f"{_path(model)}/checkpoints")
        return [CheckpointInfo.model_validate(item) for item in found]

    async def delete_checkpoints(
        self, model: "TrainableModel[Any]", best_checkpoint_metric: str = "val/reward"
    ) -> list[int]:
        query = f"keep_last=1&keep_best={quote(best_checkpoint_metric, safe='')}"
        return await self._ask("DELETE", f"{_path(model)}/checkpoints?{query}")

    async def log(
        self, model: "TrainableModel[Any]", metrics: Mapping[str, float], *, split: str, step: int
    ) -> None:
        body = json.dumps({"split": split, "step": step, "metrics": dict(metrics)})
        await self._ask("POST", f"{_path(model)}/metrics", body)

    async def calls(self, rollout: str) -> list[RecordedCall]:
        """What the server recorded of a rollout."""
        found = await self._ask("GET", f"/v1/rollouts/{quote(rollout, safe=':~')}")
        return [RecordedCall.model_validate(item) for item in found["calls"]]

    # ---- jobs -----------------------------------------------------------------------------

    async def _submit(self, request: JobRequest) -> JobInfo:
        body = request.model_dump_json()
        answer = await self._ask("POST", "/v1/training/jobs", body, read_s=PREPARE_S)
        return JobInfo.model_validate(answer)

    async def _wait(self, job: JobInfo, *, verbose: bool) -> JobInfo:
        """Follow the job's events to its end."""
        bar = Progress(f"train {job.model}", lines=verbose)
        async with aclosing(self._events(job.id)) as events:
            with bar:
                async for event in events:
                    _show(event, bar)
                    if event.type in _FINAL:
                        break
        return await self._job(job.id)

    async def _job(self, job_id: str) -> JobInfo:
        return JobInfo.model_validate(await self._ask("GET", f"/v1/training/jobs/{job_id}"))

    async def _events(self, job_id: str) -> AsyncGenerator[JobEvent, None]:
        """Every event of the job once, over as many connections as it takes."""
        seen, pause, lost_at = 0, 0.1, None
        url = f"{self.base_url}/v1/training/jobs/{job_id}/events"
        while True:
            try:
                headers = {"Last-Event-ID": str(seen)}
                async with self._client(SILENCE_S) as client, client.sse(url, headers=headers) as s:
                    if s.response.status_code != HTTPStatus.OK:
                        await s.response.aread()
                        raise refusal(s.response, self.log_place)
                    lost_at = None
                    async for message in s:
                        event = JobEvent.model_validate_json(message.data)
                        seen, pause = event.id, 0.1
                        yield event
                if (await self._job(job_id)).state in _FINAL:
                    return
            except (httpx2.TransportError, Unavailable) as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self.patience_s or self.lost():
                    failure = self._unreachable(error)
                    failure.add_note(f"Job {job_id} was accepted and goes on when its server does.")
                    raise failure from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _withdraw(self, submitting: "asyncio.Task[JobInfo]") -> None:
        """Cancel the job of a `train` that was cancelled, if it came to be; never raises."""
        try:
            async with asyncio.timeout(WITHDRAW_S):
                job = await submitting
                await self._ask("POST", f"/v1/training/jobs/{job.id}/cancel")
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

    # ---- HTTP -----------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, body: str | None = None, *, read_s: float = ANSWER_S
    ) -> Any:
        """One request, sent again while the server is out of reach or says `later`."""
        pause, give_up_at = 0.1, None
        await self.connect()
        while True:
            try:
                async with self._client(read_s) as client:
                    response = await client.request(method, self.base_url + path, content=body)
            except httpx2.TransportError as error:
                failure = self._unreachable(error)
            else:
                self._met = True
                if response.is_success:
                    return response.json() if response.content else None
                failure = refusal(response, self.log_place)
                if response.status_code not in _LATER:
                    raise failure
                pause = max(pause, retry_after_s(response))
            patience_s = self.patience_s if self._met else FIRST_S
            give_up_at = give_up_at or time.monotonic() + patience_s
            if time.monotonic() + pause > give_up_at or self.lost():
                raise failure from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _client(self, read_s: float) -> httpx2.AsyncClient:
        """One per request: usable from any event loop, and there is nothing to close at the end."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(
            headers={"Content-Type": "application/json", **key},
            timeout=httpx2.Timeout(read_s, connect=CONNECT_S),
            verify=self._certificates,
            trust_env=host_of(urlsplit(self.base_url).hostname or "") != "localhost",
        )

    @cached_property
    def _certificates(self) -> Any:
        # Reading the certificate store takes 50 ms, and plain HTTP uses none.
        return httpx2.create_ssl_context() if self.base_url.startswith("https:") else False

    def _unreachable(self, error: Exception) -> HoneError:
        said = str(error) or type(error).__name__
        return self.lost() or Unavailable(
            f"{self.base_url}: no hone server answers there ({said}). Start one with `hone serve`, "
            "name its address, or let hone.LocalBackend() start one."
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


def _path(model: "TrainableModel[Any]") -> str:
    return f"/v1/training/models/{model.project}/{model.name}"


def _checked_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"base_url {base_url!r}: expected http://HOST:PORT")
    url = base_url.rstrip("/").removesuffix("/v1")
    # 0.0.0.0 is where one listens, not where one calls.
    return url.replace("//0.0.0.0", "//127.0.0.1", 1)


async def _uninterrupted(coroutine: Coroutine[Any, Any, None]) -> None:
    """Finish it even if the caller is cancelled once more meanwhile."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
