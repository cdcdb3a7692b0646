"""A model is deleted with everything stored about it, whenever the server is killed."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.api import AGENT, JOBS, Api, Open
from tests.server.conftest import MakeState
from tests.server.small_server import SmallServer, spec, token_groups

from hone.errors import Conflict, StorageError
from hone.server.serve import policies
from hone.server.state import State
from hone.store import database
from hone.store.deletion import FAILPOINTS
from hone.types import JobInfo, ModelKey, ModelSpec, RunSpec, TrainConfig, stored_name

KEY, OTHER = ModelKey("default", "agent"), ModelKey("default", "other")


@pytest.fixture
async def trained(open_api: Open) -> Api:
    """A server whose model `agent` has one trained step; `other` has none."""
    api = await open_api()
    await api.register()
    await api.register(name="other")
    await api.ended(await api.submit(config={"learning_rate": 1e-3}, idempotency_key="k"))
    return api


def left_over(api: Api) -> list[str]:
    return [path.name for path in api.state.checkpoints.model_dir(KEY).parent.iterdir()]


async def test_nothing_of_a_deleted_model_is_left_and_its_name_is_free(trained: Api):
    api, state = trained, trained.state
    await api.ask("POST", "/v1/runs", json={"id": "mine", "model": "agent"})
    await api.ask("POST", "/v1/runs/mine/close")
    await api.ask("POST", "/v1/runs", json={"id": "others", "model": "other"})
    size = sum(f.stat().st_size for f in state.checkpoints.model_dir(KEY).rglob("*") if f.is_file())
    adapter = (await state.serving.resolve("agent")).adapter
    assert adapter is not None

    answer = await api.ask("DELETE", AGENT)
    assert answer == {"model": "default/agent", "bytes": size} and size > 0
    await api.ask("DELETE", AGENT, status=404)
    await api.ask("GET", AGENT, status=404)
    assert [model["name"] for model in await api.ask("GET", "/v1/training/models")] == ["other"]
    assert await api.ask("GET", JOBS) == []
    assert [run["id"] for run in await api.ask("GET", "/v1/runs")] == ["others"]
    for table in ("job_events", "deletions", "call_refs"):
        assert state.store.query(f"SELECT * FROM {table}") == []
    assert "agent" not in left_over(api)
    assert not [name for name in left_over(api) if name.endswith(".deleted")]
    base = state.serving.engines.loaded()[api.base_model]
    assert adapter not in base.adapters, "unloaded"

    assert (await api.register(seed=5, rank=2)).step == 0
    job = await api.submit(config={"learning_rate": 1e-3}, idempotency_key="k")
    assert (await api.ended(job)).step == 1, "the key is new, too"


async def test_a_model_in_use_is_deleted_only_with_force(prose: Prose, api: Api):
    running, queued = await api.submit(), await api.submit()
    refused = await api.ask("DELETE", AGENT, status=409)
    prose(refused["error"]["message"])
    for one in (queued, running):
        await api.ask("POST", f"{JOBS}/{one.id}/cancel")
    await api.ended(running, state="cancelled")
    await api.ask("POST", "/v1/runs", json={"id": "run", "model": "default/agent"})
    refused = await api.ask("DELETE", AGENT, status=409)
    prose(refused["error"]["message"])
    await api.submit()
    await api.ask("DELETE", f"{AGENT}?force=true")
    assert await api.ask("GET", JOBS) == []
    with pytest.raises(Conflict) as caught:
        api.state.calls.run_of("run:0")
    prose(caught)


async def test_a_damaged_row_can_be_deleted(api: Api):
    with api.state.store.transaction() as db:
        db.execute("UPDATE models SET spec = '{' WHERE name = 'agent'")
    api.state.models.read_again()
    await api.ask("GET", AGENT, status=500)
    await api.ask("DELETE", AGENT)
    await api.register()


def test_a_name_is_not_free_before_its_directory_is_gone(
    prose: Prose, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
):
    """A new model of that name would otherwise get the old checkpoints, or lose its own."""
    state = make_state()
    model = ModelSpec(name="agent", base_model="tiny")
    state.models.register(model)
    state.checkpoints.log(KEY, 3, {"reward": 1.0}, "val")
    rename = Path.rename

    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StorageError):
        state.deletions.delete(KEY)
    with pytest.raises(Conflict) as caught:
        state.models.register(model)
    prose(caught)
    state.store.close()
    monkeypatch.setattr(Path, "rename", rename)
    state = make_state()
    state.models.register(model)
    assert state.checkpoints.history(KEY) == []
    state.checkpoints.log(KEY, 4, {"reward": 1.0}, "val")
    # Files that cannot be removed do not hold up the name, and the new model keeps its own.
    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(StorageError):
        state.deletions.delete(KEY)
    monkeypatch.undo()
    state.models.register(model)
    state.checkpoints.log(KEY, 5, {"reward": 1.0}, "val")
    state.store.close()
    state = make_state()
    assert [line["step"] for line in state.checkpoints.history(KEY)] == [5]
    parent = state.checkpoints.model_dir(KEY).parent
    assert [path.name for path in parent.iterdir()] == ["agent"]


async def test_a_new_model_never_gets_the_adapter_of_a_deleted_one(
    trained: Api, monkeypatch: pytest.MonkeyPatch
):
    """The rows are gone, and a file could not be removed: a failing disk, or one over a network."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(16, "Device or resource busy")

    assert (await trained.state.serving.resolve("agent")).step == 1
    monkeypatch.setattr(shutil, "rmtree", fail)
    await trained.ask("DELETE", AGENT, status=503)
    assert (await trained.register(seed=5, rank=2)).step == 0
    assert (await trained.state.serving.resolve("agent")).step == 0
    monkeypatch.undo()


