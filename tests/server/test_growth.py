"""What a server keeps is bounded: its log, logged trajectories, runs whose clients are gone."""

import logging
import os
from pathlib import Path

from tests.server.api import Api
from tests.server.conftest import MakeState
from tests.server.worlds import World

from hone.logs import output_file, say, write_output
from hone.server.settings import Settings
from hone.server.telemetry import rotate_output, start_logging, stop_logging
from hone.store.checkpoints import log_groups, prune_groups
from hone.types import RunSpec


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


def test_the_oldest_logged_trajectories_leave_first(tmp_path: Path):
    group = {"logs": ["x" * 90]}
    paths = []
    for step in range(4):
        model = tmp_path / "default" / "models" / f"model-{step % 2}"
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
