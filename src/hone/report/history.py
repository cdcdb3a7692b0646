"""What a run did, round by round, put together from its events.

In:   events, all at once or one by one as they happen
Out:  a History: rounds with their rewards and jobs, validations, time by phase, how it ended

Where a run was interrupted, something may have happened twice: the later event counts, as what it
led to is what was trained. Times are the exception: all of them were spent.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hone.events import Event
from hone.report.validations import Validation


@dataclass(slots=True)
class Round:
    """One collect-train-publish round; an epoch has one, unless `groups_per_step` splits it."""

    epoch: int
    index: int = 0
    of: int = 1
    rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of each (example, generation) that could be scored."""
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    """`kind: reason` of each that could not."""
    collected: Event | None = None
    """epoch_collected."""
    job: Event | None = None
    """job_done or job_failed."""

    @property
    def trained(self) -> float:
        """Epochs of training behind the policy that sampled it: where it stands on an axis."""
        return self.epoch + self.index / max(self.of, 1)

    @property
    def metrics(self) -> dict[str, Any]:
        """What was collected, in the order of the metrics file."""
        return {} if self.collected is None else self.collected["metrics"]

    @property
    def learned(self) -> dict[str, float]:
        """What its job measured; nothing without one that ended well."""
        return dict(self.job["metrics"] or {}) if self.job and "metrics" in self.job else {}


PHASES = ("start_s", "rollout_s", "learn_s", "validate_s")
"""Start: from the command to the first rollout: the server, the model, the checks before it."""
_STAGES = {
    "epoch_started": "rollout_s",
    "validation_started": "validate_s",
    "job_submitted": "learn_s",
    "epoch_collected": None,
    "job_done": None,
    "job_failed": None,
    "validation": None,
    "final_validation": None,
}
"""What begins with an event, or ends."""


def _began(event: Event) -> float:
    """When the command of this session was given."""
    return min(event["at"], event.get("began", event["at"]))


