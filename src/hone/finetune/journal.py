"""What a killed run needs to resume: finished rollouts, and what exactly was submitted.

In:   RolloutRecords of finished rollouts; each submission before it is sent
Out:  files under output_dir; after a kill, all of them without a torn last line

    run.json                        id and configuration of the run, number of starts
    trajectories/epoch_NNN.jsonl    one line per rollout; also validation_NNN.jsonl, final_NNN.jsonl
    submissions/NNN_RRR.json        the rollouts that round RRR of epoch NNN trains on

A submission refers to rollouts by id, is on disk before it is sent, and is sent again byte for byte
with the same key, so the server recognizes it whenever the harness was killed. Only events.jsonl
says what is done, so the two cannot contradict each other. The rollouts of an epoch are read once
and indexed; later ones are added to the index.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from hone.errors import ConfigError, Conflict, StateError
from hone.files.disk import append_lines, move, open_lines, write_atomic
from hone.files.event_log import FILE as EVENTS
from hone.files.event_log import IDS, first_error
from hone.files.lock import LockFile, holder, in_use, lock_directory
from hone.files.redact import redact_json
from hone.files.rollout_record import RolloutRecord, Split, at_close, file_name
from hone.finetune.fingerprint import differences
from hone.finetune.records import trajectory_of
from hone.finetune.types import Trajectory, TrajectoryCollection
from hone.types import Strict

RUN_FILE = "run.json"
LOCK_FILE = "run.lock"
COMMAND, KEY = "hone finetune", "finetuning.output_dir"
DIFFERENCES_SHOWN = 8
"""Maximum number of differing keys to list."""

Rollouts = dict[tuple[str, int], RolloutRecord]
"""Records by example and generation."""


class RunFile(Strict):
    """The contents of run.json: which run the directory belongs to."""

    model_config = ConfigDict(extra="ignore")  # a newer version may write more

    run_id: str
    created: float
    session: int = Field(ge=1)
    """Number of starts."""
    anew: bool = False
    """Whether the backend must still be reset to step 0."""
    replaces: str | None = None
    """The run that it replaces (`--fresh`)."""
    facts: dict[str, Any]
    """The fingerprint: configuration, data and code, which must not change during a run."""


class Journal:
    """The directory of one run, locked by this process."""

    def __init__(self, directory: Path, run: RunFile, lock: LockFile) -> None:
        self.directory, self.run, self._lock = directory, run, lock
        self.run_id = run.run_id
        self.session = run.session
        """Number of starts; part of rollout ids, so that no id is used twice."""
        self._indexed: tuple[Path, dict[int, Rollouts]] | None = None
        """The file that was read last, with its rollouts by round."""
        self._scored: dict[Split, tuple[int, int]] = {}
        """Epoch and round of the first rollout that its evaluator scored, as far as it is known."""
        for path in (directory / "trajectories").glob("*.jsonl"):
            open_lines(path).close()  # removes a torn last line

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: Mapping[str, Any],
        *,
        fresh: bool = False,
        prefix: str = "run",
    ) -> Self:
        """Resume the run in this directory, or start one; `fresh` moves the old to DIR.RUNID.

        `fingerprint`: JSON values that must not change between two starts of the run. `prefix`: how
        the id of a new run begins.
        """
        lock = _locked(directory)
        try:
            start = plan_start(directory, fingerprint, fresh=fresh)
            if start.aside is not None:
                move(directory.absolute(), start.aside)
                old, lock = lock, _locked(directory)
                old.release()
            run = start.resumed or RunFile(
                run_id=f"{prefix}_{secrets.token_hex(4)}",
                created=time.time(),
                session=1,
                anew=fresh,
                replaces=start.replaced,
                facts=dict(fingerprint),
            )
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
        """Unlock the directory."""
        self._lock.release()

    def begun_anew(self) -> None:
        """Record that the backend was reset to step 0."""
        self.run = self.run.model_copy(update={"anew": False})
        write_atomic(self.directory / RUN_FILE, self.run.model_dump_json(indent=2))

    # ---- rollouts -------------------------------------------------------------------------

    def add(self, record: RolloutRecord) -> None:
        """Append a record; it is on disk on return."""
        path = self._rollouts(record.split, record.epoch)
        append_lines(path, record.model_dump_json().encode() + b"\n")
        if self._indexed is not None and self._indexed[0] == path:
            _index(self._indexed[1], record)
        self._note_scored(record)

    def records(self, split: Split, epoch: int, round: int = 0) -> list[RolloutRecord]:
        """Finished rollouts in order, as they are `at_close`; only the last record of each."""
        path = self._rollouts(split, epoch)
        if self._indexed is None or self._indexed[0] != path:
            rounds: dict[int, Rollouts] = {}
            for record in read_records(path):
                _index(rounds, record)
            self._indexed = path, rounds
        ended = list(self._indexed[1].get(round, {}).values())
        return at_close(ended, scored_before=self.scored_before(split, epoch, round))

    def scored_before(self, split: Split, epoch: int, round: int = 0) -> bool:
        """Whether the evaluator scored a rollout of an earlier round, or of an earlier validation.

        Training and validations are apart: their examples differ, and their evaluators may.
        """
        if split == "final":  # after the validation of the later of its two policies
            split, epoch, round = "val", round + 1, 0
        if self._scored.get(split, (epoch, round)) < (epoch, round):
            return True
        for earlier in reversed(range(epoch + (round > 0))):
            for record in read_records(self._rollouts(split, earlier)):
                self._note_scored(record)
                if self._scored.get(split, (epoch, round)) < (epoch, round):
                    return True
        return False

    def _note_scored(self, record: RolloutRecord) -> None:
        if record.failure is None:
            place = record.epoch, record.round
            self._scored[record.split] = min(place, self._scored.get(record.split, place))

    def finished(self, split: Split, epoch: int, round: int = 0) -> Rollouts:
        """Rollouts that need not be run again.

        Infrastructure failures are not among them: the server may be back by now.
        """
        return {
            (record.example, record.generation): record
            for record in self.records(split, epoch, round)
            if record.failure_kind != "infrastructure"
        }

    def unscored(self, split: Split, epoch: int) -> Path:
        """The file of rollouts that have ended and wait for others of their group."""
        return self.directory / "unscored" / file_name(split, epoch)

    def _rollouts(self, split: Split, epoch: int) -> Path:
        return self.directory / "trajectories" / file_name(split, epoch)

    # ---- submissions ----------------------------------------------------------------------

    def note_submission(
        self, epoch: int, round: int, sent: TrajectoryCollection, collected: Mapping[str, Any]
    ) -> None:
        """Write a submission atomically, before it is sent.

        `collected`: the fields of the round's `epoch_collected` event.
        """
        path = self._submission(epoch, round)
        known = {record.rollout: record for record in self.records("train", epoch, round)}
        groups = [[_reference(one, known) for one in group] for group in sent.trajectories]
        numbers = redact_json(dict(collected), keep=IDS)
        file = {"collected": numbers, **sent.model_dump(exclude={"trajectories"})}
        write_atomic(path, to_json(file | {"groups": groups}))

    def submitted(
        self, epoch: int, round: int
    ) -> tuple[TrajectoryCollection, dict[str, Any]] | None:
        """What a round submitted, and what it collected; None if it has submitted nothing yet."""
        path = self._submission(epoch, round)
        try:
            file = from_json(path.read_bytes())
            known = {record.rollout: record for record in self.records("train", epoch, round)}
            groups = [[_resolved(one, known) for one in group] for group in file["groups"]]
            sent = {name: file[name] for name in ("run_id", "metadata")} | {"trajectories": groups}
            return TrajectoryCollection.model_validate(sent), file["collected"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise StateError(
                f"{path}: not a submission ({why}). Start a new run with --fresh."
            ) from None

    def _submission(self, epoch: int, round: int) -> Path:
        return self.directory / "submissions" / f"{epoch:03d}_{round:03d}.json"


@dataclass(frozen=True, slots=True)
class Start:
    """What starting a run in a directory does."""

    resumed: RunFile | None = None
    """The run to resume; None for a new one."""
    aside: Path | None = None
    """Where the earlier run's directory is moved to; None if it stays."""
    replaced: str | None = None
    """Id of the earlier run."""


