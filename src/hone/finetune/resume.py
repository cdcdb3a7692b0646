"""Where a run stands: what is done, what comes next, and whether to go on.

In:   the run's events, those of earlier starts and those of this process; the `finetuning:` section
Out:  which epochs, rounds and rollouts need not be run again, the examples of the next round

Events are the only memory of what happened, and the order of examples depends on the seed alone. A
resumed run therefore takes the same turns as one that was never interrupted.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from hone.errors import RolloutError
from hone.event_log import EventLog, read
from hone.events import Event, JobDone, JobFailed
from hone.finetune.curriculum import Curriculum, none_collected
from hone.finetune.records import RolloutRecord, TrainingStatusEnum
from hone.report.history import History, Validation
from hone.report.text import counted

if TYPE_CHECKING:
    from hone.config.schema import EarlyStoppingConfig, FinetuneConfig
    from hone.evaluation.base import EvalInputItem
    from hone.finetune.journal import Journal

COMPLETED = TrainingStatusEnum.COMPLETED

T = TypeVar("T")


class RoundPlan(NamedTuple):
    """The examples of one round."""

    items: list["EvalInputItem"]
    """Examples to run."""
    drawn: list[str]
    """Their ids, and the ids of the examples that the curriculum skips."""


class RunState:
    """Listens to the run's events and answers questions about them."""

    def __init__(self, config: "FinetuneConfig", past: Iterable[Event] = ()) -> None:
        self.config = config
        self.history = History()
        self.failed_jobs: Counter[tuple[int, int]] = Counter()
        """How often the job of an epoch and round failed."""
        for event in past:
            self.add(event)

    @classmethod
    def follow(cls, config: "FinetuneConfig", events: EventLog) -> Self:
        """The state after the events so far, and after each that will be appended."""
        state = cls(config, read(events.path))
        events.listeners.append(state.add)
        return state

    def add(self, event: Event) -> None:
        """Index one more event."""
        self.history.add(event)
        if isinstance(event, JobFailed):
            self.failed_jobs[event.epoch, event.round] += 1

    # ---- what is done ---------------------------------------------------------------------

    def is_done(self, epoch: int) -> bool:
        """Every round of it was trained or rightly skipped, and it was closed."""
        done = self.history.done.get(epoch)
        return done is not None and done.status == COMPLETED

    def epochs_done(self, num_epochs: int) -> str:
        """How many of so many epochs are done, in words with their verb."""
        done = sum(map(self.is_done, range(num_epochs)))
        return counted(done, "epoch") + (" is" if done == 1 else " are")

    def has_failed(self, epoch: int) -> bool:
        """The epoch ended with a failure; it is run again."""
        return epoch in self.history.done and not self.is_done(epoch)

    def is_over(self, epoch: int, round: int) -> bool:
        """The round was trained, gave nothing, or the curriculum chose none of its groups.

        Where its epoch failed, a round that gave nothing is run again and may now give something.
        """
        last = next((r for r in self.history.rounds_of(epoch) if r.index == round), None)
        if last is None or isinstance(last.job, JobDone):
            return last is not None
        if last.metrics.get("num_trajectories"):
            return not last.metrics.get("filtered_trajectories")
        return not self.has_failed(epoch)

    def is_validated(self, epoch: int) -> bool:
        """The validation after so many epochs gave a number; one that failed is tried again."""
        return any(v.epoch == epoch and v.error is None for v in self.history.validations)

    def is_finished(self, num_epochs: int) -> bool:
        """There is nothing left to do, and the run said so."""
        ended = self.history.finished
        if ended is None or ended.status != COMPLETED:
            return False
        return all(map(self.is_done, range(num_epochs))) or self.reason_to_stop() is not None

    def last_job(self, epoch: int) -> JobDone | None:
        """The epoch's newest job; raises RolloutError where it collected nothing at all."""
        rounds = self.history.rounds_of(epoch)
        if not any(r.metrics.get("num_trajectories") for r in rounds):
            dropped = [Counter(r.collected.dropped) for r in rounds if r.collected]
            why = sum(dropped, start=Counter[str]())
            raise RolloutError(none_collected(epoch, why, self.config.target_functions))
        return next((r.job for r in reversed(rounds) if isinstance(r.job, JobDone)), None)

    # ---- what comes next ------------------------------------------------------------------

    def reason_to_stop(self) -> str | None:
        """Why early stopping ends the run here, if it does."""
        return reason_to_stop(self.history.validations, self.config.early_stopping)

    def rounds(self, items: Sequence["EvalInputItem"], epoch: int) -> list[RoundPlan]:
        """The epoch's examples, round by round."""
        config = self.config
        drawn = epoch_of(items, seed=config.seed, epoch=epoch, size=config.examples_per_epoch)
        # The curriculum as the epoch began: its first rounds must not change its last ones.
        planned = set(self.curriculum(before=epoch).plan([item.id for item in drawn], epoch))
        return [
            RoundPlan([item for item in some if item.id in planned], [item.id for item in some])
            for some in rounds_of(drawn, config.groups_per_step)
        ]

    def curriculum(self, before: int | None = None) -> Curriculum:
        """The curriculum after the rounds so far, or after those before an epoch."""
        past = (r.collected for r in reversed(self.history.rounds))
        newest = next((c for c in past if c and (before is None or c.epoch < before)), None)
        snapshot = (newest and newest.curriculum) or {}
        return Curriculum.restore(self.config.curriculum_learning, self.config.seed, snapshot)


