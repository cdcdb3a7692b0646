"""What a server stores is bounded: its log, logged trajectories, runs whose clients are gone."""

import logging
import os
from pathlib import Path

from tests.server.api import AGENT, JOBS, Api, Open
from tests.server.conftest import MakeState
from tests.server.worlds import World

from hone.files.logs import output_file, say, write_output
from hone.server.settings import Settings
from hone.server.telemetry import rotate_output, start_logging, stop_logging
from hone.store.checkpoints import log_groups, prune_groups
from hone.types import RunSpec

CONFIG = {"learning_rate": 1e-3, "max_staleness": None}


def test_the_log_is_rotated(tmp_path: Path):
    settings = Settings(root=tmp_path, log_bytes=4096, log_files=2)
    before = logging.getLogger("hone.server").propagate
    start_logging(settings)
    try:
        for number in range(500):
            say("something happened", number=number)
            write_output("learner", f"a long line of a library, number {number}", pid=7)
    finally:
        stop_logging()
        logging.getLogger("hone.server").propagate = before
    files = sorted(settings.log_file.parent.iterdir())
    assert [path.name for path in files] == [
        f"{part}.log{number}" for part in ("learner", "server") for number in ("", ".1", ".2")
    ]
    assert all(path.stat().st_size <= 4096 for path in files)
    assert "number=499" in settings.log_file.read_text()
    assert files[0].read_text().endswith("Z [7] a long line of a library, number 499\n")
    assert output_file("learner") is None, "closed"


def test_the_output_of_a_server_is_rotated_while_processes_append_to_it(tmp_path: Path):
    settings = Settings(root=tmp_path, log_bytes=4096, log_files=2)
    path = tmp_path / "logs" / "server.out"
    rotate_output(settings)  # a server that no client started has none
    path.parent.mkdir()
    with path.open("ab", buffering=0) as output:
        for number in range(5):
            output.write(b"%d" % number * 4096)
            rotate_output(settings)
        output.write(b"the last line\n")
    rotate_output(settings)
    files = {file.name: file.read_text() for file in path.parent.iterdir()}
    older = {"server.out.1": "4" * 4096, "server.out.2": "3" * 4096}
    assert files == {"server.out": "the last line\n", **older}


def test_the_oldest_logged_trajectories_are_deleted_first(tmp_path: Path):
    group = {"logs": ["x" * 90]}
    paths = []
    for step in range(4):
        model = tmp_path / "projects" / "default" / "models" / f"model-{step % 2}"
        paths.append(log_groups(model, "val", step, [group]))
        os.utime(paths[-1], (step, step))
    size = paths[0].stat().st_size
    assert prune_groups(tmp_path, 4 * size) == 0
    assert prune_groups(tmp_path, 2 * size) == 2
    assert [path.exists() for path in paths] == [False, False, True, True]


async def test_a_run_that_nobody_uses_is_closed_and_its_calls_can_go(
    make_state: MakeState, tiny_model: Path
):
    world = await World.open(make_state(), tiny_model)
    calls = world.state.calls
    for run in ("dead", "alive"):
        calls.open_run(RunSpec(id=run, model="agent"))
    calls._opened.clear()  # as after a restart
    with world.state.store.transaction() as db:
        db.execute("UPDATE runs SET opened_at = opened_at - 1000")
    world.add([5, 6], rollout="dead:0", created_at=0.0)
    fresh = world.add([5, 7], rollout="alive:0", created_at=2.0**33)
    assert calls.close_idle_runs(2000) == []
    assert calls.close_idle_runs(600) == ["dead"]
    assert (calls.run("dead")[1], calls.run("alive")[1]) == (False, True)
    assert calls.prune(max_age_s=600, max_bytes=2**40) == 1
    assert [call.id for call in calls.rollout("alive:0")] == [fresh.id]
    # Its client comes back: opened again, it is young.
    calls.open_run(RunSpec(id="dead", model="agent"))
    assert calls.close_idle_runs(600) == []
    await world.close()


