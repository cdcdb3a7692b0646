"""When a base model's learner is launched: before its first job, once, and never only to serve."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE_S
from tests.server.small_server import LearnerHere, SmallServer, spec, token_groups

from hone.errors import TrainingError
from hone.inference.embedded import engine as embedded
from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.process import LearnerProcess, LearnerSpec
from hone.models import machine
from hone.server.serve.engine_choice import EngineChoice
from hone.server.settings import Settings
from hone.server.train import learners

pytestmark = pytest.mark.e2e


class Launches:
    """`LearnerProcess.launch`, and what it was asked for."""

    def __init__(self, launch: Callable[..., LearnerProcess] = LearnerProcess.launch) -> None:
        self._launch = launch
        self.learners: list[LearnerProcess] = []
        self.gave_way: list[bool] = []

    def __call__(self, spec: LearnerSpec, *, gives_way: bool, **more: Any) -> LearnerProcess:
        self.gave_way.append(gives_way)
        learner = self._launch(spec, gives_way=gives_way, **more)
        self.learners.append(learner)
        return learner

    async def begun(self) -> None:
        """Once it was asked for one."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.gave_way:
                await asyncio.sleep(0.01)

    async def first(self) -> LearnerProcess:
        async with asyncio.timeout(PATIENCE_S):
            while not self.learners:
                await asyncio.sleep(0.01)
        return self.learners[0]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_learner_is_loaded_before_the_first_job(tiny_model: Path, tmp_path: Path):
    launches = Launches()
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        record = server.models.register(spec(tiny_model))
        assert launches.learners == []
        await asyncio.gather(*(server.service.prepare(record) for _ in range(5)))
        ahead = await launches.first()
        assert is_alive(ahead.pid) and server.jobs.list() == []
        await server.trained(tiny_model, 0, 10)
        for step in (1, 2):
            manifest = server.checkpoints.get(record.key, step).manifest
            assert manifest["learner"]["pid"] == ahead.pid
        await server.service.prepare(record)
        assert launches.gave_way == [True]  # it is the only one
    assert not is_alive(ahead.pid)


async def test_a_job_that_comes_first_launches_it_and_preparing_launches_no_second(
    tiny_model: Path, tmp_path: Path
):
    launches = Launches(LearnerHere)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        await server.trained(tiny_model, 0)
        await server.service.prepare(server.models.find("agent"))
    assert launches.gave_way == [False]


async def test_a_server_that_only_serves_has_no_learner(tiny_model: Path, tmp_path: Path):
    launches = Launches()
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        server.models.register(spec(tiny_model))
        for name in (str(tiny_model), "agent"):
            await server.serving.resolve(name)
    assert launches.gave_way == []


