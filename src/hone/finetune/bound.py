"""A trainer with its parts at hand: opened, restored from an earlier start, and closed again.

In:   the `finetuning:` section; a journal and events, or the directory to open them in
Out:  what the loop works with: its standing, its curriculum, its files
"""

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError, HoneError
from hone.events import FILE, EventLog, FinalValidationDone, ValidationDone, read
from hone.finetune.base import (
    Trainer,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilder,
)
from hone.finetune.comparison import Comparison
from hone.finetune.journal import Journal, RunFacts, Submission
from hone.finetune.phases import Phases
from hone.finetune.standing import Standing, Visit
from hone.report import diagnosis, metrics
from hone.report.text import counted, failed
from hone.report.validations import Validation
from hone.report.writer import Files

if TYPE_CHECKING:
    from hone.config.registry import TrainerConfig
    from hone.config.schema import FinetuneConfig

log = logging.getLogger("hone")

BACKEND = "openpipe-art"
"""What the originals call the backend of this trainer."""


class BoundTrainer(Trainer):
    """Everything of a trainer but its loop."""

    def __init__(self, trainer_config: "TrainerConfig", **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._run_id: str | None = None
        self._job_refs: list[TrainingJobRef] = []
        self._step: int | None = None
        """The policy step that is served now."""
        self._logged: dict[int | None, dict[str, float]] = {}
        """What the backend was told of each validated step."""
        self._phases = Phases()
        self._own = ExitStack()
        self._parts: tuple[Standing, Files] | None = None

    async def initialize(self, run_config: "FinetuneConfig") -> None:
        """Reach the backend, and take up the run where its events end."""
        if not hasattr(self, "journal"):
            self._open(run_config)
        self._run_id = self.journal.run_id
        if self.journal.anew and self.trainer_adapter is not None:
            await self.trainer_adapter.start_anew(self.journal.run.replaces)
            self.journal.begun_anew()
        await super().initialize(run_config)
        self._adapter.events = self.events
        standing = Standing(run_config, read(self.events.path))
        self.events.listeners.append(standing.add)
        self._parts = standing, Files(self.events, run_config.output_dir)
        self._curriculum = standing.curriculum()
        self._curriculum_state = self._curriculum.state
        await self._adapter.open_run(self.journal.run_id, run_config.seed)
        self._step = await self._adapter.policy_step()

    def _open(self, config: "FinetuneConfig") -> None:
        """For those who use a trainer without `hone finetune`."""
        facts = RunFacts(config.seed, {})
        journal = self._own.enter_context(Journal.open(config.output_dir, facts))
        self.bind_run(journal, self._own.enter_context(EventLog(config.output_dir / FILE)))

    async def cleanup(self) -> None:
        """End what still runs, and wait until the files are written."""
        running = [
            task
            for held in getattr(self.trajectory_builder, "evaluation_runs", {}).values()
            for task in held
        ]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._parts is not None:
            await self._files.settle()
        self._own.close()

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The jobs of this process."""
        jobs: list[dict[str, Any]] = []
        for ref in self._job_refs:
            try:
                jobs.append({"job_ref": ref, "status": await self._adapter.status(ref)})
            except (HoneError, ValueError) as error:
                jobs.append({"job_ref": ref, "error": str(error)})
        return {"run_id": run_id, "total_epochs": len(self._job_refs), "jobs": jobs}

    # ---- its parts ------------------------------------------------------------------------

    @property
    def _config(self) -> "FinetuneConfig":
        assert self.run_config is not None, "initialize comes first"
        return self.run_config

    @property
    def _builder(self) -> TrajectoryBuilder:
        assert self.trajectory_builder is not None, "bind_components comes first"
        return self.trajectory_builder

    @property
    def _adapter(self) -> TrainerAdapter:
        assert self.trainer_adapter is not None, "bind_components comes first"
        return self.trainer_adapter

    @property
    def _comparison(self) -> Comparison:
        """How the trajectories of a job are compared."""
        return Comparison.of(getattr(self._adapter, "adapter_config", None))

    @property
    def _standing(self) -> Standing:
        return self._bound()[0]

    @property
    def _files(self) -> Files:
        return self._bound()[1]

    def _bound(self) -> tuple[Standing, Files]:
        if self._parts is None:
            raise ConfigError(
                f"{type(self).__name__} was not initialized; await initialize(run_config) first"
            )
        return self._parts

    @property
    def _validation_interval(self) -> int:
        told = self._config.run_configuration
        return 5 if told is None else told.validation_interval

    @property
    def _reward_history(self) -> list[dict[str, Any]]:
        return metrics.reward_history(self._parts[0].history) if self._parts else []

    @property
    def _validation_history(self) -> list[dict[str, Any]]:
        return metrics.validation_history(self._parts[0].history) if self._parts else []

    # ---- where it stands ------------------------------------------------------------------

    def _rounds(self, epoch: int) -> list[Visit]:
        """The epoch's examples, as they are run together."""
        evaluation = self._builder.evaluation
        if evaluation is None:
            raise ConfigError(
                f"{type(self).__name__} has nothing to run; call bind_evaluations(training, "
                "validation) first"
            )
        return self._standing.rounds(evaluation.items, epoch)

    def _status(
        self, epoch: int, status: TrainingStatusEnum, message: str | None, **more: Any
    ) -> TrainingJobStatus:
        return TrainingJobStatus(
            run_id=self.journal.run_id,
            backend=BACKEND,
            status=status,
            progress=100.0 if status is TrainingStatusEnum.COMPLETED else None,
            message=message,
            metadata={"epoch": epoch, **more},
        )

    def _failure(self, epoch: int, error: Exception) -> TrainingJobStatus:
        if not isinstance(error, HoneError):
            log.error("epoch %d failed", epoch + 1, exc_info=error)
        return self._status(epoch, TrainingStatusEnum.FAILED, str(error) or type(error).__name__)

    # ---- what it says ---------------------------------------------------------------------

    async def _log_validation(self, epoch: int, found: dict[str, Any]) -> None:
        """Say it, and let the backend know it; and what it changes about earlier ones.

        Under `drop` a failure of the model counts as the run's lowest reward. Where that fell,
        earlier validations are worth less than the backend was told.
        """
        history = self._standing.history
        worst = min(history.failure_reward, _lowest(found))
        new = Validation.of(ValidationDone(at=0.0, **found), worst)
        if new.mean is None:
            self._warn(found["error"])
        else:
            after = counted(epoch, "epoch")
            log.info("Validation after %s - Avg Reward: %.4f%s", after, new.mean, failed(new))
        for one in (*history.validations, new):
            if one.mean is None or (one is not new and not one.policy_failures):
                continue
            told = {"reward": one.mean, "failure_rate": one.failure_rate or 0.0}
            if self._logged.get(one.step) != told:
                self._logged[one.step] = told
                await self._adapter.log_metrics(told, split="val", step=one.step)

    def _say_final(self, found: dict[str, Any]) -> None:
        event = FinalValidationDone(at=0.0, **found)
        new = Validation.of(event, self._standing.history.failure_reward)
        if new.mean is None:
            self._warn(found["error"])
        else:
            log.info(
                "Final validation of step %d - Avg Reward: %.4f%s", new.step, new.mean, failed(new)
            )

    def _say_what_was_dropped(self, epoch: int, noted: Submission) -> None:
        dropped = noted.collected["dropped"]
        if dropped:
            counts = ", ".join(f"{reason}: {n}" for reason, n in dropped.items())
            log.info("Epoch %d left out: %s", epoch + 1, counts)
        if noted.collected["metrics"]["num_trajectories"] and not noted.collection.trajectories:
            self._warn(f"epoch {epoch + 1}: the curriculum left no group to train on")

    def _say_how_it_went(self, epoch: int, num_epochs: int, status: TrainingJobStatus) -> None:
        self._files.refresh()
        if status.status is not TrainingStatusEnum.COMPLETED:
            log.error("Epoch %d failed: %s", epoch + 1, status.message)
            return
        log.info("Completed epoch %d/%d", epoch + 1, num_epochs)
        looks = (epoch + 1) % diagnosis.FLAT_EPOCHS == 0
        if looks and (why := diagnosis.diagnosis(self._standing.history)):
            self._warn(why)

    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Say it, and have the metrics files and the plot written in the background."""
        self._files.refresh()
        average = metrics["avg_reward"]
        log.info(
            "Epoch %d progress logged - Avg Reward: %s, Trajectories: %d",
            epoch + 1,
            "none" if average is None else f"{average:.4f}",
            metrics["num_trajectories"],
        )

    def _warn(self, message: str) -> None:
        log.warning("%s", message)
        self.events.append("warning", message=message)


def _lowest(found: dict[str, Any]) -> float:
    rewards = [r for known in found["rewards"].values() for r in known if r is not None]
    return min(rewards, default=0.0)
