"""Serving: which weights answer to which model name.

In:   registered models, checkpoints, the names clients ask for
Out:  Policies: a base model's engine, and the adapter of one step in it

Nothing is loaded before it is needed, and nothing is loaded twice. NAME refers to a step once it is
promoted, not once it is loaded: in between, the engine must prove that it serves the step. Adapters
in use, the newest ones, and those not yet proved are never unloaded.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hone.errors import (
    Busy,
    ConfigError,
    Conflict,
    ModelNotFound,
    ModelUnsupported,
    NotFound,
    UnknownModel,
    near_names,
)
from hone.files.logs import say
from hone.inference.background import in_own_thread
from hone.inference.base import AdapterRef, Engine
from hone.models.find import canonical, find
from hone.server.access import may_load
from hone.server.serve.engine_choice import EngineChoice
from hone.server.serve.engines import Base, Engines
from hone.server.serve.holds import Hold
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.settings import Settings
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.models import ModelRecord, ModelStore
from hone.types import ModelKey, ModelSpec, RunSpec

OpenEngine = Callable[[str], Engine]
UNLOAD_S = 5.0
"""How long the deletion of a model waits until its adapters are unloaded."""

_AT = re.compile(r"(?P<stem>.+)@(?P<at>latest|best|[0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True)
class Policy:
    """The weights that answer a request: a base model's engine, and an adapter in it."""

    base: Base
    record: ModelRecord | None
    """None for the base model itself."""
    step: int
    adapter: AdapterRef | None
    """None for the base weights."""
    name: str
    """The name the client used."""

    @property
    def model(self) -> str:
        """PROJECT/NAME, or the base model's name."""
        return self.base.name if self.record is None else str(self.record.key)


@dataclass(frozen=True)
class ServedName:
    """A name that clients may request."""

    id: str
    root: str
    """Its base model."""
    step: int
    created_at: float


project: ContextVar[str | None] = ContextVar("hone_project", default=None)
"""The project in which the request's model names are looked up: the one of its /project/NAME/v1."""


