"""Submit groups to a hone server as jobs, and report how the jobs end.

In:   a TrajectoryCollection; which server, which model, how to train
Out:  a job on the server, its status, and the address of the model in training

A trajectory whose calls the server recorded is sent as a reference: its rollout and the ids of the
trained calls. Others are sent as text (rerender.py).
"""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from hone.backends.http import FINAL
from hone.backends.local import LocalBackend
from hone.backends.remote import RemoteBackend
from hone.capture.base import host_of
from hone.config.build import Builder, Served
from hone.config.registry import register_trainer_adapter
from hone.config.schema import DEFAULT, RUNS, FinetuneConfig
from hone.errors import ConfigError, Conflict, HoneError, NotFound, ServerError, Unreachable
from hone.finetune.adapter_config import (
    BackendConfig,
    HoneServerAdapterConfig,
    ScheduledTrainConfig,
    bracketed,
)
from hone.finetune.base import (
    AdvantageSettings,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from hone.finetune.records import append_line
from hone.finetune.rerender import sdk_groups
from hone.model import TrainableModel
from hone.trajectory import JobRequest
from hone.types import JobEvent, JobInfo, ModelInfo, RunSpec

__all__ = ["BackendConfig", "HoneServerAdapter", "HoneServerAdapterConfig", "ScheduledTrainConfig"]

logger = logging.getLogger("hone")

BACKEND = "openpipe-art"
"""Value of `backend` in a TrainingJobRef."""
NO_CONNECTION = "Failed to connect to ART backend"
STATES = {
    "queued": TrainingStatusEnum.PENDING,
    "running": TrainingStatusEnum.RUNNING,
    "done": TrainingStatusEnum.COMPLETED,
    "failed": TrainingStatusEnum.FAILED,
    "cancelled": TrainingStatusEnum.CANCELED,
}
"""The harness's status for each job state of the server."""
LESS_MEMORY = (
    "What to do: reduce backend.engine_args.gpu_memory_utilization, reduce "
    "backend.init_args.max_seq_length (or training.max_seq_length) or training.row_tokens, reduce "
    "num_generations of the trajectory builder, take a smaller backend.base_model, or increase "
    "backend.engine_args.tensor_parallel_size where there are more GPUs."
)


class HoneServerAdapter(TrainerAdapter):
    """A hone server as the harness's training backend."""

    adapter_config: HoneServerAdapterConfig

    def __init__(self, adapter_config: HoneServerAdapterConfig) -> None:
        """Does not connect yet."""
        super().__init__(adapter_config)
        config, training = adapter_config.backend, adapter_config.training
        self.server = self
        self.serves_steps, self.reads_episodes = True, False
        self.comparison = AdvantageSettings(credit=training.credit, baseline=training.baseline)
        key = None if config.api_key == "default" and config.ip is None else config.api_key
        self.backend: RemoteBackend = (
            LocalBackend(
                config.root, api_key=key, log_level="warning", settings=config.server_options()
            )
            if config.url is None
            else RemoteBackend(config.url, key)
        )
        self.model: TrainableModel[Any] = config.trainable_model()
        self.info: ModelInfo | None = None
        """The model on the server; known after `initialize`."""
        self.model_name, self.base_model = f"{config.project}/{config.name}", config.base_model
        self.recorded, self.unscoped_calls = self.backend.calls, self.backend.unmarked
        self.summaries = self.backend.call_summaries
        self.training_jobs: dict[str, str] = {}
        """The newest job of each run, by run id."""
        self._root: str | None = None
        """Root of the running server that the file names, if the server reports it."""
        self._run_id: str | None = None
        """The run that was opened last."""

    # ---- the server -------------------------------------------------------------------------

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Connect or start the server, register the model, and load it."""
        await super().initialize(run_config)
        if self.info is not None:
            return
        await self._connect()
        try:
            await self.model.register(self.backend)
            info = await self.backend.model_info(self.model)
        except ServerError as error:
            if not _is_out_of_memory(str(error)):
                raise
            raise type(error)(f"{error}\n{LESS_MEMORY}") from error
        self.served = self._served(info)
        if self.served.advertised_url:
            await self.backend.check_host(self.served.advertised_url)
        if not await self.is_healthy():
            raise Unreachable(self.no_connection(f"{self.served.base_url} does not answer"))
        self.info = info
        self._log_connection(info)

    async def _connect(self) -> None:
        if isinstance(self.backend, LocalBackend):
            self.backend.share = self.shares_server
        try:
            health = await self.backend.health()
        except HoneError as error:
            raise Unreachable(self.no_connection(str(error))) from error
        self._root = health.get("root")

    async def ended(self) -> HoneError:
        return await self.backend.ended()

    def no_connection(self, why: str) -> str:
        """The error message for a server that cannot be reached."""
        config, url = self.adapter_config.backend, self.backend.base_url
        if config.ip is None:
            return f"{NO_CONNECTION}. The run's own server did not start: {why}"
        other = config.inference_port
        ports = f"port {config.port}" + ("" if other is None else f", inference_port {other}")
        return (
            f"{NO_CONNECTION}. {why}\nWhat to do: see whether the server runs (curl {url}/health); "
            f"check backend.ip {config.ip!r} and {ports} of the trainer adapter; check the network "
            "in between (firewalls). Without ip and port, hone starts its own server."
        )

    def _served(self, info: ModelInfo) -> Served:
        base_url, key = self.model.inference_base_url, self.model.inference_api_key
        assert base_url is not None and key is not None, "the model is registered"
        host, port = urlsplit(base_url).hostname or "", self.adapter_config.backend.inference_port
        if port is not None:
            base_url = f"http://{bracketed(host)}:{port}/v1"
        name = self.model.get_inference_name()
        advertised = self.adapter_config.backend.advertise_url or info.advertised_url
        elsewhere = f"{advertised}/v1" if advertised else None
        urls = (self.backend.base_url, base_url, info.inference_base_url, elsewhere or base_url)
        trained = self.adapter_config.backend.trained(name, *urls, aliases=self._aliases)
        return Served(
            base_url,
            key,
            name,
            host_of(host),
            trained,
            self.recorded,
            elsewhere,
            held_s=self.backend.held_s,
            concurrency=info.concurrency,
        )

    @property
    def _aliases(self) -> tuple[str, ...]:
        return () if self.run_config is None else tuple(self.run_config.model_aliases)

    def _log_connection(self, info: ModelInfo) -> None:
        started = isinstance(self.backend, LocalBackend) and not self.backend.shared
        logger.info(
            "%s %s: %s over %s at step %d",
            "Started a server at" if started else "Connected to",
            self.backend.base_url,
            self.model.get_inference_name(),
            info.base_model,
            info.step,
        )
        config = self.adapter_config.backend.server_config or {}
        ignored = [*info.not_applicable, *(k for k in config if k != "engine_args")]
        if ignored:
            logger.info("Not applicable to this server, and not used: %s", ", ".join(ignored))

    async def is_healthy(self) -> bool:
        """Whether the server answers on the configured ports."""
        try:
            await self.backend.health()
            await self.backend.served_models(self.served.base_url if self.served else None)
        except HoneError as error:
            logger.warning("%s", self.no_connection(str(error)))
            return False
        return True

    @property
    def base_url(self) -> str:
        return self.backend.base_url

    def describe(self) -> dict[str, Any]:
        """The model, and the running server or the root that has it."""
        config, training = self.adapter_config.backend, self.adapter_config.training
        model = config.model_dump(include={"name", "project", "base_model"})
        model["learning_rate"] = training.learning_rate
        if config.ip is not None and self.served is not None:
            model["base_url"] = self.served.base_url
            model["needs_key"] = config.api_key != "default"
            model["root"] = self._root
        elif config.ip is None:
            model["root"] = str(config.root.absolute())
        return model

    # ---- the run ----------------------------------------------------------------------------

    async def open_run(self, run_id: str, seed: int) -> None:
        names = {"model": self.model_name, "aliases": self._aliases}
        await self.backend.open_run(RunSpec(id=run_id, seed=seed, **names))
        self._run_id = run_id

    async def close_run(self, run_id: str) -> None:
        await self.backend.close_run(run_id)

    async def policy_step(self) -> int:
        return await self.backend.step(self.model)

    async def log_metrics(
        self, metrics: Mapping[str, float], *, split: str, step: int | None
    ) -> None:
        # A validation may be recomputed; without `replace` the server would average both values.
        await self.backend.log(
            self.model, metrics, split=split, step=step, replace=split == "val", run=self._run_id
        )

    async def prune(self, keep_last: int) -> None:
        await self.backend.delete_checkpoints(
            self.model, keep_last=keep_last, keep=self.needed_steps
        )

    async def start_anew(self, old_run_id: str | None) -> None:
        """Rename the model that was trained under this name; its steps are kept."""
        await self._connect()
        aside = f"{self.model.name}.{old_run_id or datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
        try:
            await self.backend.rename(self.model, aside)
        except NotFound:
            return  # nothing was trained under this name
        logger.info("%s is called %s from now on", self.model.name, aside)
        self.info = None

    async def close(self) -> None:
        """Stop the run's own server; its jobs continue at its next start."""
        await self.backend.close()

    # ---- jobs -------------------------------------------------------------------------------

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit a job; it is on the server's disk on return."""
        run_id, place = trajectories.run_id, trajectories.metadata or {}
        training = self.adapter_config.training
        last = self.training_jobs.get(run_id)
        if last is not None and (await self.backend.job(last)).state not in FINAL:
            raise Conflict(
                f"Training job for run {run_id} already exists and has not ended; wait for it "
                "with wait_until_complete first"
            )
        groups, self.dropped = sdk_groups(trajectories)
        if not groups:
            why = ", ".join(f"{reason}: {n}" for reason, n in self.dropped.items())
            raise ConfigError(
                f"No valid trajectory groups to submit for run {run_id} ({why or 'there were none'})"
            )
        if self.adapter_config.backend.delete_old_checkpoints:
            gone = await self.backend.delete_checkpoints(self.model, keep=self.needed_steps)
            logger.info("Deleted old checkpoints: %s", ", ".join(map(str, gone)) or "none")
        epoch, rounds = int(place.get("epoch", 0)), int(place.get("rounds", 1))
        job_index = epoch * rounds + int(place.get("round", 0))
        planned = max(int(place.get("epochs", epoch + 1)) * rounds, job_index + 1)
        request = JobRequest(
            model=self.model_name,
            groups=groups,
            config={**training.job_keys(job_index, planned), **place.get("training", {})},
            idempotency_key=place.get("key"),
            plot_tensors=training.plot_tensors,
        )
        job = await self.backend.submit(request)
        self.training_jobs[run_id] = job.id
        count = sum(map(len, groups))
        logger.info("Submitted %d trajectories in %d groups for training", count, len(groups))
        used = job.config.model_dump(exclude_defaults=True) | {"beta": job.config.beta}
        logger.info("Job %s trains with %s", job.id, json.dumps(used))
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata={"job": job.id, **place})

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for its last event; cancelling the wait does not stop the job."""
        job_id = _job_id(ref)
        limit_s = 86400.0 if self.run_config is None else self.run_config.job_timeout_s
        try:
            job = await self.backend.wait(job_id, on_event=self._on_event, timeout_s=limit_s)
            return self._described(ref, job)
        except TimeoutError:
            ending = "was cancelled"
            try:
                await self.backend.cancel(job_id)
            except HoneError as error:
                ending = f"could not be cancelled ({error})"
            why = (
                f"job {job_id} did not end within finetuning.job_timeout_s={limit_s:g} and {ending}. "
                f"Its log: {self.backend.log_place}"
            )
        except HoneError as error:
            why = f"{type(error).__name__}: {error}"
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=TrainingStatusEnum.FAILED,
            message=f"Training failed with error: {why}",
        )

    def _on_event(self, event: JobEvent) -> None:
        if event.type == "progress" and self.events is not None:
            self.events.tell("job_progress", **event.data)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The current status of the job."""
        return self._described(ref, await self.backend.job(_job_id(ref)))

    def _described(self, ref: TrainingJobRef, job: JobInfo) -> TrainingJobStatus:
        """A job of the server as a status of the harness."""
        started = job.started_at or job.created_at
        why = f"{job.failure.type}: {job.failure.message}" if job.failure else "no reason given"
        failed = (
            f"Training failed with error: {why}\njob {job.id}; its log: {self.backend.log_place}"
        )
        messages = {
            "done": job.reason,
            "cancelled": f"job {job.id} was cancelled by another client",
            "failed": f"{failed}\n{LESS_MEMORY}" if _is_out_of_memory(why) else failed,
        }
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=STATES[job.state],
            progress=100.0 if job.state == "done" else None,
            message=messages.get(job.state, "Training is in progress."),
            metadata={
                "job": job.id,
                # A job without a gradient step publishes none: its base step is still served.
                "step": job.base_step if job.step is None else job.step,
                "metrics": job.metrics,
                "counts": job.counts,
                "reason": job.reason,
                "config": job.config.model_dump(),
                "seconds": 0.0 if job.ended_at is None else job.ended_at - started,
            },
        )

    # ---- its own log --------------------------------------------------------------------------

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append a line to trainer_adapter_RUN.jsonl."""
        config = self.adapter_config.backend.model_dump(include={"base_model", "project", "name"})
        own = {"run_id": ref.run_id, "backend": ref.backend, "trainer_config": config}
        directory = output_dir or RUNS / DEFAULT
        append_line(directory, f"trainer_adapter_{ref.run_id}.jsonl", own | metrics)


@register_trainer_adapter(config_type=HoneServerAdapterConfig)
async def hone_server_adapter(
    config: HoneServerAdapterConfig, builder: Builder
) -> AsyncIterator[HoneServerAdapter]:
    """A running hone server, or one that the run starts and stops."""
    adapter = HoneServerAdapter(config)
    yield adapter
    await adapter.close()


def _job_id(ref: TrainingJobRef) -> str:
    job_id = (ref.metadata or {}).get("job")
    if job_id is None:
        raise NotFound(f"No training job found with run_id {ref.run_id}")
    return str(job_id)


def _is_out_of_memory(message: str) -> bool:
    """Whether the job ran out of memory and the server's message does not say what to do."""
    short = "out of memory" in message.lower() or "OutOfMemory" in message
    return short and "num_generations" not in message
