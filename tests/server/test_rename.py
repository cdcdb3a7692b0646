"""Renaming a model moves everything stored about it, whenever the server is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.api import AGENT, JOBS, Api, Open
from tests.server.conftest import MakeState

from hone.errors import AmbiguousModel
from hone.store.rename import FAILPOINTS
from hone.types import ModelKey, ModelSpec, RunSpec, stored_name

OLD, NEW = ModelKey("default", "agent"), ModelKey("default", "agent.old")


@pytest.fixture
async def trained(open_api: Open) -> Api:
    """A server whose model `agent` has one trained step."""
    api = await open_api()
    await api.register()
    await api.ended(await api.submit(config={"learning_rate": 1e-3}, idempotency_key="k"))
    return api


async def test_a_rename_moves_steps_history_jobs_and_runs(trained: Api):
    api, state = trained, trained.state
    await api.ask("POST", f"{AGENT}/metrics", json={"metrics": {"reward": 0.5}})
    for run, model in (("short", "agent"), ("long", "default/agent"), ("none", None)):
        await api.ask("POST", "/v1/runs", json={"id": run, "model": model})
    (job,) = await api.ask("GET", JOBS)
    steps = await api.ask("GET", f"{AGENT}/checkpoints")
    before = await api.ask("GET", AGENT)

    answer = await api.ask("POST", f"{AGENT}/rename", json={"to": "agent.old"})
    assert answer == before | {"name": "agent.old", "inference_name": "agent.old"}
    assert (answer["step"], answer["best_step"]) == (1, 1)
    assert await api.ask("GET", JOBS) == [job | {"model": "default/agent.old"}]
    assert await api.ask("GET", f"{AGENT}.old/checkpoints") == steps
    assert state.checkpoints.history(NEW)[-1]["val/reward"] == 0.5
    assert not state.checkpoints.model_dir(OLD).exists()
    for run, model in (("short", str(NEW)), ("long", str(NEW)), ("none", None)):
        assert (await api.ask("GET", f"/v1/runs/{run}"))["model"] == model
        found_run = state.calls.run_of(f"{run}:a")
        assert found_run is not None and found_run.model == model
    await api.ask("GET", AGENT, status=404)
    # An answer that was lost is asked for again.
    assert await api.ask("POST", f"{AGENT}/rename", json={"to": "agent.old"}) == answer


async def test_the_old_name_can_be_registered_again_and_both_are_served(trained: Api):
    api, serving = trained, trained.state.serving
    adapter = (await serving.resolve("agent")).adapter
    await api.ask("POST", f"{AGENT}/rename", json={"to": "agent.old"})
    renamed = (await serving.resolve("agent.old")).adapter
    assert adapter is not None and renamed is not None
    assert (renamed.model, renamed.sha256) == (str(NEW), adapter.sha256)
    assert (await api.register(seed=5)).step == 0
    fresh, old = await serving.resolve("agent"), await serving.resolve("agent.old")
    assert (fresh.step, fresh.adapter) == (0, None)
    assert (old.step, old.adapter) == (1, renamed)
    job = await api.ended(await api.submit(config={"learning_rate": 1e-3}, idempotency_key="k"))
    assert (job.base_step, job.step) == (0, 1)
    assert (await serving.resolve("agent.old")).adapter == renamed


async def test_a_model_in_use_is_not_renamed(prose: Prose, api: Api):
    job = await api.submit()
    answer = await api.ask("POST", f"{AGENT}/rename", json={"to": "b"}, status=409)
    prose(answer["error"]["message"], job=job.id)


async def test_a_rename_hides_no_model_of_another_project(prose: Prose, open_api: Open):
    """Also if the new name is one that hone derives from the other's PROJECT/NAME."""
    api = await open_api()
    await api.register()
    await api.register(name="m", project="p", seed=5)
    await api.ask("POST", f"{AGENT}/rename", json={"to": stored_name("p/m")})
    for name in ("p/m", "m", "p/m@latest"):
        assert (await api.state.serving.resolve(name)).model == "p/m"
    renamed = f"default/{stored_name('p/m')}"
    assert (await api.state.serving.resolve(renamed)).model == renamed
    await api.ask("POST", f"{AGENT}/rename", json={"to": stored_name("p/m")})  # repeated
    await api.register(name="n")
    n = "/v1/training/models/default/n/rename"
    answer = await api.ask("POST", n, json={"to": stored_name("p/m").upper()}, status=409)
    prose(answer["error"]["message"])
    await api.ask("POST", n, json={"to": "m"})
    with pytest.raises(AmbiguousModel) as caught:
        await api.state.serving.resolve("m")
    prose(caught)
    assert (await api.state.serving.resolve("p/m")).model == "p/m"


@pytest.mark.parametrize(
    ("to", "status"),
    [
        ("other", 409),
        ("logged", 409),
        ("tiny", 409),
        ("../x", 422),
    ],
)
async def test_a_name_that_is_taken_is_refused(prose: Prose, open_api: Open, to: str, status: int):
    api = await open_api(held=True)
    await api.register()
    await api.register(name="other")
    api.state.models.register(ModelSpec(name="third", base_model="tiny"))
    api.state.checkpoints.log(ModelKey("default", "logged"), 0, {"a": 1.0}, "val")
    answer = await api.ask("POST", f"{AGENT}/rename", json={"to": to}, status=status)
    prose(answer["error"]["message"])
    await api.ask("POST", "/v1/training/models/default/agnet/rename", json={"to": "x"}, status=404)


RENAME = """
import sys
from pathlib import Path
from hone.server.state import State
from hone.server.settings import Settings
from hone.store.rename import Renames
from hone.types import ModelKey

state = State(Settings(root=Path(sys.argv[1])))
renames = Renames(state.store, state.models, state.jobs, state.calls, state.checkpoints)
renames.rename(ModelKey("default", "agent"), ModelKey("default", "agent.old"))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("point", FAILPOINTS)
def test_a_rename_that_was_killed_is_finished_at_the_next_start(
    make_state: MakeState, tmp_path: Path, point: str
):
    state = make_state()
    state.models.register(ModelSpec(name="agent", base_model="tiny"))
    state.calls.open_run(RunSpec(id="run", model=str(OLD)))
    state.checkpoints.log(OLD, 3, {"reward": 1.0}, "val")
    state.store.close()
    killed = subprocess.run(
        [sys.executable, "-c", RENAME, str(tmp_path / "hone")],
        env=os.environ | {"HONE_FAILPOINT": point},
        timeout=PATIENCE_S,
    )
    assert killed.returncode == -9
    state = make_state()
    assert [record.key for record in state.models.list()] == [NEW]
    assert json.loads(state.models.get(NEW).spec.model_dump_json())["name"] == "agent.old"
    assert state.checkpoints.history(NEW)[0]["step"] == 3
    run = state.calls.run_of("run:a")
    assert run is not None and run.model == str(NEW)
    # Done once: a new model under the old name stays where it is.
    state.models.register(ModelSpec(name="agent", base_model="tiny"))
    state.store.close()
    state = make_state()
    assert [record.key for record in state.models.list()] == [OLD, NEW]
