"""The events of a run, and events.jsonl, the file that holds them.

In:   event fields from the trainer, the builder and the adapter
Out:  `events.jsonl` in the run's output_dir, one line of JSON per event; typed Events for listeners
      and readers

Every curve and every number of a report comes from these events, so a run that was killed and
resumed has one history. A last line cut off by a kill is dropped when the file is opened again; a
bad line anywhere else is an error, because a history with a hole would still look complete. An
interrupted run may log an epoch twice: the later event counts.

Fields without a default have been written by every version; the others may be missing from the
log of an earlier version. Events may carry fields that are not listed here, and plugins may append
events of their own types.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import to_json, to_jsonable_python

from hone.disk import open_lines
from hone.errors import StateError

FILE = "events.jsonl"
"""Name of the log in a run's output_dir."""


class Event(BaseModel, frozen=True):
    """An event of any type; hone reads only the types below."""

    model_config = ConfigDict(
        extra="allow", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )

    at: float
    """When it was appended, in seconds since 1970."""
    type: str


class RunStarted(Event, frozen=True):
    """`hone finetune` reached the server and starts or resumes the run."""

    type: Literal["run_started"] = "run_started"
    run_id: str
    """Id of the run."""
    session: int
    """How many times the run was started, this time included."""
    epochs: int
    """Value of `finetuning.num_epochs`."""
    step: int | None
    """Policy step that is served."""
    began: float | None = None
    """When the command was typed."""
    name: str | None = None
    """Model that is trained."""
    project: str | None = None
    """Project of the model."""
    base_model: str | None = None
    """Model that the adapter is trained for."""
    config_file: str | None = None
    """Path of the configuration."""
    command: str | None = None
    """Command of this session."""
    again: str | None = None
    """Command that resumes the run."""
    seed: int | None = None
    """Value of `finetuning.seed`."""
    examples: int | None = None
    """Training examples."""
    generations: int | None = None
    """Rollouts per training example."""
    validation_examples: int | None = None
    """Held-out examples; 0 without a validation dataset."""
    validation_interval: int | None = None
    """Epochs between two validations."""
    validation_greedy: bool = False
    """Validations run at temperature 0."""
    evaluator: str | None = None
    """Evaluator that computes rewards."""
    validation_evaluator: str | None = None
    """Evaluator that computes rewards of validations, if it is another one."""
    learning_rate: float | None = None
    """Value of `training.learning_rate`."""
    credit: str = "outcome"
    """Value of `training.credit`."""
    baseline: str = "group"
    """Value of `training.baseline`."""
    output_dir: str | None = None
    """Directory of the run."""
    resumed: bool = False
    """An earlier session started the run."""
    root: str | None = None
    """Root of the server that the run starts itself."""
    base_url: str | None = None
    """Address of a server that outlives the run."""

    @property
    def command_at(self) -> float:
        """When the command of this session was typed; for old logs, when the event was written."""
        return self.at if self.began is None else min(self.at, self.began)

    @property
    def evaluators(self) -> tuple[str | None, str | None]:
        """Evaluators of the training rewards and of the held-out rewards."""
        return self.evaluator, self.validation_evaluator or self.evaluator


class PreflightDone(Event, frozen=True):
    """The checks before the first rollout are done."""

    type: Literal["preflight"] = "preflight"
    checks: list[dict[str, Any]]
    """Name, outcome and message of each check."""


class EpochStarted(Event, frozen=True):
    """A round of an epoch starts to collect rollouts."""

    type: Literal["epoch_started"] = "epoch_started"
    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""
    rounds: int
    """Rounds of the epoch."""
    step: int | None
    """Policy step that is sampled."""
    rollouts: int
    """Rollouts of the round."""
    resumed: int = 0
    """Rollouts of the round that an earlier session finished."""


class RolloutDone(Event, frozen=True):
    """A rollout ended."""

    type: Literal["rollout"] = "rollout"
    split: str
    """`train`, `val`, or `final` for the validation at the end of the run."""
    epoch: int
    """Number of the epoch; in a validation, the epochs that the policy was trained for."""
    example: str
    """Id of the example."""
    generation: int
    """Number of the rollout among those of its example, from 0."""
    reward: float | None
    """Null if the rollout has no reward."""
    failure_kind: str | None
    """`policy` if the model caused the failure, `infrastructure` otherwise; null on success."""
    tokens: int | None
    """Sampled tokens."""
    round: int = 0
    """Number of the round in the epoch, from 0."""
    rollout: str | None = None
    """Id under which the server records the calls of the rollout."""
    failure_reason: str | None = None
    """Reason of the failure, such as `timeout` or `token_limit`."""
    seconds: float | None = None
    """Duration of the rollout."""
    calls: int | None = None
    """Model calls."""


