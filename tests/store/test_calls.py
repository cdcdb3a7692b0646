"""CallStore: what was recorded comes back bit for bit, whatever was pruned around it."""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.prose import Prose

from hone.errors import Conflict, DiskFull, NotFound
from hone.store import calls as calls_module
from hone.store.calls import CallStore
from hone.store.database import Store
from hone.types import Call, RecordedCall, RunSpec


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state.sqlite", schemas=(calls_module.SCHEMA,))
    yield store
    store.close()


@pytest.fixture
def calls(store: Store) -> CallStore:
    return CallStore(store)


def recorded(
    call_id: str,
    prompt: list[int],
    completion: list[int],
    *,
    rollout: str = "r",
    index: int = 0,
    **changed: Any,
) -> RecordedCall:
    fields: dict[str, Any] = {
        "id": call_id,
        "rollout": rollout,
        "index": index,
        "model": "default/agent",
        "requested_model": "agent",
        "base_model": "tiny",
        "adapter_sha256": "ab" * 32,
        "fingerprint": "f-t",
        "created_at": 1000.0 + index,
        "messages": [{"role": "user", "content": f"question {i}"} for i in range(index + 1)],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "reply": {"role": "assistant", "content": f"answer {index}"},
        "finish": "stop",
        "outcome": "bridged",
        "reasons": ["exact"],
        "call": Call(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=[-0.5 - i for i in range(len(completion))],
            temperature=0.7,
            step=3,
            function="main.agent",
            forced=[0] if completion else [],
        ),
    }
    return RecordedCall(**(fields | changed))


def conversation(turns: int, *, rollout: str = "r") -> list[RecordedCall]:
    """Each turn's prompt is the last prompt and completion and two ids more; likewise messages."""
    made: list[RecordedCall] = []
    prompt = [1, 2, 3]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "question 0"}]
    for turn in range(turns):
        completion = [100 + turn, 7]
        call = recorded(
            f"{rollout}-{turn}",
            list(prompt),
            completion,
            rollout=rollout,
            index=turn,
            messages=list(messages),
        )
        made.append(call)
        prompt += [*completion, 50 + turn, 51]
        messages += [call.reply, {"role": "user", "content": f"question {turn + 1}"}]
    return made


def add_conversation(calls: CallStore, turns: int, *, rollout: str = "r") -> list[RecordedCall]:
    made = conversation(turns, rollout=rollout)
    for call, parent in zip(made, [None, *made], strict=False):
        calls.add([call], parent=parent)
    return made


def test_a_rollout_comes_back_as_it_was_recorded(calls: CallStore) -> None:
    made = add_conversation(calls, 5)
    assert calls.rollout("r") == made
    assert calls.get([made[3].id, made[0].id]) == [made[3], made[0]]
    assert calls.rollout("another") == []


def test_a_turn_is_stored_as_its_difference(calls: CallStore, store: Store) -> None:
    add_conversation(calls, 3)
    rows = store.query("SELECT parent, ids_kept, turns_kept, ids, completion FROM calls")
    # 3 ids; then the 3 + 2 before and 2 new ones; then the 7 + 2 before and 2 new ones.
    assert [(row["ids_kept"], len(row["ids"]) // 4) for row in rows] == [(0, 3), (5, 2), (9, 2)]
    # 1 message; then that one, the reply and a new one; then those 3, the reply and a new one.
    assert [row["turns_kept"] for row in rows] == [0, 2, 4]
    assert [row["parent"] for row in rows] == [None, 1, 2]
    assert all(row["completion"] == struct.pack("2i", 100 + i, 7) for i, row in enumerate(rows))


def test_the_choices_of_a_request_share_their_prompt(calls: CallStore, store: Store) -> None:
    made = [recorded(f"c{i}", [1, 2, 3, 4], [9, i], choice=i) for i in range(3)]
    calls.add(made)
    rows = store.query("SELECT ids FROM calls ORDER BY choice")
    assert [len(row["ids"]) // 4 for row in rows] == [4, 0, 0]
    assert calls.rollout("r") == made


def test_a_parent_that_is_not_recorded_is_not_needed(calls: CallStore) -> None:
    first, second = conversation(2)
    calls.add([second], parent=first)
    assert calls.rollout("r") == [second]


def test_a_parent_that_shares_nothing_is_not_one(calls: CallStore, store: Store) -> None:
    first = recorded("a", [1, 2], [3])
    second = recorded("b", [8, 9], [3], index=1, messages=[{"role": "user", "content": "other"}])
    calls.add([first])
    calls.add([second], parent=first)
    assert [row["parent"] for row in store.query("SELECT parent FROM calls")] == [None, None]
    assert calls.rollout("r") == [first, second]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    logprobs=st.lists(
        st.floats(max_value=0, allow_nan=False, allow_infinity=False), min_size=1, max_size=8
    )
)
def test_logprobs_come_back_bit_for_bit(calls: CallStore, logprobs: list[float]) -> None:
    ids = list(range(len(logprobs)))
    call = Call(prompt_ids=[1], completion_ids=ids, logprobs=logprobs)
    name = f"call-{time.perf_counter_ns()}"
    calls.add([recorded(name, [1], ids, call=call)])
    (stored,) = calls.get([name])
    assert stored.call.logprobs is not None
    assert struct.pack(f"{len(ids)}d", *stored.call.logprobs) == struct.pack(
        f"{len(ids)}d", *logprobs
    )


def test_float32_logprobs_take_four_bytes(calls: CallStore, store: Store) -> None:
    calls.add(
        [
            recorded(
                "half",
                [1],
                [2, 3],
                call=Call(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.5, -0.25]),
            )
        ]
    )
    calls.add(
        [
            recorded(
                "tenth",
                [1],
                [2, 3],
                call=Call(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.1, -0.25]),
            )
        ]
    )
    assert [len(row["logprobs"]) for row in store.query("SELECT logprobs FROM calls")] == [8, 16]


