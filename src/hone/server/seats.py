"""The adapters that one engine holds.

In:   adapters to be loaded, and which of those there may not leave
Out:  an engine that holds them, and no more than it should

An adapter is its hash: what is loaded under a hash is never loaded again, so one that the engine
does not really serve must leave, or the next publish of the same hash would change nothing.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hone.inference.base import AdapterRef, Engine


class Seats:
    """Adapters in an engine, least recently used first. For one event loop."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._loaded: OrderedDict[str, AdapterRef] = OrderedDict()
        self._users: Counter[str] = Counter()
        # Held while an adapter is loaded or unloaded, so that no unload overtakes a load.
        self._changing = asyncio.Lock()

    def __contains__(self, adapter: AdapterRef) -> bool:
        return adapter.sha256 in self._loaded

    @property
    def loaded(self) -> list[AdapterRef]:
        return list(self._loaded.values())

    async def load(
        self, adapter: AdapterRef, directory: Path, *, needed: Callable[[AdapterRef], bool]
    ) -> None:
        """Put an adapter in; what is too many leaves, but never one in use or `needed`."""
        async with self._changing:
            if adapter not in self:
                await self._engine.publish(adapter, directory)
            self._loaded[adapter.sha256] = adapter
            self._loaded.move_to_end(adapter.sha256)
            for sha256, other in list(self._loaded.items()):
                if len(self._loaded) <= self._most:
                    return
                if other != adapter and not self._users[sha256] and not needed(other):
                    await self._unload(other)

    async def unload(self, adapter: AdapterRef) -> None:
        async with self._changing:
            if adapter in self:
                await self._unload(adapter)

    async def _unload(self, adapter: AdapterRef) -> None:
        del self._loaded[adapter.sha256]
        await self._engine.unload(adapter)

    @contextmanager
    def using(self, adapter: AdapterRef) -> Iterator[None]:
        """Keep it in while the block runs."""
        self._loaded.move_to_end(adapter.sha256)
        self._users[adapter.sha256] += 1
        try:
            yield
        finally:
            self._users[adapter.sha256] -= 1

    def rename(self, model: str, new: str) -> None:
        """A model has another name; its adapters stay what they are."""
        for sha256, adapter in self._loaded.items():
            if adapter.model == model:
                self._loaded[sha256] = replace(adapter, model=new)
