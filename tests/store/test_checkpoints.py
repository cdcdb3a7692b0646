"""Checkpoints: whole or not at all, verified, never the last good one deleted."""

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.prose import Prose

from hone.errors import ConfigError, DiskFull, NotFound, StorageError
from hone.files import disk
from hone.store import checkpoints as checkpoints_module
from hone.store.checkpoints import FAILPOINTS, OPTIMIZER, Checkpoint, Checkpoints
from hone.types import ModelKey

KEY = ModelKey("default", "agent")


def filler(content: str) -> Callable[[Path], str]:
    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text(content)
        (directory / "adapter_config.json").write_text("{}")
        return f"sha of {content}"

    return fill


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


@pytest.fixture
def four(checkpoints: Checkpoints) -> list[Checkpoint]:
    return [checkpoints.write(KEY, step, filler(f"step {step}"), job=None) for step in range(4)]


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.list(KEY)]


def on_disk(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name for p in (checkpoints.model_dir(KEY) / "checkpoints").iterdir())


def test_a_step_is_a_directory_that_says_what_it_holds(checkpoints: Checkpoints, tmp_path: Path):
    written = checkpoints.write(KEY, 0, filler("one"), job="job-1", metrics={"learn/loss": 0.5})
    model = tmp_path / "projects" / "default" / "models" / "agent"
    assert written.path == model / "checkpoints" / "0000"
    manifest = json.loads((written.path / "manifest.json").read_text())
    assert written.manifest == manifest and written.sha256 == manifest["sha256"] == "sha of one"
    assert manifest["job"] == "job-1" and manifest["metrics"] == {"learn/loss": 0.5}
    # sha256 of "one" and of "{}", by sha256sum
    assert manifest["files"] == {
        "adapter_config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "adapter_model.safetensors": (
            "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
        ),
    }
    reopened = Checkpoints(tmp_path)
    assert reopened.newest(KEY) == reopened.get(KEY, 0) == written
    assert reopened.list(KEY) == [written]


def test_a_failed_write_leaves_no_step(checkpoints: Checkpoints, four):
    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(KEY, 4, fill)
    assert on_disk(checkpoints) == ["0000", "0001", "0002", "0003"]


def test_an_unproved_step_is_not_the_newest_until_it_is_promoted(
    prose: Prose, checkpoints: Checkpoints, four
):
    saved = checkpoints.write(KEY, 4, filler("step 4"), proved=False, job="job-4")
    assert not saved.proved and steps(checkpoints) == [0, 1, 2, 3]
    assert checkpoints.newest(KEY) == four[3]
    with pytest.raises(NotFound) as caught:
        checkpoints.get(KEY, 4)
    prose(caught)
    assert checkpoints.of_job(KEY, "job-4", 4) == saved
    assert checkpoints.of_job(KEY, "job-5", 4) is None
    assert checkpoints.of_job(KEY, "job-4", 5) is None
    promoted = checkpoints.promote(saved)
    assert promoted.proved and promoted.path.name == "0004"
    assert checkpoints.newest(KEY) == promoted == checkpoints.of_job(KEY, "job-4", 4)
    assert checkpoints.promote(promoted) == promoted  # twice does no harm


