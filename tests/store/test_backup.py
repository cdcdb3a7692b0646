"""A backup is a root of its own: consistent, complete, and without the server's secrets."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.prose import Prose
from tests.server.conftest import make_state
from tests.server.small_server import CONFIG

from hone.errors import ConfigError, Conflict, NotFound, StateError
from hone.files.owned import make_owned
from hone.model_files import read_state, write_state
from hone.server.state import State
from hone.store import backup as backup_module
from hone.store.backup import backup
from hone.store.checkpoints import OPTIMIZER, Checkpoint, Checkpoints, log_groups
from hone.store.jobs import Pin
from hone.types import JobInfo, ModelKey, ModelSpec, RunSpec

pytestmark = pytest.mark.e2e

__all__ = ["make_state"]

KEY = ModelKey("default", "agent")


@pytest.fixture
def state(make_state: Any) -> Any:
    """Of a server with a trained step and an open run."""
    state = make_state()
    state.models.register(ModelSpec(name="agent", base_model="tiny"))
    write_step(state, 0, None)
    job = finish(state, take(state, add_job(state), 0))
    state.checkpoints.log(KEY, 1, {"reward": 0.5}, "val")
    state.calls.open_run(RunSpec(id="run", model="agent"))
    (state.settings.root / "api_key").write_text("secret")
    assert job.step == 1
    yield state
    state.store.close()


def add_job(state: State) -> JobInfo:
    model = state.models.find("agent")
    return state.jobs.add(
        model=model, groups=b"groups", config=CONFIG, counts={}, request_sha256="1:x"
    )


def take(state: State, job: JobInfo, base_step: int) -> JobInfo:
    return state.jobs.take(job.id, Pin(base_step, "sha", dtype="float32", row_tokens=64))


def write_step(state: State, step: int, job: str | None, *, proved: bool = True) -> Checkpoint:
    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text(f"adapter {step}")
        (directory / OPTIMIZER).write_text(f"moments {step}")
        return f"sha {step}"

    return state.checkpoints.write(KEY, step, fill, proved=proved, job=job)


def finish(state: State, job: JobInfo) -> JobInfo:
    assert job.base_step is not None
    write_step(state, job.base_step + 1, job.id)
    return state.jobs.move(job.id, "done", step=job.base_step + 1)


def after_database(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Let something happen between the copy of the database and the copy of the steps."""
    copy = backup_module._copy_database

    def copy_then_act(*paths: Path) -> None:
        copy(*paths)
        act()

    monkeypatch.setattr(backup_module, "_copy_database", copy_then_act)


def steps(state: State) -> list[int]:
    listed = state.checkpoints.list(KEY)
    return [state.checkpoints.get(KEY, one.step).step for one in listed]  # hashes are checked


def test_the_copy_is_a_root_of_its_own(state: State, make_state: Any, tmp_path: Path):
    done = backup(state.settings.root, tmp_path / "copy")
    assert (done.models, done.steps, done.damaged) == (1, 2, [])
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert "state.sqlite" in names and "api_key" not in names and "logs" not in names
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700
    linked = state.checkpoints.get(KEY, 1).path / OPTIMIZER
    assert linked.stat().st_nlink == 2
    copy = make_state(root=tmp_path / "copy")
    assert copy.models.list() == state.models.list()
    assert copy.jobs.list() == state.jobs.list()
    assert steps(copy) == [0, 1] and copy.checkpoints.best(KEY) == 1
    assert copy.calls.run_of("run:0") == RunSpec(id="run", model="agent")
    # What changes in one does not change in the other.
    state.checkpoints.log(KEY, 0, {"reward": 0.9}, "val")
    state.checkpoints.delete(KEY, [0])
    assert steps(copy) == [0, 1] and copy.checkpoints.best(KEY) == 1
    copy.store.close()


