"""hone.rollout: a scope in which every model call is recorded under one rollout's id.

In:   `async with hone.rollout() as r:` or `with`, around the agent; `hone.step(...)` inside it
Out:  calls that carry the id; `r.trajectory(reward=...)` refers to what the server recorded; in
      the harness's rollouts, calls and steps in the scope's recorder

The open scope is a ContextVar: concurrent rollouts in one event loop each see their own scope, and
code outside sees none. Libraries are patched only while at least one scope is open in the process,
and calls made outside a scope pass unchanged.
"""

import math
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token
from dataclasses import replace
from typing import Any, Self
from urllib.parse import urlsplit

from hone.capture.base import MAX_PATH, Recorder, Scope, host_of, open_scope, shortened
from hone.capture.branches import Branch
from hone.capture.httpx import client_patches
from hone.capture.threads import EXECUTOR_PATCHES
from hone.errors import ConfigError
from hone.trajectory import Trajectory
from hone.wire.rollout import ALIAS_TEXT, ROLLOUT_ID

_FUNCTION = re.compile(rf"[!-~]{{1,{MAX_PATH}}}")


class Rollout:
    """One rollout, open between enter and exit."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._token: Token[Scope | None] | None = None

    @property
    def id(self) -> str:
        return self.scope.rollout

    def trajectory(self, reward: float = 0.0, **fields: Any) -> Trajectory:
        """A trajectory of the calls that the server recorded in this rollout, with its reward."""
        return Trajectory(rollout=self.id, reward=reward, **fields)

    def __enter__(self) -> Self:
        if self._token is not None:
            raise ConfigError(
                f"rollout {self.id!r} is open already. Tasks started inside it belong to it without "
                "opening it again; for another rollout call hone.rollout()."
            )
        _patches.open()
        self._token = open_scope.set(self.scope)
        return self

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        assert token is not None, f"rollout {self.id!r} was closed without being open"
        try:
            open_scope.reset(token)
        except ValueError:
            # Closed from another context (a fixture, a collected async generator), where the
            # variable was never set; the context that set it has ended.
            pass
        finally:
            _patches.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)


def rollout(
    id: str | None = None,
    *,
    function: str = "",
    base_url: str | None = None,
    backend: Any = None,
    aliases: Mapping[str, str] | None = None,
) -> Rollout:
    """A scope in which any httpx or httpx2 client's calls to an OpenAI API are recorded together.

    Args:
        id: id of the rollout; random if None. `RUN:REST` belongs to the open run RUN.
        function: path of the function that makes the calls.
        base_url: mark only calls to this host (on any port), so that no other host sees the id.
        backend: the same, for the host of the backend's server.
        aliases: model names in the agent's code, and the models that they mean in this rollout:
            `{"gpt-4o": "my-model"}`.
    """
    address = base_url if backend is None else backend.base_url
    host = None if address is None else host_of(urlsplit(address).hostname or "")
    pairs = tuple((aliases or {}).items())
    scope = Scope(_checked_id(id), check_function(function), host=host, aliases=pairs)
    if pairs and not ALIAS_TEXT.fullmatch(scope.alias_text):
        raise ConfigError(
            f"hone.rollout(aliases={aliases!r}): names are letters, digits and . _ : / -, and begin "
            "with a letter or a digit"
        )
    return Rollout(scope)


def recorded(
    id: str | None = None,
    *,
    host: str | None = None,
    temperature: float | None = None,
    step: int | None = None,
    aliases: Mapping[str, str] | None = None,
    recorder: Recorder | None = None,
) -> tuple[Rollout, Recorder]:
    """A rollout of the harness: all its calls are recorded, and those to `host` are marked.

    A rollout of a run (`RUN:REST`) uses the run's aliases and needs no others.
    """
    recorder = Recorder() if recorder is None else recorder
    where = None if host is None else host_of(urlsplit(f"//{host}").hostname or "")
    rollout = _checked_id(id)
    scope = Scope(
        rollout,
        host=where,
        recorder=recorder,
        temperature=temperature,
        step=step,
        aliases=() if ":" in rollout else tuple((aliases or {}).items()),
    )
    return Rollout(scope), recorder


def outside_rollouts(function: str, *, host: str) -> Rollout:
    """A scope whose calls to `host` belong to no rollout and carry only the function.

    Calls of a rollout that is opened inside it belong to that rollout.
    """
    return Rollout(Scope("", check_function(function), host=host_of(host)))


def step(name: str, value: float | None = None, **metadata: Any) -> None:
    """Record a step of the rollout: `hone.step("board_score", value=0.4)`.

    A value becomes a shaped reward of the last model call that was answered in this task or thread,
    or in one that it started. With several calls in flight, record each value in the task that made
    the call. Outside the harness's rollouts this does nothing, so agents can keep the call.

    Args:
        name: name of the step.
        value: its reward; a finite number.
        **metadata: shown beside it in the run's files.
    """
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"hone.step({name!r}, value={value!r}): a value is a finite number")
    scope = open_scope.get()
    if scope is not None and scope.recorder is not None:
        number = None if value is None else float(value)
        scope.recorder.add_step(name, number, metadata, scope.at_caller().function)


@contextmanager
def within(function: str) -> Iterator[None]:
    """Calls made inside carry this function's name; functions called inside extend the path."""
    scope = open_scope.get()
    if scope is None:
        yield
        return
    scope = scope.at_caller()
    path = f"{scope.function}.{function}" if scope.function else check_function(function)
    with _inside(replace(scope, function=check_function(shortened(path)), caller=None)):
        if scope.recorder is not None:
            Branch.here(scope.recorder.trunk)  # before it starts tasks, which become its children
        yield


