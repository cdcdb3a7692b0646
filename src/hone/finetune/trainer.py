"""THE CLIENT LOOP. It turns once an epoch: validate, collect, select, submit, wait, log.

In:   a TrajectoryBuilder, a TrainerAdapter, the `finetuning:` section, the run's journal and events
Out:  one TrainingJobStatus an epoch; everything else stands in events.jsonl

    run                       every epoch that is not done yet
      _validate                 held-out reward: before the first epoch, at each interval, at the end
      _epoch                    one epoch: its rounds, which is one unless `groups_per_step` is set
        run_epoch                 collect -> select -> note -> submit
        _wait                     until the job has ended and its step is served

Nothing here remembers what happened: that is asked of standing.py, which knows it from the run's
events, whether the epochs before this one ran in this process or in one that was killed. What is
trained is written down before it is sent, under a key by which the server knows it again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from hone.config.registry import TrainerConfig, register_trainer
from hone.errors import RolloutError, TrainingFailed
from hone.finetune.base import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from hone.finetune.bound import BoundTrainer
from hone.finetune.journal import Submission
from hone.finetune.stats import (
    check_failures,
    measured,
    none_collected,
    policy_warning,
)
from hone.finetune.validation import validate
from hone.report.comparison import to_confirm

if TYPE_CHECKING:
    from hone.config.build import Builder

log = logging.getLogger("hone")

GRACE_S = 60.0
"""Beyond the adapter's own deadline, which cancels the job as well."""
COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


