"""The queue: changes of state, and events that are durable before a listener gets them."""

import asyncio
import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.prose import Prose

from hone.errors import BadRequest, Conflict, NotFound, StateError, StorageError
from hone.learner.packed import pack_groups, unpack_groups
from hone.store.database import Store
from hone.store.jobs import ATTEMPTS, FINAL, NEXT, JobStore, Pin
from hone.store.models import ModelRecord, ModelStore
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, Failure, JobInfo, JobState, ModelKey, ModelSpec, TrainConfig

PIN = Pin(3, "ab" * 32, dtype="float32", row_tokens=4096)
NO_FAILURE = Failure(type="X", message="y")
FOREVER_S = 3600.0
"""A wait that nothing ends is ended by pytest's timeout."""


@pytest.fixture
def agent(store: Store) -> ModelRecord:
    return ModelStore(store).register(ModelSpec(name="agent", base_model="tiny"))


def groups() -> list[TrajectoryGroup]:
    call = Call(prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-0.1, -1 / 3], step=2)
    pair = [Trajectory(calls=[call], reward=reward) for reward in (1.0, 0.1)]
    return [TrajectoryGroup(pair, example="one", metadata={"k": None})]


def add(queue: JobStore, model: ModelRecord, **changes: Any) -> JobInfo:
    given = {"config": TrainConfig(), "counts": {}, "request_sha256": "1:" + "a" * 64, **changes}
    return queue.add(model=model, groups=pack_groups(groups()), **given)


def reach(queue: JobStore, job: JobInfo, state: JobState) -> JobInfo:
    """Bring a queued job into a state by allowed moves."""
    if state == "queued":
        return job
    taken = queue.take(job.id, PIN)
    return taken if state == "running" else queue.move(job.id, state)


def last(queue: JobStore, job: JobInfo) -> int:
    return queue.events(job.id, limit=-1)[-1].id


def types(queue: JobStore, job: JobInfo) -> list[str]:
    return [event.type for event in queue.events(job.id)]


def test_an_accepted_job_is_durable(queue, agent, tmp_path: Path):
    config = TrainConfig(learning_rate=1 / 3, beta=0.1)
    job = add(queue, agent, config=config, counts={"matched": 2}, calls=["call-1"])
    store = Store(tmp_path / "state.sqlite")  # as after a kill: the first one was never closed
    reopened = JobStore(store)
    assert reopened.get(job.id) == job
    assert job.state == "queued" and job.config == config and job.model == "default/agent"
    assert [g.model_dump() for g in unpack_groups(reopened.packed_groups(job.id))] == [
        g.model_dump() for g in groups()
    ]
    refs = [tuple(row) for row in store.query("SELECT job, call FROM call_refs")]
    assert refs == [(job.id, "call-1")]
    assert [e.type for e in reopened.events(job.id)] == ["queued"]
    store.close()


def test_a_nan_logprob_comes_back_as_nan(queue, agent):
    call = Call(prompt_ids=[1], completion_ids=[2], logprobs=[math.nan])
    group = TrajectoryGroup([Trajectory(calls=[call], reward=1.0)])
    job = queue.add(
        model=agent,
        groups=pack_groups([group]),
        config=TrainConfig(),
        counts={},
        request_sha256="a",
    )
    (stored,) = unpack_groups(queue.packed_groups(job.id))
    logprobs = stored.trajectories[0].calls[0].logprobs
    assert logprobs is not None and math.isnan(logprobs[0])  # for the learner to refuse


def test_the_same_key_and_request_give_the_same_job(prose: Prose, queue, agent, store):
    first = add(queue, agent, idempotency_key="k")
    assert add(queue, agent, idempotency_key="k") == first
    done = reach(queue, first, "done")
    assert add(queue, agent, idempotency_key="k") == done  # also when it is over
    with pytest.raises(Conflict) as caught:
        add(queue, agent, idempotency_key="k", request_sha256="1:" + "b" * 64)
    prose(caught, first=first.id)
    other = ModelStore(store).register(ModelSpec(name="other", base_model="tiny"))
    assert add(queue, other, idempotency_key="k").id != first.id  # keys belong to a model
    assert add(queue, agent).id != add(queue, agent).id  # without a key, every request is a job
    assert types(queue, first) == ["queued", "started", "done"]


