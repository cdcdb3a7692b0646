"""What a run did, round by round.

In:   events, one by one
Out:  a History: rounds with their rewards and jobs, validations, seconds by phase, how it ended

An interrupted run may log something twice: the later event counts, because what it led to is what
was trained. Times are the exception: all of them were spent.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from hone.events import (
    EpochCollected,
    EpochDone,
    EpochStarted,
    Event,
    FinalValidationDone,
    JobDone,
    JobFailed,
    RolloutDone,
    RoundEvent,
    RunFinished,
    RunStarted,
    ValidationDone,
    ValidationResult,
    ValidationStarted,
    WarningLogged,
)
from hone.report.validations import Validation


@dataclass(slots=True)
class Round:
    """One collect-train-publish round; an epoch has one, unless `groups_per_step` splits it."""

    epoch: int
    index: int = 0
    of: int = 1
    rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    """By example and generation."""
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    """`kind: reason`, by example and generation."""
    collected: EpochCollected | None = None
    job: JobDone | JobFailed | None = None

    @property
    def trained(self) -> float:
        """Epochs that the sampled policy was trained for: its place on an axis."""
        return self.epoch + self.index / max(self.of, 1)

    @property
    def metrics(self) -> dict[str, Any]:
        """Numbers of what was collected, in the order of the metrics file."""
        return {} if self.collected is None else self.collected.metrics

    @property
    def learned(self) -> dict[str, Any]:
        """Metrics of the learner; empty without a job that ended well."""
        return dict(self.job.metrics or {}) if isinstance(self.job, JobDone) else {}

    @property
    def num_flat(self) -> int:
        """Groups with equal rewards."""
        return self.collected.zero_variance_groups or 0 if self.collected else 0

    @property
    def by_example(self) -> dict[str, list[float]]:
        """Rewards by example."""
        groups: dict[str, list[float]] = {}
        for (example, _), reward in self.rewards.items():
            groups.setdefault(example, []).append(reward)
        return groups


PHASES = ("start_s", "rollout_s", "learn_s", "validate_s")
"""Start is the time from the command to the first rollout: server, model, checks."""
_PHASE_AFTER = {
    "epoch_started": "rollout_s",
    "validation_started": "validate_s",
    "job_submitted": "learn_s",
    "epoch_collected": None,
    "job_done": None,
    "job_failed": None,
    "validation": None,
    "final_validation": None,
    "epoch_done": None,
}
"""Phase that begins with an event; None if one ends."""


class _Clock:
    """Seconds by phase, as epochs measured them; from the times of events where none did."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._estimated: dict[str, float] = {}
        """Part of `spent` that a measured value will replace."""
        self._phase: str | None = None
        self._last = 0.0

    def add(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._estimated, self._phase, self._last = {}, "start_s", event.command_at
        if self._phase is not None:
            self.spent[self._phase] += event.at - self._last
            estimated = self._estimated.get(self._phase, 0.0)
            self._estimated[self._phase] = estimated + event.at - self._last
        self._last = event.at
        if isinstance(event, ValidationResult):
            self._replace("validate_s", event.seconds)
        elif isinstance(event, EpochDone):
            for name in ("rollout_s", "learn_s"):
                self._replace(name, event.phases.get(name))
        self._phase = _PHASE_AFTER.get(event.type, self._phase)

    def _replace(self, name: str, measured: float | None) -> None:
        estimated = self._estimated.pop(name, 0.0)
        if measured is not None:
            self.spent[name] += measured - estimated


class History:
    """A run, as far as its events are known."""

    def __init__(self) -> None:
        self.run = RunStarted(at=0.0, run_id="", session=0, epochs=0, step=None)
        """The newest run_started; an empty one before the first."""
        self.sessions = 0
        """Times the run was started."""
        self.finished: RunFinished | None = None
        """How the newest session ended."""
        self.warnings: list[str] = []
        self.resumed_at: list[float] = []
        """Epochs that were done when a session after the first began to work."""
        self.done: dict[int, EpochDone] = {}
        self.calls = self.tokens = self.rollouts = 0
        """Totals, those of interrupted rounds included."""
        self.failure_reward = 0.0
        """Reward of a policy failure in validations under `drop`.

        It is the smaller of 0 and the lowest reward of the run. It can fall as the run goes on; all
        validations are then counted again, so that they can be compared.
        """
        self._rounds: dict[int, dict[int, Round]] = {}
        self._validations: dict[tuple[int, int | None], ValidationDone] = {}
        self._counted: dict[tuple[int, int | None], Validation] = {}
        self._finals: dict[tuple[int, int | None], FinalValidationDone] = {}
        self._spans: list[list[float]] = []
        self._clock = _Clock()
        self._awaiting_work = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        """Apply one event; a type it does not know changes only the time."""
        if self._spans and not isinstance(event, RunStarted):
            self._spans[-1][1] = event.at
        self._clock.add(event)
        match event:
            case RunStarted():
                self._start(event)
            case EpochStarted():
                round = self._round(event)
                round.of = event.rounds
                self._resume_at(round.trained)
            case RolloutDone():
                self._add_rollout(event)
            case EpochCollected():
                self._round(event).collected = event
            case JobDone() | JobFailed():
                self._round(event).job = event
            case ValidationStarted():
                self._resume_at(float(len(self.done) if event.final else event.epoch))
            case ValidationResult():
                self._add_validation(event)
            case EpochDone():
                self.done[event.epoch] = event
            case WarningLogged():
                self.warnings.append(event.message)
            case RunFinished():
                self.finished = event

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
    def epochs(self) -> list[int]:
        """Epochs with a round that was collected."""
        return [epoch for epoch in sorted(self._rounds) if self.rounds_of(epoch)]

    def rewards(self, epoch: int) -> dict[str, list[float]]:
        """Training rewards of an epoch, by example."""
        rewards: dict[str, list[float]] = {}
        for r in self.rounds_of(epoch):
            for example, values in r.by_example.items():
                rewards.setdefault(example, []).extend(values)
        return rewards

    @property
    def dropped(self) -> Counter[str]:
        """Rollouts that were not trained on, by reason."""
        total: Counter[str] = Counter()
        for r in self.rounds:
            total.update((r.collected and r.collected.dropped) or {})
        return total

    @property
    def failures(self) -> Counter[str]:
        """Training rollouts that failed, by `kind: reason`."""
        return Counter(why for r in self.rounds for why in r.failures.values())

    @property
    def jobs(self) -> list[JobDone]:
        """Jobs that ended well."""
        return [r.job for r in self.rounds if isinstance(r.job, JobDone)]

    # ---- validations ----------------------------------------------------------------------

    @property
    def validations(self) -> list[Validation]:
        for key, event in tuple(self._validations.items()):  # the display reads in its own thread
            if key not in self._counted:
                self._counted[key] = Validation.of(event, self.failure_reward)
        return sorted(self._counted.values(), key=lambda v: (v.epoch, v.step or 0))

    @property
    def scored(self) -> list[Validation]:
        """Validations with a mean reward."""
        return [v for v in self.validations if v.mean is not None and v.rewards]

    @property
    def best(self) -> Validation | None:
        """The highest mean; the first of equal ones, because it moved least from the base model."""
        return max(self.scored, key=lambda v: v.mean or 0.0, default=None)

    def final(self, of: Validation) -> Validation | None:
        """What the same policy answered at the end of the run; None if it did not."""
        event = self._finals.get((of.epoch, of.step))
        return None if event is None else Validation.of(event, self.failure_reward)

    # ---- the run --------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """completed, failed, another status of the trainer, or unfinished."""
        return "unfinished" if self.finished is None else self.finished.status

    @property
    def seconds(self) -> float:
        """Duration of all sessions, each from its command; the time between them does not count."""
        return sum(end - start for start, end in self._spans)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase; they add up to `seconds`."""
        spent = dict(self._clock.spent)
        spent["other_s"] = max(0.0, self.seconds - sum(spent.values()))
        return spent

    # ---- applying events ------------------------------------------------------------------

    def _start(self, event: RunStarted) -> None:
        self._awaiting_work = self.sessions > 0
        self.run, self.finished = event, None
        self.sessions += 1
        self._spans.append([event.command_at, event.at])

    def _resume_at(self, trained: float) -> None:
        if self._awaiting_work:
            self.resumed_at.append(trained)
        self._awaiting_work = False

    def _add_rollout(self, event: RolloutDone) -> None:
        self.rollouts += 1
        self.calls += event.calls or 0
        self.tokens += event.tokens or 0
        training, held_out = self.run.evaluators
        if event.split != "train" or training == held_out:
            self._lower_failure_reward(event.reward)
        if event.split != "train":
            return
        r, key = self._round(event), (event.example, event.generation)
        r.rewards.pop(key, None)
        r.failures.pop(key, None)
        if event.reward is not None:
            r.rewards[key] = event.reward
        if event.failure_kind:
            r.failures[key] = f"{event.failure_kind}: {event.failure_reason or 'unknown'}"

    def _add_validation(self, event: ValidationResult) -> None:
        for rewards in event.rewards.values():
            for reward in rewards:
                self._lower_failure_reward(reward)
        key = event.epoch, event.step
        if isinstance(event, FinalValidationDone):
            self._finals[key] = event
        elif isinstance(event, ValidationDone):
            self._validations[key] = event
            self._counted.pop(key, None)

    def _lower_failure_reward(self, reward: float | None) -> None:
        """`reward` is from the evaluator of the validations."""
        if reward is not None and reward < self.failure_reward:
            self.failure_reward = reward
            self._counted.clear()

    def _round(self, event: RoundEvent) -> Round:
        rounds = self._rounds.setdefault(event.epoch, {})
        return rounds.setdefault(event.round, Round(event.epoch, event.round))
