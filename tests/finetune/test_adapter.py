"""HoneServerAdapter at a real server with a tiny model."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request, Response
from tests.finetune.worlds import adapter_for, collected, finetuning, message, rollout
from tests.prose import Prose
from tests.sdk.conftest import serving
from tests.sdk.standin import StandIn, refusal

from hone import LocalBackend, RemoteBackend
from hone.backends import http
from hone.errors import ConfigError, Conflict, Unprocessable, Unreachable
from hone.files.event_log import EventLog
from hone.finetune.adapter import HoneServerAdapter, HoneServerAdapterConfig
from hone.finetune.base import (
    TrainingJobRef,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from hone.finetune.dataset_builder import ConversationBuilderConfig

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


@asynccontextmanager
async def ready(
    server: RemoteBackend, model: Path, training: Any = None, *, run: Any = None, **backend: Any
) -> AsyncIterator[HoneServerAdapter]:
    """An initialized adapter; its connections are closed at the end, not the server."""
    adapter = adapter_for(server, model, training, **backend)
    await adapter.initialize(run or finetuning())
    try:
        yield adapter
    finally:
        await adapter.model.close()
        await adapter.close()


def new_run() -> str:
    return f"art_run_{secrets.token_hex(4)}"


# ---- the server ---------------------------------------------------------------------------------


async def test_initialize_registers_loads_and_says_where_the_model_answers(
    server: LocalBackend, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "hone")
    arguments: dict[str, Any] = {
        "init_args": {"max_seq_length": 400},
        "engine_args": {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1},
        "server_config": {"server_args": {"port": 8000}, "engine_args": {"max_logprobs": 5}},
    }
    async with ready(server, tiny_model, **arguments) as adapter:
        assert adapter.served is not None and adapter.info is not None
        assert adapter.served.base_url == f"{server.base_url}/v1"
        assert adapter.served.model == f"suite/{adapter.model.name}"
        assert (adapter.served.host, adapter.served.api_key) == ("localhost", "default")
        held_s = adapter.served.rollout_arguments["held_s"]
        assert await held_s("run:1", time.monotonic() - 60) == 0  # it has made no call
        assert adapter.info.base_model == str(tiny_model)
        assert adapter.describe()["root"] == str(server.root)
        assert (await adapter.policy_step(), await adapter.is_healthy()) == (0, True)
        await adapter.initialize(finetuning())  # a second time is nothing
    [message] = [r.getMessage() for r in caplog.records if "Not applicable" in r.getMessage()]
    assert "engine_args.gpu_memory_utilization" in message
    assert "engine_args.max_logprobs" in message and "server_args" in message
    assert sum("Connected to" in r.getMessage() for r in caplog.records) == 1


async def test_no_server_at_the_address(
    prose: Prose, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "FIRST_S", 0.2)
    adapter = adapter_for(RemoteBackend("http://127.0.0.1:1"), tiny_model)
    with pytest.raises(ConnectionError) as caught:
        await adapter.initialize(finetuning())
    message = str(caught.value)
    prose(message)
    assert "firewalls" in message
    assert not await adapter.is_healthy()


async def test_another_server_at_the_address(prose: Prose, tiny_model: Path):
    standin = StandIn()
    standin.refuse = lambda request: Response("nothing here", 404)
    async with serving(standin.app) as url:
        with pytest.raises(Unreachable) as caught:
            await adapter_for(RemoteBackend(url), tiny_model).initialize(finetuning())
        prose(caught)


async def test_a_wrong_key_and_a_wrong_inference_port(
    prose: Prose, server: LocalBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "FIRST_S", 0.2)
    adapter = adapter_for(server, tiny_model, inference_port=1)
    with pytest.raises(Unreachable) as caught:
        await adapter.initialize(finetuning())
    prose(caught)


async def test_a_status_that_is_no_success_is_not_healthy(tiny_model: Path):
    standin = StandIn()

    def refuse(request: Request) -> Response | None:
        return refusal(500, "broken", "ServerError") if request.url.path == "/health" else None

    standin.refuse = refuse
    async with serving(standin.app) as url:
        assert not await adapter_for(RemoteBackend(url), tiny_model).is_healthy()


async def test_two_gpus_on_one_device_are_refused(
    prose: Prose, server: LocalBackend, tiny_model: Path
):
    adapter = adapter_for(server, tiny_model, engine_args={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError) as caught:
        await adapter.initialize(finetuning())
    prose(caught)


async def test_another_base_model_under_the_same_name_is_refused(
    prose: Prose, server: LocalBackend, tiny_model: Path
):
    async with ready(server, tiny_model) as adapter:
        other = adapter_for(server, "smollm2-135m-instruct", name=adapter.model.name)
        with pytest.raises(Conflict) as caught:
            await other.initialize(finetuning())
        prose(caught)


@pytest.mark.e2e
async def test_a_server_of_its_own(tmp_path: Path, tiny_model: Path):
    block = {"root": tmp_path / "own", "base_model": str(tiny_model)}
    adapter = HoneServerAdapter(HoneServerAdapterConfig.model_validate({"backend": block}))
    assert isinstance(adapter.backend, LocalBackend)
    assert not (tmp_path / "own").exists(), "nothing is started before it is needed"
    await adapter.initialize(finetuning())
    try:
        assert adapter.served is not None
        assert adapter.served.model == "trainer_project/trainer_run"
        assert (await rollout(adapter, "r1")).token_ids
    finally:
        await adapter.model.close()
        await adapter.close()
    assert adapter.backend._server is None


async def test_starting_anew_keeps_the_old_steps_under_another_name(
    server: LocalBackend, tiny_model: Path
):
    async with ready(server, tiny_model) as adapter:
        ref = await adapter.submit(await collected(adapter, new_run()))
        assert (await adapter.wait_until_complete(ref)).metadata["step"] == 1  # pyright: ignore[reportOptionalSubscript]
        again = adapter_for(server, tiny_model, name=adapter.model.name)
        await again.start_anew("art_run_0000abcd")
        await again.initialize(finetuning())
        assert await again.policy_step() == 0
        aside = adapter_for(server, tiny_model, name=f"{adapter.model.name}.art_run_0000abcd")
        assert await aside.policy_step() == 1
        await again.start_anew("art_run_0000abce")
        nobody = adapter_for(server, tiny_model)
        await nobody.start_anew(None)  # nothing was trained under that name: nothing to do
        await again.model.close()


# ---- jobs ---------------------------------------------------------------------------------------


async def test_a_job_from_submission_to_step(
    server: LocalBackend, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "hone")
    run_id = new_run()
    async with ready(server, tiny_model, {"learning_rate": 1e-3, "beta": 0.1}) as adapter:
        with EventLog(tmp_path / "events.jsonl") as adapter.events:
            progress: list[Any] = []
            adapter.events.listeners.append(progress.append)
            meta = {"epoch": 0, "round": 0, "rounds": 1, "epochs": 2, "key": f"{run_id}:0:0"}
            groups = await collected(adapter, run_id, examples=2, **meta)
            ref = await adapter.submit(groups)
            assert (ref.run_id, ref.backend) == (run_id, "openpipe-art")
            status = await adapter.wait_until_complete(ref)
        assert (status.status, status.progress) == (COMPLETED, 100.0)
        outcome = status.metadata or {}
        assert outcome["step"] == 1 == await adapter.policy_step()
        # What was written, not the server's defaults and not this adapter's.
        assert (outcome["config"]["learning_rate"], outcome["config"]["beta"]) == (1e-3, 0.1)
        assert outcome["counts"] == {"by_rollout": 4}
        assert outcome["metrics"]["learn/grad_norm"] > 0
        assert {event.type for event in progress} == {"job_progress"}
        # Sent again under its key it is the same job, and nothing is trained twice.
        again = await adapter.submit(groups)
        assert again == ref
        assert (await adapter.wait_until_complete(again)).metadata == outcome
        assert await adapter.policy_step() == 1
        # A later job of the run is another one.
        later = await adapter.submit(await collected(adapter, run_id, epoch=1))
        assert (await adapter.wait_until_complete(later)).metadata["step"] == 2  # pyright: ignore[reportOptionalSubscript]
        assert await adapter.wait_until_complete(ref) == status
        # Another process knows it by its reference.
        other = adapter_for(server, tiny_model, name=adapter.model.name)
        assert await other.status(ref) == status == await other.wait_until_complete(ref)
        await adapter.close_run(run_id)
    lines = [record.getMessage() for record in caplog.records]
    assert "Submitted 4 trajectories in 2 groups for training" in lines
    assert any('"learning_rate": 0.001' in line and '"beta": 0.1' in line for line in lines)


async def test_the_learning_rate_falls_over_the_run(server: LocalBackend, tiny_model: Path):
    run_id = new_run()
    training = {"learning_rate": 1e-3, "schedule": "linear"}
    async with ready(server, tiny_model, training) as adapter:
        used = []
        for epoch, round in ((0, 0), (0, 1), (1, 0), (1, 1)):
            place = {"epoch": epoch, "round": round, "rounds": 2, "epochs": 2}
            groups = await collected(adapter, f"{run_id}-{epoch}-{round}", **place)
            ref = await adapter.submit(groups)
            outcome = (await adapter.wait_until_complete(ref)).metadata or {}
            used.append(outcome["config"]["learning_rate"])
    # Four jobs: 4/4, 3/4, 2/4, 1/4 of 1e-3.
    assert used == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


async def test_calls_that_are_not_named_are_context(server: LocalBackend, tiny_model: Path):
    run_id = new_run()
    async with ready(server, tiny_model) as adapter:
        collection = await collected(adapter, run_id)
        for trajectory in collection.trajectories[0]:
            assert trajectory.metadata is not None
            await rollout(adapter, trajectory.rollout)  # a second call, not a target
        ref = await adapter.submit(collection)
        outcome = (await adapter.wait_until_complete(ref)).metadata or {}
    assert outcome["counts"]["by_rollout"] == 2


async def test_rollouts_nobody_recorded_are_refused_in_the_seed_s_words(
    prose: Prose, server: LocalBackend, tiny_model: Path
):
    async with ready(server, tiny_model) as adapter:
        episode = [message("user", "hi"), message("assistant", "ok", {})]
        both = [Trajectory(episode=episode, reward=reward) for reward in (0.0, 1.0)]
        group = TrajectoryCollection(trajectories=[both], run_id="r")
        with pytest.raises(Unprocessable) as caught:
            await adapter.submit(group)
        prose(caught)


async def readable(adapter: HoneServerAdapter, nth: int) -> Any:
    """An answer whose text holds all of its tokens; random weights also say half characters."""
    seeds = (await rollout(adapter, new_run(), max_tokens=1, seed=s) for s in range(100))
    texts = [choice async for choice in seeds if (choice.message.content or "\ufffd").isascii()]
    return texts[nth]


async def test_text_with_logprobs_where_nothing_was_recorded(
    server: LocalBackend, tiny_model: Path
):
    async with ready(server, tiny_model) as adapter:
        group = []
        for reward in (0.0, 1.0):
            choice = await readable(adapter, int(reward))
            logprobs = choice.logprobs.model_dump(mode="json")
            answer = message("assistant", choice.message.content, logprobs, finish_reason="length")
            group.append(
                Trajectory(episode=[message("user", "Say a number."), answer], reward=reward)
            )
        ref = await adapter.submit(TrajectoryCollection(trajectories=[group], run_id=new_run()))
        outcome = (await adapter.wait_until_complete(ref)).metadata or {}
        assert outcome["step"] == 1
        assert sum(outcome["counts"].get(how, 0) for how in ("matched", "rerendered")) == 2


async def test_old_checkpoints_are_deleted_before_each_job(server: LocalBackend, tiny_model: Path):
    async with ready(server, tiny_model, delete_old_checkpoints=True) as adapter:
        for epoch in range(3):
            ref = await adapter.submit(await collected(adapter, new_run(), epoch=epoch))
            assert (await adapter.wait_until_complete(ref)).status is COMPLETED
            if epoch == 1:
                await adapter.log_metrics({"reward": 0.5}, split="val", step=1)
        # Before the third job: 2 is the newest, 1 the best; then 3 came.
        steps = [c.step for c in await adapter.backend.checkpoints(adapter.model)]
        assert steps == [1, 2, 3]
        await adapter.prune(1)
        steps = [c.step for c in await adapter.backend.checkpoints(adapter.model)]
        assert steps == [1, 3]


async def test_the_first_step_of_a_run_survives_until_its_verdict(
    server: LocalBackend, tiny_model: Path
):
    """A second run begins at step 1 and trains two steps, of which the first is the best."""
    async with ready(server, tiny_model, delete_old_checkpoints=True) as adapter:

        async def train(run_id: str) -> None:
            ref = await adapter.submit(await collected(adapter, run_id))
            assert (await adapter.wait_until_complete(ref)).status is COMPLETED

        async def retained() -> list[int]:
            return [c.step for c in await adapter.backend.checkpoints(adapter.model)]

        first, second = new_run(), new_run()
        await train(f"{first}-1")
        await adapter.open_run(first, 0)
        await adapter.log_metrics({"reward": 0.9}, split="val", step=1)
        for step, reward in ((1, 0.3), (2, 0.6), (3, 0.5)):
            await adapter.open_run(second, 0)
            await adapter.log_metrics({"reward": reward}, split="val", step=step)
            adapter.needed_steps = {1}
            if step < 3:
                await train(f"{second}-{step}")
        assert (await adapter.backend.model_info(adapter.model)).best_step == 2
        await adapter.prune(1)
        assert await retained() == [1, 2, 3]
        adapter.needed_steps = set()
        await adapter.prune(1)
        assert await retained() == [2, 3]


async def test_the_left_out_trajectories_of_the_last_job_are_logged(
    prose: Prose, server: LocalBackend, tiny_model: Path
):
    adapter = adapter_for(server, tiny_model)
    with pytest.raises(ValueError, match="No valid trajectory groups to submit") as caught:
        await adapter.submit(TrajectoryCollection(trajectories=[], run_id="r"))
    prose(caught)
    bad = Trajectory(episode=[message("assistant", "a", {})], reward=0.0, metadata={"id": "e1"})
    with pytest.raises(ConfigError) as refused:
        await adapter.submit(TrajectoryCollection(trajectories=[[bad]], run_id="r"))
    prose(refused)


async def test_rows_of_a_dataset_are_trained_in_any_order(server: LocalBackend, tiny_model: Path):
    asks = {"role": "user", "content": "7?"}
    answers, before = [{"role": "assistant", "content": "seven", **w} for w in ({}, {"weight": 0})]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    rows = [[before, asks, answers], [asks, before, answers], [asks, answers, answers]]
    groups = [
        ConversationBuilderConfig().trajectories(str(i), {"messages": row, "tools": [tool]})
        for i, row in enumerate(rows)
    ]
    async with ready(server, tiny_model) as adapter:
        keys = {"training": {"loss": "sft"}}
        sent = TrajectoryCollection(trajectories=groups, run_id=new_run(), metadata=keys)
        outcome = await adapter.wait_until_complete(await adapter.submit(sent))
        assert outcome.status is COMPLETED and not adapter.dropped, outcome.message
        assert (outcome.metadata or {})["counts"] == {"from_text": 4}


def test_its_own_log(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    adapter = adapter_for(server, tiny_model, name="n")
    ref = TrainingJobRef(run_id="r1", backend="openpipe-art")
    for loss in (0.5, 0.25):
        adapter.log_progress(ref, {"loss": loss}, str(tmp_path / "log"))
    lines = (tmp_path / "log/trainer_adapter_r1.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first.pop("timestamp")
    assert first == {
        "run_id": "r1",
        "backend": "openpipe-art",
        "trainer_config": {"base_model": str(tiny_model), "project": "suite", "name": "n"},
        "loss": 0.5,
    }
    assert len(lines) == 2
