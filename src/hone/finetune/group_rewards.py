"""Rewards that compare the rollouts of an example: groups of one round, and who waits in them.

In:   the rollouts of a round; those that are known from an earlier start
Out:  a GroupPlace for each rollout to run, which scores it together with its group
      unscored/epoch_NNN.jsonl: rollouts that have ended, until all of the round have a reward

A rollout is in the journal once it has a reward, which takes the whole group. What ended before is
on disk at once, so that a killed run does not sample it again.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import from_json

from hone.capture.base import SeenCall, Step
from hone.disk import append_lines, open_lines
from hone.errors import StateError
from hone.evaluation.groups import RolloutGroup
from hone.evaluation.results import ItemResult
from hone.workflow.jsonable import dumps
from hone.workflow.run import RolloutResult

if TYPE_CHECKING:
    from hone.evaluation.base import EvalInputItem
    from hone.evaluation.run import Evaluation
    from hone.finetune.journal import Journal
    from hone.rollout_record import RolloutRecord, Split


@dataclass(slots=True)
class GroupPlace:
    """The place of one rollout in its group."""

    groups: "RoundGroups"
    group: RolloutGroup
    item: "EvalInputItem"
    generation: int
    ended: "tuple[str, EvalInputItem] | None"
    """Id and item of the rollout if it ended in an earlier start."""

    async def run_item(
        self,
        evaluation: "Evaluation",
        rollout: str,
        evaluators: Collection[str] | None,
        **options: Any,
    ) -> ItemResult:
        """Run the rollout, or take the one of an earlier start, and score it with its group."""
        if self.ended is not None:
            (rollout, item), self.ended = self.ended, None  # a retry runs it again
            member = self.group.member(self.generation)
            result = await evaluation.score_item(item, evaluators=evaluators, member=member)
            ran = RolloutResult(
                id=rollout,
                output=item.output_obj,
                calls=tuple(item.trajectory),
                steps=tuple(item.steps),
                failure=None,
                seconds=item.seconds or 0.0,
            )
            return ItemResult(result.item, ran, result.scores)

        def note(item: "EvalInputItem") -> None:
            self.groups.note(self.item.id, self.generation, rollout, item)

        member = self.group.member(self.generation, note)
        return await evaluation.run_item(
            self.item, rollout=rollout, evaluators=evaluators, member=member, **options
        )


class RoundGroups:
    """The groups of one round, or of one validation."""

    def __init__(
        self,
        path: Path | None,
        round: int,
        items: "Sequence[EvalInputItem]",
        generations: Iterable[int],
        known: Collection[tuple[str, int]],
    ) -> None:
        """`known`: example and generation of rollouts that have a reward already."""
        self._path, self._round = path, round
        by_id = {item.id: item for item in items}
        ended = _read(path, round, by_id)
        self._ended = {place: one for place, one in ended.items() if place not in known}
        self._groups = {
            example: RolloutGroup(
                members=[k for k in generations if (example, k) not in known],
                # The others are compared with those that have a reward, which do not change.
                ended={k: item for (e, k), (_, item) in ended.items() if e == example},
            )
            for example in by_id
        }

    @classmethod
    def of(
        cls,
        evaluation: "Evaluation",
        reward: str | None,
        journal: "Journal | None",
        split: "Split",
        epoch: int,
        round: int,
        **rollouts: Any,
    ) -> Self | None:
        """The groups of a round; None if its reward compares nothing."""
        if not evaluation.compares(None if reward is None else [reward]):
            return None
        path = None if journal is None else journal.unscored(split, epoch)
        return cls(path, round, **rollouts)

    @contextmanager
    def place(self, item: "EvalInputItem", generation: int) -> Iterator[GroupPlace]:
        """The place of a rollout that has no reward yet; at the end it leaves its group."""
        group, ended = self._groups[item.id], self._ended.get((item.id, generation))
        try:
            yield GroupPlace(self, group, item, generation, ended)
        finally:
            group.leave(generation)

    def note(self, example: str, generation: int, rollout: str, item: "EvalInputItem") -> None:
        """Write an ended rollout to disk."""
        if self._path is None:
            return
        line = {
            "round": self._round,
            "example": example,
            "generation": generation,
            "rollout": rollout,
            "output": item.output_obj,
            "seconds": item.seconds,
            "calls": [asdict(call) for call in item.trajectory],
            "steps": [asdict(step) for step in item.steps],
        }
        append_lines(self._path, dumps(line).encode("utf-8", "replace") + b"\n")

    def close(self, records: "Iterable[RolloutRecord]") -> None:
        """Remove the file, unless one of the round's rollouts would be run again.

        A rollout that is run again in a later start is compared with those that have a reward, which
        only this file has whole.
        """
        if self._path is None:
            return
        if not any(r.failure is not None and r.failure.kind == "infrastructure" for r in records):
            self._path.unlink(missing_ok=True)


def _read(
    path: Path | None, round: int, items: "dict[str, EvalInputItem]"
) -> "dict[tuple[str, int], tuple[str, EvalInputItem]]":
    """Rollouts of the round that ended, by example and generation."""
    if path is None or not path.exists():
        return {}
    open_lines(path).close()  # which cuts a torn last line
    ended = {}
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not text:
            continue
        try:
            line = from_json(text)
            example, generation = line["example"], line["generation"]
            if line["round"] == round and example in items:
                item = items[example].copy_with_updates(
                    output_obj=line["output"],
                    seconds=line["seconds"],
                    trajectory=[SeenCall(**call) for call in line["calls"]],
                    steps=[
                        Step(**step | {"about": tuple(step["about"])}) for step in line["steps"]
                    ],
                )
                ended[example, generation] = line["rollout"], item
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path}:{number}: not a rollout ({error}). Remove the file: its rollouts are run "
                "again."
            ) from None
    return ended