@contextmanager
def called_by(caller: Callable[[], str]) -> Iterator[None]:
    """Calls made inside carry the name that `caller` returns when they are sent, if it returns one.

    For adapters of frameworks: the framework knows which of its nodes or agents runs.
    """
    scope = open_scope.get()
    with nullcontext() if scope is None else _inside(replace(scope, caller=caller)):
        yield


def not_captured() -> AbstractContextManager[None]:
    """Requests inside are neither marked nor recorded, whatever their path."""
    return _inside(None)


@contextmanager
def _inside(scope: Scope | None) -> Iterator[None]:
    token = open_scope.set(scope)
    try:
        yield
    finally:
        open_scope.reset(token)


@contextmanager
def keep_patched() -> Iterator[None]:
    """Keep libraries patched, even if another thread closes the scope meanwhile."""
    _patches.open()
    try:
        yield
    finally:
        _patches.close()


def _checked_id(id: str | None) -> str:
    if id is None:
        return f"rollout-{secrets.token_hex(10)}"
    if not ROLLOUT_ID.fullmatch(id):
        raise ConfigError(
            f"hone.rollout(id={id!r}): an id is 1 to 200 letters, digits and . _ ~ : -, and begins "
            "with a letter or a digit"
        )
    return id


def check_function(function: str) -> str:
    """The path of a function, if a header can hold it."""
    if function and not _FUNCTION.fullmatch(function):
        raise ConfigError(
            f"function path {function!r}: it is sent in a header, so it is at most 200 characters "
            "of ASCII without spaces"
        )
    return function


class _Patches:
    """Replaces methods of libraries while at least one scope is open, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def open(self) -> None:
        with self._lock:
            if not self._open:
                for kind, name, wrap in (*client_patches(), *EXECUTOR_PATCHES):
                    original = kind.__dict__[name]
                    ours = wrap(original)
                    setattr(kind, name, ours)
                    self._replaced.append((kind, name, original, ours))
            self._open += 1

    def close(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
            for kind, name, original, ours in self._replaced:
                # Another patch over ours calls ours, which does nothing outside scopes; restoring
                # the original would remove that patch too.
                if kind.__dict__[name] is ours:
                    setattr(kind, name, original)
            self._replaced.clear()


_patches = _Patches()