# ---- which examples, in which order -------------------------------------------------------------


def epoch_of(examples: Sequence[T], *, seed: int, epoch: int, size: int | None = None) -> list[T]:
    """The examples of an epoch: `size` of them, or all. One comes again when all were seen."""
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
            # The examples this epoch began with wait until the others were seen.
            again.sort(key=set(drawn).__contains__)
            missing = size - len(drawn)
            drawn, waiting = drawn + again[:missing], again[missing:]
    return [examples[i] for i in drawn]


def rounds_of(examples: Sequence[T], size: int | None) -> list[list[T]]:
    """The examples in rounds of `size`, or in one; the last may be smaller."""
    size = size or max(len(examples), 1)
    return [list(examples[i : i + size]) for i in range(0, len(examples), size)]


# ---- which rollouts of a round are known --------------------------------------------------------


def known_rollouts(
    journal: "Journal",
    epoch: int,
    round: int,
    wanted: Collection[tuple[str, int]],
    *,
    smallest: int,
    failed_before: bool = True,
) -> dict[tuple[str, int], RolloutRecord]:
    """Rollouts of a round that are not run again, by example and generation.

    A rollout that gave something to train on is never run again. One that failed through the model,
    or gave nothing, is a result too and is kept, unless the whole round gave nothing and its epoch
    failed: with the same failures the run would end there again, whatever was fixed meanwhile.

    Args:
        journal: holds the rollouts that ended.
        epoch: of the round.
        round: of the epoch.
        wanted: every rollout of the round.
        smallest: size of the smallest group that is trained.
        failed_before: whether the epoch may have failed in an earlier start.
    """
    known = journal.finished("train", epoch, round)
    ended = journal.records("train", epoch, round)
    if failed_before and gave_nothing(ended, set(wanted), smallest):
        return {place: record for place, record in known.items() if record.is_trained}
    return known


def gave_nothing(
    ended: Sequence[RolloutRecord], wanted: set[tuple[str, int]], smallest: int
) -> bool:
    """Whether every rollout of a round has ended, and no group of them can be trained."""
    if not wanted <= {(record.example, record.generation) for record in ended}:
        return False  # it was interrupted, and goes on
    groups = Counter(record.example for record in ended if record.is_trained)
    return all(size < smallest for size in groups.values())


# ---- early stopping -----------------------------------------------------------------------------


def reason_to_stop(
    validations: Sequence[Validation], config: "EarlyStoppingConfig | None"
) -> str | None:
    """Why to stop, if the last `patience` validations brought no improvement."""
    if config is None:
        return None
    top: float | None = None
    waited = 0
    for validation in validations:
        if validation.mean is None:
            continue  # a validation that failed says nothing either way
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
