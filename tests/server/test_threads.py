"""Slow work runs on threads of its own: the threads that requests share stay free."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.small_server import LearnerHere, SmallServer, spec, token_groups

from hone.inference.background import in_own_thread
from hone.inference.base import Engine
from hone.learner.process import WorkerInfo
from hone.server.http.app import create_apps

pytestmark = pytest.mark.e2e

SHARED = 2
"""Threads that all requests share."""


class Gate:
    """Where threads wait; counts those that have come."""

    def __init__(self) -> None:
        self._come = threading.Semaphore(0)
        self._open = threading.Event()

    def wait(self) -> None:
        self._come.release()
        assert self._open.wait(PATIENCE_S)

    def come(self, count: int) -> bool:
        """Whether this many come. Blocking."""
        return all(self._come.acquire(timeout=PATIENCE_S) for _ in range(count))

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def base_models(tiny_model: Path, tmp_path: Path) -> list[Path]:
    """More base models than shared threads, and one more."""
    copies = [tmp_path / f"model-{i}" for i in range(SHARED + 2)]
    for copy in copies:
        shutil.copytree(tiny_model, copy)
    return copies


def few_threads() -> None:
    """For the event loop of a test, which would have at least five."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(SHARED))


async def test_models_that_load_do_not_keep_the_others_from_answering(
    base_models: list[Path], tokenizer: Any, tmp_path: Path, gate: Gate
):
    few_threads()
    loaded, *loading = map(str, base_models)

    def open_engine(name: str) -> Engine:
        if name != loaded:
            gate.wait()
        return ScriptedEngine(["ok"], tokenizer=tokenizer)

    allowed = tuple(map(str, base_models))
    root = tmp_path / "hone"
    async with (
        asyncio.timeout(PATIENCE_S),
        SmallServer.started(root, open_engine=open_engine, allow_base_models=allowed) as server,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_apps(server)[0]), base_url="http://localhost:7623"
        ) as client,
    ):

        async def chat(model: str) -> httpx.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "Hello."}]}
            path = "/rollout/r/v1/chat/completions"
            return await client.post(path, json=body, timeout=PATIENCE_S)

        waiting = [asyncio.create_task(chat(name)) for name in loading]
        try:
            assert await in_own_thread(gate.come, len(loading))
            assert (await client.get("/health")).json()["status"] == "ok"
            assert (await chat(loaded)).status_code == 200
            assert [call.requested_model for call in server.calls.rollout("r")] == [loaded]
        finally:
            gate.open()
        assert [(await one).status_code for one in waiting] == [200] * len(loading)


async def test_learners_that_load_and_train_leave_the_shared_threads_free(
    base_models: list[Path], tokenizer: Any, tmp_path: Path, gate: Gate
):
    few_threads()
    trained = Gate()

    class Slow(LearnerHere):
        def ready(self, **more: Any) -> WorkerInfo:
            gate.wait()
            return super().ready(**more)

        def train(self, *args: Any, **more: Any) -> Any:
            trained.wait()
            return super().train(*args, **more)

    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    async with (
        asyncio.timeout(PATIENCE_S),
        SmallServer.started(
            tmp_path / "hone", open_engine=lambda name: engine, start_learner=Slow
        ) as server,
    ):
        jobs = []
        for i, base_model in enumerate(base_models):
            record = server.models.register(spec(base_model, f"agent-{i}"))
            jobs.append(server.submit(record, token_groups()))
        server.service.wake()
        for stage in (gate, trained):
            try:
                assert await in_own_thread(stage.come, len(jobs))
                assert await asyncio.to_thread(server.service.status)  # as /health does
            finally:
                stage.open()
        for job in jobs:
            assert (await server.reached(job.id, "done", "failed")).ended_at


_variable: ContextVar[str] = ContextVar("variable")


async def test_a_thread_of_its_own_has_the_callers_context_and_returns_its_error():
    _variable.set("here")
    assert await in_own_thread(_variable.get) == "here"
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(divmod, 1, 0)
    with pytest.raises(SystemExit):  # no caller waits for ever
        await in_own_thread(exit, 3)


async def test_a_caller_that_is_cancelled_does_not_wait_for_its_thread(gate: Gate):
    task = asyncio.create_task(in_own_thread(gate.wait))
    assert await in_own_thread(gate.come, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