def test_the_files_of_a_step_are_hashed_once_per_process(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[str] = []

    def sha256_of(path: Path) -> str:
        hashed.append(path.name)
        return disk.sha256_of(path)

    monkeypatch.setattr(checkpoints_module, "sha256_of", sha256_of)
    saved = checkpoints.write(KEY, 0, filler("step 0"), proved=False, job="job-0")
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert checkpoints.of_job(KEY, "job-0", 0) == saved and hashed == files
    promoted = checkpoints.promote(saved)
    assert checkpoints.newest(KEY) == promoted and hashed == files
    assert Checkpoints(checkpoints.root).newest(KEY) == promoted
    assert hashed == 2 * files  # a new process trusts nothing
    damage_file(promoted.path)
    assert checkpoints.newest(KEY) is None


def test_the_step_of_a_failed_job_is_not_used_and_is_overwritten(checkpoints: Checkpoints, four):
    for attempt in ("first", "second"):
        saved = checkpoints.write(KEY, 4, filler(attempt), proved=False, job=attempt)
        assert checkpoints.newest(KEY) == four[3] and checkpoints.of_job(KEY, attempt, 4) == saved
    assert checkpoints.of_job(KEY, "first", 4) is None
    assert on_disk(checkpoints) == ["0000", "0001", "0002", "0003", "0004.unproved"]
    assert checkpoints.promote(saved) == checkpoints.newest(KEY)


def damage_file(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_text(file.read_text().replace("s", "z"))  # same size
    os.utime(file, ns=(0, 0))  # writes within a few milliseconds may have the same time


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{ not json")


def lose_file(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def climb_out(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {"../0000/adapter_config.json": "44136f"}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (damage_file, "adapter_model.safetensors is not what was written"),
        (damage_manifest, "manifest.json cannot be read"),
        (lose_file, "adapter_config.json is missing"),
        (lose_manifest, "manifest.json cannot be read"),
        (climb_out, "manifest.json cannot be read"),
    ],
)
@pytest.mark.parametrize("restarted", [True, False])
def test_a_corrupted_newest_is_reported_and_the_one_before_is_used(
    prose: Prose,
    checkpoints: Checkpoints,
    four,
    damage,
    wrong,
    restarted,
    caplog: pytest.LogCaptureFixture,
):
    assert checkpoints.newest(KEY) == four[3]  # and is known to be good
    for broken in (3, 2):
        damage(four[broken].path)
    reopened = Checkpoints(checkpoints.root) if restarted else checkpoints
    with pytest.raises(NotFound) as caught:
        reopened.get(KEY, 3)
    prose(caught)
    with caplog.at_level(logging.WARNING, "hone.server"):
        assert reopened.newest(KEY) == four[1]
    assert on_disk(reopened) == ["0000", "0001", "0002.corrupt", "0003.corrupt"]
    lines = [getattr(record, "fields", {}) for record in caplog.records]
    assert [(f["step"], f["wrong"]) for f in lines] == [(3, wrong), (2, wrong)]
    assert steps(reopened) == [0, 1]
    again = reopened.write(KEY, 3, filler("anew"))
    assert reopened.newest(KEY) == again


def unreadable(path: Path) -> None:
    """Reading it is EIO, from the kernel: nothing is mapped at address 0."""
    path.rename(path.with_suffix(".good"))
    path.symlink_to("/proc/self/mem")


def readable_again(path: Path) -> None:
    path.with_suffix(".good").replace(path)  # at once: a missing file would be a corrupted step


@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors"])
def test_a_disk_that_fails_to_read_is_no_corruption(
    prose: Prose, checkpoints: Checkpoints, four, name: str
):
    unreadable(four[3].path / name)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            checkpoints.newest(KEY)
        prose(caught)
        with pytest.raises(StorageError):
            checkpoints.get(KEY, 3)
    assert on_disk(checkpoints) == ["0000", "0001", "0002", "0003"]
    readable_again(four[3].path / name)
    assert checkpoints.newest(KEY) == four[3]


def test_without_a_free_descriptor_no_step_seems_to_be_missing(
    prose: Prose, checkpoints: Checkpoints, four
):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        for read in (checkpoints.newest, checkpoints.list):
            with pytest.raises(StorageError) as caught:
                read(KEY)
            prose(caught)
        with pytest.raises(StorageError) as caught:
            checkpoints.of_job(KEY, "job-1", 3)
        prose(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert on_disk(checkpoints) == ["0000", "0001", "0002", "0003"]
    assert checkpoints.newest(KEY) == four[3]


def test_what_was_set_aside_as_corrupted_is_never_overwritten(checkpoints: Checkpoints, four):
    for content in ("first", "second", "third"):
        (four[3].path / "adapter_model.safetensors").write_text(content)
        assert checkpoints.newest(KEY) == four[2]
        checkpoints.write(KEY, 3, filler("anew"))
    aside = ["0003.corrupt", "0003.corrupt.2", "0003.corrupt.3"]
    assert on_disk(checkpoints)[-4:] == ["0003", *aside]
    parent = four[3].path.parent
    contents = [(parent / name / "adapter_model.safetensors").read_text() for name in aside]
    assert contents == ["first", "second", "third"]
    assert steps(checkpoints) == [0, 1, 2, 3]


def test_a_full_disk_is_named_and_leaves_nothing(prose: Prose, checkpoints: Checkpoints, four):
    def fill(directory: Path) -> str:
        with open("/dev/full", "w") as out:  # ENOSPC, from the kernel
            out.write("x")
        return "sha of x"

    with pytest.raises(DiskFull) as caught:
        checkpoints.write(KEY, 4, fill)
    prose(caught)
    assert on_disk(checkpoints) == ["0000", "0001", "0002", "0003"]


def test_nothing_is_left_when_all_are_corrupted(checkpoints: Checkpoints, four):
    for checkpoint in four:
        damage_file(checkpoint.path)
    assert checkpoints.newest(KEY) is None


def test_a_step_that_is_not_there_lists_those_that_are(
    prose: Prose, checkpoints: Checkpoints, four
):
    with pytest.raises(NotFound) as caught:
        checkpoints.get(KEY, 7)
    prose(caught)
    with pytest.raises(NotFound) as caught:
        checkpoints.get(ModelKey("default", "nobody"), 0)
    prose(caught)
    damage_file(four[1].path)
    with pytest.raises(NotFound) as caught:
        checkpoints.get(KEY, 1)
    prose(caught)


def test_deleting_spares_the_newest_good_one(checkpoints: Checkpoints, four):
    assert checkpoints.delete(KEY, [0, 3, 99]) == [0]
    damage_file(four[3].path)
    assert checkpoints.delete(KEY, [1, 2, 3]) == [1]  # 2 is the newest good one now
    assert on_disk(checkpoints) == ["0002", "0003.corrupt"]


def test_keeping_the_last_the_best_and_some(checkpoints: Checkpoints, four):
    for step, reward in ((0, 0.1), (1, 0.9), (2, 0.2), (3, 0.3)):
        checkpoints.log(KEY, step, {"reward": reward}, "val")
    checkpoints.write(KEY, 4, filler("step 4"))
    assert checkpoints.keep(KEY, last=2, best="val/reward", steps=[0]) == [2]
    assert steps(checkpoints) == [0, 1, 3, 4]
    assert checkpoints.keep(KEY, last=1, best="val/unknown") == [0, 1, 3]
    assert checkpoints.keep(KEY, last=None, best=None) == []


def with_optimizer(checkpoints: Checkpoints, count: int) -> None:
    def fill(directory: Path) -> str:
        (directory / OPTIMIZER).write_bytes(b"moments")
        return filler(directory.name)(directory)

    for step in range(count):
        checkpoints.write(KEY, step, fill, job=None)


def with_moments(checkpoints: Checkpoints) -> list[int]:
    """Steps whose manifest and directory have the optimizer's state; they must agree."""
    listed = checkpoints.list(KEY)
    for checkpoint in listed:
        assert (checkpoint.path / OPTIMIZER).exists() == checkpoint.has_optimizer
        assert checkpoints.get(KEY, checkpoint.step) == checkpoint, "whole by its manifest"
    return [checkpoint.step for checkpoint in listed if checkpoint.has_optimizer]


def test_old_steps_lose_only_the_state_of_their_optimizer(checkpoints: Checkpoints):
    with_optimizer(checkpoints, 7)
    checkpoints.log(KEY, 2, {"reward": 1.0}, "val")
    before = checkpoints.get(KEY, 1)
    assert checkpoints.drop_optimizers(KEY, last=2, steps=[0]) == [1, 3, 4]
    assert with_moments(checkpoints) == [0, 2, 5, 6]  # first, best, newest two
    files = dict(before.manifest["files"])
    assert files.pop(OPTIMIZER)
    now = Checkpoints(checkpoints.root).get(KEY, 1)
    assert now.manifest == before.manifest | {"files": files} and now.sha256 == before.sha256
    assert checkpoints.drop_optimizers(KEY, last=2, steps=[0]) == []
    assert checkpoints.drop_optimizers(KEY, last=1) == [0, 5]
    assert with_moments(checkpoints) == [2, 6]


def test_a_step_that_is_pruned_while_it_is_listed_is_no_error(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with_optimizer(checkpoints, 2)
    (step, newest), iterdir = checkpoints.list(KEY), Path.iterdir

    def iterdir_then_prune(path: Path) -> list[Path]:
        files = list(iterdir(path))
        checkpoints.drop_optimizers(KEY, last=1)
        return files

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", iterdir_then_prune)
        assert 0 < step.bytes < newest.bytes
    checkpoints.delete(KEY, [0])
    assert step.bytes == 0


def test_an_optimizer_that_was_half_dropped_is_dropped_the_next_time(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with_optimizer(checkpoints, 2)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)  # after the manifest was replaced
        with pytest.raises(KeyboardInterrupt):
            checkpoints.drop_optimizers(KEY, last=1)
    step = Checkpoints(checkpoints.root).get(KEY, 0)  # the manifest does not name what is left
    assert not step.has_optimizer and (step.path / OPTIMIZER).exists()
    assert checkpoints.drop_optimizers(KEY, last=1) == [0]
    assert with_moments(checkpoints) == [1]


def test_best_is_of_retained_steps_and_may_be_smoothed(checkpoints: Checkpoints, four):
    assert checkpoints.best(KEY) is None
    for step, reward in ((0, 0.0), (1, 0.6), (1, 1.0), (2, 0.7), (3, 0.75), (9, 5.0)):
        checkpoints.log(KEY, step, {"reward": reward, "other": float("nan")}, "val")
    assert checkpoints.best(KEY) == 1  # its mean is 0.8
    # alpha 0.5: 0, (0.8 + 0)/1.5 = 0.53, (0.7 + 0.4 + 0)/1.75 = 0.63, (0.75 + 0.35 + 0.2)/1.875 = 0.69
    assert checkpoints.best(KEY, smoothing=0.5) == 3
    assert checkpoints.best(KEY, "val/other") is None
    checkpoints.log(KEY, 2, {"reward": 0.8}, "val")
    assert checkpoints.best(KEY) == 1  # and that of step 2 is 0.75, as of step 3
    checkpoints.delete(KEY, [1])
    assert checkpoints.best(KEY) == 2  # of equal ones the first, as in a run's report
    damage_manifest(four[2].path)
    unreadable(four[0].path / "manifest.json")  # not read, because another one is better
    assert checkpoints.best(KEY) == 3


def test_best_is_chosen_within_the_newest_run(checkpoints: Checkpoints, four):
    """The first run liked step 1; the second began at step 1 and measures by another dataset."""
    for step, reward in ((0, 0.2), (1, 0.9)):
        checkpoints.log(KEY, step, {"reward": reward}, "val", run="first", replace=True)
    assert checkpoints.best(KEY) == 1
    for step, reward in ((1, 0.3), (2, 0.4), (3, 0.4)):
        checkpoints.log(KEY, step, {"reward": reward}, "val", run="second", replace=True)
    assert checkpoints.best(KEY) == 2  # of equal ones the first
    assert checkpoints.keep(KEY, last=1, best="val/reward", steps=[1]) == [0]
    # A lower failure reward changes a validation later; other metrics change nothing.
    checkpoints.log(KEY, 2, {"reward": -0.4}, "val", run="second", replace=True)
    checkpoints.log(KEY, 1, {"reward": 5.0}, "train", run="third")
    assert checkpoints.best(KEY) == 3
    # The first run goes on: its own values count, also those of before.
    checkpoints.log(KEY, 2, {"reward": 0.5}, "val", run="first", replace=True)
    assert checkpoints.best(KEY) == 1
    # A program that logs without a run is not measured by the runs of before.
    checkpoints.log(KEY, 3, {"reward": 0.1}, "val")
    assert checkpoints.best(KEY) == 3


def test_a_value_may_replace_what_was_logged_before(checkpoints: Checkpoints, four):
    for step, reward in ((1, 0.6), (2, 0.5)):
        checkpoints.log(KEY, step, {"reward": reward}, "val")
    checkpoints.log(KEY, 1, {"reward": 0.2}, "val", replace=True)
    assert checkpoints.best(KEY) == 2  # the mean of step 1 would be 0.4, and it is 0.2
    checkpoints.log(KEY, 1, {"reward": 0.9}, "val")
    assert checkpoints.best(KEY) == 1  # (0.2 + 0.9) / 2


def test_history_goes_on_after_half_a_line(checkpoints: Checkpoints):
    checkpoints.log(KEY, 1, {"reward": 0.5}, "val")
    with (checkpoints.model_dir(KEY) / "history.jsonl").open("a") as out:
        out.write('{"val/reward": 0.')
    checkpoints.log(KEY, 2, {"reward": 0.75, "tokens": 3}, "train")
    first, second = checkpoints.history(KEY)
    assert first.pop("recorded_at") < second.pop("recorded_at")
    assert first == {"val/reward": 0.5, "step": 1}
    assert second == {"train/reward": 0.75, "train/tokens": 3, "step": 2}


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../../etc", "a\x00b", ".hidden", "a" * 129]
)
def test_no_name_escapes_the_root(prose: Prose, checkpoints: Checkpoints, name: str):
    for key in (ModelKey(name, "agent"), ModelKey("default", name)):
        with pytest.raises(ConfigError) as caught:
            checkpoints.model_dir(key)
        prose(caught)


DYING = """
import sys
from pathlib import Path
from hone.store.checkpoints import Checkpoints
from hone.types import ModelKey
def fill(directory):
    (directory / "adapter_model.safetensors").write_text("new")
    return "sha of new"
key, checkpoints = ModelKey("default", "agent"), Checkpoints(Path(sys.argv[1]))
checkpoints.promote(checkpoints.write(key, 4, fill, proved=False, job="job-4"))
"""


@pytest.mark.parametrize("name", FAILPOINTS)
def test_killed_at_any_point_there_is_the_old_step_or_the_new(
    checkpoints: Checkpoints, four, name: str
):
    dying = subprocess.run(
        [sys.executable, "-c", DYING, str(checkpoints.root)],
        env={**os.environ, "HONE_FAILPOINT": name},
    )
    assert dying.returncode == -9, name
    reopened = Checkpoints(checkpoints.root)
    newest, saved = reopened.newest(KEY), reopened.of_job(KEY, "job-4", 4)
    assert newest is not None
    assert newest.step == (4 if name == "checkpoint/after-promote" else 3)
    written = ("after-rename", "before-promote", "after-promote")
    assert (saved is not None) == (name.split("/")[1] in written)
    again = reopened.promote(reopened.write(KEY, 5, filler("step 5"), proved=False))
    assert reopened.newest(KEY) == again
    assert not [p for p in on_disk(reopened) if p.startswith(".")]  # and what was half-done is gone