class EpochCollected(Event, frozen=True):
    """All rollouts of a round ended, and the curriculum selected what is trained on."""

    type: Literal["epoch_collected"] = "epoch_collected"
    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""
    metrics: dict[str, Any]
    """Numbers for `training_metrics.jsonl`."""
    dropped: dict[str, int] | None
    """Rollouts that are not trained on, by reason."""
    zero_variance_groups: int | None
    """Groups in which all rollouts have the same reward."""
    step: int | None = None
    """Policy step that was sampled."""
    curriculum_state: dict[str, Any] | None = None
    """Content of `curriculum_state.json`; null without a curriculum."""
    curriculum: dict[str, Any] | None = None
    """What a resumed run needs to restore the curriculum."""


class JobSubmitted(Event, frozen=True):
    """The server accepted the training job of a round."""

    type: Literal["job_submitted"] = "job_submitted"
    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""
    job: str | None
    """Id of the job."""
    trajectories: int
    """Trajectories that were submitted."""
    groups: int
    """Groups that were submitted."""


class JobProgress(Event, frozen=True):
    """The learner is about to compute a row. Shown on the terminal, not written to the log."""

    type: Literal["job_progress"] = "job_progress"
    phase: str
    """What the learner does, such as `train`."""
    step: int
    """Optimizer step, from 1."""
    steps: int
    """Optimizer steps of the job."""
    row: int | None = None
    """Row of the optimizer step, from 0."""
    rows: int | None = None
    """Rows of the optimizer step."""


class JobDone(Event, frozen=True):
    """A training job ended well, and its step is served."""

    type: Literal["job_done"] = "job_done"
    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""
    job: str | None
    """Id of the job."""
    step: int | None
    """New policy step."""
    metrics: dict[str, Any] | None
    """Metrics of the learner."""
    seconds: float
    """Duration of the job."""
    counts: dict[str, Any] | None = None
    """Counts of what the learner did with the trajectories."""
    reason: str | None = None
    """Why the job made no gradient step; empty if it made one."""
    config: dict[str, Any] | None = None
    """Training settings that the server used."""


class JobFailed(Event, frozen=True):
    """A training job failed."""

    type: Literal["job_failed"] = "job_failed"
    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""
    message: str
    """Why the job failed."""
    job: str | None = None
    """Id of the job."""
    step: int | None = None
    """Policy step that is served."""


class ValidationStarted(Event, frozen=True):
    """A validation starts."""

    type: Literal["validation_started"] = "validation_started"
    epoch: int
    """Epochs that the policy was trained for."""
    rollouts: int
    """Rollouts of the validation."""
    resumed: int = 0
    """Rollouts of the validation that an earlier session finished."""
    final: bool = False
    """The validation is part of the comparison at the end of the run."""


def _number_of_failures(failures: Any) -> Any:
    """The first version counted failures by reason."""
    return sum(failures.values()) if isinstance(failures, dict) else failures or 0


class ValidationResult(Event, frozen=True):
    """Fields that `validation` and `final_validation` share."""

    epoch: int
    """Epochs that the policy was trained for."""
    step: int | None
    """Policy step that answered."""
    avg_reward: float | None
    """Null if the validation failed."""
    rewards: dict[str, list[float | None]]
    """Rewards by example; null for a rollout without a reward."""
    failures: Annotated[int, BeforeValidator(_number_of_failures)]
    """Rollouts without a reward."""
    min_reward: float | None = None
    """Lowest reward."""
    max_reward: float | None = None
    """Highest reward."""
    num_examples: int | None = None
    """Examples that were run."""
    policy_failures: dict[str, int] | None = None
    """Rollouts that failed because of the model, by example."""
    on_policy_failure: Literal["drop"] | float = "drop"
    """Reward of such a rollout, or `drop`."""
    error: str | None = None
    """Why the validation failed."""
    seconds: float | None = None
    """Duration of the validation."""


class ValidationDone(ValidationResult, frozen=True):
    """The policy answered the held-out examples."""

    type: Literal["validation"] = "validation"


class FinalValidationDone(ValidationResult, frozen=True):
    """The first or the chosen policy answered the held-out examples again, to be compared."""

    type: Literal["final_validation"] = "final_validation"


