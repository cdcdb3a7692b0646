"""Model and TrainableModel: a name one can call, and perhaps train.

In:   a name and where it is served; for a trainable one its base model and a backend
Out:  an OpenAI client for it; jobs that make its next step

Nothing is contacted before `register`. A model only knows names and addresses; what happened to
it is kept by its backend, so two programs that name the same model mean the same one.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr
from typing_extensions import TypeVar  # with default=, which typing has from 3.13

from hone.backends.base import Backend, TrainResult
from hone.capture.base import host_of
from hone.errors import ConfigError, NotInThisVersion
from hone.trajectory import Trajectory, TrajectoryGroup, means
from hone.types import ModelSpec, Name, ProjectName, TrainConfig

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TIMEOUT_S = 1200.0
"""Of one answer: requests may be held while a step is published."""
CONNECT_S = 30.0
MAX_CONNECTIONS = 100_000
"""Rollouts are limited by the server, never by a pool on this side."""

ConfigT = TypeVar("ConfigT", default=Any)


class Model(BaseModel, Generic[ConfigT]):
    """A model served anywhere: `hone.Model(name=..., project=..., inference_base_url=...)`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: Name
    project: ProjectName = "default"
    config: ConfigT | None = None
    """Whatever the user's rollouts want to find on the model; hone does not look at it."""
    inference_base_url: str | None = None
    inference_api_key: str | None = None
    inference_model_name: str | None = None
    """The name to ask for there, if it is not `name`."""

    _backend: Backend | None = PrivateAttr(default=None)
    _client: Any = PrivateAttr(default=None)
    _client_of: Any = PrivateAttr(default=None)

    @property
    def trainable(self) -> bool:
        return False

    async def register(self, backend: Backend) -> None:
        """Remember the backend; a model that is not trained needs nothing from it."""
        self._backend = backend

    def backend(self) -> Backend:
        """The backend it was registered with."""
        if self._backend is None:
            raise ConfigError(
                f"model {self.name!r} has no backend yet: await model.register(backend) first"
            )
        return self._backend

    def openai_client(self) -> "AsyncOpenAI":
        """An AsyncOpenAI client for this model, made once per event loop."""
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
        import openai  # here: it takes a second, and `import hone` promises to be light

        timeout = openai.Timeout(TIMEOUT_S, connect=CONNECT_S)
        # Of the class openai's own HTTP library has: httpx up to version 2, httpx2 from 3 on.
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
        )
        return openai.AsyncOpenAI(
            base_url=self.inference_base_url,
            api_key=self.inference_api_key,
            timeout=timeout,
            http_client=openai.DefaultAsyncHttpxClient(
                timeout=timeout,
                limits=limits,
                # No proxy on the way to this machine, whatever the environment says of proxies.
                trust_env=host_of(urlsplit(self.inference_base_url).hostname or "") != "localhost",
            ),
        )

    def _no_address(self) -> str:
        return (
            f"model {self.name!r}: inference_base_url is {self.inference_base_url!r} and "
            f"inference_api_key is {'set' if self.inference_api_key else None}; a client needs both"
        )

    def get_inference_name(self, step: int | None = None) -> str:
        """The name to ask the OpenAI API for: the newest step, or a certain one."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The newest published step; 0 for a model that is not trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException] = (),
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Write the means of these trajectories into the model's history; returns what was written.

        Args:
            trajectories: groups, or trajectories alone; exceptions stand for rollouts that failed.
            split: in front of each metric: `val` gives val/reward, by which the best step is found.
            metrics: more of them.
            step: which one they are of; the newest if left out.
        """
        raise NotInThisVersion(
            f"model {self.name!r} is not trained, and only trained models have a history: log() "
            "for a hone.Model is not in this version"
        )


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that is trained: a name of its own over a base model."""

    base_model: str = Field(min_length=1, max_length=512)
    """A name of `hone models list`, a hub name, or a directory on the server's machine."""
    rank: int = Field(default=8, gt=0, le=512)
    """Of the LoRA adapter."""
    alpha: float = Field(default=16.0, gt=0)
    seed: int = Field(default=0, ge=0)
    """Of the adapter's first weights."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template for every call of this model."""
    defaults: dict[str, JsonValue] = {}
    """Keys of TrainConfig that jobs of this model use unless they say otherwise."""
    init_args: dict[str, JsonValue] = {}
    """How Unsloth would load the base model; max_seq_length becomes every job's default."""
    engine_args: dict[str, JsonValue] = {}
    """What vLLM would be started with; the server names the keys that mean nothing to it."""
    peft_args: dict[str, JsonValue] = {}
    """PEFT's words for the adapter: r is rank, lora_alpha alpha, random_state seed."""

    def __init__(self, **fields: Any) -> None:
        if "_internal_config" in fields:
            self._internal_config = None
        super().__init__(**fields)

    @property
    def _internal_config(self) -> None:
        return None

    @_internal_config.setter
    def _internal_config(self, _: Any) -> NoReturn:
        raise NotInThisVersion(
            "_internal_config (ART's) is not taken by hone.TrainableModel. Its init_args, "
            "engine_args and peft_args are fields of their own here, and trainer_args go to "
            "TrainConfig or defaults; ART's own client may send it to a hone server as it is."
        )

    @property
    def trainable(self) -> bool:
        return True

    def spec(self) -> ModelSpec:
        """What the server is told."""
        return ModelSpec(**self.model_dump(include=set(ModelSpec.model_fields)))

    async def register(self, backend: Backend) -> None:
        """Make it known to the backend and ready to answer; loads the base model if need be."""
        await backend.register(self)
        self._backend = backend
        self.inference_base_url, self.inference_api_key = await backend.prepare(self)
        # With its project: a bare name stops being one the day another project uses it too.
        self.inference_model_name = f"{self.project}/{self.name}"

    def _no_address(self) -> str:
        return f"model {self.name!r} is not registered: await model.register(backend) first"

    async def get_step(self) -> int:
        return await self.backend().step(self)

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the groups and wait until the new step is served.

        Args:
            trajectory_groups: each the rollouts of one input, compared with each other.
            config: how; keys left out come from the model's `defaults`, then from hone's.
            verbose: show progress also where stderr is not a terminal.
            **keys: keys of TrainConfig, as a shorter way to write `config`.
        """
        return await self.backend().train(self, trajectory_groups, config, verbose=verbose, **keys)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """Delete all steps but the newest and the best by a logged metric; which were deleted."""
        return await self.backend().delete_checkpoints(self, best_checkpoint_metric)

    async def log(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException] = (),
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        written = {**means(trajectories), **(metrics or {})}
        if not written:
            raise ConfigError(f"model {self.name!r}: log() got neither trajectories nor metrics")
        step = await self.get_step() if step is None else step
        await self.backend().log(self, written, split=split, step=step)
        return {f"{split}/{name}": value for name, value in written.items()}


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