async def test_a_run_that_waits_for_its_job_is_not_idle(open_api: Open):
    api = await open_api(held=True, idle_run_s=500.0, keep_events_s=500.0)
    await api.register()
    await api.register(name="other")
    for run, model in (("short", "agent"), ("long", "default/agent"), ("dead", "other")):
        await api.ask("POST", "/v1/runs", json={"id": run, "model": model})
    job = await api.submit()
    api.state.calls._opened.clear()
    with api.state.store.transaction() as db:
        db.execute("UPDATE runs SET opened_at = opened_at - 1000")
    await api.state._prune()
    runs = {run["id"]: run["open"] for run in await api.ask("GET", "/v1/runs")}
    assert runs == {"short": True, "long": True, "dead": False}
    await api.ask("POST", f"{JOBS}/{job.id}/cancel")
    await api.ended(job, state="cancelled")
    with api.state.store.transaction() as db:
        db.execute("UPDATE runs SET closed_at = closed_at - 1000")
    await api.state._prune()  # closes two, and deletes what was closed long ago
    runs = {run["id"]: run["open"] for run in await api.ask("GET", "/v1/runs")}
    assert runs == {"short": False, "long": False}


async def test_runs_are_listed(api: Api):
    for run in ("first", "second"):
        assert (await api.client.post("/v1/runs", json={"id": run})).status_code == 200
    await api.client.post("/v1/runs/first/close")
    listed = (await api.client.get("/v1/runs")).json()
    assert [(run["id"], run["open"], run["calls"]) for run in listed] == [
        ("second", True, 0),
        ("first", False, 0),
    ]
    assert len((await api.client.get("/v1/runs?limit=1")).json()) == 1


async def test_only_the_newest_steps_and_those_that_are_needed_stay_whole(open_api: Open):
    api = await open_api(keep_optimizer_steps=1)
    await api.register()
    for _ in range(3):
        await api.ended(await api.submit(config=CONFIG))
    await api.ask("POST", f"{AGENT}/metrics", json={"step": 1, "metrics": {"reward": 1.0}})
    sizes = {s["step"]: s["bytes"] for s in await api.ask("GET", f"{AGENT}/checkpoints")}
    await api.state._prune()
    steps = await api.ask("GET", f"{AGENT}/checkpoints")
    assert [(s["step"], s["optimizer"]) for s in steps] == [
        (0, True),
        (1, True),  # the best
        (2, False),
        (3, True),
    ]
    assert steps[2]["bytes"] < sizes[2] and steps[3]["bytes"] == sizes[3]
    # The newest is damaged: the one before it is used, and the job says what that means.
    record = api.state.models.find("agent")
    newest = api.state.checkpoints.get(record.key, 3)
    (newest.path / "adapter_model.safetensors").write_bytes(b"")
    api.state.serving.engines.loaded()[api.base_model].adapters.newest.clear()
    job = await api.ended(await api.submit(config=CONFIG))
    assert (job.base_step, job.step) == (2, 3)
    learned = [e for e in api.state.jobs.events(job.id, limit=-1) if e.type == "learned"]
    assert "step 2 had lost the state of its optimizer" in learned[0].data["notes"][-1]


async def test_old_steps_go_when_a_number_of_steps_is_set(open_api: Open):
    api = await open_api(keep_steps=1)
    await api.register()
    for _ in range(3):
        await api.ended(await api.submit(config=CONFIG))
    await api.state._prune()
    steps = await api.ask("GET", f"{AGENT}/checkpoints")
    assert [step["step"] for step in steps] == [0, 3]


async def test_the_first_step_of_an_open_run_stays(open_api: Open):
    """The run's last validation compares it with the best step."""
    api = await open_api(keep_steps=1)
    await api.register()
    await api.ended(await api.submit(config=CONFIG))
    api.state.calls.open_run(RunSpec(id="run1", model="default/agent"))
    for _ in range(2):
        await api.ended(await api.submit(config=CONFIG))
    await api.state._prune()
    steps = await api.ask("GET", f"{AGENT}/checkpoints")
    assert [(step["step"], step["in_use"]) for step in steps] == [(0, False), (1, True), (3, False)]
    api.state.calls.close_run("run1")
    await api.state._prune()
    steps = await api.ask("GET", f"{AGENT}/checkpoints")
    assert [step["step"] for step in steps] == [0, 3]
