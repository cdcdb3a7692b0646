"""The gate that requests pass: shut while a job trains on the device that the engines use.

In:   pauses, of one job or of several at once; requests
Out:  engines that sleep while any pause lasts; requests that wait, but not for ever

Pauses are counted: the gate opens with the end of the last one, however each of them ends. It opens
even if an engine does not wake, so that no failure leaves it shut.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from hone.errors import Unavailable
from hone.inference.base import Engine
from hone.logs import log
from hone.server.settings import Settings


class Gate:
    """For one event loop."""

    def __init__(self, settings: Settings, engines: Callable[[], Sequence[Engine]]) -> None:
        self._settings = settings
        self._engines = engines
        self._pauses = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def shut(self) -> bool:
        return not self._open.is_set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """A pause while the block runs, however it ends."""
        await self.pause()
        try:
            yield
        finally:
            await self.resume()

    async def pause(self) -> None:
        """Let what runs end, hold what comes, and free the engines' key-value memory.

        Raises Unavailable, with the gate open again, if what runs does not end in `pause_s`.
        """
        self._pauses += 1
        self._open.clear()
        try:
            await self._sleep()
        except BaseException:
            await self.resume()
            raise

    async def resume(self) -> None:
        """End one pause; the last one to end opens the gate."""
        self._pauses -= 1
        if not self._pauses:
            self._open.set()
            # Shielded: a task that is cancelled here would leave engines asleep.
            await asyncio.shield(self._wake())

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(self._settings.pause_s):
                await asyncio.gather(*(engine.sleep() for engine in self._engines()))
        except TimeoutError:
            raise Unavailable(
                "serving could not be paused for training: answers were still being sampled after "
                f"{self._settings.pause_s:g} s (pause_s). Requests are served, and the job tries again."
            ) from None

    async def _wake(self) -> None:
        waking = (engine.wake() for engine in self._engines())
        for error in await asyncio.gather(*waking, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("an engine did not wake", exc_info=error)

    async def engine_opened(self, engine: Engine) -> None:
        """An engine that is opened during a pause sleeps until its end, like the others."""
        if self._pauses:
            await engine.sleep()

    async def ready(self) -> None:
        """Wait until serving is not paused, but not for ever."""
        if self._open.is_set():
            return
        try:
            await asyncio.wait_for(self._open.wait(), self._settings.hold_s)
        except TimeoutError:
            raise Unavailable(
                f"serving has been paused for training for {self._settings.hold_s:g} s; try again "
                "later, or start the server with serving_during_training: continue"
            ) from None
