"""Values and protocols of capturing: the open scope, the calls seen in it, the taps that see them.

In:   nothing
Out:  Scope, current; SeenCall, Step, Recorder; Tap

A SeenCall is what the harness saw on the wire: text, for evaluators, files and reports. The tokens
that are trained are the server's, which recorded them where they were sampled.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hone.capture.branches import Branch

ROLLOUT_HEADER = "X-Hone-Rollout"
FUNCTION_HEADER = "X-Hone-Function"
TEMPERATURE_HEADER = "X-Hone-Temperature"
STEP_HEADER = "X-Hone-Step"

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One call of a rollout as it was seen on the wire, answered or not."""

    index: int
    """Its place among the rollout's calls, in the order in which they were sent."""
    function: str
    """Path of the function that made it, outermost first, joined by dots."""
    model: str
    """The name that was asked for."""
    host: str
    """Where it went; all names of this machine are `localhost`."""
    messages: list[dict[str, Any]] | None
    """What was asked; None where it was no chat, or cannot be read."""
    tools: list[dict[str, Any]] | None
    choices: list[dict[str, Any]]
    """The answer's, put together if it was streamed. Where a hone server recorded them (they have
    a `call_id`) their `logprobs` are left out: a thousand calls of them fill the memory."""
    usage: dict[str, int] | None
    id: str | None
    """The recorded call's where a hone server answered, otherwise the answer's."""
    policy_step: int | None
    """The step that answered; None where a foreign server did."""
    started_at: float
    """Unix seconds."""
    seconds: float
    """Until the last byte, the client's own retries included; 0 for a call of another process."""
    status: int | None
    """Of HTTP; None where no answer came."""
    error: str | None
    """Why it did not succeed."""
    temperature: float | None = None
    """What was asked for; None leaves it to the server."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Everything else that was asked for, such as `max_tokens`, as it was sent."""

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
        """Why the first choice ended."""
        return self.choices[0].get("finish_reason") if self.choices else None


@dataclass(frozen=True, slots=True)
class Step:
    """Something the agent said of its own course, with `hone.step`."""

    name: str
    value: float | None
    metadata: dict[str, Any]
    function: str
    """Path of the function that said it."""
    calls: int
    """How many calls the rollout had sent before it."""
    about: tuple[int, ...] = ()
    """Indices of the calls that its value can belong to, most likely first; empty without a value."""


class Unread(Protocol):
    """A call that a tap watches."""

    def read(self) -> SeenCall:
        """What was seen of it so far."""
        ...

    async def close(self) -> None:
        """The rollout is over: nothing more of its answer is read."""
        ...


UnreadT = TypeVar("UnreadT", bound=Unread)


class Recorder:
    """What one rollout did: its calls in the order they were sent, and its steps. Thread-safe."""

    def __init__(self) -> None:
        self.closed = False
        """The rollout is over: calls that would still be marked as its own are refused."""
        self.trunk = Branch()
        """Where the tree of the rollout's tasks and threads begins."""
        self.is_shared = False
        """The rollout's URL was handed out: calls may be made that are not seen here."""
        self._calls: list[Unread] = []
        self._steps: list[Step] = []
        self._lock = threading.Lock()

    async def close(self) -> None:
        """The rollout is over; answers that are still streamed to it are closed."""
        self.closed = True
        for call in tuple(self._calls):
            await call.close()

    @property
    def sent(self) -> int:
        """How many calls were sent; a client's own retry is not a new one."""
        return len(self._calls)

    @property
    def calls(self) -> list[SeenCall]:
        """All calls sent so far; one without an answer yet says so in `error`."""
        return [call.read() for call in tuple(self._calls)]

    @property
    def steps(self) -> list[Step]:
        return list(self._steps)

    def add_call(self, make: Callable[[int], UnreadT]) -> UnreadT:
        """A call is sent; `make` gets its index."""
        with self._lock:
            call = make(len(self._calls))
            self._calls.append(call)
        return call

    def resume(self, takes_up: Callable[[Unread], bool]) -> Unread | None:
        """The newest call that `takes_up` what is sent now, or None."""
        with self._lock:
            return next((call for call in reversed(self._calls) if takes_up(call)), None)

    def add_answer(self, index: int, branch: Branch) -> None:
        """The call that was sent on this branch is answered, or its answer begins."""
        with self._lock:
            for one in branch.path():
                one.answered.append(index)

    def add_step(
        self, name: str, value: float | None, metadata: dict[str, Any], function: str
    ) -> None:
        with self._lock:
            about = () if value is None else Branch.here(self.trunk).newest_calls()
            self._steps.append(Step(name, value, metadata, function, len(self._calls), about))


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose calls these are."""

    rollout: str
    """Empty for calls that belong to none, and say so by their function."""
    function: str = ""
    """Path of the function that runs, outermost first, joined by dots; empty outside any."""
    host: str | None = None
    """Only calls to this host are marked; None marks calls to any."""
    recorder: Recorder | None = field(default=None, compare=False)
    """Where calls are seen; None marks them only."""
    temperature: float | None = None
    """What the server samples with, whatever the agent asks for."""
    step: int | None = None
    """The step of the run's model that answers, instead of the newest one."""

    @property
    def headers(self) -> dict[str, str]:
        """What tells the server."""
        named = {ROLLOUT_HEADER: self.rollout} if self.rollout else {}
        if self.function:
            named[FUNCTION_HEADER] = self.function
        if self.temperature is not None:
            named[TEMPERATURE_HEADER] = f"{self.temperature:g}"
        if self.step is not None:
            named[STEP_HEADER] = str(self.step)
        return named

    def url(self, base_url: str) -> str:
        """The rollout's own base URL at the server whose base URL this is.

        It says what the headers say, except for the function: they do not reach the requests of
        another process.
        """
        segment = self.rollout
        if self.temperature is not None:
            segment += f",temperature={self.temperature:g}"
        if self.step is not None:
            segment += f",step={self.step}"
        return f"{base_url.rstrip('/').removesuffix('/v1')}/rollout/{segment}/v1"


open_scope: ContextVar[Scope | None] = ContextVar("hone_scope", default=None)


def current() -> Scope | None:
    """The scope this code runs in."""
    return open_scope.get()


def host_of(name: str) -> str:
    """The name of a host; all names of this machine are `localhost`."""
    return "localhost" if name in _LOCAL else name


class Tap(Protocol):
    """Marks and sees the calls of one library in the scope they are made in."""

    def attach(self) -> None:
        """Called when the first scope of the process opens."""
        ...

    def detach(self) -> None:
        """Called when the last one closes; leaves the library as it was found."""
        ...
