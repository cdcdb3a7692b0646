"""The state of a run: what is done, what comes next, and whether to stop.

In:   the run's events, of earlier starts and of this process; the `finetuning:` section
Out:  the epochs, rounds and rollouts that need not be run again, the examples of the next round

The state depends on the events alone, and the order of examples on the seed alone. A resumed run
therefore does the same as one that was never interrupted.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

from hone.config.schema import EarlyStoppingConfig, FinetuneConfig
from hone.errors import RolloutError
from hone.evaluation.base import EvalInputItem
from hone.files.event_log import EventLog, read
from hone.files.events import Event, JobDone, JobFailed
from hone.files.rollout_record import RolloutRecord
from hone.finetune.curriculum import Curriculum
from hone.finetune.journal import Journal
from hone.finetune.round_failures import none_collected
from hone.report.history import RunHistory, Validation
from hone.report.text import counted

T = TypeVar("T")


class RoundPlan(NamedTuple):
    """The examples of one round."""

    items: list[EvalInputItem]
    """Examples to run."""
    drawn: list[str]
    """Ids of these examples and of those that the curriculum skips."""


class RunState:
    """The state of a run, updated by its events."""

    def __init__(self, config: FinetuneConfig, past: Iterable[Event] = ()) -> None:
        self.config = config
        self.history = RunHistory()
        self._failed_jobs: Counter[tuple[int, int]] = Counter()
        """Number of failed jobs, by epoch and round."""
        self._planned: tuple[int, list[RoundPlan]] | None = None
        """The epoch that was planned last, and its rounds."""
        for event in past:
            self.add(event)

    @classmethod
    def follow(cls, config: FinetuneConfig, events: EventLog) -> Self:
        """The state after the events so far, and after each that will be appended."""
        state = cls(config, read(events.path))
        events.listeners.append(state.add)
        return state

    def add(self, event: Event) -> None:
        self.history.add(event)
        if isinstance(event, JobFailed):
            self._failed_jobs[event.epoch, event.round] += 1

    # ---- what is done ---------------------------------------------------------------------

    def is_done(self, epoch: int) -> bool:
        """Whether the epoch completed."""
        done = self.history.done.get(epoch)
        return done is not None and done.status == "completed"

    def epochs_done(self, num_epochs: int) -> str:
        """Number of epochs that are done, as `1 epoch is` or `2 epochs are`."""
        done = sum(map(self.is_done, range(num_epochs)))
        return counted(done, "epoch") + (" is" if done == 1 else " are")

    def has_failed(self, epoch: int) -> bool:
        """Whether the epoch failed; it is run again."""
        return epoch in self.history.done and not self.is_done(epoch)

    def is_over(self, epoch: int, round: int) -> bool:
        """Whether the round was trained, gave nothing, or had no group selected.

        A round that gave nothing is run again if its epoch failed.
        """
        last = next((r for r in self.history.rounds_of(epoch) if r.index == round), None)
        if last is None or isinstance(last.job, JobDone):
            return last is not None
        if last.metrics.get("num_trajectories"):
            return not last.metrics.get("filtered_trajectories")
        return not self.has_failed(epoch)

    def is_validated(self, epoch: int) -> bool:
        """Whether there is a validation after `epoch` epochs; a failed one is repeated."""
        return any(v.epoch == epoch and v.error is None for v in self.history.validations)

    def is_finished(self, num_epochs: int) -> bool:
        """Whether the run completed and nothing is left to do."""
        ended = self.history.finished
        if ended is None or ended.status != "completed":
            return False
        return all(map(self.is_done, range(num_epochs))) or self.reason_to_stop() is not None

    def last_job(self, epoch: int, records: Sequence[RolloutRecord] = ()) -> JobDone | None:
        """The epoch's newest job; raises RolloutError if the epoch collected nothing.

        `records`: its rollouts, which name the cause.
        """
        rounds = self.history.rounds_of(epoch)
        if not any(r.metrics.get("num_trajectories") for r in rounds):
            why = sum((r.dropped for r in rounds), start=Counter[str]())
            raise RolloutError(none_collected(epoch, why, self.config.target_functions, records))
        return next((r.job for r in reversed(rounds) if isinstance(r.job, JobDone)), None)

    # ---- what comes next ------------------------------------------------------------------

    def reason_to_stop(self) -> str | None:
        """Why early stopping ends the run; None if it does not, or if rewards are relative."""
        if self.history.run.validation_relative:
            return None
        return reason_to_stop(self.history.validations, self.config.early_stopping)

    def rounds(self, items: Sequence[EvalInputItem], epoch: int) -> list[RoundPlan]:
        """The epoch's examples, round by round."""
        if self._planned is not None and self._planned[0] == epoch:
            return self._planned[1]
        config = self.config
        drawn = epoch_of(items, seed=config.seed, epoch=epoch, size=config.examples_per_epoch)
        # The curriculum at the start of the epoch: early rounds must not change later ones.
        planned = set(self.curriculum(before=epoch).plan([item.id for item in drawn], epoch))
        rounds = [
            RoundPlan([item for item in some if item.id in planned], [item.id for item in some])
            for some in rounds_of(drawn, config.groups_per_step)
        ]
        self._planned = epoch, rounds
        return rounds

    def job_key(self, run_id: str, epoch: int, round: int) -> str:
        """The idempotency key of the round's job.

        A job that failed gets a new key: under the old one the server answers with the failure.
        """
        failed = self._failed_jobs[epoch, round]
        return f"{run_id}:{epoch}:{round}" + (f":again{failed}" if failed else "")

    def curriculum(self, before: int | None = None) -> Curriculum:
        """The curriculum after all rounds so far, or after the epochs before `before`."""
        past = (r.collected for r in reversed(self.history.rounds))
        newest = next((c for c in past if c and (before is None or c.epoch < before)), None)
        snapshot = newest.curriculum if newest else {}
        return Curriculum.restore(self.config.curriculum_learning, self.config.seed, snapshot)