STATES: tuple[JobState, ...] = get_args(JobState)


@pytest.mark.parametrize(("state", "to"), list(itertools.product(STATES, STATES)))
def test_changes_of_state_follow_the_table(
    prose: Prose, queue, agent, state: JobState, to: JobState
):
    job = reach(queue, add(queue, agent), state)
    before = types(queue, job)
    if to in NEXT.get(state, ()):
        moved = queue.move(job.id, to)
        assert moved.state == to == queue.get(job.id).state
        events = [] if moved == job else [{"running": "started"}.get(to, to)]
        assert types(queue, job) == [*before, *events]
        assert (moved.ended_at is not None) == (to in FINAL)
        assert (moved.started_at is not None) == ("running" in (state, to) and to != "queued")
    else:
        with pytest.raises(Conflict) as caught:
            queue.move(job.id, to)
        prose(caught, job=job.id)
        assert queue.get(job.id) == job and types(queue, job) == before


def test_jobs_of_a_base_model_start_in_order(queue, agent, store):
    other = ModelStore(store).register(ModelSpec(name="other", base_model="large"))
    first, second, third = add(queue, agent), add(queue, other), add(queue, agent)
    assert queue.waiting() == {"tiny": 2, "large": 1}
    assert queue.oldest("tiny").id == first.id
    taken = queue.take(first.id, PIN)
    assert (taken.attempts, taken.base_step, taken.base_sha256) == (1, 3, "ab" * 32)
    assert queue.events(first.id)[-1].data == {"attempt": 1, "base_step": 3}
    assert queue.oldest("tiny").id == third.id and queue.oldest("large").id == second.id
    assert queue.oldest("small") is None
    assert [j.id for j in queue.list()] == [third.id, second.id, first.id]
    assert [j.id for j in queue.list(model=ModelKey("default", "agent"), limit=1)] == [third.id]
    assert [j.id for j in queue.list(state="running")] == [first.id]
    with pytest.raises(Conflict):
        queue.take(first.id, PIN)


def test_a_waiting_job_delays_only_its_own_model(queue, agent, store):
    other = ModelStore(store).register(ModelSpec(name="other", base_model="tiny"))
    first, _, third = add(queue, agent), add(queue, agent), add(queue, other)
    assert queue.oldest("tiny", {third.id}).id == first.id
    assert queue.oldest("tiny", {first.id}).id == third.id
    assert queue.oldest("tiny", {first.id, third.id}) is None


def test_a_second_attempt_may_keep_its_pin(queue, agent):
    job = reach(queue, add(queue, agent), "running")
    queue.move(job.id, "queued")
    again = queue.take(job.id, None)
    assert (again.attempts, again.base_step, again.base_sha256) == (2, 3, "ab" * 32)


def test_a_job_of_a_newer_version_keeps_its_keys_and_is_not_trained_otherwise(
    prose: Prose, queue, agent, store
):
    def change(job: JobInfo, **keys: Any) -> None:
        info = json.loads(store.query("SELECT info FROM jobs WHERE id = ?", (job.id,))[0]["info"])
        for path, value in keys.items():
            *parents, key = path.split("__")
            (info[parents[0]] if parents else info)[key] = value
        with store.transaction() as db:
            db.execute("UPDATE jobs SET info = ? WHERE id = ?", (json.dumps(info), job.id))

    def stored(job: JobInfo) -> dict[str, Any]:
        return json.loads(store.query("SELECT info FROM jobs WHERE id = ?", (job.id,))[0]["info"])

    known, unknown = add(queue, agent, metrics={"a": 0.5}), add(queue, agent)
    change(known, invented={"later": [1]})
    change(unknown, config__invented=True)
    running = reach(queue, known, "running")  # what is beside the settings does not matter
    assert (running.state, running.metrics) == ("running", {"a": 0.5})
    assert stored(known)["invented"] == {"later": [1]} and stored(known)["state"] == "running"
    with pytest.raises(StateError) as caught:
        queue.take(unknown.id, PIN)
    prose(caught)
    queue.move(unknown.id, "failed", failure=NO_FAILURE)
    assert stored(unknown)["config"]["invented"] is True


