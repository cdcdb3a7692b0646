"""Run the rollouts of one round, or of one validation: each is run, scored and recorded once.

In:   an Evaluation, the round that is requested, the generations, the rollouts that are known already
Out:  a RolloutRecord for each, in the journal and in the events
      unscored/epoch_NNN.jsonl: rollouts that have ended, until their whole group has rewards

A rollout that the infrastructure failed is run again, `rollout_retries` times at most. Some rewards
compare the rollouts of an example. Such a rollout enters the journal once it has a reward, which
requires the whole group. Until then it is in the unscored file, so that a killed run does not sample
it again.
"""

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from hone.capture.base import SeenCall, Step
from hone.capture.scope import outside_rollouts
from hone.config.schema import FinetuneConfig
from hone.errors import StateError
from hone.evaluation.base import EvalInputItem
from hone.evaluation.groups import Member, RolloutGroup
from hone.evaluation.results import ItemResult
from hone.evaluation.run import Evaluation
from hone.files.disk import append_lines, open_lines
from hone.files.redact import redact_json
from hone.files.rollout_record import EVALUATOR, FailureRecord, RolloutRecord, Split, at_close
from hone.finetune.base import RoundRequest
from hone.finetune.calls import EVALUATION
from hone.finetune.records import Place, event_fields
from hone.wire.rollout import ATTEMPT
from hone.workflow.failure import answered_by_policy
from hone.workflow.jsonable import dumps, plain
from hone.workflow.outside import MODEL_NAME
from hone.workflow.run import RolloutResult

Record = Callable[[ItemResult, Place], Awaitable[RolloutRecord]]
"""Makes the record of a rollout that has ended."""


def evaluators_marked(evaluation: Evaluation) -> AbstractContextManager[Any]:
    """A scope in which calls of evaluators carry `EVALUATION` and belong to no rollout."""
    host = evaluation.host
    return nullcontext() if host is None else outside_rollouts(EVALUATION, host=host)


