"""What a killed run needs to go on: which rollouts ended, and what exactly was sent to be trained.

In:   RolloutRecords as they end; each submission before it is sent
Out:  files under output_dir; the same after a kill, less a torn last line
Used: run.py opens it; builder.py and validation.py ask it before they run a rollout; trainer.py
      sends what it noted

    run.json                        which run this is, from which configuration, how often started
    trajectories/epoch_NNN.jsonl    one line a training rollout; validation_NNN.jsonl for the others
    submissions/NNN_RRR.json        what is trained in round RRR of epoch NNN

A submission is on disk before it is sent and is sent again byte for byte under the same key: the
server then knows it, whenever the harness was killed. What was done already is told by events.jsonl
and by nothing else, so the two cannot contradict each other.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from hone.disk import sync
from hone.errors import ConfigError, Conflict, StateError
from hone.finetune.base import RolloutRecord, TrajectoryCollection
from hone.types import Strict

RUN_FILE = "run.json"
LOCK_FILE = "run.lock"
SHOWN = 8
"""Of the keys that differ, so many are named."""

Split = Literal["train", "val"]
Rollouts = dict[tuple[str, int], RolloutRecord]
"""By example and generation."""


class RunFile(Strict):
    """Which run a directory holds."""

    run_id: str
    seed: int
    created: float
    session: int = Field(ge=1)
    """How often it was started."""
    anew: bool = False
    """The backend has still to be told that this run begins at step 0."""
    replaces: str | None = None
    """The run that was set aside for it."""
    facts: dict[str, Any]
    """Whatever must not change under a run: its configuration, and what its datasets hold."""


class Submission(BaseModel):
    """What is trained in one round, and what it was chosen from."""

    collection: TrajectoryCollection
    collected: dict[str, Any]
    """The fields of the round's `epoch_collected` event."""


@dataclass(frozen=True)
class RunFacts:
    """What makes two starts the same run."""

    seed: int
    facts: Mapping[str, Any]
    """JSON values, nested; keys that may change between starts are left out by the caller."""


class Journal:
    """One run's directory, held by one process."""

    def __init__(self, directory: Path, run: RunFile, lock: int) -> None:
        self.directory = directory
        self.run = run
        self._lock: int | None = lock
        self._files: dict[Path, Any] = {}
        for path in (directory / "trajectories").glob("*.jsonl"):
            _mend(path)

    @classmethod
    def open(cls, directory: Path, started: RunFacts, *, fresh: bool = False) -> Self:
        """The run in this directory, or a new one; `fresh` moves the old one to DIR.RUNID."""
        lock = _locked(directory)
        try:
            replaced, found = None, None if fresh else _read(directory)
            if fresh and (directory / RUN_FILE).exists():
                replaced = set_aside(directory)
                old, lock = lock, _locked(directory)
                os.close(old)
            run = (
                _gone_on(directory, found, started)
                if found is not None
                else _begun(started, anew=fresh, replaces=replaced)
            )
            write_whole(directory / RUN_FILE, run.model_dump_json(indent=2))
        except BaseException:
            os.close(lock)
            raise
        return cls(directory, run, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the directory."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def session(self) -> int:
        """How often the run was started; part of rollout ids, so that none is used twice."""
        return self.run.session

    @property
    def anew(self) -> bool:
        """`--fresh` was asked for, and the backend does not know yet."""
        return self.run.anew

    def begun_anew(self) -> None:
        """The backend begins at step 0 now."""
        self.run = self.run.model_copy(update={"anew": False})
        write_whole(self.directory / RUN_FILE, self.run.model_dump_json(indent=2))

    # ---- rollouts -------------------------------------------------------------------------

    def add(self, record: RolloutRecord) -> None:
        """On the disk when it returns."""
        path = self._rollouts(record.split, record.epoch)
        file = self._files.get(path)
        if file is None:
            path.parent.mkdir(exist_ok=True)
            file = self._files[path] = path.open("ab")
        file.write(record.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())

    def records(self, split: Split, epoch: int, round: int | None = None) -> list[RolloutRecord]:
        """Every rollout that ended, in that order; of one that was run again, the last."""
        newest: Rollouts = {}
        for record in _lines(self._rollouts(split, epoch)):
            if round is None or record.round == round:
                newest[record.example, record.generation] = record
        return list(newest.values())

    def finished(self, split: Split, epoch: int, round: int = 0) -> Rollouts:
        """Rollouts that need not be run again.

        One that its world failed is not among them: the server may be back by now.
        """
        return {
            (record.example, record.generation): record
            for record in self.records(split, epoch, round)
            if record.failure is None or record.failure.kind != "infrastructure"
        }

    def _rollouts(self, split: Split, epoch: int) -> Path:
        name = "epoch" if split == "train" else "validation"
        return self.directory / "trajectories" / f"{name}_{epoch:03d}.jsonl"

    # ---- submissions ----------------------------------------------------------------------

    def note_submission(self, epoch: int, round: int, submission: Submission) -> None:
        """Written whole, before it is sent."""
        path = self._submission(epoch, round)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, submission.model_dump_json())

    def submitted(self, epoch: int, round: int) -> Submission | None:
        """What was noted; None where the round has not come so far."""
        path = self._submission(epoch, round)
        try:
            return Submission.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StateError(
                f"{path}: not a submission ({_first(error)}). Start anew with --fresh."
            ) from None

    def _submission(self, epoch: int, round: int) -> Path:
        return self.directory / "submissions" / f"{epoch:03d}_{round:03d}.json"


