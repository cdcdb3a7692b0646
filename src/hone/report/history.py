"""What a run did, round by round.

In:   events, one by one
Out:  a RunHistory: rounds with their rewards and jobs, validations, seconds by phase, how it ended

An interrupted run may log something twice: the later event counts, because its result is what was
trained. Times are the exception: all of them are added up.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Self

from hone.files.events import (
    EpochCollected,
    EpochDone,
    EpochStarted,
    Event,
    FinalValidationDone,
    JobDone,
    JobFailed,
    JobSubmitted,
    LoggerStopped,
    RolloutDone,
    RoundEvent,
    RunFinished,
    RunStarted,
    ValidationResult,
    WarningLogged,
)
from hone.files.rollout_record import EVALUATOR, kinds_at_close


class Ended(NamedTuple):
    """How a training rollout ended, as its event says."""

    reward: float | None
    kind: str | None
    """`policy` or `infrastructure`; None on success."""
    reason: str | None


@dataclass(slots=True)
class Round:
    """One collect-train-publish round; an epoch has one, unless `groups_per_step` splits it."""

    epoch: int
    index: int = 0
    of: int = 1
    ended: dict[tuple[str, int], Ended] = field(default_factory=dict)
    """How each rollout ended, by example and generation."""
    failure_reward: float = 0.0
    """Reward of policy failures without one of their own: the run's `training_failure_reward`."""
    scored_before: bool = False
    """Whether the evaluator scored a rollout of an earlier round."""
    collected: EpochCollected | None = None
    submitted: JobSubmitted | None = None
    job: JobDone | JobFailed | None = None

    @property
    def trained(self) -> float:
        """Epochs that the sampled policy was trained for: its place on an axis."""
        return self.epoch + self.index / max(self.of, 1)

    @property
    def rewards(self) -> dict[tuple[str, int], float]:
        """Rewards that count, by example and generation: policy failures count too."""
        rewards = {}
        for place, reward, kind, _ in self._closed():
            if reward is None and kind == "policy":
                reward = self.failure_reward
            if reward is not None and kind != "infrastructure":
                rewards[place] = reward
        return rewards

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """`kind: reason`, by example and generation."""
        return {place: f"{kind}: {reason}" for place, _, kind, reason in self._closed() if kind}

    def _closed(self) -> Iterator[tuple[tuple[str, int], float | None, str | None, str]]:
        """Place, reward, and kind and reason of the failure of each rollout."""
        ended = tuple(self.ended.items())  # a copy: the display reads in its own thread
        recorded = ((one.kind, one.reason) for _, one in ended)
        kinds = kinds_at_close(recorded, scored_before=self.scored_before)
        for (place, one), kind in zip(ended, kinds, strict=True):
            yield place, one.reward, kind, one.reason or "unknown"

    @property
    def metrics(self) -> dict[str, Any]:
        """Numbers of what was collected, in the order of the metrics file."""
        return {} if self.collected is None else self.collected.metrics

    @property
    def learned(self) -> dict[str, Any]:
        """Metrics of the learner that are numbers; empty without a job that ended well."""
        metrics = (self.job.metrics or {}) if isinstance(self.job, JobDone) else {}
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    @property
    def dropped(self) -> Counter[str]:
        """Counts of what was not trained, by reason: left out of the round, or of its job."""
        collected, submitted = self.collected, self.submitted
        left_out = Counter(collected.dropped if collected else {})
        return left_out + Counter(submitted.dropped if submitted else {})

    @property
    def num_flat(self) -> int:
        """Groups with equal rewards."""
        return self.collected.zero_variance_groups or 0 if self.collected else 0

    @property
    def by_example(self) -> dict[str, list[float]]:
        """Rewards that count, by example."""
        groups: dict[str, list[float]] = {}
        for (example, _), reward in self.rewards.items():
            groups.setdefault(example, []).append(reward)
        return groups


