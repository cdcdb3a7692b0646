"""Which call a value of `hone.step` belongs to, when several calls of a rollout are in flight.

In:   the task or thread that sends a call, gets its answer, or notes a value
Out:  Branch; for a value, the calls it can belong to, most likely first

A rollout is a tree of tasks and threads. A value belongs to the newest answer of the task or thread
that notes it, answers to what that one started included; only where there is none, to the newest
answer of what started it. The order in which calls were sent says nothing: of two calls in flight,
the one sent first may be the one that is answered and judged first.
"""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


class Branch:
    """One task or thread of a rollout; the trunk of the tree has no worker and no parent."""

    __slots__ = ("_worker", "answered", "parent")

    def __init__(self, parent: "Branch | None" = None, worker: Any = None) -> None:
        self.parent = parent
        self._worker = None if worker is None else weakref.ref(worker)
        self.answered: list[int] = []
        """Indices of calls, in the order of their answers; those of started tasks included."""

    @staticmethod
    def here(trunk: "Branch") -> "Branch":
        """The branch that this code runs on; a task or thread that has none yet begins one."""
        held, worker = _branch.get(), _current_worker()
        if held is None or held.trunk is not trunk:  # of another rollout, or of none
            held = trunk
        if held._worker is None or held._worker() is not worker:
            held = Branch(held, worker)
            _branch.set(held)
        return held

    @property
    def trunk(self) -> "Branch":
        *_, trunk = self.path()
        return trunk

    def path(self) -> "Iterator[Branch]":
        """From this branch to the trunk."""
        branch: Branch | None = self
        while branch is not None:
            yield branch
            branch = branch.parent

    def newest_calls(self) -> tuple[int, ...]:
        """Calls that were answered so far, the one that a value noted here belongs to first."""
        seen: dict[int, None] = {}
        for branch in self.path():
            seen.update(dict.fromkeys(reversed(branch.answered)))
        return tuple(seen)


_branch: ContextVar[Branch | None] = ContextVar("hone_branch", default=None)


def _current_worker() -> Any:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return task or threading.current_thread()