def peek(directory: Path) -> RunFile | None:
    """The run a directory holds, without opening it."""
    return _read(directory)


def set_aside(directory: Path) -> str | None:
    """Rename the directory of a run to DIR.RUNID, so that nothing of it is lost; which run it was."""
    directory = directory.absolute()
    try:
        run = _read(directory)
    except StateError:
        run = None  # it is damaged, and that is why it is set aside
    run_id = f"damaged_{secrets.token_hex(4)}" if run is None else run.run_id
    kept = directory.with_name(f"{directory.name}.{run_id}")
    if kept.exists():
        raise Conflict(f"{kept} exists already, so {directory} cannot be set aside; move it away")
    directory.rename(kept)
    return None if run is None else run_id


def write_whole(path: Path, text: str) -> None:
    """The file holds all of the text or what it held before, whenever the process is killed."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


# ---- one run a directory ------------------------------------------------------------------------


def _read(directory: Path) -> RunFile | None:
    path = directory / RUN_FILE
    try:
        return RunFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StateError(
            f"{path}: not what hone wrote ({_first(error)}). Start anew with --fresh, or move {directory} away."
        ) from None


def _begun(started: RunFacts, *, anew: bool = False, replaces: str | None = None) -> RunFile:
    return RunFile(
        run_id=f"art_run_{secrets.token_hex(4)}",
        seed=started.seed,
        created=time.time(),
        session=1,
        anew=anew,
        replaces=replaces,
        facts=dict(started.facts),
    )


def _gone_on(directory: Path, found: RunFile, started: RunFacts) -> RunFile:
    """The run, started once more; one that has nothing to lose takes what was changed since."""
    again = {"session": found.session + 1}
    if not any((directory / "trajectories").glob("*.jsonl")):
        # Its server was not there, or preflight found the mistake that was mended since.
        again |= {"seed": started.seed, "facts": dict(started.facts)}
        return found.model_copy(update=again)
    _check_same(directory, found, started)
    return found.model_copy(update=again)


def _check_same(directory: Path, found: RunFile, started: RunFacts) -> None:
    then, now = dict(_leaves(found.facts)), dict(_leaves(json.loads(json.dumps(started.facts))))
    differing = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if not differing:
        return
    lines = [f"  {key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"  and {len(differing) - SHOWN} more")
    raise Conflict(
        f"{directory} holds run {found.run_id}, which was started with another configuration:\n"
        + "\n".join(lines)
        + "\nUndo the change to go on with it, start anew with --fresh (the old directory is kept), "
        "or name another one with -o finetuning.output_dir DIR."
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not itself a table."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def _locked(directory: Path) -> int:
    """Held until it is closed or the process ends, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"finetuning.output_dir: {directory} cannot be written to ({error.strerror}). Name "
            "another directory with -o finetuning.output_dir DIR."
        ) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = os.read(held, 32).decode(errors="replace").strip() or "unknown"
        os.close(held)
        raise Conflict(
            f"{directory} is in use by another `hone finetune` (process {who}). Wait until it has "
            "ended, or name another directory with -o finetuning.output_dir DIR."
        ) from None
    os.ftruncate(held, 0)
    os.write(held, str(os.getpid()).encode())
    return held


# ---- lines --------------------------------------------------------------------------------------


def _mend(path: Path) -> None:
    """Cut off a last line that a kill tore, so that the next one does not begin in its middle."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)


def _lines(path: Path) -> Iterator[RolloutRecord]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            yield RolloutRecord.model_validate_json(line)
        except ValidationError as error:
            raise StateError(
                f"{path}:{number}: not a rollout ({_first(error)}). Restore the file, or start anew with "
                "--fresh."
            ) from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in a line."""
    wrong = error.errors()[0]
    return f"{'.'.join(map(str, wrong['loc'])) or 'it'}: {wrong['msg']}"
