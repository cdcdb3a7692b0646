"""What a killed run needs to go on: which rollouts ended, and what exactly was submitted.

In:   RolloutRecords as they end; each submission before it is sent
Out:  files under output_dir; the same after a kill, less a torn last line

    run.json                        which run this is, from which configuration, how often started
    trajectories/epoch_NNN.jsonl    one line a training rollout; validation_NNN.jsonl for the others
    submissions/NNN_RRR.json        which rollouts are trained in round RRR of epoch NNN

A submission refers to rollouts by id, is on disk before it is sent, and is sent again byte for byte
under the same key: the server then knows it, whenever the harness was killed. What is done is in
events.jsonl and nowhere else, so the two cannot contradict each other. The rollouts of an epoch are
read once and indexed; every later one is added to the index.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError

from hone.disk import open_lines, write_atomic
from hone.errors import ConfigError, Conflict, StateError
from hone.finetune.fingerprint import differences
from hone.finetune.records import RolloutRecord, Split
from hone.finetune.values import Trajectory, TrajectoryCollection
from hone.lock import LockFile, holder, in_use, lock_directory
from hone.types import Strict

RUN_FILE = "run.json"
LOCK_FILE = "run.lock"
COMMAND, KEY = "hone finetune", "finetuning.output_dir"
DIFFERENCES_SHOWN = 8
"""How many of the keys that differ are named."""

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
    """The fingerprint: what must not change under a run, its configuration, data and code."""


@dataclass(frozen=True)
class Submission:
    """What is trained in one round, and what it was chosen from."""

    collection: TrajectoryCollection
    collected: dict[str, Any]
    """The fields of the round's `epoch_collected` event."""


class _Reference(Strict):
    """A trajectory of a rollout that the journal has."""

    rollout: str
    reward: float
    shaped_rewards: list[float] | None = None


class _SubmissionFile(BaseModel):
    """A submission as it is on disk."""

    collected: dict[str, Any]
    run_id: str = ""
    metadata: dict[str, Any] | None = None
    groups: list[list[_Reference | Trajectory]] = []
    collection: TrajectoryCollection | None = None
    """Instead of the three before it, in what hone wrote before."""


@dataclass(frozen=True)
class RunFingerprint:
    """What makes two starts the same run."""

    seed: int
    facts: Mapping[str, Any]
    """JSON values, nested; keys that may change between starts are left out by the caller."""


