"""Results of an evaluation: one item, a whole run, and its summary.

In:   a rollout's result; items with their scores
Out:  ItemResult, EvaluationRunOutput, EvalSummary; the output that `result_json_path` selects
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel

from hone.capture.base import SeenCall, Step
from hone.config.policy import PolicyCalls
from hone.errors import PolicyFailure
from hone.evaluation.base import EvalInput, EvalInputItem, EvalOutput, Score, output_of
from hone.evaluation.steps import calls_of, events_of, ours, steps_of
from hone.files.place import is_line
from hone.files.rollout_record import kinds_at_close
from hone.types import Failure
from hone.workflow.failure import RolloutFailure, answered_by_policy
from hone.workflow.jsonable import as_text
from hone.workflow.paths import values_at
from hone.workflow.run import RolloutResult

OnPolicyFailure = Literal["lowest", "drop"] | float
"""Score of an item that failed because of the model, in an average."""


@dataclass(frozen=True)
class ItemResult:
    """One item, run and scored."""

    item: EvalInputItem
    """The item, with output_obj, trajectory, steps and seconds filled in."""
    rollout: RolloutResult | None
    """None if an existing answer was scored."""
    scores: dict[str, Score]
    """Scores by evaluator; empty if the rollout failed."""

    @property
    def failure(self) -> Failure | None:
        """Why the item has no output; None if it has one."""
        if self.rollout is not None:
            return self.rollout.failure.failure if self.rollout.failure else None
        if self.item.output_obj is not None:
            return None
        message = f"item {self.item.id!r} has no generated answer, and the workflow was not run"
        return Failure(type="NoOutput", message=message)

    @property
    def kind(self) -> str | None:
        """`policy` or `infrastructure`: why the item has no output; None if it has one."""
        if self.failure is None:
            return None
        failed = self.rollout.failure if self.rollout is not None else None
        return "infrastructure" if failed is None else failed.kind

    @property
    def is_answered(self) -> bool:
        """Whether a model answered a call of the item; an output that exists already is an answer."""
        return self.rollout is None or self.rollout.answered


@dataclass(frozen=True)
class EvaluationRunOutput:
    """The results of one run over a dataset."""

    results: list[ItemResult]
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]]
    workflow_interrupted: bool = False
    """True if a rollout failed."""


def extracted(result: RolloutResult, path: str) -> RolloutResult:
    """The result with its output as JSON, reduced to the value at the path."""
    if result.failure is not None:
        return result
    try:
        output = _plain(result.output)
    except Exception as error:  # noqa: BLE001  # user code: whatever it raises is data
        return _unusable(result, error)
    if path != "$":
        try:
            values = values_at(path, json.loads(output) if isinstance(output, str) else output)
            problem = None if values else f"the workflow's output has nothing at {path}"
        except (ValueError, RecursionError) as error:
            values, problem = [], f"the workflow returned text that is not JSON ({error})"
        if problem is not None:
            message = f"result_json_path {path}: {problem}: {as_text(output)[:200]!r}"
            return _without_output(result, "unparseable", message)
        output = values[0]
    return replace(result, output=output)


def with_remote_steps(result: RolloutResult, policy: PolicyCalls | None = None) -> RolloutResult:
    """The result with the calls and steps that a remote service recorded and sent as events.

    hone's own records take precedence; a service of the toolkit sends none.
    """
    if not result.events:
        return result
    entries = list(result.events)
    seen = calls_of([e for e in entries if ours(e["payload"])]) or calls_of(entries)
    steps = tuple(steps_of(entries))
    if result.calls:
        steps = tuple(_renumbered(steps, seen, result.calls))
    answered = result.answered or answered_by_policy(seen, policy)
    failure = result.failure
    return replace(
        result,
        failure=failure.after_answer() if failure is not None and answered else failure,
        answered=answered,
        calls=result.calls or tuple(seen),
        steps=result.steps or steps,
        events=tuple(events_of(entries)),
    )


def _renumbered(
    steps: Iterable[Step], sent: Sequence[SeenCall], recorded: Sequence[SeenCall]
) -> Iterator[Step]:
    """Steps with the indices of the recorded calls.

    The service counted all calls that it sent, including failed ones and those to other servers.
    """
    places = {call.id: call.index for call in recorded}
    known = {call.index: places[call.id] for call in sent if call.id in places}
    for step in steps:
        before = [place for index, place in known.items() if index < step.calls]
        about = tuple(known[index] for index in step.about if index in known)
        yield replace(step, calls=max(before, default=-1) + 1, about=about)


def _unusable(result: RolloutResult, error: Exception) -> RolloutResult:
    kind = type(result.output).__name__
    message = (
        f"the workflow returned a {kind} that cannot be made JSON: "
        f"{type(error).__name__}: {as_text(error)}; return text, numbers, lists or dicts"
    )
    return _without_output(result, "agent_error", message)


def _without_output(result: RolloutResult, reason: str, message: str) -> RolloutResult:
    """The result of a workflow whose return value cannot be used, as if it had raised an error."""
    failure = Failure(type="NoOutput", message=message)
    why = RolloutFailure.of("agent", reason, failure, result.calls, result.answered)
    return replace(result, output=None, failure=why)


def _plain(value: Any) -> Any:
    """A model or a dataclass as plain values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def score_failure_kind(score: Score, *, answered: bool) -> Literal["policy", "infrastructure"]:
    """The kind of a failure to score, before the round closes (`kinds_at_close`)."""
    if score.blames_policy:
        return "policy"
    return "policy" if answered and not score.is_outside else "infrastructure"


