"""THE CLIENT LOOP. Each epoch: validate, collect, select, submit, wait, log.

In:   a TrajectoryBuilder, a TrainerAdapter, the `finetuning:` section, the run's journal and events
Out:  one TrainingJobStatus per epoch; everything else is in events.jsonl

    run                       every epoch that is not done yet
      _validate                 held-out reward: before the first epoch, at each interval, at the end
      _epoch                    one epoch: its rounds; one round unless `groups_per_step` is set
        run_epoch                 collect -> select -> journal -> submit
        _wait                     until the job has ended and its step is served
      compare                   at the end: the first step and the best answer side by side

The trainer keeps no state: resume.py derives what is done from the run's events, whether this process
or a killed one wrote them. A submission is in the journal, with its idempotency key, before it is sent.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from hone.config.build import Builder
from hone.config.registry import TrainerConfig, register_trainer
from hone.config.schema import FinetuneConfig
from hone.errors import ConfigError, HoneError, RolloutError, TrainingFailed
from hone.files.event_log import FILE, EventLog
from hone.files.rollout_record import not_by_policy
from hone.finetune.base import (
    RoundRequest,
    Trainer,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilder,
    TrajectoryCollection,
)
from hone.finetune.curriculum import num_flat, round_metrics
from hone.finetune.journal import Journal
from hone.finetune.resume import RoundPlan, RunState
from hone.finetune.round_failures import (
    FAILURES_AT_ONE_LINE,
    crash_error,
    crashed_at_one_line,
    infrastructure_error,
    policy_warning,
)
from hone.finetune.validation import Validator
from hone.report import diagnosis, metrics
from hone.report.writer import Files

log = logging.getLogger("hone")

GRACE_S = 60.0
"""Added to the adapter's own deadline, which also cancels the job."""
JOB_KEYS = frozenset({"job", "step", "metrics", "counts", "reason", "config", "seconds"})
"""Metadata of a job's status that goes into its event."""
NO_GROUP = "No trajectories to train on"
"""Status of an epoch with trajectories of which none was trained."""
COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