class ARTTrainer(BoundTrainer):
    """Runs the epochs of a finetuning run, from wherever it stands."""

    # ---- the loop -------------------------------------------------------------------------

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Every epoch that is not done yet; stops at one that failed."""
        standing, statuses = self._standing, []
        self._phases.take()
        for epoch in range(num_epochs):
            if standing.is_done(epoch):
                statuses.append(self._outcome(epoch))
                continue
            if epoch % self._validation_interval == 0:
                await self._validate(epoch)
            if standing.reason_to_stop():
                break
            statuses.append(await self._epoch(epoch, num_epochs))
            if statuses[-1].status is not COMPLETED:
                return statuses
        await self._validate(len(statuses))
        await self._confirm()
        await self._adapter.close_run(self.journal.run_id)
        return statuses

    async def _epoch(self, epoch: int, num_epochs: int) -> TrainingJobStatus:
        """One epoch; whatever stops it becomes its status."""
        log.info("Starting epoch %d for run %s", epoch + 1, self._run_id)
        try:
            for round, visit in enumerate(self._rounds(epoch)):
                if visit.items and not self._standing.is_over(epoch, round):
                    job = await self.run_epoch(epoch, self.journal.run_id, round)
                    if job is not None:
                        await self._wait(job, epoch, round)
            status = self._outcome(epoch)
        except Exception as error:  # noqa: BLE001  # plugins' code: what it raises ends the run, as data
            status = self._failure(epoch, error)
        self.events.append(
            "epoch_done", epoch=epoch, status=status.status, phases=self._phases.take()
        )
        self._say_how_it_went(epoch, num_epochs, status)
        return status

    async def run_epoch(self, epoch: int, run_id: str, round: int = 0) -> TrainingJobRef | None:
        """One round: collect, select, note, submit; None where there is nothing to train on."""
        noted = self.journal.submitted(epoch, round)
        if noted is None:
            collection = await self._collect(epoch, round)
            noted = self._select(collection, epoch, round)
            if collection.trajectories:
                self.journal.note_submission(epoch, round, noted)
        self.events.append("epoch_collected", **noted.collected)
        self._say_what_was_dropped(epoch, noted)
        if not noted.collection.trajectories:
            return None
        job = await self._submit(noted, epoch, round)
        self.log_progress(epoch, noted.collected["metrics"])
        await self._log_to_backend(noted)
        return job

    # ---- its stages -----------------------------------------------------------------------

    async def _validate(self, epoch: int) -> None:
        """The reward on held-out examples after so many epochs, unless it is known."""
        if self.validation is None or self._standing.is_validated(epoch):
            return
        with self._phases.timed("validate_s"):
            found = await self.run_validation_evaluation(epoch, self.journal.run_id)
        found.pop("dataset_type")
        # By this the server knows which step is NAME@best; so before the event that says it was
        # done.
        await self._log_validation(epoch, found)
        self.events.append("validation", **found)
        self._files.refresh()

    async def _confirm(self) -> None:
        """Let the first policy and the chosen one answer anew, where a step was chosen."""
        greedy = self._config.validation.greedy  # which would give the same answers again
        if self.validation is None or greedy or not self._adapter.serves_steps:
            return
        for earlier in to_confirm(self._standing.history):
            if earlier.step is None:
                return
            with self._phases.timed("validate_s"):
                found = await self._answer_held_out(earlier.epoch, earlier.step, final=True)
            self._say_final(found)
            self.events.append("final_validation", **found)
            if found["error"]:
                return

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        if self.validation is None:
            return await super().run_validation_evaluation(epoch, run_id)
        found = await self._answer_held_out(epoch, self._step)
        return {**found, "dataset_type": "validation"}

    async def _answer_held_out(
        self, epoch: int, step: int | None, *, final: bool = False
    ) -> dict[str, Any]:
        assert self.validation is not None, "there are no held-out examples"
        return await validate(
            self.validation,
            epoch=epoch,
            step=step,
            config=self._config,
            journal=self.journal,
            events=self.events,
            history=self._standing.history,
            final=final,
        )

    async def _collect(self, epoch: int, round: int) -> TrajectoryCollection:
        """Run the round's examples; refused where too many rollouts failed."""
        run_id, rounds = self.journal.run_id, self._rounds(epoch)
        items = rounds[round].items
        meta = {
            "epoch": epoch,
            "round": round,
            "run_id": run_id,
            "items": items,
            "journal": self.journal,
            "session": self.journal.session,
            "failed_before": self._standing.has_failed(epoch),
            "events": self.events,
            "trainer_config": self.trainer_config,
        }
        self.events.append(
            "epoch_started",
            epoch=epoch,
            round=round,
            rounds=len(rounds),
            step=self._step,
            rollouts=len(items) * getattr(self._builder, "num_generations", 1),
            resumed=len(self.journal.finished("train", epoch, round)),
        )
        with self._phases.timed("rollout_s"):
            await self._builder.start_run(run_id, meta)
            collection = await self._builder.finalize(run_id, meta)
        records, where = self.journal.records("train", epoch, round), f"epoch {epoch + 1}"
        check_failures(records, where=where, allowed=self._config.max_infrastructure_failures)
        if warning := policy_warning(records, where=where):
            self._warn(warning)
        return collection

    def _select(self, collection: TrajectoryCollection, epoch: int, round: int) -> Submission:
        """What of it is trained, in the form in which it will be sent."""
        rounds = self._rounds(epoch)
        self._curriculum = self._standing.curriculum()
        chosen = self._curriculum.select(
            collection, epoch, round, rounds[round].drawn, self._comparison
        )
        self._curriculum_state = self._curriculum.state
        state = self.get_curriculum_state() if self._curriculum.config.enabled else None
        place = {"epoch": epoch, "round": round}
        plan = {"rounds": len(rounds), "epochs": self._config.num_epochs}
        return Submission(
            collection=chosen.model_copy(update={"metadata": {**place, **plan}}),
            collected={
                **place,
                "step": self._step,
                "metrics": measured(
                    collection, chosen, state["current_percentile"] if state else 1.0
                ),
                "dropped": dict(self._builder.dropped),
                "zero_variance_groups": self._comparison.num_flat(collection.trajectories),
                "curriculum_state": state,
                "curriculum": self._curriculum.snapshot(),
            },
        )

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on this epoch, for those who have all of them at once."""
        return self._curriculum.select(trajectory_collection, epoch, comparison=self._comparison)

    async def _submit(self, noted: Submission, epoch: int, round: int) -> TrainingJobRef:
        """Send it; sent twice under one key, it is one job."""
        # A job that failed is not asked for again: the server would answer with the failure.
        again = self._standing.failed_jobs(epoch, round)
        key = f"{self._run_id}:{epoch}:{round}" + (f":again{again}" if again else "")
        sent = noted.collection
        named = sent.model_copy(update={"metadata": {**(sent.metadata or {}), "key": key}})
        with self._phases.timed("learn_s"):
            job = await self._adapter.submit(named)
        self._job_refs.append(job)
        self.events.append(
            "job_submitted",
            epoch=epoch,
            round=round,
            job=(job.metadata or {}).get("job"),
            trajectories=sent.count,
            groups=len(sent.trajectories),
        )
        return job

    async def _log_to_backend(self, noted: Submission) -> None:
        """While the job runs: what the policy earned, and room for the next checkpoint."""
        found = noted.collected["metrics"]
        await self._adapter.log_metrics(
            {"reward": found["avg_reward"], "trajectories": found["num_trajectories"]},
            split="train",
            step=noted.collected["step"],
        )
        if self._config.keep_checkpoints is not None:
            await self._adapter.prune(self._config.keep_checkpoints)

    async def _wait(self, job: TrainingJobRef, epoch: int, round: int) -> None:
        """Until the job has ended and its step is served; raises if it did not end well."""
        started, limit_s = time.monotonic(), self._config.job_timeout_s + GRACE_S
        try:
            with self._phases.timed("learn_s"):
                async with asyncio.timeout(limit_s):
                    status = await self._adapter.wait_until_complete(job)
        except TimeoutError:
            said = f"the adapter did not say within {limit_s:g} s how the job ended"
            status = self._status(epoch, FAILED, f"{said} (finetuning.job_timeout_s)")
        told = {"job": None, "step": None, "metrics": {}} | (status.metadata or {})
        told |= {"epoch": epoch, "round": round}
        if status.status is not COMPLETED:
            message = status.message or f"the job was {status.status}"
            self.events.append("job_failed", **told | {"message": message})
            raise TrainingFailed(message)
        self._step = self._step if told["step"] is None else told["step"]
        self.events.append("job_done", **{"seconds": time.monotonic() - started} | told)
        log.info("Training %s completed successfully.", self._run_id)
        if told.get("reason"):
            self._warn(f"epoch {epoch + 1}: nothing was learned: {told['reason']}")

    def _outcome(self, epoch: int) -> TrainingJobStatus:
        """Of an epoch whose rounds are over."""
        if not self._standing.collected(epoch):
            targets = self._config.target_functions
            raise RolloutError(none_collected(epoch, self._standing.dropped(epoch), targets))
        job = self._standing.last_job(epoch)
        if job is None:
            return self._status(epoch, COMPLETED, "No trajectories to train on")
        known = job.model_dump(include={"job", "step", "metrics", "reason"}, exclude_unset=True)
        return self._status(epoch, COMPLETED, None, **known)


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """The loop over epochs; all it needs to know stands in `finetuning:`."""


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: "Builder") -> AsyncIterator[ARTTrainer]:
    """Validates, collects, selects, submits and waits, epoch after epoch."""
    yield ARTTrainer(config)