def test_a_server_starts_although_files_of_a_deleted_model_cannot_be_removed(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(16, "Device or resource busy")

    state = make_state()
    state.models.register(ModelSpec(name="agent", base_model="tiny"))
    state.checkpoints.log(KEY, 3, {"reward": 1.0}, "val")
    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(StorageError):
        state.deletions.delete(KEY)
    state.store.close()
    make_state().store.close()
    monkeypatch.undo()
    state = make_state()
    assert list(state.checkpoints.model_dir(KEY).parent.iterdir()) == []


def add_job(state: State) -> JobInfo:
    model = state.models.register(ModelSpec(name="agent", base_model="tiny"))
    job = {"groups": b"packed", "config": TrainConfig(), "counts": {}, "request_sha256": "1:0"}
    return state.jobs.add(model=model, **job)


def test_a_change_of_a_job_that_is_only_in_memory_holds_up_no_deletion(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
):
    """The state file was locked when the job ended, and nothing was written since."""
    state = make_state()
    job = add_job(state)
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    with closing(sqlite3.connect(state.store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert state.jobs.request_cancel(job.id).state == "cancelled"
    state.deletions.delete(KEY)
    assert state.store.query("SELECT * FROM jobs") == []


async def test_a_deletion_does_not_wait_for_an_engine_that_sleeps(
    trained: Api, monkeypatch: pytest.MonkeyPatch
):
    """vLLM unloads when it wakes: after the job of another model, which may take an hour."""
    adapters = trained.state.serving.engines.loaded()[trained.base_model].adapters
    engine, awake = adapters._engine, asyncio.Event()
    unload = engine.unload

    async def later(adapter: Any) -> None:
        await awake.wait()
        await unload(adapter)

    monkeypatch.setattr(engine, "unload", later)
    monkeypatch.setattr(policies, "UNLOAD_S", 0.01)
    await trained.ask("DELETE", AGENT)
    assert (await trained.register(seed=5, rank=2)).step == 0
    awake.set()
    assert (await trained.ended(await trained.submit())).step == 1


async def test_a_job_that_begins_while_its_model_is_deleted_leaves_nothing_behind(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise a new model of that name would get the old step 0, of another rank perhaps."""
    engines, release = api.state.serving.engines, asyncio.Event()
    tokenizer = engines.tokenizer

    async def slow(base_model: str) -> Any:
        loaded = await tokenizer(base_model)
        if asyncio.current_task() in loops():
            await release.wait()
        return loaded

    def loops() -> list[Any]:
        return [loop.task for loop in api.state.service._loops.values()]

    monkeypatch.setattr(engines, "tokenizer", slow)
    await api.submit()
    await api.ask("DELETE", f"{AGENT}?force=true")
    release.set()
    async with asyncio.timeout(PATIENCE_S):
        while api.state.service.status()["jobs"]:
            await asyncio.sleep(0.01)
    assert api.state.service.parts()["training"] == {"status": "ok"}
    assert not api.state.checkpoints.model_dir(KEY).exists()


async def test_a_job_that_was_added_while_its_model_was_deleted_trains_no_other(
    prose: Prose, tiny_model: Path, tmp_path: Path
):
    """A model that a client called `p/m` in another project is not the `m` of project `p`."""
    async with SmallServer.started(tmp_path / "hone") as server:
        deleted = server.models.register(spec(tiny_model, project="p", name="m"))
        other = server.models.register(spec(tiny_model, name=stored_name("p/m")))
        server.deletions.delete(deleted.key)
        ended = await server.ended(server.submit(deleted, token_groups(1)).id)
        assert ended.failure is not None
        prose(ended.failure.message)
        assert server.checkpoints.list(other.key) == []


DELETE = """
import sys
from contextlib import closing
from pathlib import Path
from hone.server.state import State
from hone.server.settings import Settings
from hone.types import ModelKey

State(Settings(root=Path(sys.argv[1]))).deletions.delete(ModelKey("default", "agent"), force=True)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("point", FAILPOINTS)
def test_a_deletion_that_was_killed_is_finished_at_the_next_start(
    make_state: MakeState, tmp_path: Path, point: str
):
    state = make_state()
    for key in (KEY, OTHER):
        state.models.register(ModelSpec(name=key.name, base_model="tiny"))
        state.checkpoints.log(key, 3, {"reward": 1.0}, "val")
    state.calls.open_run(RunSpec(id="run", model="agent"))
    state.store.close()
    killed = subprocess.run(
        [sys.executable, "-c", DELETE, str(tmp_path / "hone")],
        env=os.environ | {"HONE_FAILPOINT": point},
        timeout=PATIENCE_S,
    )
    assert killed.returncode == -9
    state = make_state()
    assert [record.key for record in state.models.list()] == [OTHER]
    assert state.calls.runs(limit=10) == []
    parent = state.checkpoints.model_dir(KEY).parent
    assert [path.name for path in parent.iterdir()] == ["other"]
    assert state.checkpoints.history(OTHER)[0]["step"] == 3
    assert state.store.query("SELECT * FROM deletions") == []