def test_the_final_event_has_the_result(queue, agent):
    done = reach(queue, add(queue, agent), "running")
    queue.move(done.id, "done", step=4, metrics={"learn/loss": 0.25}, reason=None)
    expected = {"step": 4, "metrics": {"learn/loss": 0.25}, "reason": None}
    assert queue.events(done.id)[-1].data == expected
    failed = reach(queue, add(queue, agent), "running")
    queue.move(failed.id, "failed", failure=NO_FAILURE)
    expected = {"failure": {"type": "X", "message": "y", "traceback": "", "place": ""}}
    assert queue.events(failed.id)[-1].data == expected
    assert queue.get(failed.id).failure == NO_FAILURE


def test_cancelling(queue, agent):
    queued = add(queue, agent)
    assert queue.request_cancel(queued.id).state == "cancelled"
    assert types(queue, queued) == ["queued", "cancelled"]
    running = reach(queue, add(queue, agent), "running")
    cancelling = queue.request_cancel(running.id)
    assert cancelling.state == "running" and cancelling.cancel_requested
    assert queue.request_cancel(running.id) == cancelling  # again changes nothing
    assert types(queue, running) == ["queued", "started", "cancelling"]
    done = reach(queue, add(queue, agent), "done")
    assert queue.request_cancel(done.id) == done


def test_after_a_crash(prose: Prose, queue, agent):
    crashed = reach(queue, add(queue, agent), "running")
    waiting, done = add(queue, agent), reach(queue, add(queue, agent), "done")
    queued, failed = queue.recover(lambda job: False)
    assert [job.id for job in queued] == [crashed.id] and not failed
    assert queue.get(crashed.id).state == "queued" and queue.get(crashed.id).attempts == 1
    assert queue.get(waiting.id) == waiting and queue.get(done.id) == done
    assert queue.oldest("tiny").id == crashed.id  # before those that came later
    for _ in range(ATTEMPTS - 1):
        queue.take(crashed.id, None)
        _, failed = queue.recover(lambda job: False)
    assert [job.id for job in failed] == [crashed.id]
    ended = queue.get(crashed.id)
    assert ended.state == "failed" and ended.attempts == 3
    assert ended.failure is not None
    prose(ended.failure.message)


def test_only_consecutive_deaths_of_the_server_count(queue, agent):
    job = reach(queue, add(queue, agent), "running")
    for _ in range(4):  # it runs at every other death
        assert queue.recover(lambda job: False)[1] == []
        assert queue.get(job.id).server_deaths == 1
        assert queue.recover(lambda job: False) == ([], [])
        assert queue.get(job.id).server_deaths == 0
        queue.take(job.id, None)


def test_a_saved_step_has_its_own_attempts_to_publish(queue, agent):
    job = add(queue, agent)
    for attempt in range(1, 2 * ATTEMPTS):
        queue.take(job.id, PIN)
        assert [j.attempts for j in queue.recover(lambda job: True)[0]] == [attempt]
    queue.take(job.id, PIN)
    assert [j.id for j in queue.recover(lambda job: True)[1]] == [job.id]


def test_events_ascend_and_can_be_read_from_any_place(queue, agent):
    job = add(queue, agent)
    ids = [queue.events(job.id)[0].id, *(queue.emit(job.id, "x", {"row": i}).id for i in range(5))]
    assert [e.id for e in queue.events(job.id)] == ids == sorted(set(ids))
    assert [e.data for e in queue.events(job.id, after=ids[1], limit=2)] == [{"row": 1}, {"row": 2}]
    assert queue.events("job-nobody") == []


def test_unknown_jobs_are_named(prose: Prose, queue):
    for ask in (queue.get, queue.packed_groups, queue.request_cancel):
        with pytest.raises(NotFound) as caught:
            ask("job-nobody")
        prose(caught)


async def test_waiting_is_woken_from_another_thread(queue, agent):
    job = add(queue, agent)
    assert await queue.wait_event(job.id, 0, FOREVER_S)  # there is one already
    late = threading.Timer(0.05, queue.emit, (job.id, "progress", {}))
    late.start()
    assert await queue.wait_event(job.id, last(queue, job), FOREVER_S)
    late.join()
    assert not await queue.wait_event(job.id, last(queue, job), 0.05)