class EpochTrainer(Trainer):
    """Runs the epochs of a finetuning run that are not done yet."""

    _config: FinetuneConfig
    _builder: TrajectoryBuilder
    _adapter: TrainerAdapter
    _files: Files

    def __init__(self, trainer_config: TrainerConfig) -> None:
        super().__init__(trainer_config)
        self._run_id: str | None = None
        self._job_refs: list[TrainingJobRef] = []
        self._step: int | None = None
        """The policy step that is served now."""
        self._opened = ExitStack()
        self._is_alone = False
        """Whether it runs without `hone finetune`, which draws the final plot itself."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Connect the backend, and resume the run where its events end."""
        self._is_alone = not hasattr(self, "journal")
        if self._is_alone:
            directory = run_config.output_dir
            journal = self._opened.enter_context(Journal.open(directory, {}))
            events = self._opened.enter_context(EventLog(directory / FILE))
            self.bind_run(journal, events, RunState.follow(run_config, events))
        self._run_id = self.journal.run_id
        if self.journal.run.anew and self.trainer_adapter is not None:
            await self.trainer_adapter.start_anew(self.journal.run.replaces)
            self.journal.begun_anew()
        await super().initialize(run_config)
        assert self.trajectory_builder is not None and self.trainer_adapter is not None
        self._config = run_config
        self._builder, self._adapter = self.trajectory_builder, self.trainer_adapter
        self._adapter.events = self.events
        self._files = Files(self.events, run_config.output_dir)
        self._curriculum = self.state.curriculum()
        self._curriculum_state = self._curriculum.state
        await self._adapter.open_run(self.journal.run_id, run_config.seed)
        self._step = await self._adapter.policy_step()

    async def cleanup(self) -> None:
        """Cancel running rollouts, and wait until the files are written."""
        if self.trajectory_builder is not None:
            await self.trajectory_builder.cancel()
        if hasattr(self, "_files"):
            task = asyncio.current_task()
            interrupted = task is not None and task.cancelling() > 0  # its report draws nothing
            await self._files.settle(plot=interrupted or self._is_alone)
        self._opened.close()

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        jobs = [{"job_ref": r, "status": await self._adapter.status(r)} for r in self._job_refs]
        return {"run_id": run_id, "total_epochs": len(jobs), "jobs": jobs}

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run every epoch that is not done yet; stop at one that fails."""
        if self.run_config is None:
            raise ConfigError(
                f"{type(self).__name__} was not initialized; await initialize(run_config) first"
            )
        statuses: list[TrainingJobStatus] = []
        options = self.run_config.run_configuration
        interval = 5 if options is None else options.validation_interval
        for epoch in range(num_epochs):
            if self.state.is_done(epoch):
                statuses.append(self._outcome(epoch))
                continue
            if epoch % interval == 0:
                await self._validate(epoch)
            if self.state.reason_to_stop():
                break
            statuses.append(await self._epoch(epoch, num_epochs))
            if statuses[-1].status is not COMPLETED:
                return statuses
        await self._validate(len(statuses))
        if self.validation is not None:
            await self._validator.compare()
            await self._validator.send()  # its answers may have lowered the reward of failures
            self._files.refresh()
        await self._adapter.close_run(self.journal.run_id)
        return statuses

    async def _epoch(self, epoch: int, num_epochs: int) -> TrainingJobStatus:
        """Run one epoch; an exception becomes its status."""
        log.info("Starting epoch %d for run %s", epoch + 1, self._run_id)
        before = self.state.history.phases.copy()
        try:
            for round, plan in enumerate(self._rounds(epoch)):
                if plan.items and not self.state.is_over(epoch, round):
                    job = await self.run_epoch(epoch, self.journal.run_id, round)
                    if job is not None:
                        await self._wait(job, epoch, round)
            status = self._outcome(epoch)
        except Exception as error:  # plugins may raise anything; the run ends and reports it
            message = str(error)
            if not isinstance(error, HoneError):
                log.error("epoch %d failed", epoch + 1, exc_info=error)
                message = f"{type(error).__name__}: {error}".removesuffix(": ")
            status = self._status(epoch, FAILED, message or type(error).__name__)
        phases = {name: spent - before[name] for name, spent in self.state.history.phases.items()}
        self.events.append("epoch_done", epoch=epoch, status=status.status, phases=phases)
        self._files.refresh()
        if status.status is not COMPLETED:
            log.error("Epoch %d failed: %s", epoch + 1, status.message)
            return status
        if status.message == NO_GROUP:
            self._warn(f"epoch {epoch + 1}: the curriculum left no group to train on")
        self._log_rounds(epoch)
        log.info("Completed epoch %d/%d", epoch + 1, num_epochs)
        due = (epoch + 1) % diagnosis.FLAT_EPOCHS == 0
        if due and (why := diagnosis.diagnosis(self.state.history)):
            self._warn(why)
        return status

    async def run_epoch(self, epoch: int, run_id: str, round: int = 0) -> TrainingJobRef | None:
        """One round: collect, select, journal, submit; None if there is nothing to train on."""
        submitted = self.journal.submitted(epoch, round)
        if submitted is None:
            collection = await self._collect(epoch, round)
            submitted = self._select(collection, epoch, round)
            if collection.trajectories:
                self.journal.note_submission(epoch, round, *submitted)
        chosen, outcome = submitted
        self.events.append("epoch_collected", **outcome)
        collected, output_dir = outcome["metrics"], str(self._config.output_dir)
        if dropped := outcome["dropped"]:
            counts = ", ".join(f"{reason}: {n}" for reason, n in dropped.items())
            log.info("Left out of epoch %d: %s", epoch + 1, counts)
        if not chosen.trajectories:
            if collected["num_trajectories"]:
                message = "The curriculum selected none of the %d groups of round %d of epoch %d"
                log.info(message, collected["num_groups"], round + 1, epoch + 1)
            return None
        self._adapter.needed_steps = self._steps_to_compare()
        job = await self._submit(chosen, epoch, round)
        self._builder.log_progress(run_id, {"epoch": epoch, "round": round} | collected, output_dir)
        place = {"round": round, "rounds": len(self._rounds(epoch))}
        self.log_progress(epoch, place | collected, output_dir)
        # While the job runs: log the reward, and make room for the next checkpoint.
        measured = {
            "trajectories": collected["num_trajectories"],
            "reward": collected["avg_reward"],
        }
        # Conversations of a dataset have no reward.
        logged = {name: value for name, value in measured.items() if value is not None}
        await self._adapter.log_metrics(logged, split="train", step=outcome["step"])
        if self._config.keep_checkpoints is not None:
            await self._adapter.prune(self._config.keep_checkpoints)
        return job

    async def _validate(self, epoch: int) -> None:
        """Measure the held-out reward after `epoch` epochs, unless that was done."""
        if self.validation is None:
            return
        if not self.state.is_validated(epoch):
            outcome = {"step": self._step, "rewards": {}, "failures": 0}  # a plugin may not have it
            outcome |= await self.run_validation_evaluation(epoch, self.journal.run_id)
            outcome.pop("dataset_type", None)
            self._validator.record("validation", outcome)
            self._files.refresh()
        # Also for one that is known: a killed run may not have sent it. The server needs it for
        # NAME@best, and to prune no best step.
        await self._validator.send()

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        if self.validation is None:
            return await super().run_validation_evaluation(epoch, run_id)
        outcome = await self._validator.validate(epoch, self._step)
        return {**outcome, "dataset_type": "validation"}

    async def _collect(self, epoch: int, round: int) -> TrajectoryCollection:
        """Run the round's examples; raises RolloutError if too many rollouts failed."""
        run_id, rounds = self.journal.run_id, self._rounds(epoch)
        generations = self._builder.num_generations
        items = rounds[round].items
        request = RoundRequest(
            run_id=run_id,
            epoch=epoch,
            round=round,
            items=items,
            journal=self.journal,
            events=self.events,
            session=self.journal.session,
            failed_before=self.state.has_failed(epoch),
            failure_reward=self.state.history.training_failure_reward,
            trainer_config=self.trainer_config,
        )
        self.events.append(
            "epoch_started",
            epoch=epoch,
            round=round,
            rounds=len(rounds),
            step=self._step,
            rollouts=len(items) * (1 if generations is None else generations),
            resumed=len(self.journal.finished("train", epoch, round)),
        )
        await self._builder.start_run(run_id, request.meta)
        collection = await self._builder.finalize(run_id, request.meta)
        records, where = self.journal.records("train", epoch, round), f"epoch {epoch + 1}"
        allowed = self._config.max_infrastructure_failures
        if error := infrastructure_error(records, where=where, allowed=allowed):
            raise RolloutError(error)
        judged = records
        if len(records) < FAILURES_AT_ONE_LINE:
            # Too few to tell a bug from chance: with the rounds of this epoch before it.
            judged = [r for n in range(round + 1) for r in self.journal.records("train", epoch, n)]
        if error := crash_error(judged, where=where):
            for record in crashed_at_one_line(judged):
                if record.round == round:  # the next start runs them again
                    self.journal.add(not_by_policy(record))
            raise RolloutError(error)
        dropped = self._config.on_policy_failure == "drop"
        if warning := policy_warning(records, where=where, dropped=dropped):
            self._warn(warning)
        return collection

    def _select(
        self, collection: TrajectoryCollection, epoch: int, round: int
    ) -> tuple[TrajectoryCollection, dict[str, Any]]:
        """The groups to train on, and the fields of the round's `epoch_collected` event."""
        rounds, keys = self._rounds(epoch), self.trainer_config.job_keys()
        place = {"epoch": epoch, "round": round}
        plan: dict[str, Any] = {"rounds": len(rounds), "epochs": self._config.num_epochs}
        if keys:
            plan["training"] = keys
        flat = None  # SFT compares nothing
        if keys.get("loss") != "sft":
            flat = num_flat(collection.trajectories, self._adapter.comparison)
        self._curriculum = self.state.curriculum()
        drawn = {
            **(collection.metadata or {}),
            **place,
            "rounds": len(rounds),
            "examples": [example for one in rounds for example in one.drawn],
        }
        chosen = self.apply_curriculum_learning(
            collection.model_copy(update={"metadata": drawn}), epoch
        )
        self._curriculum_state = self._curriculum.state
        state = self.get_curriculum_state() if self._curriculum.config.enabled else None
        percentile = state["current_percentile"] if state else 1.0
        records = self.journal.records("train", epoch, round)
        reward = self.state.history.training_failure_reward
        collected = {
            **place,
            "step": self._step,
            "metrics": round_metrics(collection, chosen, percentile, records, reward),
            "failure_reward": self._builder.failure_reward,
            "dropped": dict(self._builder.dropped),
            "zero_variance_groups": flat,
            "curriculum_state": state,
            "curriculum": self._curriculum.snapshot(),
        }
        return chosen.model_copy(update={"metadata": {**place, **plan}}), collected

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on this epoch.

        `metadata` of the collection has the `round`, the number of `rounds`, and the ids of the
        epoch's `examples` before the curriculum skipped any; without them, the collection is
        treated as the whole epoch.
        """
        place, comparison = trajectory_collection.metadata or {}, self._adapter.comparison
        return self._curriculum.select(
            trajectory_collection,
            epoch,
            place.get("round", 0),
            place.get("examples"),
            comparison,
            rounds=place.get("rounds", 1),
        )

    async def _submit(self, sent: TrajectoryCollection, epoch: int, round: int) -> TrainingJobRef:
        """Submit the job; the same key twice is one job."""
        key = self.state.job_key(self.journal.run_id, epoch, round)
        named = sent.model_copy(update={"metadata": {**(sent.metadata or {}), "key": key}})
        if self._adapter.reads_episodes:
            await self._builder.load_episodes(named)
        job = await self._adapter.submit(named)
        self._job_refs.append(job)
        self.events.append(
            "job_submitted",
            epoch=epoch,
            round=round,
            job=(job.metadata or {}).get("job"),
            trajectories=sent.count,
            groups=len(sent.trajectories),
            dropped=dict(self._adapter.dropped),
        )
        return job

    async def _wait(self, job: TrainingJobRef, epoch: int, round: int) -> None:
        """Wait until the job has ended and its step is served; raises TrainingFailed."""
        started, limit_s = time.monotonic(), self._config.job_timeout_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                status = await self._adapter.wait_until_complete(job)
        except TimeoutError:
            message = f"the adapter did not report the end of the job within {limit_s:g} s"
            status = self._status(epoch, FAILED, f"{message} (finetuning.job_timeout_s)")
        known = {key: value for key, value in (status.metadata or {}).items() if key in JOB_KEYS}
        place = {"epoch": epoch, "round": round}
        outcome = {"job": None, "step": None, "metrics": {}, **place, **known}
        if status.status is not COMPLETED:
            message = status.message or f"the job was {status.status}"
            self.events.append("job_failed", **outcome | {"message": message})
            raise TrainingFailed(message)
        self._step = self._step if outcome["step"] is None else outcome["step"]
        if outcome.get("seconds") is None:
            outcome["seconds"] = time.monotonic() - started
        self.events.append("job_done", **outcome)
        learned = {key: outcome[key] for key in ("epoch", "round", "job", "step")}
        learned |= outcome["metrics"] or {}
        self._adapter.log_progress(job, learned, str(self._config.output_dir))
        if outcome.get("reason"):
            self._warn(f"epoch {epoch + 1}: nothing was learned: {outcome['reason']}")
        else:
            log.info("Training %s completed successfully.", self._run_id)

    def _outcome(self, epoch: int) -> TrainingJobStatus:
        """The status of an epoch whose rounds have ended."""
        rounds = range(len(self._rounds(epoch)))
        records = [r for round in rounds for r in self.journal.records("train", epoch, round)]
        job = self.state.last_job(epoch, records)
        if job is None:
            return self._status(epoch, COMPLETED, NO_GROUP)
        shown = job.model_dump(include={"job", "step", "metrics", "reason"}, exclude_unset=True)
        return self._status(epoch, COMPLETED, None, **shown)

    def _status(
        self, epoch: int, status: TrainingStatusEnum, message: str | None, **more: Any
    ) -> TrainingJobStatus:
        return TrainingJobStatus(
            run_id=self.journal.run_id,
            backend="openpipe-art",  # as in NeMo Agent Toolkit
            status=status,
            progress=100.0 if status is COMPLETED else None,
            message=message,
            metadata={"epoch": epoch, **more},
        )

    @cached_property
    def _validator(self) -> Validator:
        assert self.validation is not None, "there are no held-out examples"
        return Validator(
            self.validation, self._config, self.journal, self.events, self.state, self._adapter
        )

    def _steps_to_compare(self) -> set[int]:
        """Steps that the verdict at the end of the run may compare: its first, and the best so far.

        The reward of policy failures can fall, and then an earlier step is the best.
        """
        history, falls = self.state.history, isinstance(self._config.on_policy_failure, str)
        best = history.contenders if falls else [history.best]
        validations = (*history.scored[:1], *best)
        return {v.step for v in validations if v is not None and v.step is not None}

    @property
    def _reward_history(self) -> list[dict[str, Any]]:
        return [] if self.run_config is None else metrics.reward_history(self.state.history)

    @property
    def _validation_history(self) -> list[dict[str, Any]]:
        return [] if self.run_config is None else metrics.validation_history(self.state.history)

    def _rounds(self, epoch: int) -> list[RoundPlan]:
        """The epoch's examples, round by round."""
        return self.state.rounds(self._builder.bound_evaluation.items, epoch)

    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Log the reward; the metrics files and the plot are written in the background."""
        self._files.output_dir = Path(output_dir or self._config.output_dir)
        self._files.refresh()
        part, rounds = "progress logged", metrics.get("rounds", 1)
        if rounds > 1:  # the epoch's own reward is logged at its end
            part = f"round {metrics['round'] + 1} of {rounds}"
        _log_reward(f"Epoch {epoch + 1} {part}", metrics)

    def _log_rounds(self, epoch: int) -> None:
        """Log the reward of an epoch that has several rounds."""
        rounds = self.state.history.rounds_of(epoch)
        if rounds and rounds[-1].of > 1:
            entry = metrics.epoch_entry(epoch, rounds)
            _log_reward(f"Epoch {epoch + 1} progress logged", entry)

    def _warn(self, message: str) -> None:
        log.warning("%s", message)
        self.events.append("warning", message=message)


def _log_reward(title: str, metrics: dict[str, Any]) -> None:
    average, count = metrics["avg_reward"], metrics["num_trajectories"]
    shown = "none" if average is None else f"{average:.4f}"
    log.info("%s - Avg Reward: %s, Trajectories: %d", title, shown, count)


class RLTrainerConfig(TrainerConfig, name="rl"):
    """The loop over epochs; `finetuning:` has its settings."""


@register_trainer(config_type=RLTrainerConfig)
async def rl_trainer(config: RLTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    """Runs the epochs: validate, collect, select, submit, wait."""
    yield EpochTrainer(config)