class _Clock:
    """Seconds by phase. An epoch measured its own; one that never ended has its events' times."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """In `spent` already, and to be replaced when the epoch says what it measured."""
        self._stage: str | None = None
        self._last = 0.0

    def add(self, event: Event) -> None:
        kind = event["type"]
        if kind == "run_started":
            self._open, self._stage = dict.fromkeys(PHASES, 0.0), "start_s"
            self._count("start_s", event["at"] - _began(event))
        elif self._stage is not None:
            self._count(self._stage, event["at"] - self._last)
        self._last = event["at"]
        if kind in ("validation", "final_validation"):
            self._correct("validate_s", event.get("seconds"))
        elif kind == "epoch_done":
            for name in ("rollout_s", "learn_s"):
                self._correct(name, event["phases"].get(name))
            self._stage = None
        self._stage = _STAGES.get(kind, self._stage)

    def _count(self, name: str, seconds: float) -> None:
        self.spent[name] += seconds
        self._open[name] += seconds

    def _correct(self, name: str, measured: float | None) -> None:
        if measured is not None:
            self.spent[name] += measured - self._open[name]
        self._open[name] = 0.0


class History:
    """A run, as far as it is known."""

    def __init__(self) -> None:
        self.run: Event = {}
        """The newest run_started."""
        self.sessions: list[Event] = []
        """Every run_started."""
        self.finished: Event | None = None
        """run_finished of the newest session."""
        self.warnings: list[Event] = []
        self.resumed_at: list[float] = []
        """Epochs that were done when a session after the first began to work."""
        self.done: dict[int, Event] = {}
        """epoch_done by epoch."""
        self.calls = self.tokens = self.rollouts = 0
        """All that were paid for, those of an interrupted round included."""
        self._rounds: dict[tuple[int, int], Round] = {}
        self._lowest = 0.0
        self._validations: dict[tuple[int, int | None], Event] = {}
        self._counted: dict[tuple[int, int | None], tuple[float, Validation]] = {}
        """With the `failure_reward` it was counted at."""
        self._finals: dict[tuple[int, int | None], Event] = {}
        self._spans: list[list[float]] = []
        self._clock = _Clock()
        self._awaiting_work = False

    @classmethod
    def of(cls, events: "Iterable[Event] | History") -> "History":
        """As it is, or put together."""
        if isinstance(events, History):
            return events
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        """One more; types it does not know change nothing but the time."""
        if self._spans and event["type"] != "run_started":
            self._spans[-1][1] = event["at"]
        self._clock.add(event)
        if event["type"] in _READERS:
            _READERS[event["type"]](self, event)

    # ---- what one asks for ----------------------------------------------------------------

    @property
    def rounds(self) -> list[Round]:
        """Those that were collected, in order."""
        found = (self._rounds[key] for key in sorted(self._rounds))
        return [r for r in found if r.collected is not None]

    @property
    def failure_reward(self) -> float:
        """What a failure of the model counts as in validations, where the configuration says `drop`.

        The smaller of 0 and the lowest reward of the run. It can fall as the run goes on, and all
        validations are then counted anew, so that they can be compared.
        """
        return self._lowest

    @property
    def validations(self) -> list[Validation]:
        found = [self._count(key, event) for key, event in self._validations.items()]
        return sorted(found, key=lambda v: (v.epoch, v.step or 0))

    def final(self, of: Validation) -> Validation | None:
        """What the same policy answered anew at the end of the run; None where it did not."""
        event = self._finals.get((of.epoch, of.step))
        return None if event is None else Validation.of(event, self._lowest)

    def _count(self, key: tuple[int, int | None], event: Event) -> Validation:
        before = self._counted.get(key)
        if before is None or before[0] != self._lowest:
            before = self._counted[key] = self._lowest, Validation.of(event, self._lowest)
        return before[1]

    @property
    def scored(self) -> list[Validation]:
        """Validations that gave a number."""
        return [v for v in self.validations if v.mean is not None and v.rewards]

    @property
    def best(self) -> Validation | None:
        """With the highest mean; of equal ones the first, as it moved least from the base model."""
        return max(self.scored, key=lambda v: v.mean or 0.0, default=None)

    @property
    def status(self) -> str:
        """completed, failed, another that the trainer named, or unfinished."""
        return "unfinished" if self.finished is None else str(self.finished["status"])

    @property
    def evaluators(self) -> tuple[str | None, str | None]:
        """What measured training rewards, and what measured held-out ones."""
        training = self.run.get("evaluator")
        return training, self.run.get("validation_evaluator", training)

    @property
    def seconds(self) -> float:
        """Of all sessions, each from its command's start; the time between them does not count."""
        return sum(end - start for start, end in self._spans)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase; they add up to `seconds`."""
        spent = dict(self._clock.spent)
        spent["other_s"] = max(0.0, self.seconds - sum(spent.values()))
        return spent

    @property
    def epochs(self) -> list[int]:
        """Those of which anything was collected."""
        return sorted({r.epoch for r in self.rounds})

    def rewards(self, epoch: int) -> dict[str, list[float]]:
        """Training rewards of an epoch, by example."""
        found: dict[str, list[float]] = {}
        for r in self.rounds:
            if r.epoch == epoch:
                for (example, _), reward in r.rewards.items():
                    found.setdefault(example, []).append(reward)
        return found

    @property
    def dropped(self) -> Counter[str]:
        """What was left out of training, by reason, over all rounds."""
        total: Counter[str] = Counter()
        for r in self.rounds:
            assert r.collected is not None, r
            total.update(r.collected["dropped"] or {})
        return total

    @property
    def failures(self) -> Counter[str]:
        """Training rollouts that failed, by `kind: reason`."""
        return Counter(why for r in self.rounds for why in r.failures.values())

    # ---- how each type is read ------------------------------------------------------------

    def _run_started(self, event: Event) -> None:
        self._awaiting_work = bool(self.sessions)
        self.run, self.finished = event, None
        self.sessions.append(event)
        self._spans.append([_began(event), event["at"]])

    def _epoch_started(self, event: Event) -> None:
        r = self._round(event)
        r.of = event["rounds"]
        self._work(r.trained)

    def _validation_started(self, event: Event) -> None:
        self._work(float(len(self.done) if event.get("final") else event["epoch"]))

    def _work(self, trained: float) -> None:
        if self._awaiting_work:
            self.resumed_at.append(trained)
        self._awaiting_work = False

    def _rollout(self, event: Event) -> None:
        self.rollouts += 1
        self.calls += event.get("calls") or 0
        self.tokens += event.get("tokens") or 0
        training, held_out = self.evaluators
        if event["split"] != "train":
            self._reward(event["reward"])
            return
        if training == held_out:
            self._reward(event["reward"])
        r, key = self._round(event), (str(event["example"]), int(event["generation"]))
        r.rewards.pop(key, None)
        r.failures.pop(key, None)
        if event["reward"] is not None:
            r.rewards[key] = event["reward"]
        if event["failure_kind"]:
            r.failures[key] = f"{event['failure_kind']}: {event.get('failure_reason') or 'unknown'}"

    def _reward(self, reward: float | None) -> None:
        """One more reward by the evaluator of the validations."""
        if reward is not None:
            self._lowest = min(self._lowest, reward)

    def _epoch_collected(self, event: Event) -> None:
        self._round(event).collected = event

    def _job_ended(self, event: Event) -> None:
        self._round(event).job = event

    def _validation(self, event: Event) -> None:
        self._held_out(event)
        key = event["epoch"], event.get("step")
        self._validations[key] = event
        self._counted.pop(key, None)

    def _final_validation(self, event: Event) -> None:
        self._held_out(event)
        self._finals[event["epoch"], event.get("step")] = event

    def _held_out(self, event: Event) -> None:
        for rewards in event["rewards"].values():
            for reward in rewards:
                self._reward(reward)

    def _epoch_done(self, event: Event) -> None:
        self.done[event["epoch"]] = event

    def _warning(self, event: Event) -> None:
        self.warnings.append(event)

    def _run_finished(self, event: Event) -> None:
        self.finished = event

    def _round(self, event: Event) -> Round:
        key = event["epoch"], event.get("round") or 0
        return self._rounds.setdefault(key, Round(*key))


_READERS = {
    "run_started": History._run_started,
    "epoch_started": History._epoch_started,
    "rollout": History._rollout,
    "epoch_collected": History._epoch_collected,
    "job_done": History._job_ended,
    "job_failed": History._job_ended,
    "validation_started": History._validation_started,
    "validation": History._validation,
    "final_validation": History._final_validation,
    "epoch_done": History._epoch_done,
    "warning": History._warning,
    "run_finished": History._run_finished,
}