def plan_start(directory: Path, fingerprint: Mapping[str, Any], *, fresh: bool) -> Start:
    """What starting here does, without doing it; raises what the start would raise.

    Used by the run and by `--dry-run`.
    """
    path = directory / RUN_FILE
    try:
        run = RunFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        # Without it, events of another configuration would count as this run's: "nothing to do".
        if left := [n for n in (EVENTS, "trajectories", "submissions") if (directory / n).exists()]:
            raise StateError(
                f"{path}: missing, but {directory} holds {', '.join(left)} of a run. Put the file "
                f"back to resume that run, or move {directory} away to start a new one."
            ) from None
        return Start()
    except ValidationError as error:
        raise StateError(
            f"{path}: not what hone wrote ({first_error(error)}). Restore the file to resume the run, "
            f"or move {directory} away to start a new one."
        ) from None
    if not fresh:
        return Start(resumed=_resume(directory, run, fingerprint))
    aside = directory.absolute().with_name(f"{directory.absolute().name}.{run.run_id}")
    if aside.exists():
        raise Conflict(f"{aside} exists already, so {directory} cannot be set aside; move it away")
    return Start(aside=aside, replaced=run.run_id)


def check_free(directory: Path) -> None:
    """Raise Conflict if another process has locked the directory."""
    process = holder(directory / LOCK_FILE)
    if process is not None:
        raise in_use(directory, process, command=COMMAND, key=KEY)