def test_what_programs_keep_of_their_models_is_copied_also_of_models_that_are_not_trained(
    state: State, tmp_path: Path
):
    """The default directory of the SDK's models is the default root of a server."""
    prompted = ModelKey("other", "prompted")
    for key in (KEY, prompted):
        directory = state.checkpoints.model_dir(key)
        write_state(directory, {"position": 3})
        (directory / "model.json").write_text("{}")
        log_groups(directory, "val", 0, [{"trajectories": []}])
    state.checkpoints.log(prompted, 0, {"reward": 0.5}, "val")
    done = backup(state.settings.root, tmp_path / "copy")
    assert (done.models, done.damaged) == (1, [])
    copy = Checkpoints(tmp_path / "copy")
    for key in (KEY, prompted):
        directory = copy.model_dir(key)
        assert read_state(directory) == {"position": 3}
        assert (directory / "model.json").read_text() == "{}"
        assert (directory / "trajectories" / "val" / "0000.jsonl").read_text()
        assert copy.history(key)


def test_steps_that_the_copied_state_does_not_know_are_left_out(
    state: State, make_state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    running, queued = take(state, add_job(state), 1), add_job(state)

    def go_on() -> None:
        finish(state, running)
        finish(state, take(state, queued, 2))
        finish(state, take(state, add_job(state), 3))

    after_database(monkeypatch, go_on)
    backup(state.settings.root, tmp_path / "copy")
    assert steps(state) == [0, 1, 2, 3, 4]
    copy = make_state(root=tmp_path / "copy")
    # The running job has its step and is only to be marked as done; the queued one trains again.
    assert steps(copy) == [0, 1, 2]
    assert [job.state for job in reversed(copy.jobs.list())] == ["done", "running", "queued"]
    assert copy.service._has_checkpoint(copy.jobs.get(running.id))
    copy.store.close()


def test_an_unproved_step_is_copied_only_with_its_job(state: State, tmp_path: Path):
    failed = take(state, add_job(state), 1)
    write_step(state, 2, failed.id, proved=False)
    state.jobs.move(failed.id, "failed")
    backup(state.settings.root, tmp_path / "one")
    assert not list((tmp_path / "one").rglob("*.unproved"))
    saved = take(state, add_job(state), 1)
    write_step(state, 2, saved.id, proved=False)
    backup(state.settings.root, tmp_path / "two")
    assert len(list((tmp_path / "two").rglob("0002.unproved"))) == 1


def test_steps_of_a_lost_database_are_copied(state: State, make_state: Any, tmp_path: Path):
    """Their jobs are unknown, but they are not newer than the copy."""
    with state.store.transaction() as db:
        db.execute("DELETE FROM job_events")
        db.execute("DELETE FROM jobs")
    assert backup(state.settings.root, tmp_path / "copy").steps == 2


def test_what_is_deleted_or_pruned_meanwhile_leaves_no_half_step(
    state: State, make_state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    finish(state, take(state, add_job(state), 1))
    state.checkpoints.log(KEY, 2, {"reward": 0.9}, "val")
    read_bytes = Path.read_bytes

    def prune(path: Path) -> bytes:
        text = read_bytes(path)  # the manifest, before its file list changes
        if path.parent.name == "0000":
            state.checkpoints.delete(KEY, [0])
        if path.parent.name == "0001":
            state.checkpoints.drop_optimizers(KEY, last=1)
        return text

    monkeypatch.setattr(Path, "read_bytes", prune)
    done = backup(state.settings.root, tmp_path / "copy")
    monkeypatch.undo()
    assert (done.steps, done.damaged) == (2, [])
    copy = make_state(root=tmp_path / "copy")
    assert steps(copy) == [1, 2]
    assert not copy.checkpoints.get(KEY, 1).has_optimizer
    copy.store.close()


def test_a_model_that_is_renamed_meanwhile_is_copied_under_one_name(
    prose: Prose, state: State, make_state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = iter(["second", "third", "fourth", "fifth"])
    key = KEY

    def rename() -> None:
        nonlocal key
        old, key = key, ModelKey("default", next(names))
        state.renames.rename(old, key)

    with monkeypatch.context() as patched:
        after_database(patched, rename)
        with pytest.raises(Conflict) as caught:
            backup(state.settings.root, tmp_path / "copy")
        prose(caught)
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob(".copy*"))
    backup(state.settings.root, tmp_path / "copy")
    copy = make_state(root=tmp_path / "copy")
    assert [checkpoint.step for checkpoint in copy.checkpoints.list(key)] == [0, 1]
    copy.store.close()


def test_a_damaged_step_is_named_and_left_out(state: State, tmp_path: Path):
    (state.checkpoints.get(KEY, 1).path / OPTIMIZER).write_text("moments X")
    done = backup(state.settings.root, tmp_path / "copy")
    assert done.steps == 1
    assert done.damaged == [
        "default/agent, step 0001: optimizer.safetensors is not what was written"
    ]


def test_on_another_file_system_files_are_copied(
    state: State, make_state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def other_file_system(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    (tmp_path / "mounted").mkdir(mode=0o755)  # an empty directory is filled
    assert backup(state.settings.root, tmp_path / "mounted").steps == 2
    assert stat.S_IMODE((tmp_path / "mounted").stat().st_mode) == 0o700
    assert state.checkpoints.get(KEY, 1).path.joinpath(OPTIMIZER).stat().st_nlink == 1
    copy = make_state(root=tmp_path / "mounted")
    assert steps(copy) == [0, 1]
    copy.store.close()


@pytest.mark.parametrize("partial", ["copy/.partial", ".copy.partial"])
def test_files_that_are_not_from_a_backup_are_not_deleted(
    state: State, tmp_path: Path, partial: str
):
    """A directory may be called as hone would call its own."""
    mine = tmp_path / partial / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(StateError):
        backup(state.settings.root, tmp_path / "copy")
    assert mine.read_text() == "mine"
    assert [path.name for path in mine.parent.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("partial", ["copy/.partial", ".copy.partial"])
def test_files_of_a_killed_backup_are_replaced(state: State, tmp_path: Path, partial: str):
    make_owned(tmp_path / partial)
    (tmp_path / partial / "state.sqlite-old").write_text("half")
    copy = tmp_path / "copy"
    assert backup(state.settings.root, copy).steps == 2
    assert {path.name for path in copy.iterdir()} == {"state.sqlite", "projects"}
    assert not list(tmp_path.rglob("*.partial")) and stat.S_IMODE(copy.stat().st_mode) == 0o700


@pytest.mark.parametrize("exists", [True, False])
def test_only_one_of_two_backups_at_the_same_time_writes_the_directory(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
):
    """The second would empty what the first has copied, and the first would not notice."""
    copy, copy_step, refusals = tmp_path / "copy", backup_module._copy_step, list[str]()
    if exists:
        copy.mkdir()

    def during_another(*args: Any) -> str | None:
        with pytest.raises(Conflict) as refused:
            backup(state.settings.root, copy)
        refusals.append(str(refused.value))
        return copy_step(*args)

    monkeypatch.setattr(backup_module, "_copy_step", during_another)
    assert backup(state.settings.root, copy).steps == 2
    assert {path.name for path in copy.iterdir()} == {"state.sqlite", "projects"}
    assert refusals == 2 * [
        f"{copy}: another backup is writing to it. Wait until it has ended, or name another directory."
    ]


def test_wrong_directories_are_named(prose: Prose, state: State, tmp_path: Path):
    root = state.settings.root
    with pytest.raises(NotFound) as caught:
        backup(tmp_path, tmp_path / "copy")
    prose(caught)
    with pytest.raises(Conflict) as caught:
        backup(root, root / "copy")
    prose(caught)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(Conflict) as caught:
        backup(root, tmp_path / "full")
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        backup(root, tmp_path / "full" / "file" / "copy")
    prose(caught)


@pytest.mark.parametrize("page", [0, 1])
def test_a_damaged_database_is_no_backup(prose: Prose, state: State, tmp_path: Path, page: int):
    state.store.close()
    path = state.settings.root / "state.sqlite"
    whole = path.read_bytes()
    at = page * 4096
    path.write_bytes(whole[:at] + b"\x99" * 4096 + whole[at + 4096 :])
    with pytest.raises(StateError) as caught:
        backup(state.settings.root, tmp_path / "copy")
    prose(caught)
    assert not (tmp_path / "copy").exists()
