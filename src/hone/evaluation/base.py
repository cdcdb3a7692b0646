"""Values and protocols of evaluation: items in, scores out.

In:   an EvalInputItem: a row of the dataset, and the workflow's output for it
Out:  a Score: a finite number, or the reason why there is none

A failure is never a number. An evaluator that raises, returns an `error`, None, NaN or a value that
is not a number has not scored the item. Whether the output is to blame is decided when all items
were scored (`kinds_at_close`); a failure of a service or of the network never is.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hone.capture.base import SeenCall, Step
from hone.errors import ConfigError, PolicyFailure
from hone.files.rollout_record import EVALUATOR
from hone.tasks.tally import as_float
from hone.trajectory import failure_of
from hone.types import Failure
from hone.workflow.outside import outside_reason


def _as_id(value: Any) -> Any:
    # Ids are keys of groups, journals and files, and files store text: 7 and "7" are the same id.
    return str(value) if isinstance(value, int | float) else value


ItemId = Annotated[str, BeforeValidator(_as_id)]


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EvalInputItem(_Item):
    """One row of the dataset, and the workflow's output for it."""

    id: ItemId
    example: ItemId | None = None
    """Id of the row, shared by its `--reps`; None if it equals `id`."""
    input_obj: Any
    """The workflow's input."""
    expected_output_obj: Any = None
    """The expected output, from the row."""
    output_obj: Any = None
    """The workflow's output; None before it ran."""
    expected_trajectory: list[Any] = []
    """The expected steps, as written in the row."""
    trajectory: list[SeenCall] = []
    """The model calls of the rollout, in order."""
    steps: list[Step] = []
    """The `hone.step` calls of the rollout, in order."""
    events: list[Any] = []
    """Intermediate steps in NeMo Agent Toolkit's format, if one of its workflows ran."""
    seconds: float | None = None
    """Duration of the rollout."""
    full_dataset_entry: Any = None
    """The whole row, as read."""
    row_number: int | None = Field(default=None, exclude=True)
    """Number of its row in the file, from 1; None if it is not from a file."""

    def copy_with_updates(self, **updates: Any) -> Self:
        """A copy with some fields replaced; unknown fields are errors."""
        return type(self)(
            **{**{name: getattr(self, name) for name in type(self).model_fields}, **updates}
        )


class EvalInput(_Item):
    """The items of one evaluation."""

    eval_input_items: list[EvalInputItem]


class EvalOutputItem(_Item):
    """One evaluator's score of one item."""

    id: ItemId
    score: Any = None
    """A number; None if the item could not be scored."""
    reasoning: Any = None
    error: str | None = None
    """Why the item could not be scored; `score` is then ignored."""
    failure: Failure | None = Field(default=None, exclude=True)
    """The error with its traceback; not written to files."""
    failure_kind: str | None = Field(default=None, exclude=True)
    """`policy` if the model is to blame, `infrastructure` otherwise; set when all items were scored."""
    is_outside: bool = Field(default=False, exclude=True)
    """Whether the cause lies outside the output, such as a service that is down."""


class EvalOutput(_Item):
    """One evaluator's scores of all items."""

    average_score: Any = None
    """Mean of the numeric scores, not rounded; None if there are none. In a run of the workflow, items
    that failed because of the model count with `failure_reward`."""
    eval_output_items: list[EvalOutputItem] = []
    policy_failures: int = 0
    """Number of items that failed because of the model."""
    failure_reward: float | None = None
    """Score with which each of them counts; None if there are none."""


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluator's result for one item: a value or a failure."""

    value: float | None
    """None if the item could not be scored."""
    reasoning: Any = None
    failure: Failure | None = None
    is_outside: bool = False
    """Whether the cause of the failure lies outside the output: in a service, the network, the row or
    the configuration."""
    reason: str = EVALUATOR
    """Reason under which the failure is counted; another one if the evaluator raised PolicyFailure,
    which says that the model failed."""
    output: EvalOutputItem | None = field(default=None, compare=False)
    """What the evaluator returned, with the value as a float; None for a failure. `compute_reward` of
    a trajectory builder gets it."""

    @property
    def blames_policy(self) -> bool:
        """Whether the evaluator said that the model failed."""
        return self.failure is not None and self.reason != EVALUATOR