async def test_no_event_is_missed_when_writes_and_reads_overlap(queue, agent):
    """Whoever waits for the next event in turn sees each once and in order, however they fall."""
    job = add(queue, agent)

    def write() -> None:
        for i in range(100):
            queue.emit(job.id, "progress", {"row": i})

    async def read() -> list[int]:
        seen: list[int] = []
        while len(seen) < 101:
            assert await queue.wait_event(job.id, seen[-1] if seen else 0, FOREVER_S)
            batch = await asyncio.to_thread(queue.events, job.id, seen[-1] if seen else 0)
            seen += [event.id for event in batch]
        return seen

    writing = asyncio.to_thread(write)
    *readers, _ = await asyncio.gather(read(), read(), read(), writing)
    assert readers == [[e.id for e in queue.events(job.id)]] * 3


async def test_stopping_the_server_wakes_all_listeners(queue, agent):
    job = add(queue, agent)
    seen = last(queue, job)
    waiting = [asyncio.create_task(queue.wait_event(job.id, seen, FOREVER_S)) for _ in range(3)]
    await asyncio.sleep(0.05)
    queue.stop_waiting()
    await asyncio.gather(*waiting)
    assert not await queue.wait_event(job.id, seen, FOREVER_S)
    assert await queue.wait_event(job.id, 0, FOREVER_S), "what there is may still be read"
    assert not queue._listeners


def test_an_id_that_a_crash_lost_is_not_used_again_when_the_clock_goes_back(
    queue, agent, store, monkeypatch: pytest.MonkeyPatch
):
    """A client that saw it goes on after it, and would wait for the end of the job for ever."""
    job = reach(queue, add(queue, agent), "running")
    for row in range(50):
        queue.progress(job.id, {"phase": "train", "row": row})
    seen = last(queue, job)
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    restarted = JobStore(store)
    restarted.move(job.id, "done")
    assert [event.type for event in restarted.events(job.id, after=seen)] == ["done"]


# ---- pruning ----------------------------------------------------------------------------------


def test_groups_of_ended_jobs_are_pruned_by_age_and_size(prose: Prose, queue, agent):
    ended = [reach(queue, add(queue, agent), state) for state in ("done", "failed", "cancelled")]
    live = [reach(queue, add(queue, agent), state) for state in ("queued", "running")]
    size = len(queue._store.query("SELECT groups FROM jobs LIMIT 1")[0]["groups"])
    assert queue.prune(max_age_s=600, max_bytes=3 * size) == 0
    # The oldest of those that ended goes first; what is not over counts for nothing.
    assert queue.prune(max_age_s=600, max_bytes=3 * size - 1) == 1
    with pytest.raises(BadRequest) as caught:
        unpack_groups(queue.packed_groups(ended[0].id))
    prose(caught)
    assert len(unpack_groups(queue.packed_groups(ended[1].id))) == 1
    assert queue.prune(max_age_s=0, max_bytes=2**40) == 2
    assert queue.prune(max_age_s=0, max_bytes=0) == 0
    for job in live:
        assert [g.model_dump() for g in unpack_groups(queue.packed_groups(job.id))] == [
            g.model_dump() for g in groups()
        ]
    assert [queue.get(job.id) for job in ended] == ended


async def test_waiting_leaks_no_listeners(queue, agent):
    job = add(queue, agent)
    seen = last(queue, job)
    waiting = asyncio.create_task(queue.wait_event(job.id, seen, FOREVER_S))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not await queue.wait_event(job.id, seen, 0.01)
    assert not queue._listeners


# ---- a disk that takes no changes ----------------------------------------------------------------


