"""Copy the state and the checkpoints of a root, while its server runs or not.

In:   a root, and a directory that is new or empty
Out:  a root of its own: state.sqlite, the directories of the models that it names, and what programs
      have logged of others

First comes a consistent copy of the database, then the steps that it lists. The steps of jobs that
had not started by then are left out, because the copy will train them. A step is
immutable and exists before its job is done, so every step of the copied jobs is there, except those
that were deleted. A file of a step is a hard link if the file system allows, otherwise a copy; its
hash is checked either way. Files that grow are copied.

Left out are the server's key, which is a secret and is made again; logs and caches; runs and evals,
which belong to the harness.
"""

import json
import os
import shutil
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from hone.errors import Conflict, StateError
from hone.files.disk import move, open_lines, output, sha256_of, storage, sync
from hone.files.owned import MARK, discard, lock_directory, make_owned, remove_owned
from hone.store.checkpoints import HISTORY, MANIFEST, UNPROVED, Checkpoints
from hone.store.database import STATE, state_file
from hone.types import ModelKey

TRIES = 3
"""How often something is copied again if it was changed meanwhile."""
RECORDS = ("state.json", "model.json")
"""Files beside the history: of the SDK's models and of ART's. Each is replaced as a whole."""
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Backup:
    """What was copied."""

    models: int
    steps: int
    damaged: list[str]
    """Steps that were left out because their files are not as they were written."""


@dataclass(frozen=True, slots=True)
class _Job:
    state: str
    base_step: int | None

    @property
    def has_started(self) -> bool:
        return self.state == "done" or self.base_step is not None

    @property
    def may_be_saved(self) -> bool:
        """Whether it may have an unproved step, which the copy is to publish."""
        return self.state in ("queued", "running") and self.base_step is not None