@runtime_checkable
class Evaluator(Protocol):
    """Scores one item. An exception is a failure, not a zero.

    An attribute `is_service = True` says that it asks a model or another service, so that its
    failures are never the policy's.
    """

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem: ...


@runtime_checkable
class GroupEvaluator(Evaluator, Protocol):
    """Scores the rollouts of one example by comparing them; `evaluate_item` scores a single one."""

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> Sequence[EvalOutputItem]:
        """One output for each item, in the order of the items, whose ids may be equal."""
        ...


@dataclass(frozen=True)
class EvaluatorInfo:
    """An evaluator given as a function of many items."""

    config: Any
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str = ""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """The function's result for this item alone."""
        output = await self.evaluate_fn(EvalInput(eval_input_items=[item]))
        results = [result for result in output.eval_output_items if result.id == item.id]
        if len(results) != 1:
            ids = [result.id for result in output.eval_output_items]
            raise ValueError(
                f"evaluate_fn was given item {item.id!r} and returned results for {ids!r}; it must "
                "return one EvalOutputItem with the id of each item"
            )
        return results[0]


class BaseEvaluator(ABC):
    """An evaluator written as a class: implement `evaluate_item`."""

    is_service: bool = False
    """Whether it asks a model or another service. Its failures are then never the policy's."""

    def __init__(self, max_concurrency: int = 4, tqdm_desc: str = "Evaluating") -> None:
        self.max_concurrency = max_concurrency
        self.tqdm_desc = tqdm_desc
        self.semaphore = asyncio.Semaphore(max_concurrency)

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem: ...

    async def evaluate(self, eval_input: EvalInput) -> EvalOutput:
        """Score all items, `max_concurrency` at a time; a failure does not stop the others."""
        items = eval_input.eval_input_items
        scores = await asyncio.gather(*(score(self, item) for item in items))
        return output_of((item.id, one) for item, one in zip(items, scores, strict=True))


class DatasetLoader(Protocol):
    """Reads a dataset."""

    def load(self, path: Path | None) -> list[dict[str, Any]] | EvalInput:
        """Rows, which become items according to `structure`; or items."""
        ...


@dataclass(frozen=True)
class EvalOptions:
    """The options of `hone eval`."""

    config_file: Path
    dataset: Path | None = None
    """Replaces the document's dataset; the extension selects its type."""
    result_json_path: str = "$"
    skip_workflow: bool = False
    """Score existing answers, from the dataset or from the last evaluation."""
    skip_completed_entries: bool = False
    """Run only the items without an answer."""
    endpoint: str | None = None
    """The workflow runs at this address."""
    endpoint_timeout: float = 300.0
    """Timeout of one rollout there, in seconds."""
    reps: int = 1
    override: Sequence[tuple[str, str]] = ()

    def check(self) -> None:
        """Raise ConfigError for options that cannot be combined."""
        skips = self.skip_workflow or self.skip_completed_entries
        if self.reps < 1:
            raise ConfigError(f"--reps {self.reps}: at least 1")
        if self.reps > 1 and skips:
            raise ConfigError(
                f"--reps {self.reps} runs each entry anew, so it does not go with --skip_workflow or "
                "--skip_completed_entries; leave one of them out"
            )
        if self.skip_workflow and self.endpoint:
            raise ConfigError(
                f"--skip_workflow runs no entry, and --endpoint {self.endpoint} says where entries "
                "run; leave one of them out"
            )
        if self.skip_workflow and self.skip_completed_entries:
            raise ConfigError(
                "--skip_workflow runs no entry and --skip_completed_entries runs some; choose one"
            )


async def score(
    evaluator: Evaluator,
    item: EvalInputItem,
    *,
    timeout_s: float | None = None,
    is_service: bool = False,
    listed: Collection[str] = (),
) -> Score:
    """The evaluator's score of the item; an exception or a timeout becomes its failure.

    Args:
        evaluator: scores the item.
        item: the item, with an output.
        timeout_s: the evaluator fails if it takes longer.
        is_service: whether its failures are never the policy's.
        listed: `finetuning.infrastructure_exceptions`, whose failures are never the policy's either.
    """
    evaluator = _behind(evaluator)

    async def alone() -> Sequence[EvalOutputItem]:
        return [await evaluator.evaluate_item(item)]

    [one] = await _scores(evaluator, alone, [item], timeout_s, is_service, listed)
    return one