@dataclass(frozen=True, slots=True)
class Validation:
    """One pass over the held-out examples.

    A rollout that failed because of the model counts: with the reward that the configuration gives
    it, or under `lowest` and `drop` with the run's `failure_reward`. A rollout that failed because of its
    environment does not count.
    """

    epoch: int
    """Epochs that the policy was trained for."""
    step: int | None
    at: float
    mean: float | None
    """None if the validation failed."""
    min: float | None
    max: float | None
    num_examples: int
    failures: int
    """Number of rollouts without their own reward."""
    policy_failures: int
    """Rollouts that failed because of the model."""
    failure_reward: float | None
    """Reward of each of those; None if there are none."""
    rewards: dict[str, list[float]]
    """Rewards that count, by example."""
    error: str | None
    attempts: dict[tuple[str, int], float | None] = field(default_factory=dict)
    """Reward of each rollout that the policy answered, by example and repetition; None if the
    environment failed it afterwards."""
    unanswered: frozenset[tuple[str, int]] = frozenset()
    """Rollouts that failed before the policy answered, by example and repetition."""

    @classmethod
    def of(cls, result: ValidationResult, failure_reward: float) -> Self:
        """`failure_reward`: reward of a policy failure under `lowest` and `drop`."""
        failed, instead = result.policy_failures, result.on_policy_failure
        reward = failure_reward if isinstance(instead, str) else instead
        rewards = {e: [r for r in all_ if r is not None] for e, all_ in result.rewards.items()}
        if isinstance(instead, str):
            for example, n in failed.items():
                rewards.setdefault(example, []).extend([reward] * n)
        counted = [r for all_ in rewards.values() for r in all_]
        attempts = _attempts(result, failure_reward)
        mean, low, high = result.avg_reward, result.min_reward, result.max_reward
        if failed and counted and not result.error:
            mean, low, high = fmean(counted), min(counted), max(counted)
        return cls(
            epoch=result.epoch,
            step=result.step,
            at=result.at,
            mean=mean,
            min=low,
            max=high,
            num_examples=len(rewards) if result.num_examples is None else result.num_examples,
            failures=result.failures,
            policy_failures=sum(failed.values()),
            failure_reward=reward if failed else None,
            rewards={example: values for example, values in rewards.items() if values},
            error=result.error,
            attempts=attempts,
            unanswered=frozenset(
                (example, repetition)
                for example, all_ in result.rewards.items()
                for repetition in range(len(all_))
                if (example, repetition) not in attempts
            ),
        )

    @property
    def unscored(self) -> int:
        """Examples without any reward: all of their rollouts failed because of the environment."""
        return max(self.num_examples - len(self.rewards), 0)

    @property
    def failure_rate(self) -> float | None:
        """Share of policy failures among the rollouts that count; None without any."""
        counted = sum(map(len, self.rewards.values()))
        return self.policy_failures / counted if counted else None


def _attempts(
    result: ValidationResult, failure_reward: float
) -> dict[tuple[str, int], float | None]:
    """`failure_reward`: reward of a policy failure whose reward is null in the event."""
    attempts: dict[tuple[str, int], float | None] = {}
    for example, rewards in result.rewards.items():
        lost, unanswered = (by.get(example, ()) for by in (result.lost, result.unanswered))
        failed = result.policy_failures.get(example, 0)
        for repetition, reward in enumerate(rewards):
            if reward is not None or repetition in lost:
                attempts[example, repetition] = reward
            elif failed and repetition not in unanswered:
                failed -= 1
                attempts[example, repetition] = failure_reward
    return attempts


PHASE_AFTER = {
    "run_started": "start_s",
    "epoch_started": "rollout_s",
    "epoch_collected": "learn_s",
    "validation_started": "validate_s",
    **dict.fromkeys(("job_done", "job_failed", "epoch_done"), "other_s"),
    **dict.fromkeys(("validation", "final_validation"), "other_s"),
}
"""Phase that begins with an event. Start is from the command to the first rollout."""


_Key = tuple[int | None, int, int | None]
"""Of a validation: round of the final comparison, or None during the run; epoch; step."""


