"""The adapters in one engine: loaded once, unloaded least recently used first.

In:   adapters of checkpoints
Out:  which hashes the engine holds, and the promoted step of every model

Adapters in use, promoted ones and those not yet proved are never unloaded.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hone.errors import EngineError
from hone.files.logs import log, write_output
from hone.inference.base import AdapterRef, Engine
from hone.types import ModelKey

_write = partial(write_output, "engine")


class Adapters:
    """The adapters in one engine, least recently used first. For one event loop.

    An adapter is identified by its hash. A hash that is loaded is never loaded again, so an adapter
    that the engine does not really serve must be unloaded, or publishing it again would do nothing.
    """

    def __init__(self, engine: Engine, max_adapters: int) -> None:
        self._engine = engine
        self._max = max_adapters
        self._loaded: OrderedDict[str, AdapterRef] = OrderedDict()
        self._users: Counter[str] = Counter()
        # Held while an adapter is loaded or unloaded, so that no unload overtakes a load.
        self._changing = asyncio.Lock()
        self._unloading: asyncio.Task[None] | None = None
        self.unproved: set[str] = set()
        """Published by the running job of this base model (one at a time), until it ends."""
        self.newest: dict[ModelKey, tuple[int, AdapterRef | None]] = {}
        """The promoted step of every model; None for step 0, which is the base weights."""

    def __contains__(self, adapter: AdapterRef) -> bool:
        return adapter.sha256 in self._loaded

    async def load(self, adapter: AdapterRef, directory: Path) -> None:
        """Load an adapter. Others, above the limit and not needed, are unloaded after the return."""
        async with self._changing:
            if adapter not in self:
                began = time.monotonic()
                await self._engine.publish(adapter, directory)
                _write(f"loaded {_name(adapter)} in {time.monotonic() - began:.2f} s")
            self._loaded[adapter.sha256] = adapter
            self._loaded.move_to_end(adapter.sha256)
        if len(self._loaded) > self._max and (self._unloading is None or self._unloading.done()):
            self._unloading = asyncio.create_task(self._unload_unneeded())

    async def _unload_unneeded(self) -> None:
        """Unload adapters above the limit that are neither in use nor needed; loads wait."""
        async with self._changing:
            needed = self._promoted() | self.unproved | set(+self._users)
            # The last one was just requested.
            unneeded = [sha256 for sha256 in list(self._loaded)[:-1] if sha256 not in needed]
            for sha256 in unneeded[: max(len(self._loaded) - self._max, 0)]:
                try:
                    await self._unload(sha256)
                except EngineError as error:
                    log.warning("an adapter was not unloaded", exc_info=error)

    def promote(self, key: ModelKey, adapter: AdapterRef | None, step: int) -> None:
        self.newest[key] = (step, adapter)

    async def withdraw(self, adapter: AdapterRef) -> None:
        """Unload a step that was not proved; a promoted one stays."""
        async with self._changing:
            if adapter in self and adapter.sha256 not in self._promoted():
                await self._unload(adapter.sha256)

    async def _unload(self, sha256: str) -> None:
        adapter = self._loaded.pop(sha256)
        await self._engine.unload(adapter)
        _write(f"unloaded {_name(adapter)}")

    def _promoted(self) -> set[str]:
        return {adapter.sha256 for _, adapter in self.newest.values() if adapter is not None}

    @contextmanager
    def using(self, adapter: AdapterRef) -> Iterator[None]:
        """Keep it loaded while the block runs."""
        self._loaded.move_to_end(adapter.sha256)
        self._users[adapter.sha256] += 1
        try:
            yield
        finally:
            self._users[adapter.sha256] -= 1

    async def forget(self, key: ModelKey) -> None:
        """Forget a deleted model, and unload its adapters that no request uses."""
        self.newest.pop(key, None)
        async with self._changing:
            needed = self._promoted() | self.unproved | set(+self._users)
            for sha256, adapter in list(self._loaded.items()):
                if adapter.model == str(key) and sha256 not in needed:
                    try:
                        await self._unload(sha256)
                    except EngineError as error:
                        log.warning("an adapter was not unloaded", exc_info=error)

    def rename(self, key: ModelKey, new: ModelKey) -> None:
        """Move the newest step of a model to another name."""
        if key in self.newest:
            step, adapter = self.newest.pop(key)
            self.newest[new] = step, adapter and replace(adapter, model=str(new))


def _name(adapter: AdapterRef) -> str:
    return f"{adapter.model}@{adapter.step} ({adapter.sha256[:12]})"
