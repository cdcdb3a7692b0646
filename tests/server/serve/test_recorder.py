"""Recorder: requests that end together are recorded together, and none fails because of another."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.store.test_calls import recorded

from hone.errors import StateError
from hone.server.serve.recorder import NewCalls, Recorder
from hone.store import calls as calls_module
from hone.store.calls import CallStore
from hone.store.database import Store
from hone.types import RecordedCall


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state.sqlite", schemas=(calls_module.SCHEMA,))
    yield store
    store.close()


class Answered:
    """A request with one choice; notes what was on record when it was told so."""

    def __init__(self, store: CallStore, call: RecordedCall | Exception) -> None:
        self.store = store
        self.call = call
        self.seen: list[RecordedCall] = []

    def make_calls(self) -> NewCalls:
        if isinstance(self.call, Exception):
            raise self.call
        return [self.call], None

    def committed(self, calls: Sequence[RecordedCall]) -> None:
        self.seen = self.store.get([call.id for call in calls])


async def test_requests_that_end_together_continue_when_all_are_recorded(store: Store) -> None:
    calls = CallStore(store)
    recorder = Recorder(calls)
    made = [recorded(f"c{i}", [1, i], [7], rollout=f"r{i}") for i in range(20)]
    requests = [Answered(calls, call) for call in made]
    await asyncio.gather(*(recorder.record(request) for request in requests))
    assert [request.seen for request in requests] == [[call] for call in made]
    last = recorded("last", [1], [2])
    await recorder.record(Answered(calls, last))  # one that ends alone
    assert calls.get(["last"]) == [last]


async def test_a_request_that_cannot_be_recorded_fails_alone(store: Store) -> None:
    calls = CallStore(store)
    recorder = Recorder(calls)
    good = [recorded(f"c{i}", [1, i], [7]) for i in range(3)]
    twice = recorded("c0", [5], [6])
    wrong = ValueError("no such token")
    requests = [Answered(calls, call) for call in (good[0], wrong, good[1], twice, good[2])]
    ends = await asyncio.gather(*map(recorder.record, requests), return_exceptions=True)
    assert [ends[0], ends[2], ends[4]] == [None, None, None]
    assert ends[1] is wrong
    assert "UNIQUE" in str(ends[3])
    assert calls.get(["c0", "c1", "c2"]) == good
    assert requests[3].seen == []


async def test_cancelling_a_caller_does_not_undo_its_recording(store: Store) -> None:
    calls = CallStore(store)
    recorder = Recorder(calls)
    left = asyncio.create_task(recorder.record(Answered(calls, recorded("c", [1], [2]))))
    await asyncio.sleep(0)  # it has begun
    left.cancel()
    await recorder.drain()
    assert left.cancelled()
    assert [call.id for call in calls.get(["c"])] == ["c"]


async def test_a_closed_store_refuses_all(store: Store) -> None:
    calls = CallStore(store)
    recorder = Recorder(calls)
    store.close()
    requests = [Answered(calls, recorded(f"c{i}", [1], [2])) for i in range(2)]
    ends = await asyncio.gather(*map(recorder.record, requests), return_exceptions=True)
    assert [type(end) for end in ends] == [StateError, StateError]
