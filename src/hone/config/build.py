"""Build the components of a Document, each at its first use.

In:   a checked Document; the factories of the registry
Out:  a Builder: functions, models, evaluators and the three parts of a training run, by name

Components are closed in reverse order, all of them, even after a failure: the code after a
factory's `yield` always runs, so a factory needs no `try`. A server that a run started would
otherwise outlive it.
"""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from hone.config import registry
from hone.config.base import ComponentConfig, DatasetBaseConfig, LLMBaseConfig
from hone.config.policy import (
    Trained,
    address_of,
    choose_policy,
    needs_training_server,
    policy_calls,
    sent_name,
)
from hone.config.problems import dotted
from hone.config.schema import Document
from hone.errors import ConfigError, NotInThisVersion, did_you_mean
from hone.types import RecordedCall
from hone.wire.access import derive_inference_key

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 8
"""Rollouts at a time, if neither the YAML nor the training server says how many."""
WORKFLOW = "<workflow>"
"""The name of the workflow among functions."""

_TITLES = {
    "function": "Function",
    "llm_provider": "LLM",
    "evaluator": "Evaluator",
    "dataset_loader": "Dataset loader",
    "trajectory_builder": "Trajectory builder",
    "trainer_adapter": "Trainer adapter",
    "trainer": "Trainer",
}

_SECTIONS = {
    "function": ("functions",),
    "llm_provider": ("llms",),
    "evaluator": ("eval", "evaluators"),
    "trajectory_builder": ("trajectory_builders",),
    "trainer_adapter": ("trainer_adapters",),
    "trainer": ("trainers",),
}
"""The section of the YAML for each kind; the dataset has no section."""

T = TypeVar("T")
Key = tuple[str, str]
_under: ContextVar[tuple[Key, ...]] = ContextVar("hone_building", default=())


@dataclass(frozen=True)
class Served:
    """Where the trained model is served."""

    base_url: str
    """Base URL of the OpenAI API; ends in /v1."""
    api_key: str
    model: str
    """The model name to send."""
    host: str | None = None
    """The server's host and port, as rollouts reach it."""
    trained: Trained | None = None
    """The model in training, which decides which name `llms` entries send; None if they send their
    own."""
    recorded: Callable[[str], Awaitable[list[RecordedCall]]] | None = None
    """Returns the recorded calls of a rollout id; None if the server does not record calls."""
    advertised_url: str | None = None
    """Base URL for agents in other processes, if it differs; ends in /v1."""
    held_s: Callable[[str, float], Awaitable[float]] | None = None
    """Returns for how long since a time (of the monotonic clock) the server held the calls of a rollout
    id; None if it cannot be asked."""
    concurrency: int | None = None
    """Number of requests at a time that keep its engine busy; None if that is not known."""

    @property
    def rollout_arguments(self) -> dict[str, Any]:
        """Arguments of a rollout (workflow/run.py) about this server."""
        aliases = () if self.trained is None else self.trained.aliases
        return {
            "host": self.host,
            "recorded_calls": self.recorded,
            "held_s": self.held_s,
            "aliases": dict.fromkeys(sorted(aliases), self.model),
        }


