"""What an evaluator gets and gives: items in, scores out. Protocols and values only.

In:   an EvalInputItem: a row of the dataset, and what the workflow made of it
Out:  a Score: a finite number, or the reason why there is none

A failure is never a number. An evaluator that raises, says `error`, or gives None, NaN or
something that is no number has not scored the item: 0 would be trained on as if the policy had
been bad.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hone.capture.base import SeenCall, Step
from hone.trajectory import failure_of
from hone.types import Failure


def _as_id(value: Any) -> Any:
    # Ids key groups, journals and files, and a file gives back only text: 7 and "7" are one.
    return str(value) if isinstance(value, int | float) else value


ItemId = Annotated[str, BeforeValidator(_as_id)]


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EvalInputItem(_Item):
    """One row of the dataset, and what the workflow made of it."""

    id: ItemId
    input_obj: Any
    """What the workflow is given."""
    expected_output_obj: Any = None
    """What the row says the answer is."""
    output_obj: Any = None
    """What the workflow returned; None before it ran."""
    expected_trajectory: list[Any] = []
    """The steps the row says were expected, as they stand there."""
    trajectory: list[SeenCall] = []
    """The model calls of the rollout, in order."""
    steps: list[Step] = []
    """What the workflow told with hone.step, in order."""
    seconds: float | None = None
    """How long the rollout took."""
    full_dataset_entry: Any = None
    """The whole row, as it was read."""

    def copy_with_updates(self, **updates: Any) -> Self:
        """The same item with some fields replaced; names of fields that do not exist are refused."""
        return type(self)(
            **{**{name: getattr(self, name) for name in type(self).model_fields}, **updates}
        )


class EvalInput(_Item):
    """The items of one evaluation."""

    eval_input_items: list[EvalInputItem]


class EvalOutputItem(_Item):
    """What one evaluator says of one item."""

    id: ItemId
    score: Any = None
    """A number; None if it could not be scored."""
    reasoning: Any = None
    error: str | None = None
    """Why it could not be scored; whatever stands in `score` then does not count."""
    failure: Failure | None = Field(default=None, exclude=True)
    """The same with its traceback; not written to files."""


class EvalOutput(_Item):
    """What one evaluator says of all items."""

    average_score: Any = None
    """Mean of the numeric scores, not rounded; None if there is none."""
    eval_output_items: list[EvalOutputItem] = []


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluator's word on one item: a value or a failure."""

    value: float | None
    """None: could not be scored."""
    reasoning: Any = None
    failure: Failure | None = None


@runtime_checkable
class Evaluator(Protocol):
    """Scores one item. It may raise; that is a failure of the evaluator, not a zero."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem: ...


@dataclass(frozen=True)
class EvaluatorInfo:
    """An evaluator given as a function of many items."""

    config: Any
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str = ""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """What the function says when it is given this item alone."""
        output = await self.evaluate_fn(EvalInput(eval_input_items=[item]))
        told = [one for one in output.eval_output_items if one.id == item.id]
        if len(told) != 1:
            ids = [one.id for one in output.eval_output_items]
            raise ValueError(
                f"evaluate_fn was given item {item.id!r} and returned results for {ids!r}; it must "
                "return one EvalOutputItem with the id of each item"
            )
        return told[0]


class BaseEvaluator(ABC):
    """An evaluator written as a class: implement `evaluate_item`."""

    def __init__(self, max_concurrency: int = 4, tqdm_desc: str = "Evaluating") -> None:
        self.max_concurrency = max_concurrency
        self.tqdm_desc = tqdm_desc
        self.semaphore = asyncio.Semaphore(max_concurrency)

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem: ...

    async def evaluate(self, eval_input: EvalInput) -> EvalOutput:
        """Score all items, `max_concurrency` at a time; one that fails does not stop the others."""
        items = eval_input.eval_input_items
        scores = await asyncio.gather(*(score(self, item) for item in items))
        return output_of((item.id, one) for item, one in zip(items, scores, strict=True))


class DatasetLoader(Protocol):
    """Reads a dataset."""

    def load(self, path: Path | None) -> list[dict[str, Any]] | EvalInput:
        """Rows, from which items are made as `structure` says, or items ready made."""
        ...


@dataclass(frozen=True)
class EvalOptions:
    """The options of `hone eval`."""

    config_file: Path
    dataset: Path | None = None
    """Replaces the document's dataset; the extension says of which type it is."""
    result_json_path: str = "$"
    skip_workflow: bool = False
    """Score the answers that are there: in the dataset, or from the last evaluation."""
    skip_completed_entries: bool = False
    """Run only the items without an answer."""
    reps: int = 1
    override: Sequence[tuple[str, str]] = ()


async def score(
    evaluator: Evaluator, item: EvalInputItem, *, timeout_s: float | None = None
) -> Score:
    """The evaluator's word on the item; a failure, a missed deadline too, is kept as data."""
    evaluator = _behind(evaluator)
    # The deadline is for the scoring alone: a thousand items may wait for their turn.
    turn = evaluator.semaphore if isinstance(evaluator, BaseEvaluator) else nullcontext()
    deadline: asyncio.Timeout | None = None
    try:
        async with turn, asyncio.timeout(timeout_s) as deadline:
            return score_of(await evaluator.evaluate_item(item))
    except TimeoutError as error:
        if deadline is None or not deadline.expired():
            return Score(None, failure=failure_of(error))
        message = f"item {item.id!r}: the evaluator did not end within {timeout_s:g} s"
        return Score(None, failure=Failure(type="TimeoutError", message=message))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code: whatever it raises is data
        return Score(None, failure=failure_of(error))


def _behind(evaluator: Evaluator) -> Evaluator:
    """The class behind an EvaluatorInfo, where its function is no more than that class's own."""
    function = evaluator.evaluate_fn if isinstance(evaluator, EvaluatorInfo) else None
    if getattr(function, "__func__", None) is BaseEvaluator.evaluate:
        return getattr(function, "__self__", evaluator)
    return evaluator


def score_of(output: EvalOutputItem) -> Score:
    """What an evaluator returned, as a value or a failure."""
    if output.failure is not None or output.error:
        failure = output.failure or Failure(type="EvaluatorError", message=str(output.error))
        return Score(None, output.reasoning, failure)
    value = output.score
    if isinstance(value, Real) and math.isfinite(value):
        return Score(float(value), output.reasoning)
    message = f"item {output.id!r}: the score is {value!r}; it must be a finite number"
    return Score(None, output.reasoning, Failure(type="NoScore", message=message))


def output_of(scores: Iterable[tuple[str, Score]]) -> EvalOutput:
    """Scores in the form in which they are written; the mean is over those that are numbers."""
    items = [
        EvalOutputItem(
            id=id,
            score=one.value,
            reasoning=one.reasoning,
            error=None if one.failure is None else f"{one.failure.type}: {one.failure.message}",
            failure=one.failure,
        )
        for id, one in scores
    ]
    values = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=fmean(values) if values else None, eval_output_items=items)
