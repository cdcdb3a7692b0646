"""Run the policy on held-out examples, at one point of the run, and two policies at its end.

In:   an Evaluation of the validation set, the epochs of training behind it, the journal
Out:  the fields of a `validation` event: mean, bounds, rewards by example, failures, or an error;
      at the end two `final_validation` events, of policies that answered side by side

A rollout that failed because of the model lowers the mean: without it, a policy that breaks on half
of the examples and solves the rest would score 1. A rollout that failed because of its environment
says nothing about the model and is left out; where too many did, the validation has no mean. The
comparison at the end has one: a rollout that failed is left out of both sides (report/comparison.py).
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hone.config.schema import FinetuneConfig
from hone.evaluation.base import EvalInputItem
from hone.evaluation.run import Evaluation, ItemResult
from hone.files.event_log import EventLog
from hone.files.events import FinalValidationDone, ValidationResult
from hone.files.rollout_record import RolloutRecord, Split, at_close
from hone.finetune.base import RoundRequest, TrainerAdapter
from hone.finetune.journal import Journal
from hone.finetune.records import Place, record_of, reward_or_substitute, score_of_reward
from hone.finetune.resume import RunState
from hone.finetune.rollouts import Rollouts
from hone.finetune.round_failures import crash_warning, infrastructure_error
from hone.report.comparison import to_compare
from hone.report.history import Validation
from hone.report.text import counted, failed
from hone.tasks.tally import run_together

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

    async def validate(self, epoch: int, step: int | None) -> dict[str, Any]:
        """Run every example `validation.reps` times, without the rollouts that the journal has."""
        started, rollouts = time.monotonic(), self._rollouts("val", epoch)
        self._announce(epoch, [rollouts])
        records = await run_together(
            rollouts.run(item, rep, self._record, temperature=self._temperature)
            for item, rep in self._places()
        )
        records = rollouts.close(records)
        outcome = self._outcome(records, f"validation after {counted(epoch, 'epoch')}")
        return {
            "epoch": epoch,
            "step": step,
            **outcome,
            **missing(records),
            "seconds": time.monotonic() - started,
        }

    async def compare(self) -> None:
        """Let the run's first policy and the chosen one answer side by side, unless they have.

        Each example is answered by both, one right after the other and in random order: an outage, or
        a service that changes with time, then hits both policies alike.
        """
        pair = to_compare(self.state.history)
        if pair is None or not self.adapter.serves_steps or any(v.step is None for v in pair):
            return
        started, round = time.monotonic(), pair[1].epoch
        sides = [self._rollouts("final", v.epoch, round) for v in pair]
        self._announce(round, sides, final=True)
        ordered = [
            (side, item, rep)
            for item, rep in self._places()
            for side in random.Random(f"{self.config.seed}:{item.id}:{rep}").sample((0, 1), 2)
        ]
        ended = await run_together(
            sides[side].run(
                item, rep, self._record, temperature=self._temperature, step=pair[side].step
            )
            for side, item, rep in ordered
        )
        # Both sides are one round: an evaluator that scores only one of the policies is not broken.
        places = [(side, item.id, rep) for side, item, rep in ordered]
        before = self.journal.scored_before("final", pair[1].epoch, round)
        closed = at_close(ended, scored_before=before)
        by_place = dict(zip(places, zip(ended, closed, strict=True), strict=True))
        outcomes = []
        for side, (validation, rollouts) in enumerate(zip(pair, sides, strict=True)):
            both = [by_place[side, item.id, rep] for item, rep in self._places()]
            records = [record for _, record in both]
            rollouts.write_closed([record for record, _ in both], records)
            outcomes.append(self._final_outcome(records, validation))
        seconds = time.monotonic() - started
        for validation, outcome in zip(pair, outcomes, strict=True):
            place = {"epoch": validation.epoch, "step": validation.step, "round": round}
            self.record("final_validation", {**place, **outcome, "seconds": seconds})

    def _final_outcome(self, records: Sequence[RolloutRecord], of: Validation) -> dict[str, Any]:
        where = f"final validation of step {of.step}"
        outcome = {**self._outcome(records, where, final=True), **missing(records)}
        answered = {s for r in records for s in r.policy_steps}  # including those of helper models
        if answered and of.step not in answered and not outcome["error"]:
            error = f"{where}: step {max(answered)} answered instead"
            outcome |= {"avg_reward": None, "error": error}
        return outcome

    def _places(self) -> list[tuple[EvalInputItem, int]]:
        """Every example and repetition."""
        reps = range(self.config.validation.reps)
        return [(item, rep) for item in self.evaluation.items for rep in reps]

    def _rollouts(self, split: Split, epoch: int, round: int = 0) -> Rollouts:
        journal = self.journal
        request = RoundRequest(
            run_id=journal.run_id,
            epoch=epoch,
            round=round,
            journal=journal,
            events=self.events,
            session=journal.session,
        )
        return Rollouts(
            self.evaluation,
            self.config,
            request,
            range(self.config.validation.reps),
            known=journal.finished(split, epoch, round),
            split=split,
        )

    def _announce(self, epoch: int, sides: Sequence[Rollouts], *, final: bool = False) -> None:
        self.events.append(
            "validation_started",
            epoch=epoch,
            rollouts=len(sides) * len(self._places()),
            resumed=sum(len(side.known) for side in sides),
            final=final,
        )

    @property
    def _temperature(self) -> float | None:
        return 0.0 if self.config.validation.greedy else None

    async def _record(self, result: ItemResult, place: Place) -> RolloutRecord:
        score, failure = score_of_reward(result, self.config.reward_name)
        reward = reward_or_substitute(score and score.value, failure, self.config)
        calls = self.config.record_calls
        return record_of(result, place, reward=reward, failure=failure, with_calls=calls)

    def _outcome(
        self, records: Sequence[RolloutRecord], where: str, *, final: bool = False
    ) -> dict[str, Any]:
        """`final`: any number of rollouts may have failed because of the infrastructure."""
        rewards: dict[str, list[float | None]] = {}
        for record in records:
            rewards.setdefault(record.example, []).append(record.reward)
        policy_failures = Counter(r.example for r in records if r.failure_kind == "policy")
        instead, allowed = self.config.on_policy_failure, self.config.max_infrastructure_failures
        scored = [record.reward for record in records if record.reward is not None]
        if isinstance(instead, str):
            scored += [self.state.history.failure_reward] * policy_failures.total()
        # A trained policy that crashes its agent is a result, so a validation only warns.
        if crash := crash_warning(records, where=where):
            log.warning("%s", crash)
            self.events.append("warning", message=crash)
        error = infrastructure_error(records, where=where, allowed=allowed)
        if final and scored:
            error = None
        elif error is not None:
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
        history = self.state.history
        if history.run.validation_relative:
            return  # the server would choose NAME@best by it
        validations = [v for v in history.validations if v.mean is not None]
        for step, one in {v.step: v for v in validations}.items():
            values = {"reward": one.mean or 0.0, "failure_rate": one.failure_rate or 0.0}
            if self._sent.get(step) != values:
                self._sent[step] = values
                await self.adapter.log_metrics(values, split="val", step=step)


def missing(records: Sequence[RolloutRecord]) -> dict[str, dict[str, list[int]]]:
    """Rollouts that the environment failed, before and after the policy answered: fields of the event.

    Positions among the records of their example.
    """
    unanswered: dict[str, list[int]] = {}
    lost: dict[str, list[int]] = {}
    seen: Counter[str] = Counter()
    for record in records:
        if record.reward is None and record.failure_kind == "infrastructure":
            kind = lost if record.answered else unanswered
            kind.setdefault(record.example, []).append(seen[record.example])
        seen[record.example] += 1
    return {"unanswered": unanswered, "lost": lost}
