"""Values and protocols of capture: the open scope, its calls and steps, patched methods.

In:   nothing
Out:  Scope, current; SeenCall, Step, Recorder; Patch

A SeenCall is a call as the harness saw it on the wire: text, for evaluators, files and reports. The
trained tokens come from the server, which recorded them where they were sampled.
"""

import re
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from hone.capture.branches import Branch
from hone.wire.access import LOCAL
from hone.wire.rollout import RolloutScope

MAX_PATH = 200
_NOT_IN_PATH = re.compile(r"[^!-~]")


HeldSince = Callable[[float], Awaitable[float]]
"""A time of the monotonic clock -> for how many seconds since then the server held calls."""


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One call of a rollout as seen on the wire, answered or not."""

    index: int
    """Its index among the rollout's calls, in the order in which they were sent."""
    function: str
    """Path of the function that made it, outermost first, joined by dots."""
    model: str
    """The model name of the request."""
    host: str
    """The host it was sent to; all names of this machine are `localhost`."""
    messages: list[dict[str, Any]] | None
    """The messages of the request; None if it is not a chat or cannot be parsed."""
    tools: list[dict[str, Any]] | None
    choices: list[dict[str, Any]]
    """The choices of the response, assembled if it was streamed. Choices that a hone server recorded
    (they have a `call_id`) have no `logprobs`, to save memory."""
    usage: dict[str, int] | None
    id: str | None
    """Id of the recorded call if a hone server answered, otherwise the id of the response."""
    policy_step: int | None
    """The step that answered; None if another server answered."""
    started_at: float
    """When it was sent, in Unix seconds."""
    seconds: float
    """Time until the last byte, including the client's retries; 0 for a call from another
    process."""
    status: int | None
    """HTTP status; None if there was no response."""
    error: str | None
    """Why it failed; None if it succeeded."""
    temperature: float | None = None
    """The requested temperature; None if the server chose it."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """The other parameters of the request, such as `max_tokens`."""
    is_chat: bool = True
    """Whether `parameters` are those of a chat completion rather than of another API."""
    held_s: float = 0.0
    """How long a hone server held it: serving was paused for training, or engine or adapter were being
    loaded. Part of `seconds`."""

    @property
    def reply(self) -> dict[str, Any] | None:
        """The first choice's message."""
        if not self.choices:
            return None
        first = self.choices[0]
        if "message" in first:
            return first["message"]
        return {"role": "assistant", "content": first.get("text") or ""}

    @property
    def finish(self) -> str | None:
        """The finish reason of the first choice."""
        return self.choices[0].get("finish_reason") if self.choices else None


@dataclass(frozen=True, slots=True)
class Step:
    """One `hone.step` call of the agent."""

    name: str
    value: float | None
    metadata: dict[str, Any]
    function: str
    """Path of the function that called it."""
    calls: int
    """Number of model calls that the rollout had sent before it."""
    about: tuple[int, ...] = ()
    """Indices of the calls that its value may belong to, most likely first; empty without a
    value."""
    at: float = field(default=0.0, compare=False)
    """When it was called, in Unix seconds; 0 if that is not known."""


class WatchedCall(Protocol):
    """A call that a patched client sends."""

    def read(self) -> SeenCall:
        """The call as seen so far."""
        ...

    async def close(self) -> None:
        """Stop reading its answer: the rollout is over."""
        ...


WatchedT = TypeVar("WatchedT", bound=WatchedCall)


class Recorder:
    """The calls and steps of one rollout, in the order in which they were sent. Thread-safe."""

    def __init__(self, on_end: Callable[[WatchedCall], None] | None = None) -> None:
        """`on_end`: called with each call when its response has ended, in the reading thread."""
        self.on_end = on_end
        self.closed = False
        """The rollout is over: calls that would still be marked as its own are refused."""
        self.trunk = Branch()
        """Root of the tree of the rollout's tasks and threads."""
        self.is_incomplete = False
        """Only the server has the whole rollout: another process may have made calls, or a request
        continued a response from outside the rollout."""
        self.held: HeldSince | None = None
        """Asks the server for how long it held the rollout's calls, open ones included; None if it
        cannot be asked."""
        self._calls: list[WatchedCall] = []
        self._steps: list[Step] = []
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    async def close(self) -> None:
        """End the rollout, and close answers that are still streamed to it."""
        self.closed = True
        for call in tuple(self._calls):
            await call.close()

    @property
    def sent(self) -> int:
        """Number of calls sent; a retry by the client is not a new call."""
        return len(self._calls)

    @property
    def calls(self) -> list[SeenCall]:
        """All calls sent so far; `error` says which have no answer yet."""
        return [call.read() for call in tuple(self._calls)]

    @property
    def steps(self) -> list[Step]:
        return list(self._steps)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Intermediate steps of a NeMo Agent Toolkit workflow, as the toolkit's own type."""
        return list(self._events)

    def add_event(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)

    def add_call(self, make: Callable[[int], WatchedT]) -> WatchedT:
        """Record a call that is being sent; `make` gets its index."""
        with self._lock:
            call = make(len(self._calls))
            self._calls.append(call)
        return call

    def sent_before(self, index: int) -> list[WatchedCall]:
        """The calls that were sent before this one, oldest first."""
        return self._calls[:index]

    def resume(self, is_retry: Callable[[WatchedCall], bool]) -> WatchedCall | None:
        """The newest call that the request is a retry of, or None."""
        with self._lock:
            return next((call for call in reversed(self._calls) if is_retry(call)), None)

    def add_answer(self, index: int, branch: Branch) -> None:
        """Record that the call sent on this branch was answered, or that its response began."""
        with self._lock:
            for parent in branch.path():
                parent.answered.append(index)

    def add_step(
        self, name: str, value: float | None, metadata: dict[str, Any], function: str
    ) -> None:
        with self._lock:
            about = () if value is None else Branch.here(self.trunk).newest_calls()
            sent, now = len(self._calls), time.time()
            self._steps.append(Step(name, value, metadata, function, sent, about, now))


@dataclass(frozen=True, slots=True)
class Scope(RolloutScope):
    """The rollout and function that calls belong to; outside any rollout, only the function."""

    host: str | None = None
    """Only calls to this host are marked; None marks calls to any host."""
    recorder: Recorder | None = field(default=None, compare=False)
    """Records the calls; None if they are only marked."""
    caller: Callable[[], str] | None = field(default=None, compare=False)
    """Returns the running part of a framework's agent, such as the node of a graph."""

    def at_caller(self) -> "Scope":
        """The scope, with the part that is running appended to its function path."""
        name = "" if self.caller is None else self.caller()
        if not name:
            return self
        path = f"{self.function}.{name}" if self.function else name
        return replace(self, function=shortened(_NOT_IN_PATH.sub("_", path)), caller=None)


def shortened(path: str) -> str:
    """A function path cut to its innermost names if it is too long for a header (recursion)."""
    return path if len(path) <= MAX_PATH else "..." + path[3 - MAX_PATH :].partition(".")[2]


open_scope: ContextVar[Scope | None] = ContextVar("hone_scope", default=None)


def current() -> Scope | None:
    """The scope this code runs in."""
    return open_scope.get()


def host_of(name: str) -> str:
    """The name of a host; all names of this machine are `localhost`."""
    return "localhost" if name in LOCAL else name


Patch = tuple[Any, str, Callable[[Any], Callable[..., Any]]]
"""A method to replace while scopes are open: its class, its name, and what wraps the original."""
