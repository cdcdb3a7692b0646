"""Where the time of an epoch went.

In:   `with phases.timed("rollout_s"):` around each stage
Out:  seconds by phase since the last reading; what no stage claims is `other_s`
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("rollout_s", "learn_s", "validate_s")


class Phases:
    """A stopwatch with a hand for each phase."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._spent = dict.fromkeys(NAMES, 0.0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The time inside belongs to this phase; phases do not nest."""
        assert name in NAMES, f"no phase {name!r}; known: {NAMES}"
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[name] += time.monotonic() - started

    def take(self) -> dict[str, float]:
        """Read all hands and set them back."""
        spent, total = self._spent, time.monotonic() - self._begun
        self._begun += total
        self._spent = dict.fromkeys(NAMES, 0.0)
        return {**spent, "other_s": max(0.0, total - sum(spent.values()))}
