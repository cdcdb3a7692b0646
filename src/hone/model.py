"""Model and TrainableModel: a named model that can be called, and trained.

In:   a name and its address; for a trainable model also its base model and a backend
Out:  an OpenAI client; training jobs

No request is made before `register`. A model holds only names and addresses; its state is in its
backend, so two programs that use the same name use the same model.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, field_validator
from typing_extensions import TypeVar  # with default=, which typing has from 3.13

from hone import model_files, options
from hone.backends.base import Backend, TrainResult
from hone.capture.base import host_of
from hone.errors import ConfigError
from hone.train_config import TrainSFTConfig
from hone.trajectory import Trajectory, TrajectoryGroup, as_plain_number, means
from hone.types import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    Alpha,
    AnyName,
    ModelSpec,
    Rank,
    TrainConfig,
    model_directory,
    stored_name,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TIMEOUT_S = 1200.0
"""Timeout of one request: requests may be held while a step is published."""
CONNECT_S = 30.0
MAX_CONNECTIONS = 100_000
"""The server limits the rollouts, not the client's connection pool."""

ConfigT = TypeVar("ConfigT", default=Any)

log = logging.getLogger("hone")


class Model(BaseModel, Generic[ConfigT]):
    """A model served anywhere: `hone.Model(name=..., project=..., inference_base_url=...)`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: AnyName
    """Any printable text; if it is not a valid directory name, files are stored under a derived
    name."""
    project: AnyName = "default"
    entity: str | None = None
    """Owner of the project in a service that metrics are reported to, such as W&B."""
    id: str | None = None
    """Not used by hone, which identifies a model by its project and name."""
    run_id: str | None = None
    config: ConfigT | None = None
    """Available to your rollouts; not used by hone."""
    base_path: str = ".hone"
    """Directory for state.json and logged trajectories, in projects/PROJECT/models/NAME below it."""
    report_metrics: list[str] | None = None
    """Loggers that metrics are also sent to, such as `wandb` and `tensorboard`. None: W&B, if
    `WANDB_API_KEY` is set and W&B is installed."""
    inference_base_url: str | None = None
    inference_api_key: str | None = None
    inference_model_name: str | None = None
    """The model name to send, if it is not `name`."""

    _backend: Backend | None = PrivateAttr(default=None)
    _client: Any = PrivateAttr(default=None)
    _client_of: Any = PrivateAttr(default=None)

    @field_validator("report_metrics")
    @classmethod
    def _can_be_reported(cls, names: list[str] | None) -> list[str] | None:
        if names:
            from hone.loggers import reporter  # imported here: `import hone` should stay fast

            reporter.check(names)
        return names

    @property
    def trainable(self) -> bool:
        return False

    async def register(self, backend: Backend) -> None:
        """Set the backend. For a model that is not trained, this makes no request."""
        self._backend = backend

    def backend(self) -> Backend:
        """The backend it was registered with."""
        if self._backend is None:
            raise ConfigError(
                f"model {self.name!r} has no backend yet: await model.register(backend) first"
            )
        return self._backend

    def openai_client(self) -> "AsyncOpenAI":
        """An AsyncOpenAI client for this model, one per event loop."""
        loop = _running_loop()
        address = (loop, self.inference_base_url, self.inference_api_key)
        if self._client is None or self._client_of != address:
            self._client, self._client_of = self._make_client(), address
        return self._client

    async def close(self) -> None:
        """Close the client's connections; the next `openai_client()` is a new one."""
        client, self._client, self._client_of = self._client, None, None
        if client is not None:
            await client.close()

    def _make_client(self) -> "AsyncOpenAI":
        if self.inference_base_url is None or self.inference_api_key is None:
            raise ConfigError(self._no_address())
        import openai

        connection = connection_to(self.inference_base_url)
        return openai.AsyncOpenAI(
            base_url=self.inference_base_url,
            api_key=self.inference_api_key,
            timeout=connection["timeout"],
            http_client=openai.DefaultAsyncHttpxClient(**connection),
        )

    def _no_address(self) -> str:
        return (
            f"model {self.name!r}: inference_base_url is {self.inference_base_url!r} and "
            f"inference_api_key is {'set' if self.inference_api_key else None}; a client needs both"
        )

    def get_inference_name(self, step: int | None = None) -> str:
        """The model name to send: of the newest step, or of the step given."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The newest published step; 0 for a model that is not trained."""
        return 0

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """The arguments of `litellm.completion` for this model."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    async def log(
        self,
        trajectories: model_files.Logged | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Write these trajectories to `base_path` and their mean metrics to the model's history.

        Args:
            trajectories: groups or trajectories; an exception counts as a failed rollout.
            split: prefix of each metric; `val` gives val/reward, which decides the best step.
            metrics: further metrics.
            step: the step they belong to; the newest one if None.

        Returns the metrics that were written.
        """
        items = list(trajectories or ())
        model_files.check_logged(f"model {self.name!r}: log()", split, step, items)
        more = {name: as_plain_number(value) for name, value in (metrics or {}).items()}
        written = {**means(items), **more}
        if not written:
            raise ConfigError(f"model {self.name!r}: log() got neither trajectories nor metrics")
        step = await self.get_step() if step is None else step
        if items:
            model_files.log_trajectories(self._directory, split, step, items)
        await self._log_metrics(written, split, step)
        named = {f"{split}/{name}": value for name, value in written.items()}
        self._report(step, named)
        return named

    async def _log_metrics(self, metrics: Mapping[str, float], split: str, step: int) -> None:
        model_files.log_metrics(self._directory, split, step, metrics)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics to the loggers of `report_metrics`; returns immediately."""
        if self.report_metrics is None and "WANDB_API_KEY" not in os.environ:
            return
        from hone.loggers import reporter

        if names := reporter.logger_names(self.report_metrics):
            known = self.model_dump(include={"name", "project", "base_model", "entity"})
            reporter.report(self._directory, names, step, metrics, **known)

    # ---- state.json: state of the user's program ----------------------------------------------

    @property
    def _directory(self) -> Path:
        return model_directory(self.base_path, self.project, self.name)

    def read_state(self) -> dict[str, Any] | None:
        """The saved state, or None."""
        return model_files.read_state(self._directory)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Replace the saved state."""
        model_files.write_state(self._directory, state)

    write_state = overwrite_state

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Merge these values into the saved state, with nested dicts; returns the whole state."""
        whole = model_files.merged(self.read_state() or {}, state)
        self.overwrite_state(whole)
        return whole


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that is trained: a LoRA adapter with its own name over a base model."""

    base_model: str = Field(min_length=1, max_length=512)
    """A name from `hone models list`, a hub name, or a directory on the server's machine."""
    rank: Rank = DEFAULT_RANK
    """LoRA rank."""
    alpha: Alpha = DEFAULT_ALPHA
    """LoRA alpha, as in PEFT."""
    seed: int = Field(default=0, ge=0)
    """Seed of the adapter's initial weights."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template for every call of this model."""
    defaults: dict[str, JsonValue] = {}
    """Keys of TrainConfig that jobs of this model use unless they say otherwise."""
    init_args: dict[str, JsonValue] = {}
    """Arguments for loading the base model, as for Unsloth; max_seq_length bounds requests and jobs."""
    engine_args: dict[str, JsonValue] = {}
    """Engine arguments, as for vLLM; the server reports the keys that it does not apply."""
    peft_args: dict[str, JsonValue] = {}
    """Adapter arguments, as for PEFT: r is rank, lora_alpha alpha, random_state seed."""

    trainer_args: dict[str, JsonValue] = {}
    """Training arguments, as for TRL: defaults of the jobs, like `defaults`."""

    _internal: dict[str, Any] | None = PrivateAttr(default=None)
    _warned: bool = PrivateAttr(default=False)
    """Whether the user was warned that metrics are not reported."""

    def __init__(self, **fields: Any) -> None:
        internal = fields.pop("_internal_config", None)
        super().__init__(**fields)
        self._internal_config = internal

    @property
    def _internal_config(self) -> dict[str, Any] | None:
        """ART's options, as written; hone has fields for all of them."""
        return self._internal

    @_internal_config.setter
    def _internal_config(self, config: Mapping[str, Any] | None) -> None:
        options.model_fields(config or {})  # raises at the caller's line
        self._internal = None if config is None else dict(config)

    @property
    def trainable(self) -> bool:
        return True

    def spec(self) -> ModelSpec:
        """The registration that is sent to the server."""
        fields = self.model_dump(include=set(ModelSpec.model_fields))
        for section, values in options.model_fields(self._internal or {}).items():
            fields[section] = _agreeing(fields[section], values, section)
        fields |= {"name": stored_name(self.name), "project": stored_name(self.project)}
        return ModelSpec(**fields)

    async def register(
        self,
        backend: Backend,
        _openai_client_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Register it with the backend and load the base model if it is not loaded.

        Args:
            backend: where it is served and trained.
            _openai_client_config: options with which ART would start its OpenAI server. hone's is
        already running, so only its engine_args have an effect.
        """
        engine_args, unused = options.engine_fields(_openai_client_config)
        self.engine_args = _agreeing(self.engine_args, engine_args, "engine_args")
        info = await backend.register(self)
        unused += options.without_effect(self._internal or {})
        if without_effect := [*info.not_applicable, *unused]:
            log.warning(
                "model %s: these options have no effect here: %s",
                self.name,
                ", ".join(without_effect),
            )
        self._backend = backend
        self.inference_base_url, self.inference_api_key = await backend.prepare(self)
        # With its project: a bare name is ambiguous once another project uses it too.
        self.inference_model_name = f"{stored_name(self.project)}/{stored_name(self.name)}"

    def _no_address(self) -> str:
        return f"model {self.name!r} is not registered: await model.register(backend) first"

    async def get_step(self) -> int:
        return await self.backend().step(self)

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the groups and wait until the new step is served.

        Args:
            trajectory_groups: groups of rollouts of one input, compared with each other.
            config: training settings; missing keys come from the model's `defaults`, then hone's.
            _config: ART's advanced options, `hone.art.dev.TrainConfig`; each is honoured or refused.
            verbose: show progress even if stderr is not a terminal.
            **keys: keys of TrainConfig or options of ART, instead of `config`.
        """
        keys = {**(_config or {}), **keys}
        backend = self.backend()
        result = await backend.train(self, trajectory_groups, config, verbose=verbose, **keys)
        try:
            self._report(result.step, result.metrics)
        except Exception as error:  # noqa: BLE001  # the step is trained, whatever a logger says
            if not self._warned:
                why = f"{type(error).__name__}: {error}"
                log.warning("model %s: its metrics are not reported: %s", self.name, why)
            self._warned = True
        return result

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the assistant messages of the conversations and wait for the new step.

        Args:
            trajectories: conversations; rewards do not matter. A message with `weight: 0` is context.
            config: learning rate and batch size.
            _config: as in ART; keys of TrainConfig.
            verbose: show progress even if stderr is not a terminal.
            **keys: further keys of TrainConfig.
        """
        more = {**(_config or {}), **keys}
        backend = self.backend()
        result = await backend.train_sft(self, trajectories, config, verbose=verbose, **more)
        self._report(result.step, result.metrics)
        return result

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """Delete all steps but the newest and the best by a logged metric; returns those deleted."""
        return await self.backend().delete_checkpoints(self, best_checkpoint_metric)

    async def _log_metrics(self, metrics: Mapping[str, float], split: str, step: int) -> None:
        await self.backend().log(self, metrics, split=split, step=step)


def _agreeing(own: Mapping[str, Any], more: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Both; ConfigError where they disagree."""
    for key, value in more.items():
        if own.get(key, value) != value:
            raise ConfigError(
                f"{section}.{key} is {own[key]!r}, and {value!r} in _internal_config or "
                "_openai_client_config; write one of the two"
            )
    return {**own, **more}


def connection_to(base_url: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Arguments of the HTTP client under an OpenAI client."""
    import openai  # imported here: it takes a second, and `import hone` must be fast

    # The class of openai's HTTP library: httpx up to version 2, httpx2 from version 3 on.
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
    )
    return {
        "timeout": openai.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        "limits": limits,
        # No proxy to this machine, whatever the environment says.
        "trust_env": host_of(urlsplit(base_url).hostname or "") != "localhost",
    }


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
