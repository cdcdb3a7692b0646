"""The model call that a value of `hone.step` belongs to, when several calls are in flight.

In:   the task or thread that sends a call, gets its response, or records a value
Out:  Branch; for a value, the calls it may belong to, most likely first

A rollout is a tree of tasks and threads. A value belongs to the newest response in the task or
thread that records it, or in one that it started; if there is none, to the newest response of its
parent. The order in which calls were sent does not matter: either of two calls in flight may end
first.
"""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


class Branch:
    """One task or thread of a rollout; the root of the tree has no worker and no parent."""

    __slots__ = ("_worker", "answered", "parent")

    def __init__(self, parent: "Branch | None" = None, worker: Any = None) -> None:
        self.parent = parent
        self._worker = None if worker is None else weakref.ref(worker)
        self.answered: list[int] = []
        """Indices of calls in the order of their responses, including those of child tasks."""

    @staticmethod
    def here(trunk: "Branch") -> "Branch":
        """The branch that this code runs on; it is created if the task or thread has none yet."""
        branch, worker = _branch.get(), _current_worker()
        if branch is None or branch.trunk is not trunk:  # another rollout, or none
            branch = trunk
        if branch._worker is None or branch._worker() is not worker:
            branch = Branch(branch, worker)
            _branch.set(branch)
        return branch

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
        """The answered calls, starting with the one that a value recorded here belongs to."""
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