class Builder:
    """The components of a Document. A factory gets it too, for the components it needs."""

    def __init__(self, document: Document, stack: AsyncExitStack) -> None:
        self.document = document
        self.served: Served | None = None
        """Set once the training server is reached, and before the first `trainable` LLM is built."""
        self.policy: str | None = None
        """The key of the entry of `llms` that is trained; set by `choose_policy`."""
        self.is_training = False
        """In a training run the policy decides which model name each entry sends."""
        self.runs_workflow = True
        """False with --endpoint and --skip_workflow: only what evaluators need is built."""
        self.close_failures: list[Exception] = []
        self._stack = stack
        self._live: dict[Key, Any] = {}
        self._turn = asyncio.Lock()
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get_llm(self, name: str, wrapper_type: str | None = None) -> Any:
        """One entry of `llms`, as a `workflow.llm.LLM`."""
        if wrapper_type not in (None, "openai"):
            raise NotInThisVersion(
                f"get_llm({name!r}, wrapper_type={wrapper_type!r}): not in this version of hone. "
                f"Leave wrapper_type out and give your framework the LLM's client, or its base_url."
            )
        return await self._named("llm_provider", name, self.document.llms)

    def live_llms(self) -> list[Any]:
        """The entries of `llms` that are built."""
        return [held for (kind, _), held in self._live.items() if kind == "llm_provider"]

    def get_llm_config(self, name: str) -> LLMBaseConfig:
        """The configuration of one entry of `llms`."""
        return _pick("llm_provider", name, self.document.llms)

    def choose_policy(self, target: str | None = None) -> None:
        """Decide which entry of `llms` is trained; raises ConfigError if that is ambiguous.

        `target` is the key of another document's policy, used if this document has that key.
        """
        if self.served is not None and self.served.trained is not None:
            wanted = self.document.finetuning.target_model
            if wanted is None and target in self.document.llms:
                wanted = target
            self.policy = choose_policy(self.document, self.served.trained, wanted)
            self.is_training = True

    def get_model_name(self, key: str) -> str | None:
        """The model name that an entry of `llms` sends; None if it is not known yet."""
        config, served = self.get_llm_config(key), self.served
        if self.is_training and served is not None and served.trained is not None:
            return sent_name(config, served.trained, is_policy=key == self.policy)
        written = getattr(config, "model_name", None)
        return written or (served.model if served is not None else None)

    def is_training_server(self, base_url: str) -> bool:
        """Whether this is an address of the server that trains and records rollouts."""
        trained = None if self.served is None else self.served.trained
        return trained is not None and address_of(base_url) in trained.addresses

    def get_rollouts_url(self, base_url: str) -> str | None:
        """The URL at which agents outside this process reach the server with this address.

        None if it is not the server that records rollouts.
        """
        if self.served is None or not self.is_training_server(base_url):
            return None
        return self.served.advertised_url or base_url

    def get_rollout_key(self, base_url: str, api_key: str | None) -> str | None:
        """The key for agents outside this process, if it differs from `api_key`.

        None if it is the same: a key of another server, or one that is not valid for the training
        API.
        """
        if self.served is None or not self.is_training_server(base_url):
            return None
        key = self.served.api_key
        return derive_inference_key(key) if api_key == key != "default" else None

    async def get_function(self, name: str) -> Any:
        """One entry of `functions`, as a `workflow.function.Function`."""
        return await self._named("function", name, self.document.functions)

    async def get_workflow(self) -> Any:
        """The workflow, as a `workflow.function.Function` called `<workflow>`."""
        config = self.document.workflow
        if config is None:
            raise ConfigError(
                f"{self.document.file}: there is no `workflow:`; add one, for example "
                f"{{_type: python, target: my_package.agent:run}}"
            )
        return await self._get("function", WORKFLOW, config)

    async def get_evaluator(self, name: str) -> Any:
        """One entry of `eval.evaluators`, as an `evaluation.base.Evaluator`."""
        return await self._named("evaluator", name, self.document.eval.evaluators)

    @property
    def rollout_arguments(self) -> dict[str, Any]:
        """Arguments of a rollout (workflow/run.py): its server, and whose failures are the policy's.

        Only in a training run is it known which calls the policy answers: elsewhere all count.
        """
        served, listed = self.served, self.document.finetuning.infrastructure_exceptions
        arguments: dict[str, Any] = {"infrastructure_exceptions": listed}
        if served is None:
            return arguments
        if self.is_training and served.trained is not None:
            arguments["policy"] = policy_calls(self.document, served.trained, self.policy)
        return {**arguments, **served.rollout_arguments}

    def get_max_concurrency(self) -> int:
        """The number of items at a time for what is not served by the training server."""
        return self.document.eval.general.max_concurrency or DEFAULT_CONCURRENCY

    def get_rollout_concurrency(self) -> int:
        """The number of rollouts that run at a time.

        Without a value in the YAML, as many as keep the training server's engine busy. Programs
        also use this machine, so there are at most two for each of its cores, and 8 at least.
        """
        written = self.document.eval.general.max_concurrency
        if written is not None:
            return written
        is_foreign = self.document.finetuning.allow_foreign_endpoint  # of unknown capacity
        if self.served is None or self.served.concurrency is None or is_foreign:
            return DEFAULT_CONCURRENCY
        blocks = [self.document.workflow, *self.document.functions.values()]
        if any(block is not None and block.type_name == "command" for block in blocks):
            cores = max(DEFAULT_CONCURRENCY, 2 * (os.cpu_count() or 1))
            return min(self.served.concurrency, cores)
        return self.served.concurrency

    def get_output_dir(self) -> Path:
        """The directory that an evaluation writes to."""
        return self.document.eval.general.output_dir

    async def get_dataset_loader(self, config: DatasetBaseConfig) -> Any:
        """The loader of a dataset, as an `evaluation.base.DatasetLoader`."""
        return await self._get("dataset_loader", f"{config.type_name} {id(config):x}", config)

    async def get_trajectory_builder(self, name: str) -> Any:
        """One entry of `trajectory_builders`, as a `finetune.base.TrajectoryBuilder`."""
        builders = self.document.trajectory_builders
        return await self._named("trajectory_builder", name, builders)

    async def get_trainer_adapter(self, name: str) -> Any:
        """One entry of `trainer_adapters`, as a `finetune.base.TrainerAdapter`."""
        return await self._named("trainer_adapter", name, self.document.trainer_adapters)

    async def get_trainer(self, name: str, *, trajectory_builder: Any, trainer_adapter: Any) -> Any:
        """One entry of `trainers`, as a `finetune.base.Trainer` bound to its two parts."""
        trainer = await self._named("trainer", name, self.document.trainers)
        await trainer.bind_components(trajectory_builder, trainer_adapter)
        return trainer

    async def serve(self) -> None:
        """Connect to or start the training server, if an LLM of this document is served only there."""
        needing = [
            name for name, config in self.document.llms.items() if needs_training_server(config)
        ]
        if self.served is not None or not needing:
            return
        finetuning = self.document.finetuning
        if finetuning.trainer_adapter is None:
            raise ConfigError(
                f"{self.document.file}: llms.{needing[0]} has no base_url, and "
                f"finetuning.trainer_adapter, which would say where it is served, is not set; "
                f"set one of them"
            )
        adapter = await self.get_trainer_adapter(finetuning.trainer_adapter)
        adapter.shares_server = True  # nothing is trained, so the server of a run may answer
        await adapter.initialize(finetuning)
        self.served = adapter.served

    async def share(self, name: str, factory: Callable[["Builder"], AsyncIterator[T]]) -> T:
        """An object that several components share: created once, and closed after all of them."""
        return await self._once(("shared", name), lambda: self._start(name, factory(self)))

    async def _start(self, what: str, source: AsyncIterator[T]) -> T:
        """The instance that a factory yields; the rest of the factory runs at the end."""
        generator = cast("AsyncGenerator[T]", source)
        instance = await anext(generator)
        self._stack.push_async_callback(self._close, what, generator)
        return instance

    async def _named(self, kind: str, name: str, configs: Mapping[str, ComponentConfig]) -> Any:
        return await self._get(kind, name, _pick(kind, name, configs))

    async def _get(self, kind: str, name: str, config: ComponentConfig) -> Any:
        return await self._once((kind, name), lambda: self._make(kind, name, config))

    async def _once(self, key: Key, make: Callable[[], Awaitable[Any]]) -> Any:
        under = _under.get()
        if key in self._live:
            return self._live[key]
        if key in under:
            circle = " -> ".join(n for _, n in (*under[under.index(key) :], key))
            raise ConfigError(
                f"{self.document.file}: components need each other in a circle: {circle}"
            )
        # One at a time: two requests whose components depend on each other would deadlock.
        async with nullcontext() if under else self._turn, self._locks[key]:
            if key not in self._live:
                token = _under.set((*under, key))
                try:
                    self._live[key] = await make()
                finally:
                    _under.reset(token)
        return self._live[key]

    async def _make(self, kind: str, name: str, config: ComponentConfig) -> Any:
        component = registry.find(kind, config.type_name)
        if component is None:
            raise ConfigError(registry.unknown(kind, config.type_name))
        try:
            instance = await self._start(f"{kind} {name!r}", component.factory(config, self))
        except StopAsyncIteration:
            raise ConfigError(
                f"{kind} {name!r}: the factory of {component.name!r} ended without a yield"
            ) from None
        except BaseException as error:
            # Only the innermost component adds its place, and only to a message without one.
            has_place = bool(getattr(error, "__notes__", ())) or str(error).startswith(
                str(self.document.file)
            )
            if isinstance(error, ConfigError) and not has_place:
                error.args = (f"{self._place(kind, name)}: {error}",)
            error.add_note(f"while building {kind} {name!r} (_type: {component.name})")
            raise
        wrap = registry.WRAPPERS.get(kind)
        return instance if wrap is None else wrap(name, instance)

    def _place(self, kind: str, name: str) -> str:
        """File, line and key of the component."""
        path: tuple[str, ...] = ("eval", "general", "dataset")
        if kind in _SECTIONS:
            path = ("workflow",) if name == WORKFLOW else (*_SECTIONS[kind], name)
        return f"{self.document.loaded.place(path)}: {dotted(path)}"

    async def _close(self, what: str, source: AsyncGenerator[Any]) -> None:
        try:
            await anext(source)
        except StopAsyncIteration:
            return
        except Exception as error:  # noqa: BLE001  # the others must be closed too; build() raises it
            logger.warning("closing %s failed: %s: %s", what, type(error).__name__, error)
            self.close_failures.append(error)
            return
        await source.aclose()
        self.close_failures.append(ConfigError(f"{what}: its factory yields more than once"))


@asynccontextmanager
async def build(document: Document) -> AsyncIterator[Builder]:
    """Components of the document, built on demand and closed in reverse order on exit."""
    stack = AsyncExitStack()
    builder = Builder(document, stack)
    async with stack:
        yield builder
    if builder.close_failures:
        raise builder.close_failures[0]


def _pick(kind: str, name: str, configs: Mapping[str, Any]) -> Any:
    if name in configs:
        return configs[name]
    maybe, names = did_you_mean(name, configs), ", ".join(configs) or "none"
    raise ConfigError(f"{_TITLES[kind]} {name!r} not found.{maybe} There are: {names}.")
