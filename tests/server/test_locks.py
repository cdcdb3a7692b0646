"""A lock of another process on the state file loses no job, at any point of the loop."""

import asyncio
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.small_server import LearnerHere, SmallServer, spec, token_groups
from tests.store.test_checkpoints import filler

from hone.errors import DiskFull, LearnerDied, StorageError
from hone.files import disk
from hone.server import supervision
from hone.server.http.app import create_apps
from hone.server.train import loop as service
from hone.server.train import stages as job_stages
from hone.store import checkpoints, database, jobs, rename
from hone.types import JobInfo, ModelKey

pytestmark = pytest.mark.e2e

KEY = ModelKey("default", "agent")
BEFORE_TAKE = "job/before-take"
POINTS = (
    *jobs.FAILPOINTS,
    *("job/before-move:2", "job/after-move:2"),  # of the end; the first move is the start
    *service.FAILPOINTS,
    *checkpoints.FAILPOINTS,
)


class OtherProcess:
    """Locks the state file when the server reaches a failpoint, as a sqlite3 shell would."""

    def __init__(self) -> None:
        self.held = False
        self._point, self._left = "", 0

    def lock_at(self, path: Path, point: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._point, _, count = point.partition(":")
        self._left = int(count or 1)

    def __call__(self, point: str) -> None:
        self._left -= point == self._point
        if point == self._point and self._left == 0:
            self._db.execute("BEGIN IMMEDIATE")
            self.held = True

    def release(self) -> None:
        assert self.held, self._point
        self._db.close()
        self.held = False


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherProcess:
    other = OtherProcess()
    for module in (jobs, service, job_stages, checkpoints):
        monkeypatch.setattr(module, "failpoint", other)
    return other


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    monkeypatch.setattr(supervision, "FIRST_S", 0.02)
    monkeypatch.setattr(supervision, "LONGEST_S", 0.1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


async def let_go(server: SmallServer, other: OtherProcess) -> None:
    """The file is locked, and the loop has done with its job what it can."""
    async with asyncio.timeout(PATIENCE_S):
        while not other.held or server.service.status()["jobs"]:
            await asyncio.sleep(0.005)


async def written(server: SmallServer, job: JobInfo) -> str:
    """The job's state on disk, once nothing is only in memory."""
    async with asyncio.timeout(PATIENCE_S):
        while server.jobs._pending or server.jobs.unwritten:
            await asyncio.sleep(0.005)
    ((state,),) = server.store.query("SELECT state FROM jobs WHERE id = ?", (job.id,))
    return state


async def served(server: SmallServer) -> int:
    """The step that is served, which is the newest on disk."""
    newest = server.checkpoints.newest(KEY)
    assert newest is not None
    assert (await server.serving.resolve("agent")).step == newest.step
    return newest.step


async def test_no_job_is_left_running_wherever_a_lock_meets_it(
    tiny_model: Path, tmp_path: Path, other: OtherProcess
):
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        for step, point in enumerate(POINTS, start=1):
            other.lock_at(server.store.path, point)
            job = server.submit(record, token_groups(1, first=step))
            server.service.wake()
            await let_go(server, other)
            assert server.jobs.get(job.id).state in ("queued", "done"), point
            other.release()
            ended = await server.ended(job.id)
            assert (ended.state, ended.step, ended.attempts) == ("done", step, 1), (point, ended)
            assert await written(server, job) == "done", point
            assert await served(server) == step, point
            # What was learned is not learned again, and the events of both attempts are on disk.
            types = server.event_types(job.id)
            assert types.count("learned") == types.count("done") == 1, (point, types)
            stored = server.store.query("SELECT type FROM job_events WHERE job = ?", (job.id,))
            assert [row["type"] for row in stored] == types, point


@pytest.mark.parametrize("point", ["job/after-take", "job/after-save", "job/after-promote"])
async def test_after_a_restart_a_job_that_met_a_lock_comes_before_the_next(
    tiny_model: Path, tmp_path: Path, other: OtherProcess, point: str
):
    """The server stops while the file is locked: on disk the job is still running."""
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        other.lock_at(server.store.path, point)
        first, second = (server.submit(record, token_groups(1, first=n)) for n in (0, 10))
        server.service.wake()
        await let_go(server, other)
    other.release()
    async with SmallServer.started(tmp_path / "hone") as again:
        for step, job in ((1, first), (2, second)):
            ended = await again.ended(job.id)
            assert (ended.state, ended.step) == ("done", step), ended
        assert await served(again) == 2
        assert [c.manifest["job"] for c in again.checkpoints.list(KEY)] == [
            None,
            first.id,
            second.id,
        ]


async def test_a_job_whose_step_another_job_made_is_trained_from_the_newest(
    tiny_model: Path, tmp_path: Path
):
    """As a server left it whose loop went on to the next job after a lock."""
    root = tmp_path / "hone"
    async with SmallServer.started(root) as server:
        await server.trained(tiny_model, 0)
    left = SmallServer.at(root)
    first = left.checkpoints.get(KEY, 0)
    job = left.submit(left.models.find("agent"), token_groups(1, first=10))
    left.jobs.take(job.id, jobs.Pin(0, first.sha256, dtype="float32", row_tokens=4096))
    left.checkpoints.write(KEY, 1, filler("not proved"), proved=False, job=job.id)
    await left.close()
    async with SmallServer.started(root) as again:
        ended = await again.ended(job.id)
        assert (ended.state, ended.base_step, ended.step) == ("done", 1, 2), ended
        assert await served(again) == 2


@pytest.mark.parametrize(
    ("change", "state"), [("cancel", "cancelled"), ("refuse", "failed"), ("kill", "done")]
)
async def test_a_job_that_ends_under_a_lock_ends(
    tiny_model: Path, tmp_path: Path, other: OtherProcess, change: str, state: str
):
    """Cancelled while it runs, refused by the learner, or retried because the learner died."""

    class Learner(LearnerHere):
        deaths = 1

        def train(self, *args: Any, **more: Any) -> Any:
            if change == "cancel":
                assert server.jobs.request_cancel(job.id).cancel_requested
            if change == "kill" and Learner.deaths:
                Learner.deaths -= 1
                raise LearnerDied("learner process 7, during 'train': it ended (signal SIGKILL)")
            return super().train(*args, **more)

    async with SmallServer.started(tmp_path / "hone", start_learner=Learner) as server:
        record = server.models.register(spec(tiny_model))
        groups = token_groups(1)
        if change == "refuse":
            groups[0].trajectories[0].calls[0].completion_ids[0] = 9999
        other.lock_at(server.store.path, "job/before-learn")
        job = server.submit(record, groups)
        server.service.wake()
        await let_go(server, other)
        assert server.jobs.get(job.id).state == (state if change != "kill" else "queued")
        other.release()
        assert (await server.ended(job.id)).state == state
        server.service.wake()
        assert await written(server, job) == state


async def test_a_job_that_waits_for_a_lock_can_be_cancelled(
    tiny_model: Path, tmp_path: Path, other: OtherProcess
):
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        other.lock_at(server.store.path, BEFORE_TAKE)
        job = server.submit(record, token_groups(1))
        server.service.wake()
        await let_go(server, other)
        waiting = server.jobs.get(job.id)
        assert waiting.state == "queued" and "holds a lock" in (waiting.waiting_for or "")
        assert server.service.status()["state"] == "waiting"
        assert "StorageError" in server.service.parts()["training"]["reason"]
        assert server.jobs.request_cancel(job.id).state == "cancelled"
        other.release()
        assert await written(server, job) == "cancelled"
        assert server.jobs.get(job.id).attempts == 0


async def test_a_request_that_writes_is_told_to_retry_while_the_file_is_locked(
    prose: Prose, tiny_model: Path, tmp_path: Path, other: OtherProcess
):
    async with SmallServer.started(tmp_path / "hone") as server:
        transport = httpx.ASGITransport(create_apps(server)[0])
        body = {"name": "agent", "base_model": str(tiny_model), "rank": 4}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            other.lock_at(server.store.path, BEFORE_TAKE)
            other(BEFORE_TAKE)
            refused = await http.post("/v1/training/models", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["exception"] == "StorageError"
            prose(refused.json()["error"]["message"])
            assert (await http.get("/v1/training/models")).json() == []
            other.release()
            assert (await http.post("/v1/training/models", json=body)).status_code == 201


async def test_a_rename_that_meets_a_lock_moves_nothing_and_can_be_repeated(
    prose: Prose,
    tiny_model: Path,
    tmp_path: Path,
    other: OtherProcess,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rename, "failpoint", other)
    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(tiny_model, 0)
        new = ModelKey("default", "renamed")
        other.lock_at(server.store.path, "rename/after-intent")
        with pytest.raises(StorageError) as caught:
            server.renames.rename(KEY, new)
        prose(caught)
        assert await served(server) == 1
        other.release()
        assert server.renames.rename(KEY, new)
        assert [step.step for step in server.checkpoints.list(new)] == [0, 1]
        assert server.store.query("SELECT done FROM renames")[0]["done"] == 1


async def test_a_rename_that_the_disk_refuses_to_commit_moves_nothing_and_can_be_repeated(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the model would have no steps until the next start, and train from step 0."""

    def fill_disk(point: str) -> None:
        if point == "rename/after-move":
            raise DiskFull("the disk is full")

    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(tiny_model, 0)
        new = ModelKey("default", "renamed")
        with monkeypatch.context() as full, pytest.raises(DiskFull):
            full.setattr(rename, "failpoint", fill_disk)
            server.renames.rename(KEY, new)
        assert await served(server) == 1
        assert server.renames.rename(KEY, new)
        assert [step.step for step in server.checkpoints.list(new)] == [0, 1]


# ---- a disk that fails between a rename and its sync --------------------------------------------


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("undone", [True, False])
async def test_a_rename_that_could_not_be_synced_is_neither_served_nor_done(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undone: bool,
    cancelled: bool,
):
    """It is done once the directory is synced, and is then the step that is served.

    A job that is cancelled meanwhile is cancelled only if the rename could be undone.
    """
    sync, errors = disk.sync, 2

    def failing(path: Path) -> None:
        nonlocal errors
        if errors and (path / "0001").exists():
            errors -= 1
            if cancelled:
                server.jobs.request_cancel(job.id)
            if not undone:  # so that the rename cannot be undone
                (path / "0001.unproved" / "in the way").mkdir(parents=True, exist_ok=True)
            raise OSError(errno.EIO, "Input/output error", str(path))
        sync(path)

    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        await server.service.prepare(record)
        monkeypatch.setattr(disk, "sync", failing)
        monkeypatch.setattr(checkpoints, "sync", failing)
        job = server.submit(record, token_groups(1))
        ended = await server.ended(job.id)
        state, step = ("cancelled", None) if undone and cancelled else ("done", 1)
        assert (ended.state, ended.step) == (state, step)
        assert server.event_types(job.id).count("queued") == (3 if step else 1)
        assert await served(server) == (step or 0)
    async with SmallServer.started(tmp_path / "hone") as again:
        assert await served(again) == (step or 0)
        assert again.jobs.get(job.id).state == state


def test_a_rename_is_undone_if_it_cannot_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "old").mkdir()

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(disk, "sync", failing)
    with pytest.raises(StorageError), disk.storage(tmp_path):
        disk.move(tmp_path / "old", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