def backup(root: Path, directory: Path) -> Backup:
    """Copy a root into a new or empty directory, which only its owner may read."""
    state_file(root)  # raises
    target = Path(os.path.realpath(directory))
    if target.is_relative_to(os.path.realpath(root)):
        raise Conflict(f"{directory} is inside the root {root}; name a directory outside of it")
    with output(str(directory)):
        exists = target.exists()
        _check_free(target, directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A directory that exists is filled, not replaced: it may be a mount point.
        partial = target / _PARTIAL if exists else target.with_name(f".{target.name}{_PARTIAL}")
        lock = lock_directory(
            partial,
            f"{directory}: another backup is writing to it. Wait until it has ended, or name another "
            "directory.",
        )
    try:
        _check_free(target, directory)  # again: another backup may have ended meanwhile
        for _ in range(TRIES):
            with output(str(directory)):
                make_owned(partial)  # empties what a killed backup left
                partial.chmod(0o700)
            if (done := _copy(root, partial)) is None:
                continue
            with output(str(directory)):
                if exists:
                    target.chmod(0o700)
                    for path in partial.iterdir():
                        if path.name != MARK:
                            move(path, target / path.name)
                    remove_owned(partial)
                else:
                    move(partial, target)
                    (target / MARK).unlink()
            return done
    finally:
        discard(partial)
        os.close(lock)
    raise Conflict(
        f"--root {root}: models were renamed or deleted again and again while they were copied. Make "
        "the backup when that has ended."
    )


def _check_free(target: Path, directory: Path) -> None:
    """Raise Conflict unless the directory is new or empty, but for what a killed backup left."""
    if target.exists() and (
        not target.is_dir() or any(file.name != _PARTIAL for file in target.iterdir())
    ):
        raise Conflict(f"{directory} exists and is not empty; name a new directory")


def _copy(root: Path, partial: Path) -> Backup | None:
    """None if a model was renamed or deleted meanwhile."""
    _copy_database(root / STATE, partial / STATE)
    keys, jobs = _known(partial / STATE)
    source, copy = Checkpoints(root), Checkpoints(partial)
    listed = {key: _steps(source.model_dir(key)) for key in keys}
    # Read after the steps were listed: a job is known before its step is written.
    added = _known(root / STATE)[1].keys() - jobs.keys()
    steps, damaged = 0, list[str]()
    for key in keys:
        directory, target = source.model_dir(key), copy.model_dir(key)
        _copy_records(directory, target)
        for step in listed[key]:
            wrong = _copy_step(step, target / "checkpoints" / step.name, jobs, added)
            if wrong is not None:
                damaged.append(f"{key}, step {step.name}: {wrong}")
            steps += (target / "checkpoints" / step.name).exists()
    for directory in _not_trained(root, keys):
        _copy_records(directory, partial / directory.relative_to(root))
    if not set(keys) <= set(_known(root / STATE)[0]):
        return None
    for path, _, _ in os.walk(partial):
        sync(Path(path))
    return Backup(len(keys), steps, damaged)


def _steps(directory: Path) -> list[Path]:
    """The directories of a model's steps, proved or not; none that was set aside."""
    return sorted(
        path
        for path in (directory / "checkpoints").glob("[0-9]*")
        if path.name.removesuffix(UNPROVED).isdigit()
    )


def _copy_database(source: Path, target: Path) -> None:
    """A consistent copy. Writers of the source go on: it has a write-ahead log."""
    with output(str(target.parent)):
        try:
            with (
                closing(sqlite3.connect(source)) as live,
                closing(sqlite3.connect(target)) as copy,
            ):
                live.backup(copy)
                (result,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError:
            raise  # of the disk
        except sqlite3.DatabaseError as error:
            result = str(error)
    if result != "ok":
        raise StateError(f"{source}: it is damaged ({result}). Restore it from an older backup.")
    sync(target)


def _known(path: Path) -> tuple[list[ModelKey], dict[str, _Job]]:
    """The models and jobs of a database."""
    with storage(path), closing(sqlite3.connect(path)) as db:
        models = db.execute("SELECT project, name FROM models ORDER BY project, name").fetchall()
        jobs = db.execute(
            "SELECT id, state, CASE json_valid(info) WHEN 1 THEN "
            "json_extract(info, '$.base_step') END FROM jobs"
        ).fetchall()
    return [ModelKey(*row) for row in models], {id: _Job(*rest) for id, *rest in jobs}


def _copy_step(
    step: Path, target: Path, jobs: Mapping[str, _Job], added: Collection[str]
) -> str | None:
    """Copy a step that the copied database knows; returns what is wrong with its files.

    Nothing is copied if something is wrong, or if the step was deleted meanwhile.
    """
    wrong = None
    for _ in range(TRIES):  # its optimizer's state may be dropped meanwhile
        try:
            wrong = _copy_whole(step, target, jobs, added)
        except FileNotFoundError as error:
            wrong = f"{Path(error.filename).name} is missing"
        if wrong is None:
            return None
        shutil.rmtree(target, ignore_errors=True)
    return wrong if step.exists() else None


def _copy_whole(
    step: Path, target: Path, jobs: Mapping[str, _Job], added: Collection[str]
) -> str | None:
    with storage(step):
        text = (step / MANIFEST).read_bytes()
    try:
        manifest = json.loads(text)
        files, job_id = dict(manifest["files"]), manifest.get("job")
    except (ValueError, KeyError, TypeError):
        return "manifest.json cannot be read"
    is_proved, job = not step.name.endswith(UNPROVED), jobs.get(job_id)
    if job is None:  # it has none, or an earlier database had it
        wanted = is_proved and job_id not in added
    else:
        wanted = job.has_started if is_proved else job.may_be_saved
    if not wanted:
        return None
    with output(str(target)):
        target.mkdir(parents=True)
        (target / MANIFEST).write_bytes(text)
        sync(target / MANIFEST)
    for name, sha256 in files.items():
        _link_or_copy(step / name, target / name)
        with storage(target / name):
            if sha256_of(target / name) != sha256:
                return f"{name} is not what was written"
    return None


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without hard links
        with output(str(target)):
            shutil.copyfile(file, target)
            sync(target)


def _not_trained(root: Path, keys: Collection[ModelKey]) -> list[Path]:
    """Directories of models that programs have logged to, and that the database does not know."""
    trained = {(key.project, key.name) for key in keys}
    return sorted(
        path
        for path in root.glob("projects/*/models/[!.]*")
        if (path.parts[-3], path.name) not in trained and not (path / "checkpoints").exists()
    )


def _copy_records(directory: Path, target: Path) -> None:
    """Copy what was logged of a model, and what its user's program keeps there."""
    for file in (directory / HISTORY, *directory.glob("trajectories/*/*.jsonl")):
        _copy_lines(file, target / file.relative_to(directory))
    for name in RECORDS:
        with output(str(target)), suppress(FileNotFoundError):
            shutil.copyfile(directory / name, target / name)
            sync(target / name)


def _copy_lines(file: Path, target: Path) -> None:
    """Copy whole lines of a file that may grow meanwhile."""
    with output(str(target)), suppress(FileNotFoundError):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        open_lines(target).close()  # removes a torn last line
        sync(target)