def test_changes_that_the_disk_refuses_are_kept_in_memory_and_written_later(
    queue, agent, store, tmp_path: Path
):
    running, waiting = reach(queue, add(queue, agent), "running"), add(queue, agent)
    store._writer.execute("PRAGMA query_only = ON")  # every change is refused
    with pytest.raises(StorageError):
        queue.move(running.id, "queued")
    why = "the disk is full"
    back = queue.move(running.id, "queued", remember=True, waiting_for=why, attempts=0)
    assert (back.state, back.attempts, back.waiting_for) == ("queued", 0, "the disk is full")
    assert queue.request_cancel(waiting.id).state == "cancelled"
    assert queue.get(running.id) == back and queue.waiting() == {"tiny": 1}
    assert [job.id for job in queue.list(state="queued")] == [running.id]
    assert [job.id for job in queue.list(state="running")] == []
    assert queue.events(running.id)[-1].data == {"waiting_for": "the disk is full"}
    assert types(queue, waiting) == ["queued", "cancelled"]
    with pytest.raises(StorageError):
        queue.write_pending()
    store._writer.execute("PRAGMA query_only = OFF")
    queue.write_pending()
    opened = Store(tmp_path / "state.sqlite")  # as the next server finds it
    reopened = JobStore(opened)
    assert reopened.get(running.id) == back and reopened.get(waiting.id).state == "cancelled"
    assert [e.model_dump() for e in reopened.events(running.id)] == [
        e.model_dump() for e in queue.events(running.id)
    ]
    assert reopened.oldest("tiny") == back
    opened.close()


def test_the_newest_of_a_state_are_found_while_the_disk_takes_no_changes(queue, agent, store):
    first, second, *_ = [add(queue, agent) for _ in range(4)]
    for job in queue.list(limit=2):
        reach(queue, job, "done")
    store._writer.execute("PRAGMA query_only = ON")
    queue.request_cancel(second.id)
    assert [job.id for job in queue.list(state="queued", limit=1)] == [first.id]
    assert [job.id for job in queue.list(state="cancelled", limit=1)] == [second.id]
    assert queue.list(model=ModelKey("default", "other")) == []
    assert len(queue.list(limit=3)) == 3


# ---- progress and growth -----------------------------------------------------------------------


def test_progress_is_sent_at_once_and_never_written(queue, agent, store):
    job = reach(queue, add(queue, agent), "running")
    before = store._writer.total_changes
    for row in range(50):
        queue.progress(job.id, {"phase": "train", "row": row})
    assert store._writer.total_changes == before
    events = queue.events(job.id)
    assert [e.data["row"] for e in events[2:]] == list(range(50))
    assert queue.events(job.id, after=events[-3].id) == events[-2:]
    queue.move(job.id, "done")
    assert types(queue, job) == ["queued", "started", *["progress"] * 50, "done"]
    assert types(JobStore(store), job) == ["queued", "started", "done"]


def test_after_a_crash_no_event_id_is_reused(queue, agent, store):
    job = reach(queue, add(queue, agent), "running")
    for row in range(5):
        queue.progress(job.id, {"phase": "train", "row": row})
    seen = queue.events(job.id)[-1].id
    reopened = JobStore(store)  # what was only in memory is gone
    assert reopened.events(job.id)[-1].id < seen
    reopened.recover(lambda job: False)
    assert [e.type for e in reopened.events(job.id, after=seen)] == ["queued"]


def test_events_are_bounded(agent, store):
    queue = JobStore(store, keep_progress=3)
    job = reach(queue, add(queue, agent), "running")
    for phase in range(10):
        queue.progress(job.id, {"phase": phase})
    queue.emit(job.id, "learned", {})
    assert types(queue, job) == ["queued", "started", *["progress"] * 3, "learned"]
    assert [e.data["phase"] for e in queue.events(job.id) if e.type == "progress"] == [7, 8, 9]
    queue.move(job.id, "done")
    assert queue.prune_events(max_age_s=600) == 0
    assert queue.prune_events(max_age_s=-1) == 3
    assert types(JobStore(store), job) == ["done"]


def test_the_first_attempt_pins_what_determines_the_exact_result(queue, agent):
    job = add(queue, agent, config=TrainConfig(importance_cap=None))
    taken = queue.take(job.id, PIN)
    assert taken.config == TrainConfig(importance_cap=None, row_tokens=4096)
    assert (taken.base_step, taken.dtype) == (3, "float32")
    queue.recover(lambda job: False)
    # By then the machine has been given more memory.
    again = queue.take(job.id, Pin(3, "ab" * 32, dtype="float32", row_tokens=9999))
    assert again.config.row_tokens == 4096
    own = add(queue, agent, config=TrainConfig(row_tokens=77), request_sha256="1:" + "b" * 64)
    assert queue.take(own.id, PIN).config.row_tokens == 77
