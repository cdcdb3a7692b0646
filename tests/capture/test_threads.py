"""Work in thread pools belongs to the rollout that submitted it, and to no other."""

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S

import hone
from hone.capture.base import current
from hone.capture.httpx import client_patches
from hone.tasks.loop import run_loop

SUBMIT = ThreadPoolExecutor.__dict__["submit"]


def here(_: object = None) -> str | None:
    scope = current()
    return None if scope is None else scope.rollout


def test_submitted_work_runs_in_the_scope_of_its_submitter():
    with ThreadPoolExecutor(1) as pool:  # one thread, started inside the first rollout
        with hone.rollout("a"):
            assert pool.submit(here).result() == "a"
            assert list(pool.map(here, range(2))) == ["a", "a"]
        assert pool.submit(here).result() is None
        with hone.rollout("b"):
            inside = pool.submit(here)
        assert inside.result() == "b"


def test_work_submitted_outside_a_scope_has_no_scope():
    opened, done = threading.Event(), threading.Event()

    def play() -> None:
        with hone.rollout("elsewhere"):
            opened.set()
            done.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        playing = pool.submit(play)
        assert opened.wait(PATIENCE_S)
        assert pool.submit(here).result() is None
        done.set()
        playing.result()


def test_the_patch_keeps_arguments_and_errors_and_is_removed():
    with hone.rollout(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert isinstance(pool.submit(lambda: 1 / 0).exception(), ZeroDivisionError)
        assert ThreadPoolExecutor.__dict__["submit"] is not SUBMIT
    assert ThreadPoolExecutor.__dict__["submit"] is SUBMIT


def test_a_scope_that_failed_to_open_does_not_affect_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A client library that cannot be imported, and then can.
    (tmp_path / "unfinished.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("hone.capture.httpx.LIBRARIES", ("unfinished",))
        client_patches.cache_clear()
        with pytest.raises(ModuleNotFoundError, match="no_such_module"), hone.rollout():
            pass
    with hone.rollout("a"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(here).result() == "a"
    assert ThreadPoolExecutor.__dict__["submit"] is SUBMIT


class Pickling(Executor):
    """As those that send work to another process: it takes what can be pickled, and no context."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        work, future = pickle.loads(pickle.dumps(fn)), Future[Any]()
        threading.Thread(target=lambda: future.set_result(work(*args, **kwargs))).start()
        return future


class Threads(Executor):
    """An executor of the user's own."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        threading.Thread(target=lambda: future.set_result(fn(*args, **kwargs))).start()
        return future


@pytest.mark.parametrize("run", [asyncio.run, run_loop])
def test_run_in_executor_keeps_the_scope_with_any_executor(run: Callable[..., Any]):
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool, hone.rollout("r"):
            executors = (None, pool, Threads(), Pickling())
            return [await loop.run_in_executor(executor, here) for executor in executors]

    before = asyncio.BaseEventLoop.run_in_executor
    assert run(main()) == ["r", "r", "r", None]
    assert asyncio.BaseEventLoop.run_in_executor is before


def test_another_patch_over_ours_survives(monkeypatch: Any):
    counted: list[Callable[..., Any]] = []
    with hone.rollout("r"):
        ours = ThreadPoolExecutor.submit

        def theirs(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            counted.append(fn)
            return ours(self, fn, *args, **kwargs)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", theirs)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(here).result() == "r"
    assert ThreadPoolExecutor.__dict__["submit"] is theirs
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(here).result() is None
    assert counted == [here, here]


class Bound:
    """A patch that has to be bound, as wrapt's: called as a function it takes no `self`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(self, method)

    def __get__(self, instance: Any, kind: type) -> Callable[..., Any]:
        return functools.partial(self._method, instance)

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"called without an instance: {fn!r}")


def test_another_patch_under_ours_is_called_as_a_method(monkeypatch: Any):
    for kind, name in (
        (ThreadPoolExecutor, "submit"),
        (asyncio.BaseEventLoop, "run_in_executor"),
        (httpx.Client, "send"),
    ):
        monkeypatch.setattr(kind, name, Bound(kind.__dict__[name]))

    async def main() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, here)

    respond = httpx.MockTransport(lambda request: httpx.Response(200, json=dict(request.headers)))
    with hone.rollout("r"), httpx.Client(transport=respond) as client:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(here).result() == "r"
        assert asyncio.run(main()) == "r"
        headers = client.post("http://127.0.0.1/v1/chat/completions", json={}).json()
        assert headers["x-hone-rollout"] == "r"
        assert client.get("http://127.0.0.1/").status_code == 200
