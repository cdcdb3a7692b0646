"""The engine of each base model: opened once, started again when it fails, closed when idle.

In:   names of base models
Out:  Bases: a base model's Language with its engine

All who ask for a base model share one load. An engine that failed is replaced as soon as somebody
notices: its requests have failed by then, and who asks meanwhile waits for the new one. Engines that
fail again and again are opened at growing intervals; requests between two attempts are refused.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hone.errors import Unavailable
from hone.inference.base import Engine
from hone.logs import say
from hone.server.language import Language
from hone.server.settings import Settings
from hone.server.supervision import Part, backoff_s

T = TypeVar("T")

STEADY_S = 60.0
"""An engine that worked for so long has no earlier failures."""


@dataclass(frozen=True, eq=False)
class Base(Language):
    """A base model that is loaded."""

    engine: Engine


class Engines:
    """Engines and templates by base model. For one event loop."""

    def __init__(
        self,
        settings: Settings,
        open_engine: Callable[[str], Engine],
        *,
        opened: Callable[[Engine], Awaitable[None]],
        lost: Callable[[str], None],
        restore: Callable[[str], Awaitable[None]],
    ) -> None:
        """`open_engine` loads a base model by name; it runs in a thread.

        `opened` is awaited with every new engine. `lost` is called with the base model whose engine
        is gone with all its adapters, `restore` once another has taken the place of one that failed.
        """
        self._settings = settings
        self._open_engine = open_engine
        self._opened, self._lost, self._restore = opened, lost, restore
        self._languages: dict[str, asyncio.Task[Language]] = {}
        self._bases: dict[str, asyncio.Task[Base]] = {}
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}
        self._opened_at: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}
        self._parts: dict[str, Part] = {}
        self._restarts: set[asyncio.Task[None]] = set()

    async def template(self, base_model: str) -> Language:
        """How a base model is talked to; its weights are not loaded."""
        load = lambda: asyncio.to_thread(Language.load, base_model, self._settings.root)  # noqa: E731
        return await once(self._languages, base_model, load)

    async def get(self, base_model: str) -> Base:
        """A base model with its engine. All who ask share one load; a failed one may be retried."""
        self._check(base_model)
        wait_s = self._retry_at.get(base_model, 0.0) - time.monotonic()
        if wait_s > 0:
            part = self._parts[base_model]
            raise Unavailable(
                f"the engine of {base_model!r} failed {part.failures} times in a row "
                f"({part.reason}); it is started again in {wait_s:.0f} s"
            )
        base = await once(self._bases, base_model, lambda: self._open(base_model))
        self._used_at[base_model] = time.monotonic()
        return base

    def __contains__(self, base_model: str) -> bool:
        """Whether it is loaded, or is being loaded."""
        return base_model in self._bases

    def loaded(self) -> list[Base]:
        tasks = [t for t in list(self._bases.values()) if t.done() and not t.cancelled()]
        return [task.result() for task in tasks if task.exception() is None]

    @contextmanager
    def using(self, base_model: str) -> Iterator[None]:
        """Keep the engine open while the block runs, and notice at its end if it failed."""
        self._users[base_model] += 1
        try:
            yield
        finally:
            self._users[base_model] -= 1
            self._used_at[base_model] = time.monotonic()
            self._check(base_model)

    async def close_idle(self, idle_s: float) -> None:
        """Close engines that nobody has used for so long; the next request opens another."""
        for base in self.loaded():
            idle = time.monotonic() > self._used_at[base.name] + idle_s
            if idle and not self._users[base.name]:
                del self._bases[base.name]
                self._lost(base.name)
                await base.engine.close()
                say("engine closed: it was idle", base_model=base.name, idle_s=idle_s)

    async def close(self) -> None:
        """Close every engine; loads under way are let go."""
        for task in (*self._restarts, *self._languages.values(), *self._bases.values()):
            task.cancel()
        await asyncio.gather(*(base.engine.close() for base in self.loaded()))
        self._bases.clear()

    def status(self) -> dict[str, Any]:
        """Whether every engine that was opened works."""
        for base in self.loaded():
            self._check(base.name)
        failing = {name: p.status() for name, p in self._parts.items() if p.reason is not None}
        if not failing:
            return {"status": "ok"}
        reason = "; ".join(f"{name}: {said['reason']}" for name, said in failing.items())
        return {"status": "restarting", "reason": reason}

    # ---- opening, and opening again ---------------------------------------------------------

    async def _open(self, base_model: str) -> Base:
        language = await self.template(base_model)
        say("loading", base_model=base_model)
        engine = await asyncio.to_thread(self._open_engine, base_model)
        await self._opened(engine)
        self._opened_at[base_model] = self._used_at[base_model] = time.monotonic()
        say("loaded", base_model=base_model)
        fields = {name: getattr(language, name) for name in Language.__dataclass_fields__}
        return Base(**fields, engine=engine)

    def _check(self, base_model: str) -> None:
        """If the engine has failed: forget it, and start another."""
        base = next((base for base in self.loaded() if base.name == base_model), None)
        if base is None or (failure := base.engine.failure) is None:
            return
        part = self._parts.setdefault(base_model, Part(f"engine of {base_model}"))
        if time.monotonic() > self._opened_at[base_model] + STEADY_S:
            part.recover()
        part.fail(failure)
        failure.__traceback__ = None  # it is logged; its frames would keep the old weights alive
        del self._bases[base_model]
        self._lost(base_model)
        self._wait(base_model, part)
        restart = asyncio.create_task(self._restart(base, part))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    def _wait(self, base_model: str, part: Part) -> None:
        """Set the time of the next attempt: at once after the first failure, later after more."""
        delay_s = backoff_s(part.failures - 1) if part.failures > 1 else 0.0
        self._retry_at[base_model] = time.monotonic() + delay_s

    async def _restart(self, base: Base, part: Part) -> None:
        await base.engine.close()
        while True:
            await asyncio.sleep(max(0.0, self._retry_at[base.name] - time.monotonic()))
            try:
                await self.get(base.name)
                await self._restore(base.name)
            except Exception as error:  # noqa: BLE001  foreign code loads it: told, and tried again
                part.fail(error)
                self._wait(base.name, part)
            else:
                part.reason = None  # its failures count until it has worked for STEADY_S
                say("engine started again", base_model=base.name)
                return


async def once(
    under_way: dict[Any, asyncio.Task[T]], key: Hashable, make: Callable[[], Awaitable[T]]
) -> T:
    """What `make` returns, made once for all who ask; forgotten if it failed."""

    def forget(task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            under_way.pop(key, None)

    task = under_way.get(key)
    if task is None:
        task = under_way[key] = asyncio.create_task(_awaited(make))
        task.add_done_callback(forget)
    # Shielded: one client that leaves must not take the load from the others.
    return await asyncio.shield(task)


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()
