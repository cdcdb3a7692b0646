"""One round of rollouts, before it begins: what it is about, and which of it need not be run.

In:   what trainer.py says of the round; the journal
Out:  Round: its examples, the rollouts that are known already

A rollout that gave something to train on is never run again. What failed by the model's own doing,
or gave nothing, is the round's result like any other and is kept too, unless the whole round came
to nothing and its epoch failed: then the run had ended there, and going on with the same failures
would end it again, whatever was fixed meanwhile.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.finetune.base import RolloutRecord

if TYPE_CHECKING:
    from hone.evaluation.base import EvalInputItem
    from hone.events import EventLog
    from hone.finetune.journal import Journal

Known = dict[tuple[str, int], RolloutRecord]
"""By example and generation."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one `start_run` is about."""

    run_id: str
    items: list["EvalInputItem"]
    epoch: int
    round: int
    session: int
    journal: "Journal | None"
    events: "EventLog | None"
    known: Known
    """Rollouts that ended before and are not run again."""
    unmarked: Counter[str]
    """Requests by model that had named no rollout when the round began."""

    @classmethod
    def of(
        cls,
        run_id: str,
        items: "Sequence[EvalInputItem]",
        meta: Mapping[str, Any] | None,
        *,
        generations: int,
        smallest: int,
        unmarked: Mapping[str, int] | None = None,
    ) -> "Round":
        """`smallest`: a group of fewer trajectories is dropped.

        `meta["failed_before"]` says whether the epoch has failed in an earlier start; where it is
        left out, it may have.
        """
        said = meta or {}
        epoch, round = int(said.get("epoch", 0)), int(said.get("round", 0))
        journal: Journal | None = said.get("journal")
        visited = list(said.get("items") or items)
        known: Known = {}
        if journal is not None:
            known = journal.finished("train", epoch, round)
            wanted = {(item.id, k) for item in visited for k in range(generations)}
            ended = journal.records("train", epoch, round)
            if said.get("failed_before", True) and came_to_nothing(ended, wanted, smallest):
                known = {place: one for place, one in known.items() if one.trajectory is not None}
        return cls(
            run_id=run_id,
            items=visited,
            epoch=epoch,
            round=round,
            session=int(said.get("session", 1)),
            journal=journal,
            events=said.get("events"),
            known=known,
            unmarked=Counter(unmarked or {}),
        )


def came_to_nothing(
    ended: Sequence[RolloutRecord], wanted: set[tuple[str, int]], smallest: int
) -> bool:
    """Whether every rollout of a round has ended, and no group of them can be trained."""
    if not wanted <= {(record.example, record.generation) for record in ended}:
        return False  # it was interrupted: what is there is part of a round that goes on
    groups = Counter(record.example for record in ended if record.trajectory is not None)
    return all(size < smallest for size in groups.values())