# ---- which examples, in which order -------------------------------------------------------------


def epoch_of(examples: Sequence[T], *, seed: int, epoch: int, size: int | None = None) -> list[T]:
    """The examples of an epoch: `size` of them, or all. None is repeated before all were drawn."""
    if size is None or size >= len(examples):
        everything = list(examples)
        random.Random(f"{seed}:{epoch}").shuffle(everything)
        return everything
    waiting: list[int] = []
    drawn: list[int] = []
    for past in range(epoch + 1):
        drawn, waiting = waiting[:size], waiting[size:]
        if len(drawn) < size:
            again = list(range(len(examples)))
            random.Random(f"{seed}:{past}").shuffle(again)
            # Examples that are already in this epoch come last.
            again.sort(key=set(drawn).__contains__)
            missing = size - len(drawn)
            drawn, waiting = drawn + again[:missing], again[missing:]
    return [examples[i] for i in drawn]


def rounds_of(examples: Sequence[T], size: int | None) -> list[list[T]]:
    """The examples in rounds of `size`, or in one round; the last may be smaller."""
    size = size or max(len(examples), 1)
    return [list(examples[i : i + size]) for i in range(0, len(examples), size)]


# ---- which rollouts of a round are known --------------------------------------------------------


def known_rollouts(
    journal: Journal,
    epoch: int,
    round: int,
    wanted: Collection[tuple[str, int]],
    *,
    smallest: int,
    failed_before: bool = True,
) -> dict[tuple[str, int], RolloutRecord]:
    """Rollouts of a round that are not run again, by example and generation.

    A rollout that can be trained is not run again. One that failed because of the model, or gave
    nothing to train on, is kept too. If the epoch failed because the whole round gave nothing, all
    that were not trained are run again. The run would otherwise fail again, whatever was fixed
    meanwhile.

    Args:
        journal: has the finished rollouts.
        epoch: epoch of the round.
        round: number of the round in the epoch.
        wanted: all rollouts of the round, by example and generation.
        smallest: size of the smallest group that is trained.
        failed_before: whether the epoch failed in an earlier start.
    """
    known = journal.finished("train", epoch, round)
    if not failed_before:
        return known
    ended = journal.records("train", epoch, round)
    nothing = gave_nothing(ended, set(wanted), smallest)
    return {place: record for place, record in known.items() if record.is_trained or not nothing}


def gave_nothing(
    ended: Sequence[RolloutRecord], wanted: set[tuple[str, int]], smallest: int
) -> bool:
    """Whether all rollouts of a round have ended and none of its groups can be trained."""
    if not wanted <= {(record.example, record.generation) for record in ended}:
        return False  # it was interrupted
    groups = Counter(record.example for record in ended if record.is_trained)
    return all(size < smallest for size in groups.values())


# ---- early stopping -----------------------------------------------------------------------------


def reason_to_stop(
    validations: Sequence[Validation], config: EarlyStoppingConfig | None
) -> str | None:
    """Why to stop: the last `patience` validations brought no improvement; None if they did."""
    if config is None:
        return None
    top: float | None = None
    waited = 0
    for validation in validations:
        if validation.mean is None:
            continue  # a failed validation does not count
        if top is None or validation.mean > top + config.min_delta:
            top, waited = validation.mean, 0
        else:
            waited += 1
    if top is None or waited < config.patience:
        return None
    return (
        f"{config.metric} has not risen above {top:.4f} by more than {config.min_delta:g} in "
        f"{waited} validations (finetuning.early_stopping.patience: {config.patience})"
    )
