"""The deadline of a rollout, or of the program or service that runs it, without the server's pauses.

In:   a timeout; the open rollout, whose recorder can ask the server for how long it held its calls
Out:  Deadline: when the time is over, and how long the server's pauses extended it

On one GPU the server alternates between training and serving, and holds calls while it trains. This
time does not count against the agent. When the timeout has passed, the server is asked how long it
held calls, and the deadline moves by that time; at the new deadline it is asked again. If the server
cannot be asked, the deadline does not move.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hone.capture.base import HeldSince, current
from hone.errors import HoneError

SHORTEST_S = 0.001
"""The server measures to the millisecond; the time is over if less than this is left."""

_log = logging.getLogger(__name__)


class Deadline:
    """The timeout of the open rollout; it starts when this object is created."""

    def __init__(self, timeout_s: float | None, held: HeldSince | None = None) -> None:
        """`held`: asks for the held time; by default the open rollout's."""
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        scope = current()
        recorder = None if scope is None else scope.recorder
        self._held = held or (None if recorder is None else recorder.held)
        self.held_s = 0.0
        """How long the server has held calls since the beginning, when it was last asked."""

    async def passed(self) -> None:
        """Return when the time is over; never without a timeout."""
        if self._timeout_s is None:
            await asyncio.get_running_loop().create_future()  # never done
            return
        while (left_s := self._left_s(self._timeout_s)) > SHORTEST_S:
            await asyncio.sleep(left_s)
            if self._held is None:
                return
            try:
                self.held_s = await self._held(self._began)
            except (HoneError, TimeoutError) as error:
                _log.warning(
                    "the server cannot be asked for how long it held calls (%s); the deadline of "
                    "%g s is not extended",
                    error or type(error).__name__,
                    self._timeout_s,
                )
                return

    def _left_s(self, timeout_s: float) -> float:
        return self._began + timeout_s + self.held_s - time.monotonic()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block when the time is over, and raise TimeoutError."""
        loop, passing = asyncio.get_running_loop(), asyncio.ensure_future(self.passed())
        async with asyncio.timeout(None) as limit:

            def expire(_: object) -> None:
                limit.reschedule(loop.time())

            passing.add_done_callback(expire)
            try:
                yield
            finally:
                passing.remove_done_callback(expire)
                passing.cancel()

    def extension(self) -> str:
        """For messages, after the timeout: the time that was added to it; empty without any."""
        return (
            f" (and {self.held_s:.3g} s in which the server held its calls)" if self.held_s else ""
        )