class Rollouts:
    """The rollouts of one round, or of one validation."""

    def __init__(
        self,
        evaluation: Evaluation,
        config: FinetuneConfig,
        request: RoundRequest,
        generations: range,
        *,
        known: Mapping[tuple[str, int], RolloutRecord],
        split: Split,
    ) -> None:
        """`known`: rollouts that are not run again, by example and generation."""
        items = list(evaluation.items if request.items is None else request.items)
        self.items, self.request = items, request
        self._evaluation, self._config, self.known = evaluation, config, known
        self._split: Split = split
        self._numbers = {item.id: n for n, item in enumerate(evaluation.items)}
        reward = config.reward_name
        self._evaluators = None if reward is None else [reward]
        self._unscored: Path | None = None
        self._ended: dict[tuple[str, int], tuple[str, EvalInputItem]] = {}
        self._groups: dict[str, RolloutGroup] = {}
        """The groups by example; empty if the reward does not compare rollouts."""
        if evaluation.compares(self._evaluators):
            if request.journal is not None:
                self._unscored = request.journal.unscored(split, request.epoch)
            ended = _read(self._unscored, request.round, {item.id: item for item in items}, known)
            self._ended = {place: one for place, one in ended.items() if place not in known}
            for item in items:
                self._groups[item.id] = RolloutGroup(
                    members=[k for k in generations if (item.id, k) not in known],
                    # New rollouts are compared with those that have a reward, whose rewards do not
                    # change.
                    ended={
                        k: one for (example, k), (_, one) in ended.items() if example == item.id
                    },
                )

    async def run(
        self, item: EvalInputItem, generation: int, record: Record, **options: Any
    ) -> RolloutRecord:
        """The record of a rollout, which is run unless it is known.

        `record` makes it; `options` are arguments of `Evaluation.run_item`.
        """
        if (known := self.known.get((item.id, generation))) is not None:
            return known
        request = self.request
        place = Place(self._split, request.epoch, request.round, generation)

        async def run(rollout: str) -> RolloutRecord:
            with evaluators_marked(self._evaluation):
                result = await self._run_item(item, generation, rollout, options)
            return await record(result, place)

        try:
            return await run_recorded(
                run,
                request,
                place,
                item=self._numbers.get(item.id, len(self._numbers)),
                retries=self._config.rollout_retries,
            )
        finally:
            if item.id in self._groups:
                self._groups[item.id].leave(generation)

    def close(self, records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """The records after all rollouts ended: now it is known which outputs no evaluator scores."""
        at, journal = self.request, self.request.journal
        before = journal is not None and journal.scored_before(self._split, at.epoch, at.round)
        closed = at_close(records, scored_before=before)
        self.write_closed(records, closed)
        return closed

    def write_closed(self, ended: Sequence[RolloutRecord], closed: Sequence[RolloutRecord]) -> None:
        """Write the records that closing changed, and remove the file of unscored rollouts.

        After the evaluator is fixed, a rollout of a killed run may have a score, and the failures
        that are not run again yet would look like failures of the model. The file of unscored
        rollouts stays if one of them would be run again: it is then compared with those that have a
        reward, and only this file has them whole.
        """
        journal = self.request.journal
        if journal is not None:
            for before, record in zip(ended, closed, strict=True):
                if record is not before:
                    journal.add(record)
        again = any(record.failure_kind == "infrastructure" for record in closed)
        if self._unscored is not None and not again:
            self._unscored.unlink(missing_ok=True)

    async def _run_item(
        self, item: EvalInputItem, generation: int, rollout: str, options: dict[str, Any]
    ) -> ItemResult:
        """Run and score the rollout, with its group if there is one."""
        group, member = self._groups.get(item.id), None
        if group is not None:
            ended = self._ended.pop((item.id, generation), None)  # a retry runs it again
            if ended is not None:
                return await self._score(*ended, group.member(generation))
            member = group.member(generation, partial(self._note, item.id, generation, rollout))
        return await self._evaluation.run_item(
            item, rollout=rollout, evaluators=self._evaluators, member=member, **options
        )

    async def _score(self, rollout: str, item: EvalInputItem, member: Member) -> ItemResult:
        """Score a rollout that ended in an earlier start."""
        scored = await self._evaluation.score_item(item, evaluators=self._evaluators, member=member)
        ran = RolloutResult(
            id=rollout,
            output=item.output_obj,
            calls=tuple(item.trajectory),
            steps=tuple(item.steps),
            failure=None,
            seconds=item.seconds or 0.0,
            answered=answered_by_policy(item.trajectory, self._evaluation.policy),
        )
        return ItemResult(scored.item, ran, scored.scores)

    def _note(self, example: str, generation: int, rollout: str, item: EvalInputItem) -> None:
        """Write a rollout that has ended and waits for others of its group."""
        if self._unscored is None:
            return
        output, steps = plain(item.output_obj), [plain(asdict(step)) for step in item.steps]
        shown = redact_json([output, steps])
        # The calls stay as they are, since they may be trained.
        line = {
            "round": self.request.round,
            "example": example,
            "generation": generation,
            "rollout": rollout,
            "output": shown[0],
            "seconds": item.seconds,
            "calls": [asdict(call) for call in item.trajectory],
            "steps": shown[1],
            "is_whole": shown == [output, steps],
        }
        append_lines(self._unscored, dumps(line).encode("utf-8", "replace") + b"\n")


# ---- one rollout --------------------------------------------------------------------------------


async def run_recorded(
    run: Callable[[str], Awaitable[RolloutRecord]],
    request: RoundRequest,
    place: Place,
    *,
    item: int,
    retries: int,
) -> RolloutRecord:
    """Run a rollout, retry infrastructure failures, and write its event and its record.

    The record has the failures of all attempts. `item`: number of the example.
    """
    known = {"item": item, "session": request.session}
    record = await run(rollout_id(request.run_id, place, **known))
    failed: list[FailureRecord] = []
    for retry in range(1, retries + 1):
        failure = record.failure
        # Running the agent again fixes neither an evaluator nor a name.
        if not failure or failure.kind == "policy" or failure.reason in (EVALUATOR, MODEL_NAME):
            break
        failed.append(failure)
        record = await run(rollout_id(request.run_id, place, **known, retry=retry))
    if failed:
        record = record.model_copy(update={"retries": failed})
    # The event first: after a kill in between, the rollout is run again and the later event counts.
    # In the opposite order, a resumed run would lack the event.
    if request.events is not None:
        request.events.append("rollout", **event_fields(record))
    if request.journal is not None:
        request.journal.add(record)
    return record


def rollout_id(run_id: str, place: Place, *, item: int, session: int, retry: int = 0) -> str:
    """RUN:EPOCH.ROUND.ITEM.GENERATION~SESSION[.RETRY].

    The epoch of a validation is preceded by `v`, that of a final validation by `f`. Session and retry
    distinguish attempts, whose calls use the same seeds (`wire.rollout.without_attempt`).
    """
    first = {"train": "", "val": "v", "final": "f"}[place.split]
    where = f"{first}{place.epoch}.{place.round}.{item}.{place.generation}"
    again = f".{retry}" if retry else ""
    return f"{run_id}:{where}{ATTEMPT}{session}{again}"


# ---- rollouts that have ended and wait for their group ------------------------------------------


def _read(
    path: Path | None,
    round: int,
    items: dict[str, EvalInputItem],
    scored: Container[tuple[str, int]],
) -> dict[tuple[str, int], tuple[str, EvalInputItem]]:
    """Rollouts of the round that ended, by example and generation.

    Without those that lack a secret of their output, unless they have a reward already: another
    text could get another reward, so they are run again.
    """
    if path is None or not path.exists():
        return {}
    open_lines(path).close()  # removes a torn last line
    ended = {}
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
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
                if not line.get("is_whole", True) and (example, generation) not in scored:
                    del ended[example, generation]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path}:{number}: not a rollout ({error}). Remove the file: its rollouts are run "
                "again."
            ) from None
    return ended
