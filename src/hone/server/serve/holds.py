"""How long the server held requests: the time for which no engine was available.

In:   requests, and when each begins and ends to wait for its engine
Out:  the held time of each call; for how long a rollout was held, with the calls that wait now

A request is held while serving is paused for training, while its engine is loaded, restarted or
asleep, and while its adapter is loaded. It is not held while it is read and tokenized, nor while it
waits in a working engine for other requests: an engine that is too slow for its load is not a pause.

A rollout is held while at least one of its calls is. Calls that wait at the same time count once,
because the rollout's deadline runs once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

MAX_ROLLOUTS = 8192
"""Held rollouts in memory; beyond, the least recently used are forgotten."""

Interval = tuple[float, float]
"""Begin and end, in seconds of the monotonic clock."""


@dataclass(slots=True)
class _Rollout:
    """The requests of one rollout that are open, and when the rollout was held."""

    open: int = 0
    waiting: int = 0
    """Requests that are held now."""
    since: float = 0.0
    """Since when, if there are any."""
    intervals: list[Interval] = field(default_factory=list)
    """Earlier ones; they do not overlap."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no request is held any longer, and then replaced."""


class Hold:
    """The held time of one request. For one event loop."""

    def __init__(self, rollout: _Rollout | None = None) -> None:
        """`rollout`: counts the time too; None outside any."""
        self._rollout = rollout
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def held_s(self) -> float:
        """How long the request was held so far, to the millisecond."""
        waited = 0.0 if self._since is None else monotonic() - self._since
        return round(self._seconds + waited, 3)

    def begin(self) -> None:
        """The request waits from now on; nothing changes if it does already."""
        if self._since is not None:
            return
        self._since = monotonic()
        rollout = self._rollout
        if rollout is not None:
            if not rollout.waiting:
                rollout.since = self._since
            rollout.waiting += 1

    def end(self) -> None:
        """The request does not wait any longer; nothing changes if it did not."""
        if self._since is None:
            return
        now = monotonic()
        self._seconds += now - self._since
        self._since, rollout = None, self._rollout
        if rollout is None:
            return
        rollout.waiting -= 1
        if not rollout.waiting:
            rollout.intervals.append((rollout.since, now))
            rollout.released.set()
            rollout.released = asyncio.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The request is held while the block waits; a block that never waits holds nothing."""
        begin = asyncio.get_running_loop().call_soon(self.begin)
        try:
            yield
        finally:
            begin.cancel()
            self.end()


class Holds:
    """Every open request, and the rollouts that were held. For one event loop."""

    def __init__(self, max_rollouts: int = MAX_ROLLOUTS) -> None:
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._max_rollouts = max_rollouts

    def __len__(self) -> int:
        return len(self._rollouts)

    @contextmanager
    def request(self, rollout: str) -> Iterator[Hold]:
        """A request of this rollout, open while the block runs; the empty one belongs to none."""
        if not rollout:
            yield Hold()
            return
        held = self._rollouts.setdefault(rollout, _Rollout())
        self._rollouts.move_to_end(rollout)
        held.open += 1
        hold = Hold(held)
        try:
            yield hold
        finally:
            hold.end()
            held.open -= 1
            if not (held.open or held.intervals):
                del self._rollouts[rollout]
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest rollouts that have no open request."""
        excess = len(self._rollouts) - self._max_rollouts
        if excess > 0:
            ended = [name for name, held in self._rollouts.items() if not held.open]
            for name in ended[:excess]:
                del self._rollouts[name]

    def open(self, rollout: str) -> int:
        """Number of its requests that are being answered, held ones included."""
        held = self._rollouts.get(rollout)
        return 0 if held is None else held.open

    def is_held(self, rollout: str) -> bool:
        """Whether one of its requests is held now."""
        held = self._rollouts.get(rollout)
        return held is not None and held.waiting > 0

    def intervals(self, rollout: str) -> list[Interval]:
        """When the rollout was held; the last one ends now if it still is."""
        held = self._rollouts.get(rollout)
        if held is None:
            return []
        now = [(held.since, monotonic())] if held.waiting else []
        return [*held.intervals, *now]

    async def released(self, rollout: str, timeout_s: float) -> None:
        """Wait until none of its requests is held, or until the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (held := self._rollouts.get(rollout)) is not None and held.waiting:
                    await held.released.wait()


def covered_s(intervals: Iterable[Interval], since: float) -> float:
    """The time since `since` that at least one interval covers."""
    seconds, end = 0.0, since
    for begin, until in sorted(intervals):
        seconds += max(0.0, until - max(begin, end))
        end = max(end, until)
    return seconds
