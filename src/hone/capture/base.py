"""What a capture adapter works with: the scope a call belongs to, and the taps that mark calls.

In:   nothing; protocols and values only
Out:  Scope, Tap
Used: capture/scope.py opens scopes; every tap puts the open one on the calls of one library
"""

from dataclasses import dataclass
from typing import Protocol

ROLLOUT_HEADER = "X-Hone-Rollout"
FUNCTION_HEADER = "X-Hone-Function"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose calls these are."""

    rollout: str
    function: str = ""
    """Path of the function that runs, outermost first, joined by dots; empty outside any."""
    host: str | None = None
    """Only calls to this host are marked; None marks calls to any."""

    @property
    def headers(self) -> dict[str, str]:
        """What tells the server."""
        function = {FUNCTION_HEADER: self.function} if self.function else {}
        return {ROLLOUT_HEADER: self.rollout, **function}


class Tap(Protocol):
    """Marks the calls of one library with the scope they are made in."""

    def attach(self) -> None:
        """Called when the first scope of the process opens."""
        ...

    def detach(self) -> None:
        """Called when the last one closes; leaves the library as it was found."""
        ...