def failure_kinds(name: str, results: Sequence[ItemResult]) -> list[str | None]:
    """Why each item has no score of this evaluator: `policy`, `infrastructure`, or None."""
    outcomes: list[tuple[str | None, str | None]] = []
    for result in results:
        score = result.scores.get(name, Score(None))
        if result.kind is not None:
            outcomes.append((result.kind, "rollout"))
        elif score.value is None:
            kind = score_failure_kind(score, answered=result.is_answered)
            outcomes.append((kind, score.reason))
        else:
            outcomes.append((None, None))
    return kinds_at_close(outcomes)


def output_by(
    name: str, results: Sequence[ItemResult], on_policy_failure: OnPolicyFailure = "lowest"
) -> EvalOutput:
    """One evaluator's scores of all items; items without an output have an error and no score.

    An item that failed because of the model counts in the average.
    """
    missing = Score(None)
    scores = []
    for result in results:
        one = result.scores.get(name, missing)
        if result.failure is not None:
            one = Score(None, failure=result.failure)
        scores.append((result.item.id, one))
    output, kinds = output_of(scores), failure_kinds(name, results)
    for item, kind in zip(output.eval_output_items, kinds, strict=True):
        item.failure_kind = kind
    values = [item.score for item in output.eval_output_items if item.score is not None]
    if failed := kinds.count("policy"):
        lowest = min([0.0, *values])
        reward = lowest if isinstance(on_policy_failure, str) else on_policy_failure
        output.policy_failures, output.failure_reward = failed, reward
        output.average_score = fmean([*values, *[reward] * failed])
    return output


@dataclass(frozen=True)
class EvaluatorSummary:
    """One line of the summary table."""

    name: str
    average_score: float | None
    """Mean of the scores, and of `failure_reward` for each item that failed because of the model."""
    output_file: Path
    failures: int
    """Items with an output that this evaluator could not score."""
    policy_failures: int = 0
    """Items that failed because of the model: without an output, or with one that cannot be scored."""
    failure_reward: float | None = None
    """Score with which each of those counts in the average; None if there are none."""


@dataclass(frozen=True)
class EvalSummary:
    """The summary that `hone eval` prints."""

    status: str
    """COMPLETED, or INTERRUPTED if an item has no output for reasons other than the model."""
    seconds: float
    items: int
    failed_items: int
    """Number of items without an output."""
    evaluators: list[EvaluatorSummary]
    workflow_output_file: Path
    message: str
    """What failed for reasons other than the model, and how often; empty if nothing did."""
    note: str = ""
    """How often the model failed; empty if it did not."""

    @property
    def failed(self) -> bool:
        """Whether the command must exit non-zero."""
        return bool(self.message)


def summary_of(
    run: EvaluationRunOutput, output_file: Path, files: Sequence[Path], seconds: float
) -> EvalSummary:
    total, lines, notes, rows = len(run.results), [], [], []
    failed = [result for result in run.results if result.failure is not None]
    interrupted = [result.failure for result in failed if result.kind == "infrastructure"]
    if interrupted:
        lines.append(
            f"{len(interrupted)} of {total} items have no output and were not scored; the "
            f"first: {_first(interrupted[0])}. {output_file} has them all under `failure`."
        )
    for (name, output), file in zip(run.evaluation_results, files, strict=True):
        items = zip(output.eval_output_items, run.results, strict=True)
        unscored = [item for item, result in items if result.failure is None and item.failure]
        rows.append(
            EvaluatorSummary(
                name,
                output.average_score,
                file,
                len(unscored),
                output.policy_failures,
                output.failure_reward,
            )
        )
        broken = [item.failure for item in unscored if item.failure_kind == "infrastructure"]
        if broken:
            lines.append(
                f"evaluator {name!r} could not score {len(broken)} of {total} items; "
                f"the first: {_first(broken[0])}. {file} has them all under `error`."
            )
        if output.policy_failures:
            by_policy = [i.failure for i in output.eval_output_items if i.failure_kind == "policy"]
            notes.append(
                f"evaluator {name!r}: {output.policy_failures} of {total} items failed because of "
                f"the model; each counts as {output.failure_reward:g} in the average. The first: "
                f"{_first(by_policy[0])}. {file} has them all under `error`."
                f"{_at_one_line(by_policy, total)}"
            )
    return EvalSummary(
        status="INTERRUPTED" if interrupted else "COMPLETED",
        seconds=seconds,
        items=total,
        failed_items=len(failed),
        evaluators=rows,
        workflow_output_file=output_file,
        message="\n".join(lines),
        note="\n".join(notes),
    )


def _at_one_line(failures: Sequence[Failure | None], total: int) -> str:
    """The line at which more than half of the items failed with one exception; empty if none is.

    PolicyFailure is no bug: the agent or the evaluator says that the model failed.
    """
    places = Counter(
        (one.type, one.place)
        for one in failures
        if one is not None and is_line(one.place) and one.type != PolicyFailure.__name__
    )
    (type, place), n = max(places.items(), key=lambda known: known[1], default=(("", ""), 0))
    if n < 2 or 2 * n <= total:
        return ""
    return (
        f" {n} of them failed with {type} at {place}: if that line has a bug, they say nothing about "
        "the model."
    )


def _first(failure: Failure | None) -> str:
    assert failure is not None, "an item that failed says why"
    line = failure.message.strip().partition("\n")[0].rstrip(".")
    return f"{failure.type}: {line}"