class RunHistory:
    """A run, according to the events so far."""

    def __init__(self) -> None:
        self.run = RunStarted(at=0.0, run_id="", session=0, epochs=0, step=None)
        """The newest run_started event; an empty one before the first."""
        self.sessions = 0
        """Number of times the run was started."""
        self.finished: RunFinished | None = None
        """How the newest session ended."""
        self.warnings: list[str] = []
        self.resumed_at: list[float] = []
        """Epochs that were done when each session after the first began."""
        self.done: dict[int, EpochDone] = {}
        """Epochs that ended, failed ones included."""
        self.calls = self.tokens = self.rollouts = 0
        """Totals, including those of interrupted rounds."""
        self.phases = dict.fromkeys(PHASE_AFTER.values(), 0.0)
        """Seconds by phase, over all sessions; the time between sessions does not count."""
        self.failure_reward = 0.0
        """Reward of a policy failure in validations under `lowest` and `drop`.

        It is the smaller of 0 and the lowest reward of the run. It can fall as the run goes on; all
        validations are then counted again, so that they can be compared.
        """
        self.highest_reward = -math.inf
        """Highest reward of a rollout that the evaluator of the validations scored."""
        self.training_failure_reward = 0.0
        """The same for training rollouts: the smaller of 0 and their lowest reward so far."""
        self.has_scored = self.has_scored_validation = False
        """Whether the evaluator scored a training rollout, or one of a validation during the run."""
        self.attempts = self.validation_attempts = 0
        """Attempts to run a training rollout, or one of a validation; retries included."""
        self.retried: Counter[str] = Counter()
        """Failed attempts of training rollouts that were run again, by `kind: reason`; at once, or
        in a later session."""
        self.validation_retried: Counter[str] = Counter()
        """The same for rollouts of validations."""
        self._failed: dict[tuple[str, int, int, str, int], str] = {}
        """Failures of rollouts, by split, epoch, round, example and generation."""
        self._rounds: dict[int, dict[int, Round]] = {}
        self._results: dict[_Key, ValidationResult] = {}
        self._validations: dict[_Key, Validation] = {}
        self._phase, self._last_at = "other_s", 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        """Apply one event; a type it does not know changes only the time."""
        match event:
            case RunStarted():
                if self.sessions:
                    self.resumed_at.append(float(self.num_done))
                self.run, self.finished = event, None
                self.sessions += 1
                self._last_at, self._phase = event.command_at, "start_s"
            case EpochStarted():
                r = self._round(event)
                r.of = event.rounds
                self._note_failures(r)
            case RolloutDone():
                self._add_rollout(event)
            case EpochCollected():
                self._round(event).collected = event
            case JobSubmitted():
                self._round(event).submitted = event
            case JobDone() | JobFailed():
                self._round(event).job = event
            case ValidationResult():
                round = event.round if isinstance(event, FinalValidationDone) else None
                key = round, event.epoch, event.step
                self._results[key] = event
                self._lower_failure_reward(r for all_ in event.rewards.values() for r in all_)
                self._validations[key] = Validation.of(event, self.failure_reward)
            case EpochDone():
                self.done[event.epoch] = event
            case WarningLogged() | LoggerStopped():
                self.warnings.append(event.message)
            case RunFinished():
                self.finished = event
        self.phases[self._phase] += event.at - self._last_at
        self._last_at = event.at
        self._phase = PHASE_AFTER.get(event.type, self._phase)

    # ---- rounds ---------------------------------------------------------------------------

    @property
    def rounds(self) -> list[Round]:
        """Rounds that were collected, in order."""
        return [r for epoch in sorted(self._rounds) for r in self.rounds_of(epoch)]

    def rounds_of(self, epoch: int) -> list[Round]:
        """Rounds of one epoch that were collected."""
        rounds = self._rounds.get(epoch, {})
        return [rounds[i] for i in sorted(rounds) if rounds[i].collected is not None]

    @property
    def failed_round(self) -> Round | None:
        """The round whose failures ended the newest session: its rollouts ran, and were not collected."""
        last = self.done[max(self.done)] if self.done else None
        if (
            self.finished is None
            or last is None
            or last.status != "failed"
            or last.at < self.run.at
        ):
            return None
        rounds = sorted(self._rounds.get(last.epoch, {}).items())
        uncollected = [r for _, r in rounds if r.collected is None and r.ended]
        return uncollected[-1] if uncollected else None

    @property
    def epochs(self) -> list[int]:
        """Epochs with a round that was collected."""
        return [epoch for epoch in sorted(self._rounds) if self.rounds_of(epoch)]

    def rewards(self, epoch: int) -> dict[str, list[float]]:
        """Training rewards of an epoch that count, by example."""
        rewards: dict[str, list[float]] = {}
        for r in self.rounds_of(epoch):
            for example, values in r.by_example.items():
                rewards.setdefault(example, []).extend(values)
        return rewards

    @property
    def dropped(self) -> Counter[str]:
        """Rollouts that were not trained on, by reason."""
        return sum((r.dropped for r in self.rounds), start=Counter[str]())

    @property
    def failures(self) -> Counter[str]:
        """Training rollouts whose last attempt failed, by `kind: reason`."""
        return Counter(why for r in self.rounds for why in r.failures.values())

    @property
    def jobs(self) -> list[JobDone]:
        """Jobs that succeeded."""
        return [r.job for r in self.rounds if isinstance(r.job, JobDone)]

    # ---- validations ----------------------------------------------------------------------

    @property
    def validations(self) -> list[Validation]:
        """Validations in the order of the policies, without the comparison at the end."""
        known = tuple(self._validations.items())  # a copy: the display reads in its own thread
        during_the_run = (v for (round, *_), v in known if round is None)
        return sorted(during_the_run, key=lambda v: (v.epoch, v.step or 0))

    @property
    def scored(self) -> list[Validation]:
        """Validations with a mean reward."""
        return [v for v in self.validations if v.mean is not None and v.rewards]

    @property
    def best(self) -> Validation | None:
        """The validation with the highest mean; of equal ones the first, which moved least.

        Of a step that was validated several times, the last validation counts, as on the server. None
        if the rewards are relative: they do not compare policies.
        """
        return max(self._last_of_steps, key=lambda v: v.mean or 0.0, default=None)

    @property
    def contenders(self) -> list[Validation]:
        """The best validation, and those that become it if the reward of policy failures falls."""
        contenders: list[Validation] = []
        for v in sorted(self._last_of_steps, key=lambda v: -(v.mean or 0.0)):
            if not contenders or (v.failure_rate or 0.0) < (contenders[-1].failure_rate or 0.0):
                contenders.append(v)
        return contenders

    @property
    def _last_of_steps(self) -> list[Validation]:
        """The last validation of each step; none if the rewards are relative."""
        if self.run.validation_relative:
            return []
        return list({(v.epoch if v.step is None else v.step): v for v in self.scored}.values())

    @property
    def finals(self) -> list[tuple[Validation, Validation]]:
        """Pairs of policies that answered side by side, the earlier policy first; the last is newest.

        Only those in which both have a mean reward.
        """
        rounds: dict[int, list[Validation]] = {}
        for (round, *_), validation in tuple(self._validations.items()):
            if round is not None and validation.mean is not None:
                rounds.setdefault(round, []).append(validation)
        pairs = [sorted(pair, key=lambda v: v.epoch) for pair in rounds.values()]
        whole = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
        return sorted(whole, key=lambda pair: max(v.at for v in pair))

    # ---- the run --------------------------------------------------------------------------

    @property
    def num_done(self) -> int:
        """Number of epochs that did not fail."""
        return sum(epoch.status != "failed" for epoch in self.done.values())

    @property
    def status(self) -> str:
        """completed, failed, another status of the trainer, or unfinished."""
        return "unfinished" if self.finished is None else self.finished.status

    @property
    def seconds(self) -> float:
        """Duration of all sessions, each from its command."""
        return sum(self.phases.values())

    # ---- applying events ------------------------------------------------------------------

    def _add_rollout(self, event: RolloutDone) -> None:
        self.rollouts += 1
        self.calls += event.calls
        self.tokens += event.tokens
        self._count_attempts(event)
        training, held_out = self.run.evaluators
        if event.split != "train" or training == held_out:
            self._lower_failure_reward([event.reward])
            if event.reward is not None:
                self.highest_reward = max(self.highest_reward, event.reward)
        is_scored = event.failure_kind is None
        if event.split != "train":
            self.has_scored_validation |= is_scored and event.split == "val"
            return
        r, key = self._round(event), (event.example, event.generation)
        self.has_scored |= is_scored
        r.ended[key] = Ended(event.reward, event.failure_kind, event.failure_reason)
        lowest = self.training_failure_reward
        if event.failure_kind is None and event.reward is not None and event.reward < lowest:
            self.training_failure_reward = event.reward
            for rounds in self._rounds.values():
                for one in rounds.values():
                    one.failure_reward = event.reward

    def _count_attempts(self, event: RolloutDone) -> None:
        """Count the attempts of a rollout, and the failed ones that were run again."""
        place = event.split, event.epoch, event.round, event.example, event.generation
        again = [*event.retried]
        if (before := self._failed.pop(place, None)) is not None:
            again.append(before)  # in an earlier session
        if event.failure_kind:
            kind, reason = event.failure_kind, event.failure_reason or "unknown"
            if event.split != "train" and reason == EVALUATOR:
                kind = "infrastructure"  # a validation runs no failure of the policy again
            self._failed[place] = f"{kind}: {reason}"
        if event.split == "train":
            self.attempts += 1 + len(event.retried)
            self.retried.update(again)
        else:
            self.validation_attempts += 1 + len(event.retried)
            self.validation_retried.update(again)

    def _note_failures(self, r: Round) -> None:
        """Note why rollouts of an interrupted round failed, before some of them are run again."""
        for (example, generation), why in r.failures.items():
            self._failed["train", r.epoch, r.index, example, generation] = why

    def _lower_failure_reward(self, rewards: Iterable[float | None]) -> None:
        """`rewards` are from the evaluator of the validations."""
        lowest = min((r for r in rewards if r is not None), default=0.0)
        if lowest < self.failure_reward:
            self.failure_reward = lowest
            for key, result in self._results.items():
                self._validations[key] = Validation.of(result, lowest)

    def _round(self, event: RoundEvent) -> Round:
        rounds = self._rounds.setdefault(event.epoch, {})
        new = Round(
            event.epoch,
            event.round,
            failure_reward=self.training_failure_reward,
            scored_before=self.has_scored,
        )
        return rounds.setdefault(event.round, new)