def test_calls_without_logprobs_messages_or_tokens(calls: CallStore) -> None:
    made = recorded(
        "bare", [5], [], messages=None, tools=None, abandoned=True,
        call=Call(prompt_ids=[5], completion_ids=[], logprobs=None),
    )  # fmt: skip
    calls.add([made])
    assert calls.rollout("r") == [made]


def test_calls_are_found_by_their_sampled_ids(calls: CallStore) -> None:
    for i in range(3):
        calls.add([recorded(f"c{i}", [1, i], [7, 8], rollout=f"r{i}")])
    calls.add([recorded("other", [1], [7, 9])])
    calls.add([recorded("elsewhere", [1], [7, 8], base_model="another")])
    assert [call.id for call in calls.match("tiny", [7, 8])] == ["c2", "c1", "c0"]
    assert calls.match("tiny", [7]) == []
    assert [call.id for call in calls.match("another", [7, 8])] == ["elsewhere"]


def test_an_unknown_call_is_named(prose: Prose, calls: CallStore) -> None:
    with pytest.raises(NotFound) as caught:
        calls.get(["call-x"])
    prose(caught)


def test_the_same_call_is_not_recorded_twice(calls: CallStore, store: Store) -> None:
    made = recorded("c", [1], [2])
    calls.add([made])
    with pytest.raises(Exception, match="UNIQUE"):
        calls.add([recorded("d", [1], [3]), made])
    assert calls.rollout("r") == [made], "all or none"


# ---- runs ------------------------------------------------------------------------------------


def test_a_rollout_of_a_run_needs_the_run_open(
    prose: Prose, calls: CallStore, store: Store
) -> None:
    assert calls.run_of(None) is None
    assert calls.run_of("plain") is None
    with pytest.raises(Conflict) as caught:
        calls.run_of("run1:a")
    prose(caught)
    spec = RunSpec(id="run1", model="agent", seed=5)
    calls.open_run(spec)
    calls.open_run(spec)
    assert calls.run_of("run1:a:b") == spec
    assert CallStore(store).run_of("run1:a") == spec, "a restarted server knows it"
    calls.close_run("run1")
    calls.close_run("run1")
    with pytest.raises(Conflict) as caught:
        calls.run_of("run1:a")
    prose(caught)
    calls.open_run(spec)
    assert calls.run_of("run1:a") == spec


class FullDisk(Store):
    """A store whose commits find no room."""

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[Connection]:
        with super().transaction(durable=durable) as db:
            yield db
            raise DiskFull("no room")


def test_a_run_that_could_not_be_opened_or_closed_stays_as_it_was(
    prose: Prose, calls: CallStore, store: Store
):
    calls.open_run(RunSpec(id="run1"))
    disk = FullDisk(store.path)
    full = CallStore(disk)
    for change in (lambda: full.open_run(RunSpec(id="run2")), lambda: full.close_run("run1")):
        with pytest.raises(DiskFull):
            change()
    assert full.run_of("run1:0") == RunSpec(id="run1")
    with pytest.raises(Conflict) as caught:
        full.run_of("run2:0")
    prose(caught)
    disk.close()


def test_a_run_cannot_become_another(prose: Prose, calls: CallStore) -> None:
    calls.open_run(RunSpec(id="run1", seed=5))
    with pytest.raises(Conflict) as caught:
        calls.open_run(RunSpec(id="run1", seed=6))
    prose(caught)
    with pytest.raises(NotFound) as caught:
        calls.close_run("run2")
    prose(caught)


# ---- pruning ---------------------------------------------------------------------------------


def ids(calls: CallStore, rollout: str = "r") -> list[str]:
    return [call.id for call in calls.rollout(rollout)]


