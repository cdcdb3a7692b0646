"""One engine for each base model, with its adapters: opened once, paused, restarted, closed.

In:   names of base models; adapters to load; pauses
Out:  Bases: a base model's BaseTokenizer with its engine and the adapters in it

Concurrent requests for a base model share one load. A failed engine is replaced as soon as the
failure is detected: its requests have failed by then, and new ones wait for the next engine. An
engine that fails repeatedly is reopened at growing intervals; requests between two attempts are
refused.

While a job trains on the device that an engine uses, the engine sleeps and its requests wait, up to
a time limit. It is not opened meanwhile: the learner has the memory. Pauses are counted: when the
last one of an engine ends, for whatever reason, requests continue, even if it does not wake.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from hone.errors import EngineError, Unavailable
from hone.files.logs import log, say, write_output
from hone.inference.background import in_own_thread
from hone.inference.base import Engine, EngineStats
from hone.server.serve.adapters import Adapters
from hone.server.serve.holds import Hold
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.settings import Settings
from hone.server.supervision import Part, backoff_s, shared_task

STEADY_S = 60.0
"""Earlier failures of an engine are forgotten after it has worked for this long."""


@dataclass(frozen=True, eq=False)
class Base(BaseTokenizer):
    """A base model that is loaded."""

    engine: Engine
    adapters: Adapters


@dataclass(slots=True)
class _Usage:
    """How the engine of one base model is used, and how it failed."""

    part: Part
    users: int = 0
    used_at: float = 0.0
    opened_at: float = 0.0
    retry_at: float = 0.0
    """When it may be opened again after a failure."""
    old: Engine | None = None
    """Closed before the next one is opened: there may be no memory for both."""
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while `old` is closed."""
    restart: asyncio.TimerHandle | None = None
    stats: tuple[float, EngineStats] | None = None
    """When its statistics were last written to engine.log, and which."""
    switching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engine goes to sleep or wakes: both take seconds, and two jobs may train."""
    asleep: bool = False
    sampling: set[Hold] = field(default_factory=set[Hold])
    """Requests in the engine; while it sleeps, they wait."""

    def switch(self, *, asleep: bool) -> None:
        """Mark the engine as asleep or awake."""
        self.asleep = asleep
        for hold in self.sampling:
            hold.begin() if asleep else hold.end()


class Engines:
    """Engines and templates by base model. For one event loop."""

    def __init__(self, settings: Settings, open_engine: Callable[[str], Engine]) -> None:
        """`open_engine` loads a base model by name; it runs in a thread."""
        self._settings = settings
        self._open_engine = open_engine
        self._tokenizers: dict[str, asyncio.Task[BaseTokenizer]] = {}
        self._bases: dict[str, asyncio.Task[Base]] = {}
        self._usage: dict[str, _Usage] = {}
        self.outdated: set[str] = set()
        """Base models whose engine is reopened with other arguments when no request uses it."""
        self._pauses: list[Collection[str]] = []
        """For each pause, the base models that are not paused."""
        self._resumed = asyncio.Event()
        """Set at the end of a pause, and then replaced."""
        self._opening: dict[asyncio.Task[Engine], str] = {}

    async def tokenizer(self, base_model: str) -> BaseTokenizer:
        """The tokenizer and chat template of a base model; its weights are not loaded."""
        load = lambda: in_own_thread(BaseTokenizer.load, base_model, self._settings.root)  # noqa: E731
        # Shielded, here and below: a client that disconnects must not cancel the load for all.
        return await asyncio.shield(shared_task(self._tokenizers, base_model, load))

    async def base(self, base_model: str) -> Base:
        """A base model with its engine. All callers share one load; a failed load may be retried.

        Raises Unavailable if it takes longer than `hold_s`; the load goes on.
        """
        base = self._loaded(base_model)
        if base and base.engine.failure is None and base_model not in self.outdated:
            self._usage_of(base_model).used_at = time.monotonic()
            return base
        hold_s = self._settings.hold_s
        try:
            async with asyncio.timeout(hold_s):
                return await self._newest(base_model)
        except TimeoutError:
            still = f"the engine of {base_model!r} is still being loaded after {hold_s:g} s"
            raise Unavailable(f"{still}; try again later") from None

    async def _newest(self, base_model: str) -> Base:
        """The base model once its engine is loaded and has the newest arguments."""
        usage = self._usage_of(base_model)
        while True:
            self._check(base_model)
            self._drop_outdated(base_model)
            wait_s = usage.retry_at - time.monotonic()
            if wait_s > 0:
                raise Unavailable(
                    f"the engine of {base_model!r} failed {usage.part.failures} times in a row "
                    f"({usage.part.reason}); it is started again in {wait_s:.0f} s"
                )
            load = self._start(base_model)
            base = await asyncio.shield(load)
            # Another may have replaced it, or its arguments may have changed, while it was loaded.
            replaced = self._bases.get(base_model) is not load
            if not replaced and (base_model not in self.outdated or usage.users):
                usage.used_at = time.monotonic()
                return base

    def _drop_outdated(self, base_model: str) -> None:
        """Close an engine with old arguments if no request uses it; the next one opens another."""
        load, usage = self._bases.get(base_model), self._usage_of(base_model)
        if base_model not in self.outdated or usage.users or (load and not load.done()):
            return
        self.outdated.discard(base_model)
        if (base := self.loaded().get(base_model)) is not None:
            usage.old = base.engine  # closed before the next one opens
            del self._bases[base_model]

    def __contains__(self, base_model: str) -> bool:
        """Whether it is loaded, or is being loaded."""
        return base_model in self._bases

    def loaded(self) -> dict[str, Base]:
        """The base models that are loaded, by name."""
        return {name: base for name in list(self._bases) if (base := self._loaded(name))}

    def _loaded(self, base_model: str) -> Base | None:
        load = self._bases.get(base_model)
        if load is None or not load.done() or load.cancelled() or load.exception() is not None:
            return None
        return load.result()

    @contextmanager
    def using(self, base_model: str) -> Iterator[None]:
        """Keep the engine open while the block runs, and notice at its end if it failed."""
        usage = self._usage_of(base_model)
        usage.users += 1
        try:
            yield
        finally:
            usage.users -= 1
            usage.used_at = time.monotonic()
            self._check(base_model)

    @contextmanager
    def sampling(self, base_model: str, hold: Hold) -> Iterator[None]:
        """The engine has the request while the block runs; it is held whenever the engine sleeps.

        An engine finishes what it samples before it sleeps. A request that came later waits in it.
        """
        usage = self._usage_of(base_model)
        usage.sampling.add(hold)
        if usage.asleep:
            hold.begin()
        try:
            yield
        finally:
            usage.sampling.discard(hold)
            hold.end()

    def in_use(self, base_model: str) -> bool:
        return self._usage_of(base_model).users > 0

    async def close_idle(self, idle_s: float) -> None:
        """Close engines that have been idle for this long; the next request opens another."""
        for name, base in self.loaded().items():
            usage = self._usage_of(name)
            if self._loaded(name) is not base:  # replaced while another one was closed
                continue
            if not usage.users and time.monotonic() > usage.used_at + idle_s:
                del self._bases[name]
                usage.old = base.engine
                await self._close_old(usage)
                say("engine closed: it was idle", base_model=name, idle_s=idle_s)

    async def log_stats(self) -> None:
        """Write the statistics of every engine to engine.log, if they changed."""
        for name, base in self.loaded().items():
            usage, now, stats = self._usage_of(name), time.monotonic(), base.engine.stats()
            if usage.stats is not None and usage.stats[1] == stats:
                continue
            before, then = (usage.stats[1], usage.stats[0]) if usage.stats else (None, now)
            sampled = stats.sampled_tokens - (before.sampled_tokens if before else 0)
            speed = f"; {sampled / (now - then):.0f} tokens/s" if before and now > then else ""
            fields = ", ".join(f"{key} {value}" for key, value in asdict(stats).items())
            _write(f"{name}: {fields}{speed}")
            usage.stats = now, stats

    async def close(self) -> None:
        """Close every engine and cancel running loads."""
        restarts = [usage.restart for usage in self._usage.values() if usage.restart is not None]
        for load in (*restarts, *self._tokenizers.values(), *self._bases.values()):
            load.cancel()
        old = [usage.old for usage in self._usage.values() if usage.old is not None]
        engines = [*old, *(base.engine for base in self.loaded().values())]
        await asyncio.gather(*(engine.close() for engine in engines))
        self._bases.clear()

    def replace_failed(self) -> None:
        """Restart the engines that failed, also while no request used them."""
        for name in self.loaded():
            self._check(name)

    def status(self) -> dict[str, Any]:
        """Whether every engine that was opened works, for /health."""
        self.replace_failed()
        reasons = [f"{n}: {u.part.reason}" for n, u in self._usage.items() if u.part.reason]
        failing = {"status": "restarting", "reason": "; ".join(reasons)}
        paused = {"paused": True} if self._pauses else {}
        return (failing if reasons else {"status": "ok"}) | paused

    def _usage_of(self, base_model: str) -> _Usage:
        return self._usage.setdefault(base_model, _Usage(Part(f"engine of {base_model}")))

    # ---- opening, and opening again ---------------------------------------------------------

    def _start(self, base_model: str) -> "asyncio.Task[Base]":
        return shared_task(self._bases, base_model, partial(self._open, base_model))

    async def _open(self, base_model: str) -> Base:
        tokenizer = await self.tokenizer(base_model)
        usage = self._usage_of(base_model)
        await self._close_old(usage)
        await self._unpaused(base_model)  # until then, its memory may be the learner's
        say("loading", base_model=base_model)
        opening = asyncio.create_task(self._open_or_close(base_model))
        self._opening[opening] = base_model
        opening.add_done_callback(self._opening.pop)
        engine = await opening
        usage.opened_at = usage.used_at = time.monotonic()
        usage.part.reason = None  # earlier failures count until it has worked for STEADY_S
        say("loaded", base_model=base_model)
        usage.stats = None
        _write(f"{base_model}: {type(engine).__name__} of {engine.max_length} tokens is loaded")
        return Base(
            name=tokenizer.name,
            files=tokenizer.files,
            template=tokenizer.template,
            weights_sha256=tokenizer.weights_sha256,
            max_positions=min(tokenizer.max_positions, engine.max_length),
            engine=engine,
            adapters=Adapters(engine, self._settings.max_adapters),
            rendering=tokenizer.rendering,
        )

    async def _close_old(self, usage: _Usage) -> None:
        async with usage.closing:
            if usage.old is None:  # another task has closed it
                return
            try:
                await usage.old.close()
            except Exception as error:  # noqa: BLE001  ignored: the next one is opened anyway
                log.error("an engine did not close", exc_info=error)
            usage.old = None

    async def _open_or_close(self, base_model: str) -> Engine:
        """An engine; asleep if a pause began while it was opened."""
        engine, usage = (
            await in_own_thread(self._open_engine, base_model),
            self._usage_of(base_model),
        )
        usage.switch(asleep=False)  # the one before may have slept
        try:
            if self._is_paused(base_model):
                async with usage.switching:
                    if self._is_paused(base_model):
                        await engine.sleep()
                        usage.switch(asleep=True)
        except BaseException:
            await engine.close()  # nobody else has it
            raise
        return engine

    def _check(self, base_model: str) -> None:
        """Replace an engine that has failed, immediately after its first failure."""
        base = self._loaded(base_model)
        if base is None or (failure := base.engine.failure) is None:
            return
        usage = self._usage_of(base_model)
        if time.monotonic() > usage.opened_at + STEADY_S:
            usage.part.recover()
        del self._bases[base_model]
        usage.old = base.engine
        self._restart_later(base_model, failure)

    def _restart_later(self, base_model: str, failure: BaseException) -> None:
        """Log a failure of the engine, or of its restart, and start it at once or after a while."""
        usage = self._usage_of(base_model)
        usage.part.fail(failure)
        _write(f"{base_model}: failed: {failure}")
        failure.__traceback__ = None  # logged; it would keep the old weights alive
        failures = usage.part.failures
        wait_s = backoff_s(failures - 1) if failures > 1 else 0.0
        usage.retry_at = time.monotonic() + wait_s
        usage.restart = asyncio.get_running_loop().call_later(wait_s, self._restart, base_model)

    def _restart(self, base_model: str) -> None:
        def ended(load: "asyncio.Task[Base]") -> None:
            if not load.cancelled() and (error := load.exception()) is not None:
                self._restart_later(base_model, error)

        self._start(base_model).add_done_callback(ended)

    # ---- pauses -----------------------------------------------------------------------------

    @asynccontextmanager
    async def paused(self, served: Collection[str] = ()) -> AsyncIterator[None]:
        """Let running requests end; in the block, hold new ones and free the engines' KV cache.

        Base models in `served` are not paused. Raises Unavailable, without a pause, if running
        requests and loads do not end within `pause_s`.
        """
        self._pauses.append(served)
        try:
            await self._sleep(served)
            yield
        finally:
            self._pauses.remove(served)
            self._resumed.set()
            self._resumed = asyncio.Event()
            # Shielded: a task that is cancelled here would leave engines asleep.
            await asyncio.shield(self._wake(served))

    def _is_paused(self, base_model: str) -> bool:
        return any(base_model not in served for served in self._pauses)

    async def _sleep(self, served: Collection[str]) -> None:
        pause_s, late = self._settings.pause_s, "an engine was still being loaded"
        try:
            async with asyncio.timeout(pause_s):
                # They need memory; no other begins before the end of the pause.
                if opening := [task for task, name in self._opening.items() if name not in served]:
                    await asyncio.wait(opening)
                late = "answers were still being sampled"
                held = (base for name, base in self.loaded().items() if name not in served)
                await asyncio.gather(*map(self._put_to_sleep, held))
        except TimeoutError:
            raise Unavailable(
                f"serving could not be paused for training: {late} after {pause_s:g} s (pause_s). "
                "Requests are served, and the job tries again."
            ) from None

    async def _put_to_sleep(self, base: Base) -> None:
        """Free an engine's memory. One that fails has none; it is replaced after the pause."""
        try:
            async with self._usage_of(base.name).switching:
                await base.engine.sleep()
                self._usage_of(base.name).switch(asleep=True)
        except EngineError:
            if base.engine.failure is None:
                raise
            self._check(base.name)

    async def _wake(self, served: Collection[str]) -> None:
        async def wake(base: Base) -> None:
            async with self._usage_of(base.name).switching:
                if not self._is_paused(base.name):  # else it wakes when that pause ends
                    try:
                        await base.engine.wake()
                    finally:
                        self._usage_of(base.name).switch(asleep=False)

        held = (base for name, base in self.loaded().items() if name not in served)
        waking = (wake(base) for base in held if not self._is_paused(base.name))
        for error in await asyncio.gather(*waking, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("an engine did not wake", exc_info=error)

    async def _unpaused(self, base_model: str) -> None:
        while self._is_paused(base_model):
            await self._resumed.wait()

    async def ready(self, base_model: str) -> None:
        """Wait until a base model is not paused; raises Unavailable after `hold_s`."""
        if not self._is_paused(base_model):
            return
        try:
            async with asyncio.timeout(self._settings.hold_s):
                await self._unpaused(base_model)
        except TimeoutError:
            raise Unavailable(
                f"serving has been paused for training for {self._settings.hold_s:g} s; try again "
                "later, or start the server with serving_during_training: continue"
            ) from None


_write = partial(write_output, "engine")
