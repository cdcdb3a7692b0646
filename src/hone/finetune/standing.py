"""Where a run stands: what of it is over, what comes next, and whether to go on.

In:   the run's events, those before a kill and those of this process; the `finetuning:` section
Out:  which epochs and rounds need not be run, what came of them, the examples of the next ones

There is no other memory of what happened. A resumed run therefore cannot take another turn than
one that was never interrupted, and nothing has to be kept in step with the events.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hone.events import EpochCollected, EpochDone, Event, JobDone, JobFailed
from hone.finetune.base import TrainingStatusEnum
from hone.finetune.curriculum import Curriculum
from hone.finetune.order import epoch_of, rounds_of
from hone.finetune.stopping import reason_to_stop
from hone.report.history import History, Round

if TYPE_CHECKING:
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.base import EvalInputItem


class Visit(NamedTuple):
    """The examples of one round."""

    items: list["EvalInputItem"]
    """Those that are run."""
    drawn: list[str]
    """Their ids, and the ids of those that the curriculum would leave out and spares."""


class Standing:
    """Listens to the run's events and answers questions about them."""

    def __init__(self, config: "FinetuneConfig", past: Iterable[Event] = ()) -> None:
        self.config = config
        self.history = History()
        self._failed_jobs: Counter[tuple[int, int]] = Counter()
        self._empty: set[tuple[int, int]] = set()
        """Rounds that gave no trajectory, unless their epoch has failed since."""
        for event in past:
            self.add(event)

    def add(self, event: Event) -> None:
        """One more."""
        self.history.add(event)
        if isinstance(event, JobFailed):
            self._failed_jobs[event.epoch, event.round] += 1
        elif isinstance(event, EpochCollected):
            place = event.epoch, event.round
            self._empty.discard(place)
            if not event.metrics.get("num_trajectories"):
                self._empty.add(place)
        elif isinstance(event, EpochDone) and event.status != TrainingStatusEnum.COMPLETED:
            # It is run again, and what came to nothing may now give something.
            self._empty = {place for place in self._empty if place[0] != event.epoch}

    # ---- what is over ---------------------------------------------------------------------

    def is_done(self, epoch: int) -> bool:
        """Every round of it was trained or rightly skipped, and it was closed."""
        done = self.history.done.get(epoch)
        return done is not None and done.status == TrainingStatusEnum.COMPLETED

    def has_failed(self, epoch: int) -> bool:
        """It was closed, and not well; it is run again."""
        return epoch in self.history.done and not self.is_done(epoch)

    def is_over(self, epoch: int, round: int) -> bool:
        """It was trained, or there was nothing in it to train on."""
        if (epoch, round) in self._empty:
            return True
        found = [r for r in self.history.rounds_of(epoch) if r.index == round]
        return any(_is_trained(r) or _is_skipped(r) for r in found)

    def is_validated(self, epoch: int) -> bool:
        """Its validation gave a number; one that failed is tried again."""
        return any(v.epoch == epoch and v.error is None for v in self.history.validations)

    def is_finished(self, num_epochs: int) -> bool:
        """There is nothing left to do, and it said so."""
        ended = self.history.finished
        if ended is None or ended.status != TrainingStatusEnum.COMPLETED:
            return False
        return all(map(self.is_done, range(num_epochs))) or self.reason_to_stop() is not None

    def failed_jobs(self, epoch: int, round: int) -> int:
        """How often its job failed."""
        return self._failed_jobs[epoch, round]

    def collected(self, epoch: int) -> int:
        """How many trajectories its rounds gave."""
        rounds = self.history.rounds_of(epoch)
        return sum(r.metrics.get("num_trajectories") or 0 for r in rounds)

    def dropped(self, epoch: int) -> Counter[str]:
        """What its rounds left out, by reason."""
        rounds = (r.collected for r in self.history.rounds_of(epoch))
        return sum((Counter(c.dropped) for c in rounds if c), start=Counter[str]())

    def last_job(self, epoch: int) -> JobDone | None:
        """The `job_done` of its last round that was trained."""
        rounds = self.history.rounds_of(epoch)
        trained = [r.job for r in rounds if isinstance(r.job, JobDone)]
        return trained[-1] if trained else None

    # ---- what comes next ------------------------------------------------------------------

    def reason_to_stop(self) -> str | None:
        """Of early stopping."""
        return reason_to_stop(self.history.validations, self.config.early_stopping)

    def rounds(self, items: Sequence["EvalInputItem"], epoch: int) -> list[Visit]:
        """The epoch's examples, as they are run together."""
        config = self.config
        drawn = epoch_of(items, seed=config.seed, epoch=epoch, size=config.examples_per_epoch)
        # As it stood when the epoch began: what its first rounds taught must not move its last.
        planned = set(self.curriculum(before=epoch).plan([item.id for item in drawn], epoch))
        return [
            Visit([item for item in some if item.id in planned], [item.id for item in some])
            for some in rounds_of(drawn, config.groups_per_step)
        ]

    def curriculum(self, before: int | None = None) -> Curriculum:
        """As the rounds so far left it, or those before an epoch."""
        past = [r for r in self.history.rounds if before is None or r.epoch < before]
        collected = past[-1].collected if past else None
        snapshot = (collected and collected.curriculum) or {}
        return Curriculum.restore(self.config.curriculum_learning, self.config.seed, snapshot)


def _is_trained(round: Round) -> bool:
    return isinstance(round.job, JobDone)


def _is_skipped(round: Round) -> bool:
    """There were trajectories, and the curriculum chose none of them."""
    found = round.metrics
    return bool(found.get("num_trajectories")) and not found.get("filtered_trajectories")
