"""State that another version wrote: unknown keys, damaged rows, requests that are sent again."""

import json
import logging
import zlib
from typing import Any

import pytest
from pydantic import Field
from tests.prose import Prose
from tests.server.api import AGENT, JOBS, Api, Open, job
from tests.server.worlds import World

from hone.errors import StateError
from hone.server.state import State
from hone.server.train import tasks
from hone.server.train.tasks import Head, Parsed, read
from hone.store.jobs import JobStore
from hone.trajectory import JobRequest, Trajectory, TrajectoryGroup
from hone.types import ModelKey, RunSpec


def change(state: State, table: str, column: str, where: str, text: Any) -> None:
    """Write a row as another version would have, or as a damaged disk left it."""
    with state.store.transaction() as db:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (text,))
    state.models.read_again()
    state.calls.read_runs()


def with_new_keys(state: State, table: str, column: str, *inside: str) -> None:
    for row in state.store.query(f"SELECT rowid AS id, {column} AS text FROM {table}"):
        value = json.loads(row["text"])
        value["invented_later"] = {"a": 1}
        for key in inside:
            value[key]["invented_later"] = 2
        change(state, table, column, f"rowid = {row['id']}", json.dumps(value))


async def test_keys_of_a_later_version_are_ignored_in_every_row(api: Api):
    state = api.state
    submitted = await api.submit(idempotency_key="k")
    await api.ask("POST", "/v1/runs", json={"id": "run", "model": "agent"})
    model, run = await api.ask("GET", AGENT), await api.ask("GET", "/v1/runs/run")
    spec = json.loads(state.store.query("SELECT spec FROM models")[0]["spec"])
    change(state, "models", "spec", "1", json.dumps(spec | {"invented_later": 1}))
    with_new_keys(state, "jobs", "info", "config")
    with_new_keys(state, "runs", "spec")
    assert await api.ask("GET", "/v1/training/models") == [model]
    assert await api.ask("GET", "/v1/runs") == [run]
    assert [row["id"] for row in await api.ask("GET", JOBS)] == [submitted.id]
    assert (await api.submit(idempotency_key="k")).id == submitted.id
    await api.ask("POST", f"{JOBS}/{submitted.id}/cancel")
    await api.register(status=200)
    await api.ask("POST", f"{AGENT}/rename", json={"to": "new"})


async def test_a_row_that_cannot_be_read_hides_no_other(
    prose: Prose, open_api: Open, caplog: pytest.LogCaptureFixture
):
    api = await open_api(held=True)
    for name in ("first", "agent", "other"):
        await api.register(name=name)
    first = await api.submit(model="first")
    await api.started(first)  # so that the others wait
    damaged, intact = await api.submit(), await api.submit(model="other")
    for run in ("bad", "good"):
        await api.ask("POST", "/v1/runs", json={"id": run})
    change(api.state, "models", "spec", "name = 'agent'", '{"name": "agent", "ra')
    change(api.state, "jobs", "info", f"id = '{damaged.id}'", '{"id": "x"}')
    change(api.state, "runs", "spec", "id = 'bad'", "")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            models = await api.ask("GET", "/v1/training/models")
            assert {model["name"] for model in models} == {"first", "other"}
            assert {row["id"] for row in await api.ask("GET", JOBS)} == {first.id, intact.id}
            assert [run["id"] for run in await api.ask("GET", "/v1/runs")] == ["good"]
    logged = [getattr(record, "fields", {}).get("why", "") for record in caplog.records]
    for row in ("model default/agent", f"job {damaged.id!r}", "run 'bad'"):
        assert len([why for why in logged if why.startswith(row)]) == 1, "logged once"
    for path in (AGENT, f"{JOBS}/{damaged.id}", "/v1/runs/bad"):
        refused = await api.ask("GET", path, status=500)
        prose(refused["error"]["message"])
    # Nothing is written over it, and the server goes on.
    for path, body in (
        ("/v1/training/models", {"name": "agent", "base_model": api.base_model}),
        ("/v1/runs", {"id": "bad"}),
    ):
        await api.ask("POST", path, json=body, status=500)
    await api.state._prune()
    await api.ask("POST", f"{JOBS}/{intact.id}/cancel")
    await api.ended(intact, state="cancelled")
    JobStore(api.state.store).recover(lambda job: False)  # as at the next start
    await api.ask("POST", "/v1/training/models/default/other/rename", json={"to": "new"})


async def test_a_damaged_call_spoils_only_the_rollouts_that_contain_it(prose: Prose, world: World):
    calls = world.state.calls
    for run in ("one", "two"):
        calls.open_run(RunSpec(id=run))
    first = world.add([5, 6], rollout="one:0", created_at=1.0)
    second = world.add([5, 7], rollout="one:0", index=1, created_at=2.0)
    other = world.add([5, 8], rollout="two:0", created_at=3.0)
    (row,) = world.state.store.query("SELECT body FROM calls WHERE id = ?", (other.id,))
    text = row["body"][1:]
    body = json.loads(zlib.decompress(text) if row["body"][:1] == b"z" else text)
    body["invented_later"], body["call"]["invented_later"] = 1, 2
    change(world.state, "calls", "body", f"id = '{other.id}'", b"j" + json.dumps(body).encode())
    assert calls.rollout("two:0") == [other]
    change(world.state, "calls", "body", f"id = '{second.id}'", b"z no zlib")
    with pytest.raises(StateError) as caught:
        calls.rollout("one:0")
    prose(caught, second=second.id)
    assert calls.get([first.id]) == [first]
    # A parent is pruned although its child cannot be read any more; the child follows it.
    change(world.state, "calls", "parent", f"id = '{second.id}'", 1)
    for run in ("one", "two"):
        calls.close_run(run)
    assert calls.prune(max_age_s=0.0, max_bytes=2**30) == 3
    assert calls.rollout("one:0") == []


class NewerTrajectory(Trajectory):
    """A trajectory with a field that a later version added."""

    invented: str | None = None


class NewerGroup(TrajectoryGroup):
    """A group with a field that a later version added."""

    trajectories: list[NewerTrajectory] = Field(default_factory=list)  # type: ignore[assignment]
    invented: dict[str, int] = Field(default_factory=dict)


class NewerRequest(JobRequest):
    """A request with a field that a later version added."""

    groups: list[NewerGroup]  # type: ignore[assignment]
    invented: bool = False


def digest(kind: type[JobRequest], body: dict[str, Any]) -> str:
    head = read(Parsed(), kind, json.dumps(body).encode())
    assert isinstance(head, Head), head
    return head.sha256


def test_a_new_field_with_a_default_does_not_change_the_digest():
    body = job(config={"learning_rate": 0.5})
    before = digest(JobRequest, body)
    assert digest(NewerRequest, body) == before
    # A newer client may also send the default.
    sent = job(config={"learning_rate": 0.5}, invented=False)
    assert digest(NewerRequest, sent) == before
    for changed in (
        body | {"invented": True},
        body | {"plot_tensors": True},
        body | {"config": {}},
    ):
        assert digest(NewerRequest, changed) != before


async def test_digests_of_two_versions_are_not_compared(api: Api, monkeypatch: pytest.MonkeyPatch):
    first = await api.submit(idempotency_key="k")
    await api.refused(409, idempotency_key="k", plot_tensors=True)
    monkeypatch.setattr(tasks, "DIGEST_VERSION", tasks.DIGEST_VERSION + 1)
    again = await api.submit(idempotency_key="k", plot_tensors=True)
    assert again.id == first.id  # the key alone decides
    assert api.state.jobs.list(model=ModelKey("default", "agent")) == [api.state.jobs.get(first.id)]