async def test_no_learner_is_launched_ahead_where_memory_is_short(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launches = Launches(LearnerHere)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        language = await server.serving.engines.tokenizer(str(tiny_model))
        assert learners.fits_beside_engine(language, server.serving.choice)
        # Half a megabyte of weights is more than a part in 2**60 of any memory.
        monkeypatch.setattr(learners, "AHEAD_SHARE", 2**60)
        assert not learners.fits_beside_engine(language, server.serving.choice)
        await server.service.prepare(server.models.register(spec(tiny_model)))
        await server.trained(tiny_model, 0)
    assert launches.gave_way == [False]


async def test_no_learner_is_launched_ahead_on_a_gpu(tiny_model: Path, tmp_path: Path):
    async with SmallServer.started(tmp_path / "hone") as server:
        language = await server.serving.engines.tokenizer(str(tiny_model))
        choice = EngineChoice(Settings(device="cuda:0"), server.models)
    assert not learners.fits_beside_engine(language, choice)


async def test_a_learner_that_cannot_be_launched_is_the_first_jobs_failure(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any, **__: Any) -> LearnerProcess:
        raise TrainingError("there is no memory")

    launches = Launches(refuse)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        record = server.models.register(spec(tiny_model))
        await server.service.prepare(record)
        await launches.begun()
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.failure is not None
        assert (job.failure.type, job.failure.message) == ("TrainingError", "there is no memory")
        assert launches.gave_way == [True, False]
        assert "no learner could be launched in advance; the first job launches one" in caplog.text
        assert (await server.serving.resolve("agent")).step == 0  # and the server goes on


async def test_learners_that_die_while_they_load_ahead_cost_the_first_job_nothing(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(learners, "REPLACED", 1)  # each takes seconds to load and to die

    def launch(spec: LearnerSpec, *, gives_way: bool, **more: Any) -> LearnerProcess:
        """Those that are launched ahead find no weights."""
        changed = {"model_dir": tmp_path / "nothing"} if gives_way else {}
        return LearnerProcess.launch(spec.model_copy(update=changed), gives_way=gives_way, **more)

    launches = Launches(launch)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        record = server.models.register(spec(tiny_model))
        await server.service.prepare(record)
        async with asyncio.timeout(PATIENCE_S):
            while server.service.parts()["learner"]["status"] == "ok":
                await asyncio.sleep(0.01)
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.state == "done" and job.retries <= 1, job
        assert not launches.gave_way[-1] and launches.gave_way.count(False) == 1
        assert server.service.parts()["learner"]["status"] == "ok"
    assert "a learner died while it had no job and is replaced" in caplog.text


async def test_a_learner_that_is_killed_while_idle_is_replaced_before_the_next_job(
    tiny_model: Path, tmp_path: Path
):
    launches = Launches()
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        record = server.models.register(spec(tiny_model))
        await server.service.prepare(record)
        first = await launches.first()
        os.kill(first.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while len(launches.learners) < 2:
                await asyncio.sleep(0.01)
        job = await server.ended(server.submit(record, token_groups()).id)
        assert (job.state, job.attempts, job.retries) == ("done", 1, 0), job
        manifest = server.checkpoints.get(record.key, 1).manifest
        assert manifest["learner"]["pid"] == launches.learners[1].pid
        # Idle for long enough, it is closed; the next job would launch another, as below.
        await server.service._learners.close_idle(3600.0)
        assert is_alive(launches.learners[1].pid)
        await server.service._learners.close_idle(0.0)
        assert not is_alive(launches.learners[1].pid)


@pytest.mark.parametrize("flat", [False, True])
async def test_a_learner_is_free_as_soon_as_its_step_is_saved(
    tiny_model: Path, tmp_path: Path, flat: bool
):
    launches = Launches(LearnerHere)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        record = server.models.register(spec(tiny_model))
        job = server.submit(record, token_groups(flat=flat))
        server.service.wake()
        # Flat groups make no step, so nothing is published.
        await server.reached(job.id, "done" if flat else "published")
        await server.service._learners.close_idle(0.0)
        (first,) = launches.learners
        assert not first.alive
        ended = await server.ended(job.id)
        assert (ended.state, ended.step) == ("done", None if flat else 1)
        await server.trained(tiny_model, 10)
        assert len(launches.learners) == 2


async def test_a_server_that_stops_does_not_wait_for_a_learner_that_loads(
    tiny_model: Path, tmp_path: Path
):
    def launch(*args: Any, **more: Any) -> LearnerProcess:
        learner = LearnerProcess.launch(*args, **more)
        os.kill(learner.pid, signal.SIGSTOP)  # and so will never have loaded
        return learner

    launches = Launches(launch)
    async with SmallServer.started(tmp_path / "hone", start_learner=launches) as server:
        await server.service.prepare(server.models.register(spec(tiny_model)))
        stopped = await launches.first()
    assert not is_alive(stopped.pid)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's CPU affinity")
def test_threads_are_counted_from_the_cores_the_server_may_use():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from hone.server.train.learners import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_engine_learner_and_job_use_the_number_type_that_the_machine_has(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    specs: list[LearnerSpec] = []

    def start(spec: LearnerSpec, **more: Any) -> LearnerHere:
        specs.append(spec)
        return LearnerHere(spec, **more)

    for module in (machine, embedded):
        monkeypatch.setattr(module, "choose", lambda device: ("cpu", dtype))
    async with SmallServer.started(tmp_path / "hone", start_learner=start) as server:
        await server.trained(tiny_model, 0)
        engine = (await server.serving.engines.base(str(tiny_model))).engine
        assert isinstance(engine, EmbeddedEngine) and engine.dtype == dtype
        (job,) = server.jobs.list()
        manifest = server.checkpoints.get(server.models.find("agent").key, 1).manifest
    (spec,) = specs
    assert f"torch.{spec.dtype}" == f"torch.{job.dtype}" == str(dtype)
    assert manifest["learner"]["dtype"] == job.dtype
    # What the job left to the server is in its configuration, its step's and its metrics.
    assert job.config.row_tokens == manifest["config"]["row_tokens"]
    assert job.metrics["learn/row_tokens"] == job.config.row_tokens
