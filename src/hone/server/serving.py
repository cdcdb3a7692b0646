"""Serving: which weights answer to which model name.

In:   registered models, checkpoints, the names clients ask for
Out:  Policies: a base model's engine, and the adapter of one step in it

Nothing is loaded before it is needed, and nothing twice. NAME means a step from when it is promoted,
not from when it is loaded: in between the engine must prove that it serves it. Adapters in use, the
newest ones, and those still to be proved are never unloaded.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from hone.errors import Busy, ModelNotFound, NotFound, UnknownModel
from hone.inference.base import AdapterRef, Engine
from hone.logs import say
from hone.models.find import canonical, find
from hone.server.auth import may_load
from hone.server.engines import Base, Engines, once
from hone.server.settings import Settings
from hone.store.checkpoints import Checkpoint, Checkpoints
from hone.store.models import ModelRecord, ModelStore
from hone.types import ModelKey, RunSpec

_AT = re.compile(r"(?P<stem>.+)@(?P<at>latest|best|[0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True)
class Policy:
    """What answers a request."""

    base: Base
    record: ModelRecord | None
    """None for the base model itself."""
    step: int
    adapter: AdapterRef | None
    """None for the base weights."""
    asked: str
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


@dataclass(frozen=True, slots=True)
class _BaseName:
    """A base model by its canonical name."""

    name: str
    trained: bool
    """Registered models are trained over it."""
    allowed: bool
    """The request that is being answered may use it."""


class Serving:
    """The engines, and what a model name means in a request."""

    def __init__(
        self,
        models: ModelStore,
        checkpoints: Checkpoints,
        settings: Settings,
        open_engine: Callable[[str], Engine] | None = None,
    ) -> None:
        """`open_engine` loads a base model by name; it runs in a thread."""
        self._models = models
        self._checkpoints = checkpoints
        self._settings = settings
        open_engine = open_engine or (lambda name: open_embedded(name, settings))
        engines = self._engines = Engines(settings, open_engine, self._restore)
        self.template, self.base = engines.template, engines.get
        self.paused, self.ready = engines.paused, engines.ready
        self.pause, self.resume = engines.pause, engines.resume
        self.holding, self.close_idle = engines.using, engines.close_idle
        self.status = engines.status
        self._logged: set[tuple[str, str]] = set()
        """Runs and base models for which the log says what the base model's name means."""
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- names ------------------------------------------------------------------------------

    async def resolve(
        self,
        name: str,
        *,
        rollout: str | None = None,
        run: RunSpec | None = None,
        step: int | None = None,
    ) -> Policy:
        """NAME, NAME@N, NAME@latest, NAME@best, PROJECT/NAME..., or a base model's name.

        Inside a run, the name of its model's base means that model's newest step. `step` stands in
        for the newest step of the run's model; names with a step of their own keep it.
        """
        match = _AT.fullmatch(name)
        stem, at = (match["stem"], match["at"]) if match else (name, None)
        # One thread for all lookups: each costs a third of a millisecond.
        record, base = await asyncio.to_thread(self._named, stem)
        newest = None if step is None else str(step)
        if record is not None:
            if newest and at in (None, "latest") and run is not None and run.model is not None:
                own = await asyncio.to_thread(self._models.find, run.model)
                at = newest if own.key == record.key else at
            return await self._of_record(record, at, asked=name)
        stem = base.name
        if at in (None, "latest") and rollout and run is not None and run.model is not None:
            record = await asyncio.to_thread(self._models.find, run.model)
            if record.spec.base_model == stem:
                if (run.id, stem) not in self._logged:
                    self._logged.add((run.id, stem))
                    say(
                        "inside the run, the base model's name means the run's newest step",
                        run=run.id,
                        base_model=stem,
                        model=str(record.key),
                    )
                return await self._of_record(record, newest, asked=name)
        if at not in (None, "latest", "0"):
            raise await asyncio.to_thread(self._unknown, name)
        await self._check_base(base, name)
        return Policy(await self.base(stem), None, 0, None, name)

    def _named(self, name: str) -> tuple[ModelRecord | None, "_BaseName"]:
        """The registered model of that name, and what the name means as one of a base model."""
        try:
            return self._models.find(name), _BaseName(name, trained=False, allowed=False)
        except NotFound:
            base = canonical(name)
        trained = bool(self._models.on_base(base))
        return None, _BaseName(base, trained, trained or may_load(self._settings, base))

    async def _of_record(self, record: ModelRecord, at: str | None, *, asked: str) -> Policy:
        base = await self.base(record.spec.base_model)
        if at in (None, "latest"):
            step, adapter = await self._current(record, base)
            return Policy(base, record, step, adapter, asked)
        step = await self._best(record) if at == "best" else int(at or 0)
        if step == 0:
            return Policy(base, record, 0, None, asked)
        newest, adapter = base.adapters.newest.get(record.key, (0, None))
        if step != newest:
            checkpoint = await asyncio.to_thread(self._checkpoints.get, record.key, step)
            adapter = await self._load(base, record, checkpoint)
        return Policy(base, record, step, adapter, asked)

    async def _best(self, record: ModelRecord) -> int:
        step = await asyncio.to_thread(self._checkpoints.best, record.key)
        if step is None:
            raise UnknownModel(
                f"{str(record.key)!r} has no best step: no val/reward was logged for a retained step"
            )
        return step

    async def _current(self, record: ModelRecord, base: Base) -> tuple[int, AdapterRef | None]:
        """The newest step; the first caller loads the newest good checkpoint."""
        adapters = base.adapters
        if record.key not in adapters.newest:
            await once(adapters.first_loads, record.key, lambda: self._load_newest(record, base))
        return adapters.newest[record.key]

    async def _load_newest(self, record: ModelRecord, base: Base) -> None:
        checkpoint = await asyncio.to_thread(self._checkpoints.newest, record.key)
        step, adapter = 0, None
        if checkpoint is not None and checkpoint.step > 0:
            step, adapter = checkpoint.step, await self._load(base, record, checkpoint)
        # A job may have published a later one meanwhile.
        base.adapters.newest.setdefault(record.key, (step, adapter))

    async def _check_base(self, base: "_BaseName", asked: str) -> None:
        """Refuse a name that is not allowed, or not on this machine: a request downloads nothing."""
        if not base.allowed:
            raise await asyncio.to_thread(self._unknown, asked)
        if base.trained or base.name in self._engines:
            return
        try:
            await asyncio.to_thread(find, base.name, download=False)
        except (ModelNotFound, OSError, ValueError):  # a name no path can have is not found either
            raise await asyncio.to_thread(self._unknown, asked) from None

    def _unknown(self, name: str) -> UnknownModel:
        names = ", ".join(served.id for served in self.served()) or "nothing yet"
        return UnknownModel(
            f"no model called {name[:200]!r} is served. Served: {names}. POST /v1/training/models "
            "registers one; a base model must be on the server's machine, and on the inference port "
            "it must be one that the server allows (--allow-base-models)."
        )

    # ---- steps ------------------------------------------------------------------------------

    async def publish(self, record: ModelRecord, checkpoint: Checkpoint) -> AdapterRef:
        """Load a step into its engine. It becomes what NAME means only by `promote`."""
        return await self._load(await self.base(record.spec.base_model), record, checkpoint)

    async def _load(self, base: Base, record: ModelRecord, checkpoint: Checkpoint) -> AdapterRef:
        base.check_made_for(checkpoint)
        adapter = AdapterRef(str(record.key), checkpoint.step, checkpoint.sha256)
        await base.adapters.load(adapter, checkpoint.path)
        return adapter

    def promote(self, record: ModelRecord, adapter: AdapterRef | None, step: int) -> None:
        """From now on NAME means this step."""
        base = self._engines.loaded().get(record.spec.base_model)
        if base is not None:  # else its engine failed, and the next one loads the newest checkpoint
            base.adapters.newest[record.key] = (step, adapter)

    async def _restore(self, failed: Base) -> None:
        """Load, into a new engine, the newest step of every model that the failed one served."""
        for key in list(failed.adapters.newest):
            with contextlib.suppress(NotFound):  # renamed since
                record = await asyncio.to_thread(self._models.get, key)
                await self._current(record, await self.base(failed.name))

    def rename(self, key: ModelKey, new: ModelKey) -> None:
        """The loaded steps of a model belong to another name; the old one may be registered anew."""
        for base in self._engines.loaded().values():
            base.adapters.rename(key, new)

    def newest(self, record: ModelRecord) -> tuple[int, AdapterRef | None]:
        """The step NAME means. Reads the disk if the model is not loaded."""
        base = self._engines.loaded().get(record.spec.base_model)
        if base is not None and record.key in base.adapters.newest:
            return base.adapters.newest[record.key]
        checkpoint = self._checkpoints.newest(record.key)
        if checkpoint is None or checkpoint.step == 0:
            return 0, None
        return checkpoint.step, AdapterRef(str(record.key), checkpoint.step, checkpoint.sha256)

    @contextlib.asynccontextmanager
    async def using(self, policy: Policy) -> AsyncIterator[None]:
        """Keep a policy's engine open, and its adapter loaded, while the block runs."""
        adapter = policy.adapter
        with self.holding(policy.base.name):
            if adapter is None:
                yield
                return
            assert policy.record is not None, policy
            adapters = policy.base.adapters
            while adapter not in adapters:  # unloaded since it was resolved
                checkpoint = await asyncio.to_thread(
                    self._checkpoints.get, policy.record.key, policy.step
                )
                await self._load(policy.base, policy.record, checkpoint)
            with adapters.using(adapter):
                yield

    def base_models(self) -> dict[str, bool]:
        """Base models in use, and whether each is loaded. Blocking."""
        known = (record.spec.base_model for record in self._models.list())
        loaded = self._engines.loaded()
        return {name: name in loaded for name in sorted({*known, *loaded})}

    def served(self) -> list[ServedName]:
        """Every name that the current request may use. Blocking: reads the disk."""
        records = self._models.list()
        uses = Counter(record.key.name for record in records)
        names: list[ServedName] = []
        for record in records:
            name = record.key.name if uses[record.key.name] == 1 else str(record.key)
            root, created = record.spec.base_model, record.created_at
            newest, _ = self.newest(record)
            steps = {c.step: c.manifest["created_at"] for c in self._checkpoints.list(record.key)}
            at: list[tuple[str, int]] = [("", newest), ("@latest", newest)]
            best = self._checkpoints.best(record.key)
            at += [("@best", best)] if best is not None else []
            at += [(f"@{step}", step) for step in sorted({0, newest, *steps})]
            names += [
                ServedName(name + suffix, root, step, steps.get(step, created))
                for suffix, step in at
            ]
        bases = {record.spec.base_model: record.created_at for record in reversed(records)}
        loaded = [name for name in self._engines.loaded() if may_load(self._settings, name)]
        allowed = [name for name in self._settings.allow_base_models or () if name != "*"]
        for base in dict.fromkeys([*bases, *loaded, *map(canonical, allowed)]):
            names.append(ServedName(base, base, 0, bases.get(base, 0.0)))
        return names

    # ---- concurrency ------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as being answered while the block runs. Raises Busy if there are too many."""
        if self._answering >= self._settings.max_concurrent:
            raise Busy(
                f"{self._answering} requests are being answered, the most this server takes at "
                "once (max_concurrent); try again in a second"
            )
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    async def drain(self, deadline_s: float) -> None:
        """Wait until no request is being answered, so that all are recorded."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline_s)

    async def close(self) -> None:
        """Close every engine and cancel the loads under way."""
        for base in self._engines.loaded().values():
            for task in base.adapters.first_loads.values():
                task.cancel()
        await self._engines.close()


def open_embedded(name: str, settings: Settings) -> Engine:
    # Here, because torch takes seconds to load and `hone serve` is up without it.
    from hone.inference.embedded import EmbeddedEngine
    from hone.models.machine import choose

    device, dtype = choose(settings.device)
    return EmbeddedEngine.open(name, device=device, dtype=dtype)