async def score_group(
    evaluator: GroupEvaluator,
    items: Sequence[EvalInputItem],
    *,
    timeout_s: float | None = None,
    is_service: bool = False,
    listed: Collection[str] = (),
) -> list[Score]:
    """The evaluator's scores of rollouts of one example; a failure is the failure of each."""
    return await _scores(
        evaluator, lambda: evaluator.evaluate_group(items), items, timeout_s, is_service, listed
    )


async def _scores(
    evaluator: Evaluator,
    evaluate: Callable[[], Awaitable[Sequence[EvalOutputItem]]],
    items: Sequence[EvalInputItem],
    timeout_s: float | None,
    is_service: bool,
    listed: Collection[str],
) -> list[Score]:
    # The timeout covers only the scoring, not the wait for a free slot.
    turn = evaluator.semaphore if isinstance(evaluator, BaseEvaluator) else nullcontext()
    is_service = is_service or getattr(evaluator, "is_service", False)
    deadline: asyncio.Timeout | None = None
    try:
        async with turn, asyncio.timeout(timeout_s) as deadline:
            outputs = await evaluate()
            if len(outputs) != len(items):
                raise ValueError(
                    f"evaluate_group was given {len(items)} items and returned {len(outputs)} "
                    "results; it must return one for each, in their order"
                )
            scores = [score_of(output) for output in outputs]
            return [
                replace(one, is_outside=is_service or one.is_outside) if one.failure else one
                for one in scores
            ]
    except TimeoutError as error:
        one = unscored(error, is_service=is_service, listed=listed)
        if deadline is not None and deadline.expired():
            message = f"item {items[0].id!r}: the evaluator did not end within {timeout_s:g} s"
            failure = Failure(type="TimeoutError", message=message)
            one = Score(None, failure=failure, is_outside=is_service)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  # user code: whatever it raises is data
        one = unscored(error, is_service=is_service, listed=listed)
    return [one] * len(items)


def unscored(
    error: BaseException, *, is_service: bool = False, listed: Collection[str] = ()
) -> Score:
    """The result of scoring that raised this error; arguments as in `score`."""
    failure = failure_of(error)
    if isinstance(error, PolicyFailure):
        return Score(None, failure=failure, reason=error.reason)
    outside = is_service or outside_reason(error, listed) is not None
    return Score(None, failure=failure, is_outside=outside)


def _behind(evaluator: Evaluator) -> Evaluator:
    """The BaseEvaluator of an EvaluatorInfo whose function is its `evaluate`."""
    function = evaluator.evaluate_fn if isinstance(evaluator, EvaluatorInfo) else None
    if getattr(function, "__func__", None) is BaseEvaluator.evaluate:
        return getattr(function, "__self__", evaluator)
    return evaluator


def score_of(output: EvalOutputItem) -> Score:
    """The result of an evaluator as a value or a failure."""
    if output.failure is not None or output.error:
        failure = output.failure or Failure(type="EvaluatorError", message=str(output.error))
        return Score(None, output.reasoning, failure, output.is_outside)
    number = as_float(output.score)
    if number is not None and math.isfinite(number):
        return Score(number, output.reasoning, output=output.model_copy(update={"score": number}))
    message = (
        f"item {output.id!r}: the score is {output.score!r}; return a finite number, such as "
        "float(...)"
    )
    return Score(None, output.reasoning, Failure(type="NoScore", message=message))


def output_of(scores: Iterable[tuple[str, Score]]) -> EvalOutput:
    """Scores in the form of the output files; the mean is over the numeric scores."""
    items = [
        EvalOutputItem(
            id=id,
            score=one.value,
            reasoning=one.reasoning,
            error=None if one.failure is None else f"{one.failure.type}: {one.failure.message}",
            failure=one.failure,
            is_outside=one.is_outside,
        )
        for id, one in scores
    ]
    values = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=fmean(values) if values else None, eval_output_items=items)
