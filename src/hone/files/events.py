"""The events of a run: one class for each type, with its fields.

In:   the fields of a line of events.jsonl
Out:  typed Events

Fields with a default are those that not every writer has: a program that uses the SDK logs less of
a run than `hone finetune`, and a plugin's adapter or validation says less of a job or of rewards.
Events may carry fields that are not listed here, and plugins may append events of their own types.
"""

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel, frozen=True):
    """An event of any type; hone reads only the types below."""

    model_config = ConfigDict(
        extra="allow", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )

    at: float
    """When it was appended, in seconds since 1970."""
    type: str


class RoundEvent(Event, frozen=True):
    """Fields that the events of a round share."""

    epoch: int
    """Number of the epoch, from 0."""
    round: int
    """Number of the round in the epoch, from 0."""


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
    """When the command was started."""
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
    """Command that resumes the run, from any directory."""
    program: str | None = None
    """Command of the installation of hone that runs: the path of its script."""
    seed: int | None = None
    """Value of `finetuning.seed`."""
    examples: int | None = None
    """Training examples."""
    generations: int | None = None
    """Rollouts per training example."""
    validation_examples: int | None = None
    """Held-out examples; 0 without a validation dataset."""
    shared_inputs: int = 0
    """Held-out examples whose input is that of a training example."""
    shared_ids: int = 0
    """Held-out examples whose id is that of a training example with another input."""
    validation_interval: int | None = None
    """Epochs between two validations."""
    validation_greedy: bool = False
    """Validations run at temperature 0."""
    evaluator: str | None = None
    """Evaluator that computes rewards."""
    validation_evaluator: str | None = None
    """Evaluator that computes rewards of validations, if it is another one."""
    relative: bool = False
    """The evaluator compares the rollouts of an example with each other."""
    validation_relative: bool = False
    """So does the evaluator of validations."""
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
    """Root of the server: absolute, on the machine of the server."""
    base_url: str | None = None
    """Address of a server that outlives the run."""
    needs_key: bool = False
    """Requests to that server carry a key."""

    @property
    def command_at(self) -> float:
        """When this session's command was started; without a command, when the event was written."""
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


class EpochStarted(RoundEvent, frozen=True):
    """A round of an epoch starts to collect rollouts."""

    type: Literal["epoch_started"] = "epoch_started"
    rounds: int
    """Rounds of the epoch."""
    step: int | None
    """Policy step that is sampled."""
    rollouts: int
    """Rollouts of the round."""
    resumed: int
    """Rollouts of the round that an earlier session finished."""


class RolloutDone(RoundEvent, frozen=True):
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
    """`policy` if the model caused the failure, `infrastructure` otherwise; null on success. If the
    evaluator scored no rollout of the round, all of its failures count as `infrastructure`."""
    tokens: int
    """Sampled tokens."""
    round: int
    """Number of the round in the epoch, from 0; of `final`, as in `final_validation`."""
    rollout: str
    """Id under which the server records the calls of the rollout."""
    failure_reason: str | None
    """Reason of the failure, such as `timeout` or `token_limit`; null on success."""
    seconds: float
    """Duration of the rollout."""
    calls: int
    """Model calls."""
    answered: bool
    """Whether the trained policy answered a call of the rollout."""
    retried: list[str]
    """`kind: reason` of the failed attempts before this one."""


class EpochCollected(RoundEvent, frozen=True):
    """All rollouts of a round ended, and the curriculum selected what is trained on."""

    type: Literal["epoch_collected"] = "epoch_collected"
    metrics: dict[str, Any]
    """Numbers for `training_metrics.jsonl`."""
    dropped: dict[str, int]
    """Rollouts that are not trained on, by reason."""
    zero_variance_groups: int | None
    """Groups in which all rollouts have the same reward; null if the training compares none."""
    step: int | None
    """Policy step that was sampled."""
    failure_reward: float | None
    """Reward with which rollouts that failed because of the model are trained on; null if none is."""
    curriculum_state: dict[str, Any] | None
    """Content of `curriculum_state.json`; null without a curriculum."""
    curriculum: dict[str, Any]
    """What a resumed run needs to restore the curriculum."""


