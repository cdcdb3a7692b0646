"""Run the policy on held-out examples, at one point of the run.

In:   an Evaluation of the validation set, the epochs of training behind it, the journal
Out:  the fields of a `validation` event: mean, bounds, rewards by example, failures, or an error

A rollout that failed because of the model lowers the mean: without it, a policy that breaks on half
of the examples and solves the rest would score 1. A rollout that failed because of its environment
says nothing about the model and is left out; where too many did, the validation has no mean.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hone.config.schema import FinetuneConfig
from hone.evaluation.run import Evaluation, ItemResult
from hone.event_log import EventLog
from hone.events import FinalValidationDone, ValidationResult
from hone.finetune.base import TrainerAdapter
from hone.finetune.curriculum import crash_error, infrastructure_error
from hone.finetune.journal import Journal
from hone.finetune.records import reward_or_substitute
from hone.finetune.resume import RunState
from hone.finetune.rollouts import Rollouts
from hone.report.comparison import to_confirm
from hone.report.history import Validation
from hone.report.text import counted, failed
from hone.rollout_record import RolloutRecord
from hone.tally import run_together

log = logging.getLogger("hone")


class Validator:
    """Measures the policy of a run on its held-out examples."""

    def __init__(
        self,
        evaluation: Evaluation,
        config: FinetuneConfig,
        journal: Journal,
        events: EventLog,
        state: RunState,
        adapter: TrainerAdapter,
    ) -> None:
        self.evaluation, self.config, self.adapter = evaluation, config, adapter
        self.journal, self.events, self.state = journal, events, state
        self._sent: dict[int | None, dict[str, float]] = {}
        """The metrics that this process sent to the backend, by validated step."""

    async def validate(
        self, epoch: int, step: int | None, *, final: bool = False
    ) -> dict[str, Any]:
        """Run every example `validation.reps` times, without the rollouts that the journal has.

        `final`: `step` answers, which may be an earlier one, instead of the newest.
        """
        started, split = time.monotonic(), "final" if final else "val"
        items, reps = self.evaluation.items, range(self.config.validation.reps)
        known = self.journal.finished(split, epoch)
        self.events.append(
            "validation_started",
            epoch=epoch,
            rollouts=len(items) * len(reps),
            resumed=len(known),
            final=final,
        )
        rollouts = Rollouts(
            self.evaluation,
            self.config,
            items,
            reps,
            known=known,
            run_id=self.journal.run_id,
            journal=self.journal,
            events=self.events,
            session=self.journal.session,
            split=split,
            epoch=epoch,
        )
        temperature = 0.0 if self.config.validation.greedy else None
        options = {"temperature": temperature, "step": step if final else None}
        records = await run_together(
            rollouts.run(item, rep, self._finish, **options) for item in items for rep in reps
        )
        records = rollouts.close(records)
        after = f"validation after {counted(epoch, 'epoch')}"
        where = f"final validation of step {step}" if final else after
        outcome = self._outcome(records, where)
        answered = {
            s for record in records for s in record.policy_steps
        }  # including those of helper models
        if final and answered and step not in answered and not outcome["error"]:
            error = f"{where}: step {max(answered)} answered instead"
            outcome |= {"avg_reward": None, "error": error}
        return {"epoch": epoch, "step": step, **outcome, "seconds": time.monotonic() - started}

    async def confirm(self) -> None:
        """Run the first and the chosen policy again, if a step was chosen."""
        greedy = self.config.validation.greedy  # would give the same answers again
        for earlier in () if greedy else to_confirm(self.state.history):
            if earlier.step is None or not self.adapter.serves_steps:
                return
            outcome = await self.validate(earlier.epoch, earlier.step, final=True)
            self.record("final_validation", outcome)
            if outcome["error"]:
                return

    async def _finish(self, record: RolloutRecord, result: ItemResult) -> RolloutRecord:
        return record.model_copy(update={"reward": reward_or_substitute(record, self.config)})

    def _outcome(self, records: Sequence[RolloutRecord], where: str) -> dict[str, Any]:
        rewards: dict[str, list[float | None]] = {}
        for record in records:
            rewards.setdefault(record.example, []).append(record.reward)
        policy_failures = Counter(r.example for r in records if r.failure_kind == "policy")
        instead, allowed = self.config.on_policy_failure, self.config.max_infrastructure_failures
        scored = [record.reward for record in records if record.reward is not None]
        if isinstance(instead, str):
            scored += [self.state.history.failure_reward] * policy_failures.total()
        # A trained policy that crashes its agent is a result, so a validation only warns.
        if crash := crash_error(records, where=where):
            log.warning("%s", crash)
            self.events.append("warning", message=crash)
        error = infrastructure_error(records, where=where, allowed=allowed)
        if error is not None:
            scored = []
        elif not scored:
            error = f"{where}: no rollout could be scored"
        return {
            "avg_reward": fmean(scored) if scored else None,
            "min_reward": min(scored, default=None),
            "max_reward": max(scored, default=None),
            "num_examples": len(rewards),
            "failures": sum(record.reward is None for record in records),
            "policy_failures": dict(policy_failures),
            "on_policy_failure": instead if isinstance(instead, str) else instead.reward,
            "rewards": rewards,
            "error": error,
        }

    # ---- what it reports ---------------------------------------------------------------------

    def record(self, type: str, outcome: dict[str, Any]) -> None:
        """Append the event of a validation, and log its result."""
        event = self.events.append(type, **outcome)
        assert isinstance(event, ValidationResult), type
        validation = Validation.of(event, self.state.history.failure_reward)
        if validation.mean is None:
            log.warning("%s", validation.error)
            self.events.append("warning", message=validation.error)
        else:
            title = f"Validation after {counted(event.epoch, 'epoch')}"
            if isinstance(event, FinalValidationDone):
                title = f"Final validation of step {event.step}"
            log.info("%s - Avg Reward: %.4f%s", title, validation.mean, failed(validation))

    async def send(self) -> None:
        """Send the backend every validated step's reward that it does not have yet.

        Under `lowest` and `drop`, a failure of the model counts as the run's lowest reward. Where that fell, the
        rewards of earlier steps have changed.
        """
        validations = [v for v in self.state.history.validations if v.mean is not None]
        for step, one in {v.step: v for v in validations}.items():
            values = {"reward": one.mean or 0.0, "failure_rate": one.failure_rate or 0.0}
            if self._sent.get(step) != values:
                self._sent[step] = values
                await self.adapter.log_metrics(values, split="val", step=step)