def test_old_calls_are_pruned_and_their_children_are_complete(calls: CallStore) -> None:
    made = add_conversation(calls, 6)
    # Recorded at 1000 .. 1005; everything before 1003.5 is too old.
    assert calls.prune(max_age_s=time.time() - 1003.5, max_bytes=2**40) == 4
    assert calls.rollout("r") == made[4:]
    assert calls.prune(max_age_s=time.time() - 1003.5, max_bytes=2**40) == 0


def test_the_oldest_calls_beyond_the_size_are_pruned(calls: CallStore, store: Store) -> None:
    made = add_conversation(calls, 4)
    sizes = [row["size"] for row in store.query("SELECT size FROM calls ORDER BY seq")]
    # One byte too many: the first call goes, and the second, made whole, is larger than it was.
    assert calls.prune(max_age_s=1e12, max_bytes=sum(sizes) - 1) == 1
    assert calls.rollout("r") == made[1:]
    assert calls.prune(max_age_s=1e12, max_bytes=0) == 3
    assert calls.rollout("r") == []


def test_calls_of_an_open_run_are_never_pruned(calls: CallStore) -> None:
    calls.open_run(RunSpec(id="run1"))
    add_conversation(calls, 2, rollout="run1:a")
    add_conversation(calls, 2, rollout="loose")
    assert calls.prune(max_age_s=0, max_bytes=0) == 2
    assert ids(calls, "run1:a") == ["run1:a-0", "run1:a-1"]
    assert calls.run("run1") == (RunSpec(id="run1"), True, 2)
    calls.close_run("run1")
    assert calls.prune(max_age_s=0, max_bytes=0) == 2
    assert ids(calls, "run1:a") == []


def refer(calls: CallStore, job: str, ids: list[str]) -> None:
    """As JobStore does when the job is added."""
    with calls._store.transaction() as db:
        db.executemany("INSERT INTO call_refs VALUES (?, ?)", [(job, one) for one in ids])


def release(calls: CallStore, job: str) -> None:
    """As JobStore does when the job ends."""
    with calls._store.transaction() as db:
        db.execute("DELETE FROM call_refs WHERE job = ?", (job,))


def test_calls_a_job_refers_to_are_kept_until_it_is_over(calls: CallStore) -> None:
    made = add_conversation(calls, 3)
    refer(calls, "job-1", ["r-2"])
    refer(calls, "job-2", ["r-1", "r-2"])
    release(calls, "job-2")
    assert calls.prune(max_age_s=0, max_bytes=0) == 2
    assert calls.rollout("r") == [made[2]]
    release(calls, "job-1")
    assert calls.prune(max_age_s=0, max_bytes=0) == 1


def test_many_calls_are_pruned_in_pieces(calls: CallStore) -> None:
    for i in range(450):
        calls.add([recorded(f"c{i}", [1, i], [2], rollout="", index=0)])
    assert calls.prune(max_age_s=0, max_bytes=2**40) == 450
    assert calls.rollout("") == []


def test_retained_calls_are_skipped_once(store: Store, calls: CallStore) -> None:
    """And not once for each transaction: requests that record a call wait for every one of them."""
    spec = RunSpec(id="open", model="default/agent", seed=0)
    calls.open_run(spec)
    instructions = [0]

    def count() -> None:
        instructions[0] += 10

    def pruning(kept: int) -> int:
        """Instructions of SQLite that prune 1000 calls, of which these and the earlier are kept."""
        num = len(calls.rollout("open:0"))
        old = [recorded(f"old-{i}", [1], [2], rollout="open:0") for i in range(num, kept)]
        free = [recorded(f"{kept}-{i}", [1], [2], index=1) for i in range(1000)]
        calls.add_all([([call], None) for call in old + free])
        with store.transaction() as db:
            db.set_progress_handler(count, 10)
        instructions[0] = 0
        assert calls.prune(max_age_s=0, max_bytes=0) == 1000  # in five transactions
        with store.transaction() as db:
            db.set_progress_handler(None, 10)
        return instructions[0]

    none, few, many = pruning(0), pruning(1000), pruning(3000)
    assert few - none < 50 * 1000 and many - few < 50 * 2000, (none, few, many)


def test_pruning_any_calls_leaves_the_others_as_they_were(calls: CallStore) -> None:
    """Forks: two calls of one parent, and a chain below one of them."""
    made = add_conversation(calls, 4)
    fork = recorded("fork", [*made[1].call.prompt_ids, 100 + 1, 7, 99], [5], index=9)
    calls.add([fork], parent=made[1])
    for gone in (made[1], made[0], made[3]):
        refer(calls, "job", [c.id for c in [*made, fork] if c.id != gone.id])
        calls.prune(max_age_s=0, max_bytes=2**40)
        release(calls, "job")
        remaining = {c.id: c for c in [*made, fork] if c.id != gone.id}
        assert {c.id: c for c in calls.rollout("r")} == remaining
        calls.add([gone])