class EpochDone(Event, frozen=True):
    """All rounds of an epoch ended, or one of them failed."""

    type: Literal["epoch_done"] = "epoch_done"
    epoch: int
    """Number of the epoch, from 0."""
    status: str
    """`completed`, `failed`, or another status of the trainer."""
    phases: dict[str, float]
    """Seconds by phase."""


class WarningLogged(Event, frozen=True):
    """A warning that the report repeats."""

    type: Literal["warning"] = "warning"
    message: str
    """Text of the warning."""


class RunInterrupted(Event, frozen=True):
    """Ctrl-C ended the session."""

    type: Literal["run_interrupted"] = "run_interrupted"


class RunFinished(Event, frozen=True):
    """The run completed or failed."""

    type: Literal["run_finished"] = "run_finished"
    status: str
    """`completed`, `failed`, or another status of the trainer."""
    message: str | None
    """How the run ended, in words."""
    step: int | None
    """Newest policy step."""
    seconds: float
    """Duration of the session."""
    best_step: int | None = None
    """Step with the highest held-out reward."""


KnownEvent = (
    RunStarted
    | PreflightDone
    | EpochStarted
    | RolloutDone
    | EpochCollected
    | JobSubmitted
    | JobProgress
    | JobDone
    | JobFailed
    | ValidationStarted
    | ValidationDone
    | FinalValidationDone
    | EpochDone
    | WarningLogged
    | RunInterrupted
    | RunFinished
)
TYPES: dict[str, type[Event]] = {c.model_fields["type"].default: c for c in get_args(KnownEvent)}
"""Class of each event type."""

UNSYNCED = frozenset({"rollout"})
"""Written without waiting for the disk: the journal already holds the rollout."""

Listener = Callable[[Event], None]


def parse(fields: dict[str, Any]) -> Event:
    """The typed event; a plain Event if the type is a plugin's own."""
    return TYPES.get(fields["type"], Event).model_validate(fields)


class EventLog:
    """Appends events to the log, thread-safe; an appended event is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; a torn last line is cut off."""
        self.path = path
        self.listeners: list[Listener] = []
        """Called with every event, in order, in the thread that appends it."""
        self._writing = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, type: str, /, **fields: Any) -> Event:
        """Write the event and pass it to the listeners. A number that is not finite becomes null."""
        return self._emit(type, fields, written=True)

    def tell(self, type: str, /, **fields: Any) -> Event:
        """Pass the event to the listeners without writing it."""
        return self._emit(type, fields, written=False)

    def close(self) -> None:
        self._file.close()

    def _emit(self, type: str, fields: dict[str, Any], *, written: bool) -> Event:
        # Listeners get what a reader of the file gets, so there is one way to read an event.
        plain = to_jsonable_python(fields, inf_nan_mode="null")
        raw = {"at": time.time(), "type": type} | plain
        event = parse(raw)
        with self._writing:
            if written:
                self._file.write(to_json(raw) + b"\n")
                self._file.flush()
                if type not in UNSYNCED:
                    os.fsync(self._file.fileno())
            for listener in tuple(self.listeners):
                listener(event)
        return event


class EventReader:
    """Reads a log in pieces: each call returns what was appended since the call before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.lines = 0
        """Bytes and lines read so far."""

    def read(self) -> list[Event]:
        """New events, without a torn last line; none if there is no file yet."""
        *lines, _ = self._appended().split(b"\n")
        events: list[Event] = []
        for i, line in enumerate(lines):
            fields = _parsed_json(line)
            if fields is None and i == len(lines) - 1:
                break  # torn; EventLog cuts it off
            events.append(self._event(line, fields))
            self.offset += len(line) + 1
            self.lines += 1
        return events

    def _appended(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read()
        except FileNotFoundError:
            return b""

    def _event(self, line: bytes, fields: dict[str, Any] | None) -> Event:
        where = f"{self.path}:{self.lines + 1}: not an event"
        if fields is None:
            raise StateError(
                f"{where} (expected a JSON object with 'at' and 'type', got "
                f"{line[:60].decode('utf-8', 'replace')!r}). Only a last line can be torn: restore "
                "the file from a backup, or start anew with --fresh."
            )
        try:
            return parse(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise StateError(
                f"{where} of type {fields['type']!r} ({'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}). Restore the file from a backup, or start anew with --fresh."
            ) from None


def read(path: Path) -> list[Event]:
    """All events of a log, without a torn last line; none if there is no file yet."""
    return EventReader(path).read()


def _parsed_json(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "at" in fields and "type" in fields else None
