"""What came of running and scoring items, and what is read off it.

In:   a rollout's result; items with their scores
Out:  ItemResult, EvaluationRunOutput, EvalSummary; the output that `result_json_path` picks
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hone.evaluation.base import EvalInput, EvalInputItem, EvalOutput, Score, output_of
from hone.evaluation.paths import values_at
from hone.types import Failure
from hone.workflow.jsonable import as_text
from hone.workflow.run import RolloutFailure, RolloutResult


@dataclass(frozen=True)
class ItemResult:
    """One item, run and scored."""

    item: EvalInputItem
    """With output_obj, trajectory, steps and seconds filled."""
    rollout: RolloutResult | None
    """None where an answer that was there already was scored."""
    scores: dict[str, Score]
    """By evaluator; empty if the rollout failed."""

    @property
    def failure(self) -> Failure | None:
        """Why there is nothing to score."""
        if self.rollout is not None:
            return self.rollout.failure.failure if self.rollout.failure else None
        if self.item.output_obj is not None:
            return None
        message = f"item {self.item.id!r} has no generated answer, and the workflow was not run"
        return Failure(type="NoOutput", message=message)


@dataclass(frozen=True)
class EvaluationRunOutput:
    """What came of one run over a dataset."""

    results: list[ItemResult]
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]]
    workflow_interrupted: bool = False
    """True if a rollout failed."""
    usage_stats: dict[str, Any] = field(default_factory=dict)
    """`total_runtime` in seconds, and by item `runtime`, `calls` and tokens."""
    profiler_results: None = None
    workflow_output_file: Path | None = None
    evaluator_output_files: list[Path] = field(default_factory=list)
    config_original_file: Path | None = None
    config_effective_file: Path | None = None
    config_metadata_file: Path | None = None


def extracted(result: RolloutResult, path: str) -> RolloutResult:
    """The result with its output as JSON, and of that what the path finds."""
    if result.failure is not None:
        return result
    try:
        output = _plain(result.output)
    except Exception as error:  # noqa: BLE001  # user code: whatever it raises is data
        return _unusable(result, error)
    if path != "$":
        try:
            found = values_at(path, json.loads(output) if isinstance(output, str) else output)
            problem = None if found else f"nothing is at {path} of what the workflow returned"
        except (ValueError, RecursionError) as error:
            found, problem = [], f"the workflow returned text that is no JSON ({error})"
        if problem is not None:
            message = f"result_json_path {path}: {problem}: {as_text(output)[:200]!r}"
            failure = RolloutFailure(
                # The words are the model's, if there was one.
                "policy" if result.calls else "infrastructure",
                "unparseable",
                Failure(type="NoOutput", message=message),
            )
            return replace(result, output=None, failure=failure)
        output = found[0]
    return replace(result, output=output)


def _unusable(result: RolloutResult, error: Exception) -> RolloutResult:
    kind = type(result.output).__name__
    failure = Failure(
        type="NoOutput",
        message=f"the workflow returned a {kind} that cannot be made JSON: "
        f"{type(error).__name__}: {as_text(error)}; return text, numbers, lists or dicts",
    )
    why = RolloutFailure("infrastructure", "agent_error", failure)
    return replace(result, output=None, failure=why)


def _plain(value: Any) -> Any:
    """A model or a dataclass as the JSON it stands for."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def output_by(name: str, results: Sequence[ItemResult]) -> EvalOutput:
    """One evaluator's word on all items; those without an output have an error and no score."""
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
    """What `hone eval` prints at its end."""

    status: str
    """COMPLETED, or INTERRUPTED if an item has no output."""
    seconds: float
    items: int
    failed_items: int
    """That have no output."""
    evaluators: list[EvaluatorSummary]
    workflow_output_file: Path
    message: str
    """What failed and how often; empty if nothing did."""

    @property
    def failed(self) -> bool:
        """Whether the command must exit non-zero."""
        return bool(self.message)


def summary_of(
    ended: EvaluationRunOutput, whole: Path, files: Sequence[Path], seconds: float
) -> EvalSummary:
    failures = [result.failure for result in ended.results if result.failure is not None]
    lines = []
    if failures:
        said = _first(failures[0])
        lines.append(
            f"{len(failures)} of {len(ended.results)} items have no output and were not scored; the "
            f"first: {said}. {whole} has them all under `failure`."
        )
    rows = []
    for (name, told), file in zip(ended.evaluation_results, files, strict=True):
        lost = [
            result.scores[name].failure
            for result in ended.results
            if name in result.scores and result.scores[name].failure is not None
        ]
        rows.append(EvaluatorSummary(name, told.average_score, file, len(lost)))
        if lost and lost[0] is not None:
            lines.append(
                f"evaluator {name!r} could not score {len(lost)} of {len(ended.results)} items; the "
                f"first: {_first(lost[0])}. {file} has them all under `error`."
            )
    return EvalSummary(
        status="INTERRUPTED" if failures else "COMPLETED",
        seconds=seconds,
        items=len(ended.results),
        failed_items=len(failures),
        evaluators=rows,
        workflow_output_file=whole,
        message="\n".join(lines),
    )


def _first(failure: Failure) -> str:
    line = failure.message.strip().partition("\n")[0].rstrip(".")
    return f"{failure.type}: {line}"
