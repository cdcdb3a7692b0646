"""The event stream of a job: complete, in order, resumable, woken and not polled."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.errors import NotFound
from hone.server.http.training_routes import sse
from hone.store.database import Store
from hone.store.jobs import JobStore
from hone.store.models import ModelRecord, ModelStore
from hone.types import JobEvent, ModelSpec, TrainConfig


@pytest.fixture
def job(store: Store, queue: JobStore) -> str:
    record: ModelRecord = ModelStore(store).register(ModelSpec(name="agent", base_model="tiny"))
    added = queue.add(
        model=record, groups=b"", config=TrainConfig(), counts={}, request_sha256="0" * 64
    )
    return added.id


async def read(queue: JobStore, job: str, after: int = 0, **settings: float) -> list[str]:
    return [text async for text in sse(queue.follow(job, after, **settings))]


def parsed(text: str) -> tuple[int, str, JobEvent]:
    number, kind, data, blank, rest = text.split("\n")
    assert (blank, rest) == ("", "")
    event = JobEvent.model_validate_json(data.removeprefix("data: "))
    return int(number.removeprefix("id: ")), kind.removeprefix("event: "), event


async def test_every_event_once_and_the_last_one_ends_it(queue: JobStore, job: str):
    queue.move(job, "running", attempts=1, base_step=0)
    queue.emit(job, "progress", {"row": 0, "rows": 2})
    queue.move(job, "done", step=1, metrics={"learn/loss": 0.5})
    texts = [parsed(text) for text in await read(queue, job)]
    assert [kind for _, kind, _ in texts] == ["queued", "started", "progress", "done"]
    assert texts[2][2].data == {"row": 0, "rows": 2}
    assert texts[3][2].data["metrics"] == {"learn/loss": 0.5}
    assert all(event.job == job and event.id == number for number, _, event in texts)


async def test_a_stream_continues_after_the_last_event_id(queue: JobStore, job: str):
    queue.move(job, "running", attempts=1)
    queue.move(job, "cancelled")
    first, *_, end = queue.events(job)
    texts = await read(queue, job, after=first.id)
    assert [parsed(text)[1] for text in texts] == ["started", "cancelled"]
    assert await read(queue, job, after=end.id) == []


async def test_a_job_that_went_back_to_the_queue_is_not_over(queue: JobStore, job: str):
    queue.move(job, "running", attempts=1)
    queue.move(job, "queued")
    stream = sse(queue.follow(job))
    kinds = [parsed(await anext(stream))[1] for _ in range(3)]
    assert kinds == ["queued", "started", "queued"]
    queue.request_cancel(job)
    assert parsed(await anext(stream))[1] == "cancelled"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_event_of_another_thread_arrives_without_a_heartbeat(queue: JobStore, job: str):
    stream = sse(queue.follow(job, queue.events(job)[-1].id, heartbeat_s=PATIENCE_S))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    thread = threading.Thread(target=queue.move, args=(job, "running"), kwargs={"attempts": 1})
    thread.start()
    assert parsed(await waiting)[1] == "started"
    thread.join()


async def test_a_silent_stream_sends_heartbeats(queue: JobStore, job: str):
    stream = sse(queue.follow(job, queue.events(job)[-1].id, heartbeat_s=0.01))
    assert [await anext(stream) for _ in range(2)] == [": still here\n\n"] * 2


async def test_more_events_than_one_batch_stay_in_order(queue: JobStore, job: str):
    count = 1020
    for row in range(count):
        queue.emit(job, "progress", {"row": row})
    queue.request_cancel(job)
    texts = [parsed(text) for text in await read(queue, job)]
    assert [number for number, _, _ in texts] == [e.id for e in queue.events(job, limit=-1)]
    assert [event.data["row"] for _, kind, event in texts if kind == "progress"] == [*range(count)]


async def test_an_unknown_job_is_not_found(prose: Prose, queue: JobStore):
    with pytest.raises(NotFound) as caught:
        await read(queue, "job-x")
    prose(caught)


async def test_line_breaks_in_an_event_stay_inside_its_line():
    event = JobEvent(id=3, job="j", type="failed", at=0.0, data={"failure": "one\ntwo\r\u2028"})

    async def events() -> AsyncIterator[JobEvent | None]:
        yield event

    number, kind, back = parsed(await anext(sse(events())))
    assert (number, kind, back) == (3, "failed", event)
