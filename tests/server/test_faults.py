"""A server whose disk is full, whose engine breaks or whose pruner fails goes on, and says so."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer
from tests.server.small_server import LearnerHere, SmallServer, spec, token_groups
from tests.store.test_checkpoints import filler, readable_again, unreadable

from hone.errors import EngineFailed
from hone.inference.base import Sampling, complete
from hone.inference.embedded.engine import EmbeddedEngine
from hone.models.decoder import Decoder
from hone.server import state, supervision
from hone.server.http.app import create_apps
from hone.types import ModelKey, ModelSpec

KEY = ModelKey("default", "agent")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_S", 0.05)
    monkeypatch.setattr(supervision, "LONGEST_S", 0.2)


async def health(server: SmallServer) -> dict[str, Any]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_apps(server)[0]), base_url="http://127.0.0.1"
    ) as http:
        return (await http.get("/health")).json()


async def chat(server: SmallServer) -> httpx.Response:
    body = {"model": "agent", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_apps(server)[0]), base_url="http://127.0.0.1"
    ) as http:
        return await http.post("/v1/chat/completions", json=body)


# ---- the disk ---------------------------------------------------------------------------------


class Full(LearnerHere):
    """While `full`, what it saves meets ENOSPC, from the kernel."""

    full = True

    def save(self, directory: Path, **more: Any) -> str:
        if Full.full:
            with open("/dev/full", "w") as out:
                out.write("x")
        return super().save(directory, **more)


async def test_on_a_full_disk_a_job_waits_says_why_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Full, "full", True)
    async with SmallServer.started(tmp_path / "hone", start_learner=Full) as server:
        record = server.models.register(spec(tiny_model))
        job = server.submit(record, token_groups())
        second = server.submit(record, token_groups(first=10))
        server.service.wake()
        async with asyncio.timeout(PATIENCE_S):
            while server.jobs.get(job.id).waiting_for is None:
                await server.jobs.wait_event(job.id, server.jobs.events(job.id)[-1].id, 10)
        waiting = server.jobs.get(job.id)
        assert (waiting.state, waiting.attempts, waiting.failure) == ("queued", 0, None)
        assert "the disk is full" in (waiting.waiting_for or "")
        event = [e.data for e in server.jobs.events(job.id, limit=-1) if e.type == "queued"][-1]
        assert "the disk is full" in event["waiting_for"]
        status = await health(server)
        assert status["status"] == "degraded"
        assert "DiskFull" in status["parts"]["training"]["reason"]
        assert server.jobs.request_cancel(second.id).state == "cancelled"
        monkeypatch.setattr(Full, "full", False)  # there is room
        ended = await server.ended(job.id)
        assert (ended.state, ended.attempts, ended.step) == ("done", 1, 1), ended
        assert ended.waiting_for is None
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["status"] != "ok":
                await asyncio.sleep(0.01)
        disk = server.checkpoints.model_dir(KEY) / "checkpoints"
        assert sorted(p.name for p in disk.iterdir()) == ["0000", "0001"]


async def test_a_job_under_which_the_state_file_takes_nothing_is_not_left_running(
    tiny_model: Path, tmp_path: Path
):
    full: list[bool] = []

    class Filling(LearnerHere):
        """While it trains, the disk fills: from then on every commit is refused."""

        def train(self, *args: Any, **more: Any) -> Any:
            if not full:
                full.append(True)
                server.store._writer.execute("PRAGMA query_only = ON")
            return super().train(*args, **more)

    async with SmallServer.started(tmp_path / "hone", start_learner=Filling) as server:
        record = server.models.register(spec(tiny_model))
        job, second = (server.submit(record, token_groups(first=first)) for first in (0, 10))
        ended = await server.ended(job.id)  # in memory; its step is on disk, and served
        assert (ended.state, ended.attempts, ended.step) == ("done", 1, 1)
        (row,) = server.store.query("SELECT state FROM jobs WHERE id = ?", (job.id,))
        assert row["state"] == "running"  # which is all the disk knows
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["status"] == "ok":  # the next job cannot start
                await asyncio.sleep(0.01)
        assert server.jobs.get(second.id).state == "queued"
        server.store._writer.execute("PRAGMA query_only = OFF")
        assert (await server.ended(second.id)).step == 2
        (row,) = server.store.query("SELECT state FROM jobs WHERE id = ?", (job.id,))
        assert row["state"] == "done"


def test_a_checkpoint_that_cannot_be_read_is_503_and_not_deleted(
    prose: Prose, make_server: MakeServer, tiny_model: Path
):
    server = make_server()
    server.state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    server.state.checkpoints.write(KEY, 0, filler("step 0"))
    written = server.state.checkpoints.write(KEY, 1, filler("step 1"))
    unreadable(written.path / "manifest.json")
    body = {"model": "agent", "messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(2):
        answer = httpx.post(f"{server.openai_url}/chat/completions", json=body)
        assert answer.status_code == 503, answer.text
        prose(answer.json()["error"]["message"])
    names = sorted(path.name for path in written.path.parent.iterdir())
    assert names == ["0000", "0001"]
    readable_again(written.path / "manifest.json")
    answer = httpx.post(f"{server.openai_url}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_job_reads_no_older_step_than_the_one_it_starts_from(
    tiny_model: Path, tmp_path: Path
):
    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(tiny_model, 0)
        unreadable(server.checkpoints.get(KEY, 0).path / "manifest.json")
        job = server.submit(server.models.find("agent"), token_groups(first=20))
        server.service.wake()
        async with asyncio.timeout(PATIENCE_S):
            async for event in server.jobs.follow(job.id):
                assert event is None or "waiting_for" not in event.data, event
        assert server.jobs.get(job.id).step == 2


async def test_jobs_of_other_models_do_not_wait_for_a_checkpoint_that_cannot_be_read(
    tiny_model: Path, tmp_path: Path
):
    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(tiny_model, 0)
        agent, other = (
            server.models.find("agent"),
            server.models.register(spec(tiny_model, "other")),
        )
        manifest = server.checkpoints.get(KEY, 1).path / "manifest.json"
        unreadable(manifest)
        waiting = [server.submit(agent, token_groups(first=first)) for first in (10, 20)]
        ready = [server.submit(other, token_groups(first=first)) for first in (10, 20)]
        for job, step in zip(ready, (1, 2), strict=True):
            ended = await server.ended(job.id)
            assert (ended.state, ended.step) == ("done", step), ended
        first, second = (server.jobs.get(job.id) for job in waiting)
        assert first.state == second.state == "queued" and second.waiting_for is None
        assert "cannot be read" in (first.waiting_for or "")
        status = await health(server)
        assert "StorageError" in status["parts"]["training"]["reason"]
        readable_again(manifest)
        for job, step in zip(waiting, (2, 3), strict=True):  # in their order
            assert (await server.ended(job.id)).step == step


# ---- the engine -------------------------------------------------------------------------------


class Fragile(EmbeddedEngine):
    """Breaks in a step when it is told to."""

    broken = False

    def _step(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access")
        super()._step()


async def test_an_engine_that_breaks_is_opened_anew_with_the_newest_step(
    prose: Prose, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    opened: list[Fragile] = []

    def fragile(name: str) -> Fragile:
        opened.append(Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24))
        return opened[-1]

    async with SmallServer.started(tmp_path / "hone", open_engine=fragile) as server:
        await server.trained(tiny_model, 0)
        assert (await chat(server)).status_code == 200
        opened[0].broken = True
        failed = await chat(server)
        assert failed.status_code == 503 and failed.headers["retry-after"] == "1"
        body = failed.json()
        assert body["exception"] == "EngineFailed" and body["error"]["type"] == "server_error"
        prose(body["error"]["message"])
        assert "in _step" in caplog.text and "an illegal memory access" in caplog.text
        answer = await chat(server)
        assert answer.status_code == 200, answer.text
        assert len(opened) == 2
        policy = await server.serving.resolve("agent")
        assert policy.step == 1 and policy.adapter is not None
        assert policy.base.engine is opened[1]
        assert (await opened[1].probe([], policy.adapter)).sha256 == policy.adapter.sha256
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["status"] != "ok":
                await asyncio.sleep(0.01)
        await server.trained(tiny_model, 10)  # and training goes on


async def test_an_engine_that_breaks_under_a_job_costs_it_a_retry(tiny_model: Path, tmp_path: Path):
    opened: list[Fragile] = []

    def fragile(name: str) -> Fragile:
        opened.append(Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24))
        opened[-1].broken = len(opened) == 1  # it breaks when the step is to be proved
        return opened[-1]

    async with SmallServer.started(tmp_path / "hone", open_engine=fragile) as server:
        record = server.models.register(spec(tiny_model))
        job = await server.ended(server.submit(record, token_groups()).id)
        assert (job.state, job.step, job.retries) == ("done", 1, 1), job
        assert (
            server.event_types(job.id).count("learned") == 1
        )  # what was saved is not learned again


async def test_a_step_is_proved_by_the_engine_that_replaced_a_broken_one(
    tiny_model: Path, tmp_path: Path
):
    opened: list[Fragile] = []

    def fragile(name: str) -> Fragile:
        opened.append(Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24))
        return opened[-1]

    class Unlucky(LearnerHere):
        """While it learns its second step, the engine breaks and the next request opens another."""

        def train(self, *args: Any, **more: Any) -> Any:
            if more["base_step"]:
                opened[0].broken = True
                for expected in (503, 200):
                    asked = asyncio.run_coroutine_threadsafe(chat(server), loop)
                    assert asked.result(PATIENCE_S).status_code == expected
            return super().train(*args, **more)

    loop, root = asyncio.get_running_loop(), tmp_path / "hone"
    async with SmallServer.started(root, open_engine=fragile, start_learner=Unlucky) as server:
        await server.trained(tiny_model, 0)
        record = server.models.find("agent")
        job = await server.ended(server.submit(record, token_groups(first=10)).id)
        assert (job.state, job.step, job.retries) == ("done", 2, 0), job
        assert len(opened) == 2
        assert (await server.serving.resolve("agent")).step == 2


async def test_an_engine_that_cannot_be_opened_again_at_once_is_tried_again_without_a_request(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    opened: list[Fragile | None] = []

    def fragile(name: str) -> Fragile:
        opened.append(None)
        if len(opened) == 2:
            raise EngineFailed("its memory is not free yet")
        opened[-1] = Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)
        return opened[-1]

    async with SmallServer.started(tmp_path / "hone", open_engine=fragile) as server:
        server.models.register(spec(tiny_model))
        assert (await chat(server)).status_code == 200
        assert opened[0] is not None
        opened[0].broken = True
        assert (await chat(server)).status_code == 503
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["status"] != "ok":
                await asyncio.sleep(0.01)
        assert len(opened) == 3 and "its memory is not free yet" in caplog.text
        assert (await chat(server)).status_code == 200


async def test_an_engine_that_breaks_while_it_is_idle_is_opened_anew_before_the_next_request(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state, "LOG_S", 0.05)
    opened: list[Fragile] = []

    def fragile(name: str) -> Fragile:
        opened.append(Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24))
        return opened[-1]

    async with SmallServer.started(tmp_path / "hone", open_engine=fragile) as server:
        server.models.register(spec(tiny_model))
        assert (await chat(server)).status_code == 200
        opened[0].broken = True
        with pytest.raises(EngineFailed):  # not through the server, which sees no request
            await complete(opened[0], [5], Sampling(max_tokens=1))
        async with asyncio.timeout(PATIENCE_S):
            while server.serving.base_models() != {str(tiny_model): True} or len(opened) < 2:
                await asyncio.sleep(0.01)
        assert (await chat(server)).status_code == 200 and len(opened) == 2


async def test_an_engine_that_fails_repeatedly_is_restarted_less_often_and_health_says_so(
    prose: Prose, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervision, "FIRST_S", 600.0)
    monkeypatch.setattr(supervision, "LONGEST_S", 600.0)
    opened: list[Fragile] = []

    def fragile(name: str) -> Fragile:
        opened.append(Fragile(Decoder.load(Path(name)), kv_budget_bytes=1 << 24))
        opened[-1].broken = True
        return opened[-1]

    async with SmallServer.started(tmp_path / "hone", open_engine=fragile) as server:
        server.models.register(spec(tiny_model))
        for _ in range(2):  # the first restart comes at once
            assert (await chat(server)).status_code == 503
        refused = await chat(server)
        assert refused.status_code == 503 and len(opened) == 2
        prose(refused.json()["error"]["message"])
        status = await health(server)
        assert status["status"] == "degraded"
        assert "illegal memory access" in status["parts"]["engine"]["reason"]


async def test_an_idle_engine_is_closed_and_opened_again_when_it_is_asked_for(
    tiny_model: Path, tmp_path: Path
):
    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(tiny_model, 0)
        first = await server.serving.resolve("agent")
        await server.serving.engines.close_idle(3600.0)
        async with server.serving.using("agent"):
            await server.serving.engines.close_idle(0.0)
            assert server.serving.base_models() == {str(tiny_model): True}
        while server.serving.base_models() != {str(tiny_model): False}:  # the job lets it go too
            await asyncio.sleep(0.01)
            await server.serving.engines.close_idle(0.0)
        assert (await chat(server)).status_code == 200
        again = await server.serving.resolve("agent")
        assert again.step == 1 and again.base.engine is not first.base.engine


# ---- the pruner, and health -------------------------------------------------------------------


async def test_the_pruner_goes_on_after_a_failure(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state, "PRUNE_S", 0.05)
    async with SmallServer.started(tmp_path / "hone") as server:
        server.store._writer.execute("PRAGMA query_only = ON")
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["parts"]["pruner"]["status"] == "ok":
                await asyncio.sleep(0.01)
        status = await health(server)
        assert (
            status["status"] == "degraded" and "StorageError" in status["parts"]["pruner"]["reason"]
        )
        server.store._writer.execute("PRAGMA query_only = OFF")
        async with asyncio.timeout(PATIENCE_S):
            while (await health(server))["status"] != "ok":
                await asyncio.sleep(0.01)


async def test_health_without_the_key_names_no_job_and_no_reason(tiny_model: Path, tmp_path: Path):
    async with SmallServer.started(tmp_path / "hone", api_key="secret") as server:
        server.pruner.fail(OSError("/home/somebody"))
        status = await health(server)
        assert status["status"] == "degraded" and "jobs" not in status
        assert status["parts"] == {
            "engine": {"status": "ok"},
            "training": {"status": "ok"},
            "learner": {"status": "ok"},
            "pruner": {"status": "failing"},
            "storage": {"status": "ok"},
        }
