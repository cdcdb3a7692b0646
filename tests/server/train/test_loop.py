"""The server loop: the state after a job, however it ends."""

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prose import Prose
from tests.server.conftest import write_model
from tests.server.small_server import (
    CONFIG,
    LearnerHere,
    SmallServer,
    digest,
    spec,
    token_groups,
)

from hone.inference.base import Sampling, complete
from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.packed import pack_groups, unpack_groups
from hone.learner.process import LearnerProcess, LearnerSpec
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.server.train.stages import ThrottledProgress
from hone.types import JobInfo, ModelKey, TrainConfig

KEY = ModelKey("default", "agent")
Open = Callable[..., Awaitable[SmallServer]]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
async def open_server(tmp_path: Path) -> AsyncIterator[Open]:
    """`await open_server(root="hone", **changes)`: a started server, closed when the test ends."""
    async with AsyncExitStack() as opened:

        async def make(root: str = "hone", **changes: Any) -> SmallServer:
            running = SmallServer.started(tmp_path / root, **changes)
            return await opened.enter_async_context(running)

        yield make


async def test_a_job_becomes_a_step_that_is_served(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    assert server.service.status() == {"state": "idle", "jobs": [], "queued": 0}
    submitted = server.submit(record, token_groups(), calls=["call-1"])
    job = await server.ended(submitted.id)
    assert server.store.query("SELECT * FROM call_refs") == []  # and its calls may be pruned
    assert job.state == "done" and (job.base_step, job.step, job.attempts) == (0, 1, 1)
    events = ["queued", "started", "learned", "saved", "published", "proved", "done"]
    assert server.event_types(job.id) == events
    by_type = {event.type: event.data for event in server.jobs.events(job.id)}
    assert by_type["proved"]["verdict"] == "proved"
    assert by_type["proved"]["slope"] == pytest.approx(1.0, abs=0.02)
    assert by_type["proved"]["tokens"] == 8  # of the four calls that were pushed hardest
    assert by_type["learned"]["metrics"] == by_type["done"]["metrics"] == job.metrics
    assert job.metrics["learn/optimizer_steps"] == 3 and job.metrics["learn/staleness"] == 0

    # The same job by hand: same bits.
    here = LearnerHere(LearnerSpec(model_dir=tiny_model, base_model=str(tiny_model), threads=1))
    first = server.checkpoints.get(KEY, 0)
    decoder = Decoder.load(tiny_model)
    lora = Lora.init(decoder.config, rank=4, alpha=8.0, seed=7)
    assert first.sha256 == lora.sha256 == job.base_sha256
    here.load(first.path)
    checkpoint = server.checkpoints.get(KEY, 1)
    assert here.train(pack_groups(token_groups()), CONFIG)["sha256"] == checkpoint.sha256
    assert checkpoint.sha256 != first.sha256
    assert by_type["saved"] == {"step": 1, "sha256": checkpoint.sha256}

    manifest = checkpoint.manifest
    assert manifest["job"] == job.id and manifest["metrics"] == job.metrics
    assert (manifest["base_step"], manifest["base_sha256"]) == (0, first.sha256)
    config = CONFIG.model_dump() | {"row_tokens": job.metrics["learn/row_tokens"]}
    assert manifest["config"] == config and manifest["learner"]["threads"] == 1
    policy = await server.serving.resolve("agent")
    assert policy.step == 1 and policy.adapter is not None
    assert policy.adapter.sha256 == checkpoint.sha256
    assert (await policy.base.engine.probe([], policy.adapter)).sha256 == checkpoint.sha256
    ended = server.metrics.registry.get_sample_value("hone_jobs_total", {"state": "done"})
    assert ended == 1
    step = server.metrics.registry.get_sample_value("hone_model_step", {"model": job.model})
    assert step == 1


@pytest.mark.e2e
async def test_only_the_learners_process_reads_the_groups_of_a_job(
    prose: Prose, open_server: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server that unpacks a large job in a thread stops answering meanwhile."""
    groups = token_groups()
    groups[0].metadata["notes"] = secrets.token_hex(2**20)  # far more than a pipe holds
    here = await open_server("here")
    there = await open_server("there", start_learner=LearnerProcess.launch)
    strict = CONFIG.model_copy(update={"max_staleness": 0})

    async def train_twice(server: SmallServer) -> list[JobInfo]:
        record = server.models.register(spec(tiny_model))
        options = {"config": strict, "plot_tensors": True}
        jobs = [server.submit(record, groups, **options) for _ in range(2)]
        return [await server.ended(job.id) for job in jobs]

    first, overtaken = await train_twice(here)

    unpacked: list[int] = []
    decompress = zlib.decompress

    def noted(data: bytes, *args: Any, **more: Any) -> bytes:
        unpacked.append(len(data))
        return decompress(data, *args, **more)

    monkeypatch.setattr(zlib, "decompress", noted)
    again, also_overtaken = await train_twice(there)
    assert unpacked == []
    assert len(unpack_groups(there.jobs.packed_groups(again.id))) == 3
    assert len(unpacked) == 1  # this test would see it

    # The same bits as from the groups themselves, and the same refusal.
    assert (first.state, first.step) == (again.state, again.step) == ("done", 1)
    steps = [server.checkpoints.get(KEY, 1) for server in (here, there)]
    assert digest(steps[0].path) == digest(steps[1].path)
    assert "packed_rows.png" in steps[1].manifest["files"]
    assert steps[0].manifest["movement"] == steps[1].manifest["movement"]
    assert overtaken.failure is not None and also_overtaken.failure is not None
    assert overtaken.failure.type == also_overtaken.failure.type == "SampleRefused"
    message = overtaken.failure.message.replace(overtaken.id, also_overtaken.id)
    assert message == also_overtaken.failure.message
    prose(message)


async def test_what_a_job_gives_depends_on_its_checkpoint_and_nothing_else(
    open_server: Open, tiny_model: Path
):
    """Two jobs in one server, in two servers, and with another model's job in between."""
    by_hand = LearnerHere(LearnerSpec(model_dir=tiny_model, base_model=str(tiny_model), threads=1))
    together = await (await open_server("a")).trained(tiny_model, 0, 10)
    apart = await open_server("b")
    first = await apart.trained(tiny_model, 0)
    await apart.close()
    second = await (await open_server("b")).trained(tiny_model, 10)
    assert first + second == together and together[0] != together[1]
    # One learner that was never put back: the optimizer's state has come through as well.
    by_hand.load(apart.checkpoints.get(KEY, 0).path)
    for start, wanted in zip((0, 10), together, strict=True):
        by_hand.train(pack_groups(token_groups(first=start)), CONFIG)
        by_hand.save(apart.checkpoints.root / "by-hand")
        assert digest(apart.checkpoints.root / "by-hand") == wanted
    mixed = await open_server("c")
    assert await mixed.trained(tiny_model, 0) == together[:1]
    other = mixed.models.register(spec(tiny_model, "other", rank=2))
    job = await mixed.ended(mixed.submit(other, token_groups(first=5)).id)
    assert job.state == "done"
    assert await mixed.trained(tiny_model, 10) == together[1:]


async def test_preparing_writes_step_0_once_and_serves_the_base_model(
    open_server: Open, tiny_model: Path
):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    prepared = await asyncio.gather(*(server.service.prepare(record) for _ in range(5)))
    assert len({checkpoint.manifest["created_at"] for checkpoint in prepared}) == 1
    assert prepared[0].step == 0 and [c.step for c in server.checkpoints.list(KEY)] == [0]
    policy = await server.serving.resolve("agent")
    assert (policy.step, policy.adapter) == (0, None)
    # Byte for byte what a learner that has learned nothing saves.
    fresh = LearnerHere(LearnerSpec(model_dir=tiny_model, base_model=str(tiny_model), threads=1))
    fresh.load(prepared[0].path)
    fresh.save(server.checkpoints.root / "fresh")
    assert digest(server.checkpoints.root / "fresh") == digest(prepared[0].path)


async def test_a_flat_job_is_done_and_says_why(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    job = await server.ended(server.submit(record, token_groups(flat=True)).id)
    assert job.state == "done" and job.step is None
    assert job.reason is not None and job.reason.startswith("no gradient step: 3 of 3 groups")
    assert server.event_types(job.id) == ["queued", "started", "learned", "done"]
    assert [c.step for c in server.checkpoints.list(KEY)] == [0]
    assert server.serving.newest(record) == (0, None)


async def test_a_flat_job_of_art_advances_with_the_same_adapter(
    open_server: Open, tiny_model: Path
):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    await server.trained(tiny_model, 0)
    submitted = server.submit(record, token_groups(flat=True), advance_when_flat=True)
    job = await server.ended(submitted.id)
    assert (job.state, job.base_step, job.step) == ("done", 1, 2) and job.reason
    first, second = server.checkpoints.get(KEY, 1), server.checkpoints.get(KEY, 2)
    assert digest(first.path) == digest(second.path) and first.sha256 == second.sha256
    proved = next(e.data for e in server.jobs.events(job.id) if e.type == "proved")
    assert proved == {"verdict": "unprovable by logprob", "slope": None, "tokens": 0}
    assert server.serving.newest(record)[0] == 2


async def test_cancelling_a_running_job_leaves_the_step_before(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    await server.trained(tiny_model, 0)
    job = server.submit(record, token_groups(400), calls=["call-1"])
    server.service.wake()
    await server.reached(job.id, "progress")
    assert server.service.status() == {"state": "training", "jobs": [job.id], "queued": 0}
    cancelling = server.jobs.request_cancel(job.id)
    assert cancelling.state == "running" and cancelling.cancel_requested
    ended = await server.ended(job.id)
    assert ended.state == "cancelled" and ended.step is None
    assert server.store.query("SELECT * FROM call_refs") == []
    last = server.jobs.events(job.id, limit=-1)
    progress = [event.data for event in last if event.type == "progress"]
    assert progress[-1]["step"] < 399 and last[-1].type == "cancelled"
    assert server.serving.newest(record)[0] == 1
    assert [c.step for c in server.checkpoints.list(KEY)] == [0, 1]
    await server.trained(tiny_model, 10)  # and the learner goes on


async def test_whether_a_job_was_cancelled_is_not_read_from_the_disk_before_every_row(
    open_server: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    reads = []
    monkeypatch.setattr(
        server.jobs, "get", lambda job_id, get=server.jobs.get: reads.append(job_id) or get(job_id)
    )
    jobs = [await server.ended(server.submit(record, token_groups(n)).id) for n in (3, 40)]
    rows = [job.metrics["learn/micro_batches"] for job in jobs]
    assert rows[1] > 10 * rows[0] > 0
    assert reads.count(jobs[0].id) == reads.count(jobs[1].id)


async def test_cancelling_what_waits_or_has_ended(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    running = server.submit(record, token_groups(400))
    waiting = server.submit(record, token_groups())
    server.service.wake()
    await server.reached(running.id, "progress")
    assert server.jobs.request_cancel(waiting.id).state == "cancelled"
    server.jobs.request_cancel(running.id)
    ended = await server.ended(running.id)
    assert server.jobs.request_cancel(running.id) == ended
    assert server.event_types(waiting.id) == ["queued", "cancelled"]


async def test_a_stopping_server_requeues_its_job(open_server: Open, tiny_model: Path):
    server = await open_server("whole")
    record = server.models.register(spec(tiny_model))
    whole = await server.ended(server.submit(record, token_groups(100)).id)
    assert whole.state == "done"
    wanted = digest(server.checkpoints.get(KEY, 1).path)

    first = await open_server("stopped")
    job = first.submit(first.models.register(spec(tiny_model)), token_groups(100))
    first.service.wake()
    await first.reached(job.id, "progress")
    await first.service.close()
    left = first.jobs.get(job.id)
    assert (left.state, left.attempts) == ("queued", 0)
    await first.close()
    second = await open_server("stopped")
    ended = await second.ended(job.id)
    assert (ended.state, ended.attempts) == ("done", 1)
    assert digest(second.checkpoints.get(KEY, 1).path) == wanted
    events = ["queued", "started", "queued", "started"]
    assert second.event_types(job.id)[:4] == events


async def test_a_corrupted_newest_step_is_not_served_and_is_trained_anew(
    open_server: Open, tiny_model: Path
):
    server = await open_server()
    first, second = await server.trained(tiny_model, 0, 10)
    await server.close()
    broken = server.checkpoints.get(KEY, 2).path / "adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"!")
    again = await open_server()
    policy = await again.serving.resolve("agent")
    assert policy.step == 1 and digest(again.checkpoints.get(KEY, 1).path) == first
    assert await again.trained(tiny_model, 10) == [second]  # the same job, the same step
    assert (await again.serving.resolve("agent")).step == 2


async def test_a_cancelled_job_is_not_taken_up_after_a_crash(open_server: Open, tiny_model: Path):
    server = await open_server()
    job = server.submit(server.models.register(spec(tiny_model)), token_groups())
    server.jobs.take(job.id, None)
    server.jobs.request_cancel(job.id)  # and the server is killed
    await server.service.start()
    ended = await server.ended(job.id)
    assert ended.state == "cancelled"


async def test_serving_goes_on_while_a_job_runs_unless_it_is_to_pause(
    open_server: Open, tiny_model: Path
):
    moments: list[str] = []

    class Watched(EmbeddedEngine):
        async def sleep(self) -> None:
            await super().sleep()
            moments.append("asleep")

        async def wake(self) -> None:
            moments.append("awake")
            await super().wake()

    def watched(name: str) -> Watched:
        return Watched(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)

    going_on = await open_server("on", open_engine=watched)
    job = going_on.submit(going_on.models.register(spec(tiny_model)), token_groups(300))
    going_on.service.wake()
    await going_on.reached(job.id, "progress")
    policy = await going_on.serving.resolve("agent")
    (answer,) = await complete(policy.base.engine, [1, 2, 3], Sampling(max_tokens=4, seed=0))
    assert len(answer.ids) == 4 and going_on.jobs.get(job.id).state == "running"
    going_on.jobs.request_cancel(job.id)
    await going_on.ended(job.id)
    assert moments == []

    pausing = await open_server("off", open_engine=watched, serving_during_training="pause")
    await pausing.trained(tiny_model, 0)
    assert moments == ["asleep", "awake"]
    held, not_held = (server.jobs.list()[0].metrics for server in (pausing, going_on))
    assert held["serve/held_s"] > 0 and "serve/held_s" not in not_held


async def test_the_picture_of_a_job_lies_beside_its_checkpoint(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    job = await server.ended(server.submit(record, token_groups(), plot_tensors=True).id)
    assert job.state == "done", job.failure
    checkpoint = server.checkpoints.get(KEY, 1)
    assert (checkpoint.path / "packed_rows.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "packed_rows.png" in checkpoint.manifest["files"]


def test_progress_is_reported_at_intervals_and_at_the_start_of_each_phase():
    reports: list[tuple[str, int]] = []
    progress = ThrottledProgress(lambda at: reports.append((at["phase"], at["row"])))
    for phase, rows in (("old", 50), ("train", 50)):
        for row in range(rows):
            progress.tell({"phase": phase, "row": row})
    # All within a tenth of a second.
    assert reports == [("old", 0), ("train", 0)]


async def test_jobs_of_two_base_models_do_not_wait_for_each_other(
    open_server: Open, tiny_model: Path, tmp_path: Path, tokenizer: Any
):
    server = await open_server()
    long = server.submit(server.models.register(spec(tiny_model)), token_groups(400))
    second = write_model(tmp_path / "second", tokenizer, seed=1)
    short = server.submit(server.models.register(spec(second, "other")), token_groups())
    assert (await server.ended(short.id)).state == "done"
    assert server.jobs.get(long.id).state == "running"
    server.jobs.request_cancel(long.id)
    await server.ended(long.id)


async def test_learning_rate_zero_is_left_to_the_hash(open_server: Open, tiny_model: Path):
    server = await open_server()
    record = server.models.register(spec(tiny_model))
    still = TrainConfig(learning_rate=0.0)
    job = await server.ended(server.submit(record, token_groups(), config=still).id)
    assert job.state == "done" and job.step == 1
    proved = next(e.data for e in server.jobs.events(job.id) if e.type == "proved")
    assert proved["verdict"] == "unprovable by logprob" and proved["tokens"] == 8