class Serving:
    """The engines, and the policy behind each model name."""

    def __init__(
        self,
        models: ModelStore,
        checkpoints: Checkpoints,
        settings: Settings,
        open_engine: OpenEngine | None = None,
        around_open: Callable[[OpenEngine], OpenEngine] = lambda open_engine: open_engine,
    ) -> None:
        """`open_engine` loads a base model by name; it runs in a thread."""
        self._models = models
        self._checkpoints = checkpoints
        self._settings = settings
        # vLLM's arguments do not apply to an engine that the caller provides.
        own = {"engine": "embedded", "engine_url": None} if open_engine else {}
        self.choice = EngineChoice(settings.model_copy(update=own), models)
        open_engine = around_open(open_engine or self.choice.open)
        self.engines = Engines(settings, open_engine)
        self._logged: set[tuple[str, str]] = set()
        """Runs and base models for which the meaning of the base model's name was logged."""
        self._unloading: set[asyncio.Task[None]] = set()
        """Unloading that a deletion did not wait for; the event loop alone would not keep it."""
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- names ------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(
        self,
        name: str,
        *,
        run: RunSpec | None = None,
        step: int | None = None,
        aliases: Mapping[str, str] | None = None,
        hold: Hold | None = None,
    ) -> AsyncIterator[Policy]:
        """The policy behind a name; its engine stays open and its adapter loaded in the block.

        NAME, NAME@N, NAME@latest, NAME@best, PROJECT/NAME..., or a base model's name. Inside a run,
        the base model's name and the aliases refer to the newest step of the run's model. `step`
        replaces that newest step; names that contain a step keep theirs. `aliases` are those of the
        rollout. With `hold`, this waits until the engine is not paused, and counts the time until
        engine and adapter are there.
        """
        target = (aliases or {}).get(name.removesuffix("@latest"), name)
        stem, suffix = _split(target)
        # For a registered model, unless its best step, nothing is read from the disk.
        if suffix != "best" and self._models.find_or_none(stem, _project(run)) is not None:
            base_name, record, at = self._look_up(target, run, step)
        else:
            base_name, record, at = await asyncio.to_thread(self._look_up, target, run, step)
        waiting = nullcontext if hold is None else hold.waiting
        with waiting():
            if hold is not None:
                await self.engines.ready(base_name)
            base = await self.engines.base(base_name)
        with self.engines.using(base_name):
            at, adapter = await self._adapter(base, record, at, waiting)
            with base.adapters.using(adapter) if adapter else nullcontext():
                yield Policy(base, record, at or 0, adapter, name)

    async def _adapter(
        self,
        base: Base,
        record: ModelRecord | None,
        at: int | None,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> tuple[int | None, AdapterRef | None]:
        """The step and its adapter, loaded inside `waiting`; `at` None is the newest step."""
        if record is not None and at is None:
            if record.key not in base.adapters.newest:
                with waiting():
                    await self._load_newest(record, base)
            return base.adapters.newest[record.key]
        if record is None or not at:
            return at, None
        checkpoint = await asyncio.to_thread(self._checkpoints.get, record.key, at)
        with waiting():
            return at, await self._load(base, record, checkpoint)

    async def resolve(self, name: str, **more: Any) -> Policy:
        """The policy behind a name, resolved as in `using`; loads it."""
        async with self.using(name, **more) as policy:
            return policy

    async def tokenizer(self, name: str) -> tuple[BaseTokenizer, int]:
        """The tokenizer behind a name, as in `using`, and its `max_length`; loads no weights."""
        base_name, record, _ = await asyncio.to_thread(self._look_up, name, None, None)
        loaded = self.engines.loaded().get(base_name)  # knows the engine's limit, too
        base = loaded or await self.engines.tokenizer(base_name)
        limit = self.max_length(base, record)
        if record is None or not record.spec.chat_template_kwargs:
            return base, limit
        # Other arguments may load another variant of the template, which renders it.
        variant = partial(base.with_kwargs, record.spec.chat_template_kwargs)
        return await base.in_template_thread(variant), limit

    def max_length(self, base: BaseTokenizer, record: ModelRecord | None) -> int:
        """Maximum tokens of a prompt and its answer together: the least of all limits."""
        most = min(base.max_positions, self._settings.max_seq_length)
        own = None if record is None else record.spec.defaults.get("max_seq_length")
        return min(most, int(str(own or most)))

    def _look_up(
        self, name: str, run: RunSpec | None, step: int | None
    ) -> tuple[str, ModelRecord | None, int | None]:
        """The base model, the registered model, and which of its steps; None for the newest."""
        stem, at = _split(name)
        if run is not None and run.model is not None and stem in run.aliases and at == "latest":
            stem = run.model
        record, own = self._models.find_or_none(stem, _project(run)), None
        if record is None:
            stem = canonical(stem)
        if run is not None and run.model is not None and at == "latest":
            own = self._models.find(run.model) if record is None or step is not None else None
            if record is None and own is not None and own.spec.base_model == stem:
                record = own
                self._log_once(run, own)
        if record is None:
            if at not in ("latest", "0") or not self._may_use(stem):
                raise self._unknown(name, run)
            return stem, None, 0
        if at == "latest":
            return record.spec.base_model, record, step if own == record else None
        number = self._checkpoints.best(record.key) if at == "best" else int(at)
        if number is None:
            raise UnknownModel(
                f"{str(record.key)!r} has no best step: no val/reward was logged for a retained step"
            )
        return record.spec.base_model, record, number

    def _log_once(self, run: RunSpec, record: ModelRecord) -> None:
        if (run.id, record.spec.base_model) not in self._logged:
            self._logged.add((run.id, record.spec.base_model))
            say(
                "inside the run, the base model's name means the run's newest step",
                run=run.id,
                base_model=record.spec.base_model,
                model=str(record.key),
            )

    def _may_use(self, base_model: str) -> bool:
        """Whether it is allowed, and on this machine: a request downloads nothing."""
        if self._models.on_base(base_model):
            return True
        if not may_load(self._settings, base_model):
            return False
        try:
            return base_model in self.engines or bool(
                find(base_model, download=False, convert=False)
            )
        except ModelUnsupported:
            raise  # it is here, and a file of it is damaged
        except (ModelNotFound, OSError, ValueError):  # not a valid file name, so not found
            return False

    async def _load_newest(self, record: ModelRecord, base: Base) -> None:
        checkpoint = await asyncio.to_thread(self._checkpoints.newest, record.key)
        step, adapter = 0, None
        if checkpoint is not None and checkpoint.step > 0:
            step, adapter = checkpoint.step, await self._load(base, record, checkpoint)
        # A job may have published a later one meanwhile.
        base.adapters.newest.setdefault(record.key, (step, adapter))

    def _unknown(self, name: str, run: RunSpec | None) -> UnknownModel:
        alias = ""
        if run is not None and run.model is not None:
            alias = f" To have it mean {run.model!r} in a run, set finetuning.model_aliases."
        return UnknownModel(
            f"{self.not_served(name)} POST /v1/training/models registers one; a base model must be "
            "on the server's machine, and on the inference port it must be one that the server "
            f"allows (--allow-base-models).{alias}"
        )

    def not_served(self, name: str) -> str:
        """What is served instead of a name, for messages. Reads no file."""
        return (
            f"no model called {name[:200]!r} is served. Served: {near_names(name, list(self.roots()))}. "
            "GET /v1/models lists every name and step."
        )

    # ---- steps ------------------------------------------------------------------------------

    async def publish(self, record: ModelRecord, checkpoint: Checkpoint) -> AdapterRef:
        """Load a step into its engine. NAME refers to it only after `promote`."""
        base = await self.engines.base(record.spec.base_model)
        base.adapters.unproved.add(checkpoint.sha256)
        return await self._load(base, record, checkpoint)

    async def withdraw(self, record: ModelRecord, adapter: AdapterRef) -> None:
        """Unload a step that was not promoted, if its engine is open."""
        base = self.engines.loaded().get(record.spec.base_model)
        if base is not None:
            await base.adapters.withdraw(adapter)

    def release_unproved(self, base_model: str) -> None:
        """A job has ended: its engine may unload what it published, unless that was promoted."""
        if (base := self.engines.loaded().get(base_model)) is not None:
            base.adapters.unproved.clear()

    async def _load(self, base: Base, record: ModelRecord, checkpoint: Checkpoint) -> AdapterRef:
        base.check_made_for(checkpoint)
        adapter = AdapterRef(str(record.key), checkpoint.step, checkpoint.sha256)
        await base.adapters.load(adapter, checkpoint.path)
        return adapter

    def promote(self, record: ModelRecord, adapter: AdapterRef | None, step: int) -> None:
        """Make NAME refer to this step."""
        base = self.engines.loaded().get(record.spec.base_model)
        if base is not None and (adapter is None or adapter in base.adapters):
            base.adapters.promote(record.key, adapter, step)
        elif base is not None:
            # Its engine failed: the next request loads the newest checkpoint into this one.
            base.adapters.newest.pop(record.key, None)

    def rename(self, key: ModelKey, new: ModelKey) -> None:
        """Move the loaded steps of a model to another name; the old name becomes free."""
        for base in self.engines.loaded().values():
            base.adapters.rename(key, new)

    async def forget(self, key: ModelKey) -> None:
        """Unload the steps of a model that was deleted; an engine that sleeps does so when it wakes."""
        bases = self.engines.loaded().values()
        unloading = {asyncio.create_task(base.adapters.forget(key)) for base in bases}
        if unloading:
            _, late = await asyncio.wait(unloading, timeout=UNLOAD_S)
            self._unloading = late | {task for task in self._unloading if not task.done()}

    def newest(self, record: ModelRecord) -> tuple[int, AdapterRef | None]:
        """The step that NAME refers to. Reads the disk if the model is not loaded."""
        if (newest := self._loaded_newest(record)) is not None:
            return newest
        checkpoint = self._checkpoints.newest(record.key)
        if checkpoint is None or checkpoint.step == 0:
            return 0, None
        return checkpoint.step, AdapterRef(str(record.key), checkpoint.step, checkpoint.sha256)

    def _loaded_newest(self, record: ModelRecord) -> tuple[int, AdapterRef | None] | None:
        base = self.engines.loaded().get(record.spec.base_model)
        return None if base is None else base.adapters.newest.get(record.key)

    def base_models(self) -> dict[str, bool]:
        """Base models in use, and whether each is loaded. Blocking."""
        known = (record.spec.base_model for record in self._models.list())
        loaded = self.engines.loaded()
        return {name: name in loaded for name in sorted({*known, *loaded})}

    def on_gpu_of(self, base_model: str) -> dict[str, bool]:
        """Base models in use, and whether their engine is on the GPU of this one's learner. Blocking."""
        trainer = self.choice.gpus(base_model).trainer

        def shares(name: str) -> bool:
            try:
                return trainer in self.choice.gpus(name).inference
            except ConfigError:  # it names GPUs that are not there, so its engine does not open
                return False

        return {name: shares(name) for name in self.base_models()}

    def served(
        self, run: RunSpec | None = None, aliases: Mapping[str, str] | None = None
    ) -> list[ServedName]:
        """Every name that the current request may use. Blocking: reads the disk."""
        names, aliases = self._served(), aliases or {}
        for alias in dict.fromkeys([*(() if run is None else run.aliases), *aliases]):
            try:
                base, record, step = self._look_up(aliases.get(alias, alias), run, None)
            except (NotFound, Conflict):  # only this alias fails; other names are served
                continue
            if record is not None and step is None:
                step, _ = self.newest(record)
            created = 0.0 if record is None else record.created_at
            names.append(ServedName(alias, base, step or 0, created))
        return names

    def served_name(
        self, name: str, run: RunSpec | None = None, aliases: Mapping[str, str] | None = None
    ) -> ServedName:
        """One name, also PROJECT/NAME where the list has the NAME. Raises UnknownModel, Conflict."""
        served = {entry.id: entry for entry in self.served(run, aliases)}
        if name not in served:
            stem = _split(name)[0]
            record = self._models.find_or_none(stem, _project(run))
            listed = "" if record is None else self._names([record])[0] + name.removeprefix(stem)
            if listed not in served:
                raise UnknownModel(self.not_served(name))
            return replace(served[listed], id=name)
        return served[name]

    def _served(self) -> list[ServedName]:
        """The names of models and steps, by the names of directories: no manifest is read."""
        records, names = self._models.list(), list[ServedName]()
        for record, name in zip(records, self._names(records), strict=True):
            root, created = record.spec.base_model, record.created_at
            steps = self._checkpoints.steps(record.key)
            newest = self._loaded_newest(record)
            number = max(steps, default=0) if newest is None else newest[0]
            at: list[tuple[str, int]] = [("", number), ("@latest", number)]
            best = self._checkpoints.best(record.key)
            at += [("@best", best)] if best is not None else []
            at += [(f"@{step}", step) for step in sorted({0, number, *steps})]
            names += [
                ServedName(name + suffix, root, step, steps.get(step, created))
                for suffix, step in at
            ]
        created = {record.spec.base_model: record.created_at for record in reversed(records)}
        return names + [
            ServedName(base, base, 0, created.get(base, 0.0)) for base in self._bases(records)
        ]

    def roots(self) -> dict[str, str]:
        """The base model of every model and base model that is served, by name. Reads no file."""
        records = self._models.list()
        named = zip(self._names(records), records, strict=True)
        roots = {name: record.spec.base_model for name, record in named}
        return roots | {base: base for base in self._bases(records)}

    def _names(self, records: list[ModelRecord]) -> list[str]:
        """NAME where it means this model, otherwise PROJECT/NAME."""
        keys, within = [record.key for record in records], project.get()
        short = self._models.short_name
        return [key.name if key.project == within else short(key) for key in keys]

    def _bases(self, records: list[ModelRecord]) -> list[str]:
        used = [record.spec.base_model for record in records]
        loaded = [name for name in self.engines.loaded() if may_load(self._settings, name)]
        allowed = [name for name in self._settings.allow_base_models or () if name != "*"]
        return list(dict.fromkeys([*reversed(used), *loaded, *map(canonical, allowed)]))

    # ---- concurrency ------------------------------------------------------------------------

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as being answered while the block runs. Raises Busy if there are too many."""
        if self._answering >= self._settings.max_concurrent:
            raise Busy(
                f"{self._answering} requests are being answered, the maximum of this server "
                "(max_concurrent); try again in a second"
            )
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    @asynccontextmanager
    async def paused_for_training(self, base_model: str) -> AsyncIterator[dict[str, float]]:
        """Requests wait while the block runs: all if so configured, or those to engines on this GPU.

        Yields a mapping, which has the metric of how long after the block.
        """
        metrics: dict[str, float] = {}
        choice = self._settings.serving_during_training
        shares = await in_own_thread(self.on_gpu_of, base_model)
        if choice == "continue" or (choice is None and not any(shares.values())):
            yield metrics
            return
        served = {name for name, shared in shares.items() if not shared and choice is None}
        began = time.monotonic()
        async with self.engines.paused(served):
            yield metrics
        metrics["serve/held_s"] = time.monotonic() - began

    def register(self, spec: ModelSpec) -> None:
        """Check the engine_args of a model as it is stored; reopen an engine with others. Blocking."""
        if self.choice.register(spec, self.engines.in_use(spec.base_model)):
            self.engines.outdated.add(spec.base_model)

    async def close(self) -> None:
        """Close every engine and cancel running loads."""
        await in_own_thread(self.choice.close)
        await self.engines.close()

    async def drain(self, deadline_s: float) -> None:
        """Wait until no request is being answered, so that all are recorded."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline_s)


def _project(run: RunSpec | None) -> str | None:
    """The project in which names are looked up first: the address's, else that of the run's model."""
    if project.get() is None and run is not None and run.model is not None and "/" in run.model:
        return run.model.partition("/")[0]
    return project.get()


def _split(name: str) -> tuple[str, str]:
    """A model's name, and what follows its @: `latest`, `best` or a number; latest without any."""
    match = _AT.fullmatch(name)
    return (match["stem"], match["at"]) if match else (name, "latest")
