"""Results of an evaluation: one item, a whole run, and its summary.

In:   a rollout's result; items with their scores
Out:  ItemResult, EvaluationRunOutput, EvalSummary; the output that `result_json_path` selects
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hone.capture.base import SeenCall, Step
from hone.config.policy import PolicyCalls
from hone.evaluation.base import EvalInput, EvalInputItem, EvalOutput, Score, output_of
from hone.evaluation.steps import calls_of, events_of, ours, steps_of
from hone.types import Failure
from hone.workflow.failure import RolloutFailure, answered_by_policy
from hone.workflow.jsonable import as_text
from hone.workflow.paths import values_at
from hone.workflow.run import RolloutResult


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


@dataclass(frozen=True)
class EvaluationRunOutput:
    """The results of one run over a dataset."""

    results: list[ItemResult]
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]]
    workflow_interrupted: bool = False
    """True if a rollout failed."""
    usage_stats: dict[str, Any] = field(default_factory=dict)
    """`total_runtime` in seconds, and `runtime`, `calls` and tokens of each item."""
    profiler_results: None = None
    workflow_output_file: Path | None = None
    evaluator_output_files: list[Path] = field(default_factory=list)
    config_original_file: Path | None = None
    config_effective_file: Path | None = None
    config_metadata_file: Path | None = None


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
            problem = None if values else f"nothing is at {path} of what the workflow returned"
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


def output_by(name: str, results: Sequence[ItemResult]) -> EvalOutput:
    """One evaluator's scores of all items; items without an output have an error and no score."""
    missing = Score(None)
    scores = []
    for result in results:
        one = result.scores.get(name, missing)
        if result.failure is not None:
            one = Score(None, failure=result.failure)
        scores.append((result.item.id, one))
    return output_of(scores)


def usage(results: Sequence[ItemResult], seconds: float) -> dict[str, Any]:
    def tokens(result: ItemResult, name: str) -> int:
        return sum((call.usage or {}).get(name) or 0 for call in result.item.trajectory)

    items = {
        result.item.id: {
            "runtime": result.item.seconds,
            "calls": len(result.item.trajectory),
            "prompt_tokens": tokens(result, "prompt_tokens"),
            "completion_tokens": tokens(result, "completion_tokens"),
        }
        for result in results
    }
    return {"total_runtime": seconds, "items": items}


@dataclass(frozen=True)
class EvaluatorSummary:
    """One line of the summary table."""

    name: str
    average_score: float | None
    output_file: Path
    failures: int
    """Items with an output that this evaluator could not score."""


@dataclass(frozen=True)
class EvalSummary:
    """The summary that `hone eval` prints."""

    status: str
    """COMPLETED, or INTERRUPTED if an item has no output."""
    seconds: float
    items: int
    failed_items: int
    """Number of items without an output."""
    evaluators: list[EvaluatorSummary]
    workflow_output_file: Path
    message: str
    """What failed, and how often; empty if nothing failed."""

    @property
    def failed(self) -> bool:
        """Whether the command must exit non-zero."""
        return bool(self.message)


def summary_of(
    run: EvaluationRunOutput, output_file: Path, files: Sequence[Path], seconds: float
) -> EvalSummary:
    failures = [result.failure for result in run.results if result.failure is not None]
    lines = []
    if failures:
        lines.append(
            f"{len(failures)} of {len(run.results)} items have no output and were not scored; the "
            f"first: {_first(failures[0])}. {output_file} has them all under `failure`."
        )
    rows = []
    for (name, output), file in zip(run.evaluation_results, files, strict=True):
        scores = [result.scores[name] for result in run.results if name in result.scores]
        unscored = [score.failure for score in scores if score.failure is not None]
        rows.append(EvaluatorSummary(name, output.average_score, file, len(unscored)))
        if unscored:
            lines.append(
                f"evaluator {name!r} could not score {len(unscored)} of {len(run.results)} items; "
                f"the first: {_first(unscored[0])}. {file} has them all under `error`."
            )
    return EvalSummary(
        status="INTERRUPTED" if failures else "COMPLETED",
        seconds=seconds,
        items=len(run.results),
        failed_items=len(failures),
        evaluators=rows,
        workflow_output_file=output_file,
        message="\n".join(lines),
    )


def _first(failure: Failure) -> str:
    line = failure.message.strip().partition("\n")[0].rstrip(".")
    return f"{failure.type}: {line}"