class Journal:
    """One run's directory, held by one process."""

    def __init__(self, directory: Path, run: RunFile, lock: LockFile) -> None:
        self.directory = directory
        self.run = run
        self._lock = lock
        self._written: tuple[Path, BufferedWriter] | None = None
        """The file that was appended to last."""
        self._indexed: tuple[Path, dict[int, Rollouts]] | None = None
        """The file that was asked for last, and its rollouts by round."""
        for path in (directory / "trajectories").glob("*.jsonl"):
            open_lines(path).close()  # which cuts a torn last line

    @classmethod
    def open(cls, directory: Path, started: RunFingerprint, *, fresh: bool = False) -> Self:
        """The run in this directory, or a new one; `fresh` moves the old one to DIR.RUNID."""
        lock = _locked(directory)
        try:
            start = plan_start(directory, started, fresh=fresh)
            if start.aside is not None:
                directory.absolute().rename(start.aside)
                old, lock = lock, _locked(directory)
                old.release()
            run = start.resumed or _new_run(started, anew=fresh, replaces=start.replaced)
            write_atomic(directory / RUN_FILE, run.model_dump_json(indent=2))
        except BaseException:
            lock.release()
            raise
        return cls(directory, run, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the directory."""
        if self._written is not None:
            self._written[1].close()
        self._written = None
        self._lock.release()

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
        write_atomic(self.directory / RUN_FILE, self.run.model_dump_json(indent=2))

    # ---- rollouts -------------------------------------------------------------------------

    def add(self, record: RolloutRecord) -> None:
        """On the disk when it returns."""
        path = self._rollouts(record.split, record.epoch)
        if self._written is None or self._written[0] != path:
            if self._written is not None:
                self._written[1].close()
            path.parent.mkdir(exist_ok=True)
            self._written = path, path.open("ab")
        file = self._written[1]
        file.write(record.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        if self._indexed is not None and self._indexed[0] == path:
            _index(self._indexed[1], record)

    def records(self, split: Split, epoch: int, round: int = 0) -> list[RolloutRecord]:
        """Every rollout that ended, in that order; of one that was run again, the last."""
        path = self._rollouts(split, epoch)
        if self._indexed is None or self._indexed[0] != path:
            rounds: dict[int, Rollouts] = {}
            for record in _lines(path):
                _index(rounds, record)
            self._indexed = path, rounds
        return list(self._indexed[1].get(round, {}).values())

    def finished(self, split: Split, epoch: int, round: int = 0) -> Rollouts:
        """Rollouts that need not be run again.

        One that its environment failed is not among them: the server may be back by now.
        """
        return {
            (record.example, record.generation): record
            for record in self.records(split, epoch, round)
            if record.failure is None or record.failure.kind != "infrastructure"
        }

    def _rollouts(self, split: Split, epoch: int) -> Path:
        name = {"train": "epoch", "val": "validation", "final": "final"}[split]
        return self.directory / "trajectories" / f"{name}_{epoch:03d}.jsonl"

    # ---- submissions ----------------------------------------------------------------------

    def note_submission(self, epoch: int, round: int, submission: Submission) -> None:
        """Written whole, before it is sent."""
        path, sent = self._submission(epoch, round), submission.collection
        path.parent.mkdir(exist_ok=True)
        known = {record.rollout for record in self.records("train", epoch, round)}
        file = _SubmissionFile(
            collected=submission.collected,
            run_id=sent.run_id,
            metadata=sent.metadata,
            groups=[[_reference(one, known) for one in group] for group in sent.trajectories],
        )
        write_atomic(path, file.model_dump_json(exclude={"collection"}))

    def submitted(self, epoch: int, round: int) -> Submission | None:
        """What was noted; None where the round has not come so far."""
        path = self._submission(epoch, round)
        try:
            file = _SubmissionFile.model_validate_json(path.read_bytes())
            if file.collection is not None:
                return Submission(file.collection, file.collected)
            known = {record.rollout: record for record in self.records("train", epoch, round)}
            groups = [[_resolved(one, known) for one in group] for group in file.groups]
        except FileNotFoundError:
            return None
        except (ValidationError, KeyError) as error:
            why = _first(error) if isinstance(error, ValidationError) else f"no rollout {error}"
            raise StateError(
                f"{path}: not a submission ({why}). Start anew with --fresh."
            ) from None
        sent = TrajectoryCollection(trajectories=groups, run_id=file.run_id, metadata=file.metadata)
        return Submission(sent, file.collected)

    def _submission(self, epoch: int, round: int) -> Path:
        return self.directory / "submissions" / f"{epoch:03d}_{round:03d}.json"


@dataclass(frozen=True, slots=True)
class Start:
    """What starting a run in a directory does."""

    resumed: RunFile | None = None
    """The run that goes on; None where a new one begins."""
    aside: Path | None = None
    """Where the directory of the run before is moved to, so that nothing of it is lost."""
    replaced: str | None = None
    """That run, unless its file is damaged."""


def plan_start(directory: Path, started: RunFingerprint, *, fresh: bool) -> Start:
    """What starting here does, without doing it; raises what the start would raise.

    Both the run and `--dry-run` ask this function.
    """
    if not (directory / RUN_FILE).exists():
        return Start()
    if not fresh:
        run = _read(directory)
        return Start() if run is None else Start(resumed=_resume(directory, run, started))
    try:
        run = _read(directory)
    except StateError:
        run = None  # it is damaged, and that is why it is set aside
    run_id = f"damaged_{secrets.token_hex(4)}" if run is None else run.run_id
    aside = directory.absolute().with_name(f"{directory.absolute().name}.{run_id}")
    if aside.exists():
        raise Conflict(f"{aside} exists already, so {directory} cannot be set aside; move it away")
    return Start(aside=aside, replaced=None if run is None else run_id)


def check_free(directory: Path) -> None:
    """Raise what a start would raise if another process held the directory, or nobody may write."""
    above = directory.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(directory, "not a directory" if not above.is_dir() else "no permission")
    process = holder(directory / LOCK_FILE)
    if process is not None:
        raise in_use(directory, process, command=COMMAND, key=KEY)


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


def _new_run(
    started: RunFingerprint, *, anew: bool = False, replaces: str | None = None
) -> RunFile:
    return RunFile(
        run_id=f"art_run_{secrets.token_hex(4)}",
        seed=started.seed,
        created=time.time(),
        session=1,
        anew=anew,
        replaces=replaces,
        facts=dict(started.facts),
    )


def _resume(directory: Path, run: RunFile, started: RunFingerprint) -> RunFile:
    """The run, started once more; one without rollouts takes a changed configuration."""
    update: dict[str, Any] = {"session": run.session + 1}
    if any((directory / "trajectories").glob("*.jsonl")):
        _check_same(directory, run, started)
    else:  # its server was not there, or preflight found the mistake that was fixed since
        update |= {"seed": started.seed, "facts": dict(started.facts)}
    return run.model_copy(update=update)


def _check_same(directory: Path, run: RunFile, started: RunFingerprint) -> None:
    changed = differences(run.facts, started.facts)
    if not changed:
        return
    lines = [f"  {line}" for line in changed[:DIFFERENCES_SHOWN]]
    if len(changed) > DIFFERENCES_SHOWN:
        lines.append(f"  and {len(changed) - DIFFERENCES_SHOWN} more")
    raise Conflict(
        f"{directory} holds run {run.run_id}, which was started with another configuration:\n"
        + "\n".join(lines)
        + "\nUndo the change to go on with it, start anew with --fresh (the old directory is kept), "
        "or name another one with -o finetuning.output_dir DIR."
    )


def _locked(directory: Path) -> LockFile:
    """Held until it is released or the process ends, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error.strerror) from None
    return lock_directory(directory, LOCK_FILE, command=COMMAND, key=KEY)


def _unwritable(directory: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"finetuning.output_dir: {directory} cannot be written to ({why}). Name "
        "another directory with -o finetuning.output_dir DIR."
    )


# ---- references and lines -----------------------------------------------------------------------


def _reference(trajectory: Trajectory, known: set[str]) -> _Reference | Trajectory:
    """A reference to a rollout that the journal has; the whole trajectory of any other."""
    rollout = (trajectory.metadata or {}).get("rollout")
    if not trajectory.refers or rollout not in known:
        return trajectory
    return _Reference(
        rollout=rollout, reward=trajectory.reward, shaped_rewards=trajectory.shaped_rewards
    )


def _resolved(one: _Reference | Trajectory, known: Mapping[str, RolloutRecord]) -> Trajectory:
    if isinstance(one, Trajectory):
        return one
    values = {"reward": one.reward, "shaped_rewards": one.shaped_rewards}
    return known[one.rollout].trajectory().model_copy(update=values)


def _index(rounds: dict[int, Rollouts], record: RolloutRecord) -> None:
    rounds.setdefault(record.round, {})[record.example, record.generation] = record


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