# ---- one run a directory ------------------------------------------------------------------------


def _resume(directory: Path, run: RunFile, fingerprint: Mapping[str, Any]) -> RunFile:
    """The run with one more start; one without rollouts and jobs accepts a changed configuration."""
    update: dict[str, Any] = {"session": run.session + 1}
    written = ("trajectories/*.jsonl", "submissions/*.json")  # a run on a dataset has only jobs
    if not any(path for pattern in written for path in directory.glob(pattern)):
        # The server was unreachable, or preflight failed; the mistake may be fixed now.
        return run.model_copy(update=update | {"facts": dict(fingerprint)})
    changed = [f"  {line}" for line in differences(run.facts, fingerprint)]
    if not changed:
        return run.model_copy(update=update)
    if len(changed) > DIFFERENCES_SHOWN:
        changed[DIFFERENCES_SHOWN:] = [f"  and {len(changed) - DIFFERENCES_SHOWN} more"]
    raise Conflict(
        f"{directory} holds run {run.run_id}, which was started with another configuration:\n"
        + "\n".join(changed)
        + "\nUndo the change to resume it, start a new run with --fresh (the old directory is kept), "
        "or name another one with -o finetuning.output_dir DIR."
    )


def _locked(directory: Path) -> LockFile:
    """A lock that is held until it is released or the process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"finetuning.output_dir: {directory} cannot be written to ({error.strerror}). Name "
            "another directory with -o finetuning.output_dir DIR."
        ) from None
    return lock_directory(directory, LOCK_FILE, command=COMMAND, key=KEY)


# ---- references and lines -----------------------------------------------------------------------


def _reference(trajectory: Trajectory, known: Mapping[str, RolloutRecord]) -> dict[str, Any]:
    """A reference to a rollout in the journal; a trajectory with other text is written whole."""
    record, text = known.get(trajectory.rollout), vars(trajectory).get("episode")
    if record is None or text not in (None, record.episode):
        return trajectory.model_dump(mode="json")
    fields, own = {"rollout", "reward", "shaped_rewards"}, trajectory_of(record)
    changed = ("trained_calls", "metadata")  # a plugin may have changed them
    fields |= {name for name in changed if getattr(trajectory, name) != getattr(own, name)}
    return trajectory.model_dump(include=fields)


def _resolved(one: dict[str, Any], known: Mapping[str, RolloutRecord]) -> Any:
    if "episode" in one:
        return one
    return trajectory_of(known[one["rollout"]]).model_copy(update=one)


def _index(rounds: dict[int, Rollouts], record: RolloutRecord) -> None:
    rounds.setdefault(record.round, {})[record.example, record.generation] = record


def read_records(path: Path) -> Iterator[RolloutRecord]:
    """The rollouts of a file of `trajectories/`, in the order in which they ended."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            yield RolloutRecord.model_validate_json(line)
        except ValidationError as error:
            raise StateError(
                f"{path}:{number}: not a rollout ({first_error(error)}). Restore the file, or start a new run with "
                "--fresh."
            ) from None
