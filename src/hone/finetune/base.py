"""TrajectoryBuilder, TrainerAdapter, Trainer: the three parts of the harness.

In:   nothing; abstract classes, and the values they exchange (types.py)
Out:  TrajectoryCollection from builder to adapter, TrainingJobRef and TrainingJobStatus back

The names are those of NeMo Agent Toolkit's finetuning harness, so that components written for it
need only new imports. `Trainer` is the loop over epochs; the server's Learner computes gradients.
Methods that hone adds to the classes do nothing by default.
"""

# ruff: noqa: B027  # optional methods do nothing by default

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from hone.capture.base import SeenCall
from hone.config.base import (
    RewardFunctionConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from hone.config.build import Served
from hone.config.schema import CurriculumLearningConfig, FinetuneConfig, FinetuneRunConfig
from hone.errors import ConfigError, HoneError, NotInThisVersion
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation, EvaluationRunOutput
from hone.files.event_log import EventLog
from hone.files.rollout_record import EpisodeItem, EpisodeItemRole
from hone.finetune.calls import ModelServer, TrainedCalls
from hone.finetune.journal import Journal
from hone.finetune.resume import RunState
from hone.finetune.types import (
    AdvantageSettings,
    DPOItem,
    OpenAIMessage,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from hone.tasks.tally import cancel_all

__all__ = [
    "AdvantageSettings",
    "CurriculumLearningConfig",
    "DPOItem",
    "EpisodeItem",
    "EpisodeItemRole",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "ModelServer",
    "OpenAIMessage",
    "RewardFunctionConfig",
    "RoundRequest",
    "Trainer",
    "TrainerAdapter",
    "TrainerAdapterConfig",
    "TrainerConfig",
    "TrainingJobRef",
    "TrainingJobStatus",
    "TrainingStatusEnum",
    "Trajectory",
    "TrajectoryBuilder",
    "TrajectoryBuilderConfig",
    "TrajectoryCollection",
    "TrialRollouts",
]


class TrialRollouts(Protocol):
    """Selects the calls of a rollout that would be trained, so that preflight can check them.

    A trajectory builder that can do this sets `trial`. Its runs then get every preflight check.
    """

    async def select_calls(self, rollout: str, seen: Sequence[SeenCall]) -> TrainedCalls:
        """The rollout's calls that would be trained; `seen` are those that this process made."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A round to run, as the trainer asks for it: `meta` of a trajectory builder's methods.

    A builder of another package gets it as a dict of these names, and a trainer of another package may
    leave out any of them.
    """

    run_id: str
    epoch: int = 0
    """Number of the epoch, from 0; in a validation, the epochs of training before it."""
    round: int = 0
    """Number of the round in the epoch, from 0."""
    items: Sequence[EvalInputItem] | None = None
    """The examples to run; None: all."""
    journal: Journal | None = None
    """Has the rollouts that ended in an earlier start, and gets the new ones."""
    events: EventLog | None = None
    session: int = 1
    """Number of starts of the run."""
    failed_before: bool = True
    """Whether the epoch failed in an earlier start."""
    failure_reward: float = 0.0
    """The run's lowest training reward before this round, 0 at most."""
    trainer_config: TrainerConfig | None = None

    @classmethod
    def of(cls, run_id: str, meta: Mapping[str, Any] | None) -> Self:
        """The request that a trainer passed as `meta`; other keys are its own."""
        known = {one.name for one in fields(cls)}
        request = {key: value for key, value in (meta or {}).items() if key in known}
        return cls(**{**request, "run_id": run_id})

    @property
    def meta(self) -> dict[str, Any]:
        """The request as a builder of any package gets it."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class TrajectoryBuilder(ABC):
    """Runs the workflow on examples and turns the rollouts into groups of trajectories."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig | None = None
        self.evaluation: Evaluation | None = None
        """The training set; set before the first run."""
        self.dropped: Counter[str] = Counter()
        """Counts of what the last `finalize` left out, by reason."""
        self.failure_reward: float | None = None
        """Reward that the last `finalize` gave rollouts that failed because of the model; None if it
        returned none of them."""
        self.num_generations: int | None = None
        """Rollouts per example; None if unknown."""
        self.evaluation_runs: dict[str, list[asyncio.Task[Any]]] = {}
        """Tasks of `start_run`, by run id."""
        self.trial: TrialRollouts | None = None
        """Selects the calls of preflight's rollouts; None if the builder cannot."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    def bind_evaluation(self, evaluation: Evaluation) -> None:
        """Set the training set, which is built once per run."""
        self.evaluation = evaluation

    @property
    def bound_evaluation(self) -> Evaluation:
        """The training set; raises ConfigError if there is none."""
        if self.evaluation is None:
            raise ConfigError(
                f"{type(self).__name__}: no evaluation is bound yet; call bind_evaluation(...) "
                "first, as hone.finetune.run does"
            )
        return self.evaluation

    async def run_eval(self) -> EvaluationRunOutput:
        """Run every example once."""
        return await self.bound_evaluation.run()

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start the rollouts. `meta` from the built-in trainer has the fields of a RoundRequest."""

    @abstractmethod
    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        """Wait for the rollouts; returns one group per example that has a trajectory."""

    async def compute_reward(
        self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None
    ) -> float | None:
        """The evaluator's score; None, never 0, if there is none."""
        return None if output_item.score is None else float(output_item.score)

    @abstractmethod
    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Called after each round with its metrics and the run's output_dir."""

    async def load_episodes(self, trajectories: TrajectoryCollection) -> None:
        """Fetch the text of trajectories that refer to recorded calls."""

    async def cancel(self) -> None:
        """Cancel the tasks of `start_run` and wait until they have ended."""
        await cancel_all(task for tasks in self.evaluation_runs.values() for task in tasks)


class TrainerAdapter(ABC):
    """Submits groups to a training backend and reports how the jobs end."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig | None = None
        self.served: Served | None = None
        """Address of the model in training; known after `initialize`, None for a backend that does
        not serve it."""
        self.events: EventLog | None = None
        """Event log for the progress of jobs; set by the trainer."""
        self.shares_server = False
        """Whether a server that another process runs on the same root may be used; set before
        `initialize`."""
        self.serves_steps = False
        """Whether a rollout can choose an earlier step (the header X-Hone-Step)."""
        self.server: ModelServer | None = None
        """Serves the model and records its calls; None for a backend that only trains."""
        self.comparison = AdvantageSettings()
        """How the trajectories of a job are compared."""
        self.reads_episodes = True
        """Whether `submit` reads the text of trajectories whose calls were recorded."""
        self.dropped: Counter[str] = Counter()
        """Counts of what the last `submit` left out, by reason."""
        self.needed_steps: set[int] = set()
        """Steps that are not pruned, because the run's verdict may compare them; set by the trainer."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    @abstractmethod
    async def is_healthy(self) -> bool: ...

    async def ended(self) -> HoneError:
        """Wait until the backend has ended for good, and return why; the run then ends at once."""
        return await asyncio.get_running_loop().create_future()  # never done

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start a job, or return the one that was started with this submission's `key` before."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus: ...

    @abstractmethod
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait until the job has ended. The built-in adapter does not poll."""

    @abstractmethod
    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Called after each job with its metrics and the run's output_dir."""

    def describe(self) -> dict[str, Any]:
        """The model, for the report: `name`, `project`, `base_model`, `learning_rate`.

        Also `base_url` of a server that outlives the run, or `root` of one that the run starts.
        """
        return dict.fromkeys(("name", "project", "base_model", "learning_rate"))

    async def open_run(self, run_id: str, seed: int) -> None:
        """Keep the calls of this run's rollouts until `close_run`."""

    async def close_run(self, run_id: str) -> None:
        """Allow the calls of this run to be deleted."""

    async def policy_step(self) -> int | None:
        """The step that is served; None for a backend that does not count steps."""
        return None

    async def log_metrics(
        self, metrics: Mapping[str, float], *, split: str, step: int | None
    ) -> None:
        """Write metrics of a step to the model's history, as SPLIT/METRIC."""

    async def prune(self, keep_last: int) -> None:
        """Delete all checkpoints except the newest `keep_last`, the best and `needed_steps`."""

    async def start_anew(self, old_run_id: str | None) -> None:
        """Move earlier steps of the model aside, so that the run starts at step 0 (`--fresh`).

        Called before `initialize`, and again if the run was killed in between.
        """

    async def close(self) -> None:
        """Close the connection to the backend."""


class Trainer(ABC):
    """Runs the epochs: collect, select, submit, wait, log."""

    journal: Journal
    """Everything a killed run needs to resume; set by `initialize`."""
    events: EventLog
    """Events of the run; set by `initialize`."""
    state: RunState
    """What is done, according to the events; set by `initialize`."""

    def __init__(self, trainer_config: TrainerConfig) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig | None = None
        self.curriculum_config: CurriculumLearningConfig | None = None
        self.trajectory_builder: TrajectoryBuilder | None = None
        self.trainer_adapter: TrainerAdapter | None = None
        self._curriculum_state: dict[str, Any] | None = None
        self.validation: Evaluation | None = None
        """The validation set; None without one."""

    async def bind_components(
        self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter
    ) -> None:
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    def bind_run(self, journal: Journal, events: EventLog, state: RunState) -> None:
        """Set the journal, the events, and the state that listens to them.

        Otherwise `initialize` opens those of output_dir.
        """
        self.journal, self.events, self.state = journal, events, state

    def bind_evaluations(self, training: Evaluation, validation: Evaluation | None) -> None:
        """Set the datasets; they are built after `initialize`, which connects the model."""
        assert self.trajectory_builder is not None, "bind_components comes first"
        self.trajectory_builder.bind_evaluation(training)
        self.validation = validation

    async def initialize(self, run_config: FinetuneConfig) -> None:
        if self.trajectory_builder is None or self.trainer_adapter is None:
            raise ConfigError(
                f"{type(self).__name__}.initialize: no trajectory builder and trainer adapter are "
                "bound yet; call bind_components(...) first"
            )
        self.run_config = run_config
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": run_config.curriculum_learning.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        self.trainer_config.reward = run_config.reward_function
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect, select and submit once; None if there is nothing to train on."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]: ...

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]: ...

    @abstractmethod
    async def cleanup(self) -> None: ...

    @abstractmethod
    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Called after each submission with the round's metrics and the run's output_dir."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Rewards on the validation set after `epoch` epochs of training."""
        if self.validation is None:
            raise ConfigError(
                "run_validation_evaluation: there is no validation set; name one with "
                "--validation_dataset"
            )
        measured = self._calculate_validation_metrics(await self.validation.run())
        return {**measured, "epoch": epoch, "dataset_type": "validation"}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """Mean, minimum and maximum of the scores.

        Items that failed because of the model count with `failure_reward`; others without a score
        are only counted.
        """
        wanted = None if self.trainer_config.reward is None else self.trainer_config.reward.name
        outputs = [output for name, output in eval_output.evaluation_results if name == wanted]
        items = [item for output in outputs for item in output.eval_output_items]
        own = [float(item.score) for item in items if isinstance(item.score, int | float)]
        failed = [[o.failure_reward or 0.0] * o.policy_failures for o in outputs]
        scores = [*own, *(reward for rewards in failed for reward in rewards)]
        return {
            "avg_reward": sum(scores) / len(scores) if scores else None,
            "min_reward": min(scores, default=None),
            "max_reward": max(scores, default=None),
            "num_examples": len(scores),
            "failures": len(items) - len(own),
        }

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        raise NotInThisVersion("Curriculum learning not implemented for this backend.")

    def get_curriculum_state(self) -> dict[str, Any]:
        """The state as JSON values, with its configuration."""
        state = self._curriculum_state or {}
        return {
            "current_percentile": state.get("current_percentile", 1.0),
            "last_expansion_epoch": state.get("last_expansion_epoch", -1),
            "total_groups": state.get("total_groups", 0),
            "included_groups": sorted(state.get("included_groups", ())),
            "config": self.curriculum_config.model_dump() if self.curriculum_config else None,
        }
