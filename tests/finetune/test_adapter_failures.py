"""HoneServerAdapter with a scripted server, for failures that a real server rarely has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import Request, Response
from tests.finetune.worlds import adapter_for, finetuning, message
from tests.prose import Prose
from tests.sdk.conftest import serving
from tests.sdk.standin import StandIn, refusal

from hone import RemoteBackend
from hone.errors import Conflict, HoneError, NotFound
from hone.finetune.adapter import LESS_MEMORY, HoneServerAdapter
from hone.finetune.base import (
    TrainingJobRef,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


@asynccontextmanager
async def submitted(
    standin: StandIn, *, patience_s: float = 2.0, **run: Any
) -> AsyncIterator[tuple[HoneServerAdapter, TrainingJobRef]]:
    """A job at a server that does what the test says."""
    async with serving(standin.app) as url:
        adapter = adapter_for(RemoteBackend(url), "b")
        adapter.backend.patience_s = patience_s
        adapter.run_config = finetuning(**run)
        yield adapter, await adapter.submit(collection("k"))
        await adapter.close()


def collection(key: str) -> TrajectoryCollection:
    """What is submitted for a job of the run `r`."""
    episode = [message("user", "u"), message("assistant", "a", {"content": [{}]})]
    group = [Trajectory(episode=episode, reward=r) for r in (0.0, 1.0)]
    return TrajectoryCollection(trajectories=[group], run_id="r", metadata={"key": key})


async def test_a_job_that_runs_and_one_too_many(prose: Prose):
    standin = StandIn()
    async with submitted(standin) as (adapter, ref):
        status = await adapter.status(ref)
        queued = TrainingStatusEnum.PENDING
        assert (status.status, status.message) == (queued, "Training is in progress.")
        assert list(adapter.training_jobs) == ["r"]
        trajectory = Trajectory(
            episode=[message("user", "u"), message("assistant", "a", {})], reward=0.0
        )
        group = TrajectoryCollection(trajectories=[[trajectory]], run_id="r")
        with pytest.raises(Conflict) as caught:
            await adapter.submit(group)
        prose(caught)
        unknown = TrainingJobRef(run_id="nobody", backend="openpipe-art")
        for ask in (adapter.status, adapter.wait_until_complete):
            with pytest.raises(NotFound) as caught:
                await ask(unknown)
            prose(caught)


async def test_a_job_that_runs_out_of_memory_says_what_to_do():
    standin = StandIn()
    async with submitted(standin) as (adapter, ref):
        message = "CUDA out of memory. Tried to allocate 2.00 GiB."
        failure = {"type": "OutOfMemoryError", "message": message}
        standin.emit("failed", failure=failure)
        status = await adapter.wait_until_complete(ref)
        assert status.status is FAILED
        assert status.message is not None
        assert status.message.startswith(
            "Training failed with error: OutOfMemoryError: CUDA out of memory."
        )
        assert status.message.endswith(LESS_MEMORY)
        for key in ("gpu_memory_utilization", "max_seq_length", "num_generations"):
            assert key in LESS_MEMORY
        assert "tensor_parallel_size" in LESS_MEMORY
        assert "logs/server.log" in status.message


async def test_what_the_server_proposes_is_not_repeated_without_its_values():
    standin = StandIn()
    async with submitted(standin) as (adapter, ref):
        advice = "reduce max_seq_length to 4096; reduce num_generations to 4."
        failure = {"type": "OutOfMemory", "message": f"CUDA out of memory.\n{advice}"}
        standin.emit("failed", failure=failure)
        status = await adapter.wait_until_complete(ref)
        assert status.message is not None and advice in status.message
        assert "CUDA out of memory" in status.message and LESS_MEMORY not in status.message


async def test_a_server_without_memory_for_the_model_says_what_to_do(prose: Prose):
    standin = StandIn()

    def refuse(request: Request) -> Response | None:
        if request.url.path == "/health":
            return Response('{"status": "ok"}', media_type="application/json")
        if request.url.path.endswith("/prepare"):
            return refusal(500, "CUDA out of memory. Tried to allocate 9 GiB", "EngineError")
        return None

    standin.refuse = refuse
    async with serving(standin.app) as url:
        adapter = adapter_for(RemoteBackend(url), "b")
        with pytest.raises(HoneError) as caught:
            await adapter.initialize(finetuning())
        prose(caught)
        assert LESS_MEMORY in str(caught.value)


async def test_a_failure_of_another_kind_and_a_cancelled_job():
    for event, data, expected in (
        ("failed", {"failure": {"type": "NonFinite", "message": "loss is NaN"}}, FAILED),
        ("cancelled", {}, TrainingStatusEnum.CANCELED),
    ):
        standin = StandIn()
        async with submitted(standin) as (adapter, ref):
            standin.emit(event, **data)
            status = await adapter.wait_until_complete(ref)
            assert status.status is expected
            assert LESS_MEMORY not in (status.message or "")
            assert await adapter.status(ref) == status, "it is not forgotten"


async def test_a_job_that_takes_too_long_is_cancelled():
    standin = StandIn()
    async with submitted(standin, job_timeout_s=0.2) as (adapter, ref):
        status = await adapter.wait_until_complete(ref)
        assert status.status is FAILED
        assert "did not end within finetuning.job_timeout_s=0.2 and was cancelled" in (
            status.message or ""
        )
        assert standin.job.info.state == "cancelled"


async def test_a_job_that_takes_too_long_at_a_server_that_cannot_cancel_it_has_failed_too():
    standin = StandIn()
    async with submitted(standin, patience_s=0.1, job_timeout_s=0.2) as (adapter, ref):

        def refuse(request: Request) -> Response | None:
            if request.url.path.endswith("/cancel"):
                return refusal(503, "no", "Unavailable")
            return None

        standin.refuse = refuse
        status = await adapter.wait_until_complete(ref)
        assert status.status is FAILED and status.message is not None
        assert "did not end within finetuning.job_timeout_s=0.2" in status.message
        assert "and could not be cancelled" in status.message
        assert standin.job.info.state == "queued"


async def test_whoever_stops_waiting_does_not_stop_the_job():
    standin = StandIn()
    async with submitted(standin) as (adapter, ref):
        waiting = asyncio.create_task(adapter.wait_until_complete(ref))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert standin.job.info.state == "queued"
        standin.emit("done", step=1)
        assert (await adapter.wait_until_complete(ref)).status is COMPLETED


async def test_the_next_job_is_accepted_once_the_last_has_ended_however_that_was_noticed(
    prose: Prose,
):
    for event in ("done", "cancelled"):
        standin = StandIn()
        async with submitted(standin) as (adapter, ref):
            waiting = asyncio.create_task(adapter.wait_until_complete(ref))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(Conflict) as caught:
                await adapter.submit(collection("next"))
            prose(caught)
            standin.emit(event)  # which `status` shows; a trainer of a plugin may use nothing else
            assert (await adapter.status(ref)).status is not TrainingStatusEnum.PENDING
            assert (await adapter.submit(collection("next"))).run_id == "r"


async def test_waiting_for_an_earlier_job_does_not_admit_a_second_one(prose: Prose):
    standin = StandIn()
    async with submitted(standin) as (adapter, ref):
        standin.emit("done", step=1)
        assert (await adapter.wait_until_complete(ref)).status is COMPLETED
        await adapter.submit(collection("next"))
        assert (await adapter.wait_until_complete(ref)).status is COMPLETED
        with pytest.raises(Conflict) as caught:
            await adapter.submit(collection("next"))
        prose(caught)


async def test_a_server_that_stays_away_under_a_job():
    standin = StandIn()
    async with submitted(standin, patience_s=0.1) as (adapter, ref):
        standin.refuse = lambda request: refusal(503, "closing", "Unavailable")
        standin.emit("queued")
        status = await adapter.wait_until_complete(ref)
        assert status.status is FAILED
        assert "no hone server answers there" in (status.message or "")