class JobSubmitted(RoundEvent, frozen=True):
    """The server accepted the training job of a round."""

    type: Literal["job_submitted"] = "job_submitted"
    job: str | None
    """Id of the job."""
    trajectories: int
    """Trajectories that were submitted."""
    groups: int
    """Groups that were submitted."""
    dropped: dict[str, int]
    """Trajectories and groups among them that could not be sent, by reason."""


class JobProgress(Event, frozen=True):
    """The learner is about to compute a row. Shown on the terminal, not written to the log."""

    type: Literal["job_progress"] = "job_progress"
    phase: str
    """What the learner does, such as `train`."""
    step: int
    """Optimizer step, from 0."""
    steps: int
    """Optimizer steps of the job."""
    row: int | None = None
    """Row of the optimizer step, from 0."""
    rows: int | None = None
    """Rows of the optimizer step."""
    done: int | None = None
    """Rows of the job that are computed, in all passes."""
    total: int | None = None
    """Rows of the job in all passes."""

    @property
    def progress(self) -> tuple[int, int]:
        """Rows that are computed, and all rows; optimizer steps if the backend counts no rows."""
        if self.done is not None and self.total is not None:
            return self.done, self.total
        rows = self.rows or 1
        return self.step * rows + (self.row or 0), self.steps * rows


class JobDone(RoundEvent, frozen=True):
    """A training job ended well, and its step is served."""

    type: Literal["job_done"] = "job_done"
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


class JobFailed(RoundEvent, frozen=True):
    """A training job failed."""

    type: Literal["job_failed"] = "job_failed"
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
    """Epochs that the policy was trained for; in the comparison at the end, the later policy."""
    rollouts: int
    """Rollouts of the validation; in the comparison at the end, those of both policies."""
    resumed: int
    """Rollouts of the validation that an earlier session finished."""
    final: bool
    """It is the comparison at the end of the run, in which two policies answer side by side."""


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
    failures: int
    """Rollouts without a reward."""
    min_reward: float | None = None
    """Lowest reward."""
    max_reward: float | None = None
    """Highest reward."""
    num_examples: int | None = None
    """Examples that were run."""
    policy_failures: dict[str, int] = Field(default_factory=dict)
    """Rollouts that failed because of the model, by example."""
    on_policy_failure: Literal["drop", "lowest"] | float = "drop"
    """Reward of such a rollout. `lowest` and `drop`: the smaller of 0 and the run's lowest reward."""
    unanswered: dict[str, list[int]] = Field(default_factory=dict)
    """Rollouts that failed before the policy answered: positions in `rewards`, by example."""
    lost: dict[str, list[int]] = Field(default_factory=dict)
    """Rollouts that the environment failed after the policy had answered, likewise."""
    error: str | None = None
    """Why the validation failed."""
    seconds: float | None = None
    """Duration of the validation."""


class ValidationDone(ValidationResult, frozen=True):
    """The policy answered the held-out examples."""

    type: Literal["validation"] = "validation"


class FinalValidationDone(ValidationResult, frozen=True):
    """One of the two policies that answered the held-out examples side by side, to be compared."""

    type: Literal["final_validation"] = "final_validation"
    round: int
    """`round` of the rollouts: epochs that the later policy of the comparison was trained for."""


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


class MetricsLogged(Event, frozen=True):
    """A program that uses the SDK logged metrics of a model that has `report_metrics`."""

    type: Literal["metrics"] = "metrics"
    step: int
    """Policy step that the metrics belong to."""
    metrics: dict[str, float | None]
    """By name, such as `val/reward`."""


class LoggerStopped(Event, frozen=True):
    """A logger could not send the run; the run went on without it."""

    type: Literal["logger_stopped"] = "logger_stopped"
    logger: str
    """Name of the logger."""
    message: str
    """Why it stopped, and how many events it has not sent."""
    unsent: int
    """Lines of this log that were not sent."""


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
    | MetricsLogged
    | LoggerStopped
    | RunInterrupted
    | RunFinished
)
TYPES: dict[str, type[Event]] = {c.model_fields["type"].default: c for c in get_args(KnownEvent)}
"""Class of each event type."""


def parse(fields: dict[str, Any]) -> Event:
    """The typed event; a plain Event if the type is a plugin's own."""
    return TYPES.get(fields["type"], Event).model_validate(fields)
