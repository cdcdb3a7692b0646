"""Dataset x workflow x evaluators: run the workflow on every item, then score the outputs.

In:   a Builder (or the parts), items, an id for each rollout
Out:  ItemResults in the order of the items; for `hone eval` files and an EvalSummary

Everything is built once. `max_concurrency` limits rollouts, not their scoring: an item that is being
scored holds no slot, so a slow judge does not leave the engine idle. A failed rollout is not scored.
"""

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hone.config.build import Builder, build
from hone.config.policy import PolicyCalls
from hone.config.schema import Document, read
from hone.errors import ConfigError, RolloutError
from hone.evaluation.base import (
    EvalInput,
    EvalInputItem,
    EvalOptions,
    Evaluator,
    GroupEvaluator,
    Score,
    score,
    unscored,
)
from hone.evaluation.datasets import JsonDataset, as_target, load_items
from hone.evaluation.files import FINISHED, OutputDir
from hone.evaluation.groups import Member, RolloutGroup
from hone.evaluation.mistakes import check_answers, check_evaluators
from hone.evaluation.results import (
    EvalSummary,
    EvaluationRunOutput,
    ItemResult,
    OnPolicyFailure,
    extracted,
    output_by,
    summary_of,
    with_remote_steps,
)
from hone.tasks.loop import run_loop
from hone.tasks.progress import Progress
from hone.tasks.tally import run_together
from hone.workflow.endpoint import open_endpoint
from hone.workflow.function import Function
from hone.workflow.paths import json_path
from hone.workflow.run import HeldTime, RecordedCalls, run_rollout
from hone.workflow.target import load_target

log = logging.getLogger("hone")

Endpoint = tuple[str, float]
"""The address of a workflow, and the timeout of one rollout there."""
Prepare = Callable[[EvalInputItem], EvalInputItem | Awaitable[EvalInputItem]]


class Evaluation:
    """A workflow, a dataset and evaluators, built once and run any number of times."""

    def __init__(
        self,
        *,
        workflow: Function,
        items: Sequence[EvalInputItem],
        evaluators: Mapping[str, Evaluator],
        max_concurrency: int,
        result_json_path: str = "$",
        timeout_s: float | None = None,
        host: str | None = None,
        recorded_calls: RecordedCalls | None = None,
        held_s: HeldTime | None = None,
        aliases: Mapping[str, str] | None = None,
        policy: PolicyCalls | None = None,
        infrastructure_exceptions: Sequence[str] = (),
        prepare: Prepare | None = None,
        services: Collection[str] = (),
        on_policy_failure: OnPolicyFailure = "lowest",
    ) -> None:
        """Runs nothing yet.

        Args:
            workflow: runs on each item's input.
            items: the items that `run` uses by default.
            evaluators: evaluators by name.
            max_concurrency: number of rollouts at a time, over all runs of this evaluation.
            result_json_path: the part of the workflow's return value that is its output.
            timeout_s: timeout of one rollout, and of each evaluator.
            host: host of the trained model; None marks calls to any host.
            recorded_calls: reads the calls that its server recorded of a rollout.
            held_s: asks its server for how long it held the calls of a rollout; that time extends
                the rollout's timeout.
            aliases: names and the models that they mean in a rollout.
            policy: which calls the trained policy answers; None: all.
            infrastructure_exceptions: classes of exceptions that are never the policy's failure.
            prepare: called with each item between the workflow and the evaluators.
            services: names of evaluators whose failures are never the policy's.
            on_policy_failure: score of an item that failed because of the model, in averages.
        """
        self.workflow = workflow
        self.items = list(items)
        self.evaluators = dict(evaluators)
        self.max_concurrency = max_concurrency
        self.result_json_path = json_path(result_json_path)
        self.timeout_s = timeout_s
        self.host = host
        self._recorded_calls, self._held_s, self._aliases = recorded_calls, held_s, aliases
        self.policy = policy
        self.infrastructure_exceptions = tuple(infrastructure_exceptions)
        self._prepare, self._services = prepare, frozenset(services)
        self._on_policy_failure: OnPolicyFailure = on_policy_failure
        self._slots = asyncio.Semaphore(max_concurrency)

    async def run_item(
        self,
        item: EvalInputItem,
        *,
        rollout: str | None = None,
        temperature: float | None = None,
        step: int | None = None,
        evaluators: Collection[str] | None = None,
        member: Member | None = None,
    ) -> ItemResult:
        """Run the workflow on one item, then score its output.

        Args:
            item: the item; an existing output is replaced.
            rollout: id of the rollout; random if None.
            temperature: sampling temperature, whatever the workflow asks for.
            step: the step that answers; the newest one if None.
            evaluators: score with these only.
            member: its place in the group that is scored together; None to score it alone.
        """
        names = self._names(evaluators)
        async with self._slots:
            result = await run_rollout(
                self.workflow,
                item.input_obj,
                id=rollout,
                host=self.host,
                timeout_s=self.timeout_s,
                temperature=temperature,
                step=step,
                aliases=self._aliases,
                recorded_calls=self._recorded_calls,
                held_s=self._held_s,
                policy=self.policy,
                infrastructure_exceptions=self.infrastructure_exceptions,
            )
        result = extracted(with_remote_steps(result, self.policy), self.result_json_path)
        answered = item.copy_with_updates(
            output_obj=result.output,
            trajectory=list(result.calls),
            steps=list(result.steps),
            events=list(result.events),
            seconds=result.seconds,
        )
        if result.failure is not None:
            return ItemResult(answered, result, {})
        return ItemResult(answered, result, await self._scores(answered, names, member))

    async def score_item(
        self,
        item: EvalInputItem,
        *,
        evaluators: Collection[str] | None = None,
        member: Member | None = None,
    ) -> ItemResult:
        """Score the output that the item has, without running the workflow."""
        names = self._names(evaluators)
        if item.output_obj is None:
            return ItemResult(item, None, {})
        return ItemResult(item, None, await self._scores(item, names, member))

    def compares(self, evaluators: Collection[str] | None = None) -> bool:
        """Whether one of the evaluators compares the rollouts of an example."""
        names = self._names(evaluators)
        return any(isinstance(self.evaluators[name], GroupEvaluator) for name in names)

    async def run(
        self,
        items: Sequence[EvalInputItem] | None = None,
        *,
        rollout_id: Callable[[EvalInputItem], str] | None = None,
        temperature: float | None = None,
        evaluators: Collection[str] | None = None,
        on_result: Callable[[ItemResult], None] | None = None,
        rerun: Callable[[EvalInputItem], bool] = lambda item: True,
    ) -> EvaluationRunOutput:
        """Run and score all items; results in their order.

        Args:
            items: replaces the items of the dataset.
            rollout_id: id of an item's rollout; random if None.
            temperature: as in `run_item`.
            evaluators: score with these only.
            on_result: called with each result as soon as there is one.
            rerun: items for which it returns False are only scored.
        """
        names = self._names(evaluators)
        wanted = list(enumerate(self.items if items is None else items))
        members: defaultdict[str, list[int]] = defaultdict(list)
        for n, item in wanted:
            members[item.example or item.id].append(n)
        groups = {example: RolloutGroup(numbers) for example, numbers in members.items()}

        async def one(n: int, item: EvalInputItem) -> ItemResult:
            group = groups[item.example or item.id]
            try:
                if rerun(item):
                    id = rollout_id(item) if rollout_id else None
                    result = await self.run_item(
                        item,
                        rollout=id,
                        temperature=temperature,
                        evaluators=names,
                        member=group.member(n),
                    )
                else:
                    result = await self.score_item(item, evaluators=names, member=group.member(n))
            finally:
                group.leave(n)
            if on_result is not None:
                on_result(result)
            return result

        results = await run_together(one(n, item) for n, item in wanted)
        return EvaluationRunOutput(
            results=results,
            eval_input=EvalInput(eval_input_items=[result.item for result in results]),
            evaluation_results=[
                (name, output_by(name, results, self._on_policy_failure)) for name in names
            ],
            workflow_interrupted=any(result.failure is not None for result in results),
        )

    def _names(self, evaluators: Collection[str] | None) -> list[str]:
        if evaluators is None:
            return list(self.evaluators)
        unknown = [name for name in evaluators if name not in self.evaluators]
        if unknown:
            raise ConfigError(
                f"evaluator {unknown[0]!r} not found; there are: {', '.join(self.evaluators)}"
            )
        return list(evaluators)

    async def _scores(
        self, item: EvalInputItem, names: Sequence[str], member: Member | None
    ) -> dict[str, Score]:
        if self._prepare is not None:
            try:
                prepared = self._prepare(item)
                item = await prepared if isinstance(prepared, Awaitable) else prepared
                _check_item(item)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # user code may raise anything; it is recorded
                one_for_all = unscored(error, listed=self.infrastructure_exceptions)
                return dict.fromkeys(names, one_for_all)
        if member is not None:
            member.add(item)

        async def one(name: str) -> Score:
            evaluator = self.evaluators[name]
            cause: dict[str, Any] = {
                "is_service": name in self._services,
                "listed": self.infrastructure_exceptions,
            }
            if member is not None and isinstance(evaluator, GroupEvaluator):
                return await member.score(name, evaluator, self.timeout_s, **cause)
            return await score(evaluator, item, timeout_s=self.timeout_s, **cause)

        return dict(zip(names, await run_together(map(one, names)), strict=True))


async def evaluation(
    builder: Builder,
    *,
    dataset: Path | None = None,
    result_json_path: str = "$",
    reps: int = 1,
    evaluators: Collection[str] | None = None,
    timeout_s: float | None = None,
    skip_workflow: bool = False,
    endpoint: Endpoint | None = None,
    scores_rows: bool = True,
) -> Evaluation:
    """An Evaluation of the Builder's document; with `endpoint`, its workflow runs there.

    Connects to or starts the training server if the document needs one and none is connected. Raises
    ConfigError first for an evaluator that cannot be called, and for rows without the answer that it
    needs (unless the rows are never scored: `scores_rows`).
    """
    general = builder.document.eval.general
    configs, instead = (
        builder.document.eval.evaluators,
        builder.document.finetuning.on_policy_failure,
    )
    names = configs if evaluators is None else evaluators
    prepare = general.output.custom_pre_eval_process_function if general.output else None
    items = await dataset_items(builder, dataset, reps=reps)
    _check(builder.document, names, items, dataset, scores_rows=scores_rows and prepare is None)
    builder.runs_workflow = not skip_workflow and endpoint is None
    if skip_workflow:
        workflow = Function.of("<workflow>", _not_run)
    elif endpoint is not None:
        await builder.serve()
        workflow = await builder.share("--endpoint", lambda _: open_endpoint(*endpoint))
    else:
        await builder.serve()
        workflow = await builder.get_workflow()
    return Evaluation(
        workflow=workflow,
        items=items,
        evaluators={name: await _evaluator(builder, name) for name in names},
        max_concurrency=builder.get_rollout_concurrency(),
        result_json_path=result_json_path,
        timeout_s=timeout_s,
        prepare=None if prepare is None else _prepare(prepare, builder.document.file),
        services=[name for name in names if configs[name].is_service],
        on_policy_failure=instead if isinstance(instead, str) else instead.reward,
        **builder.rollout_arguments,
    )


def _check(
    document: Document,
    names: Collection[str],
    items: Sequence[EvalInputItem],
    dataset: Path | None,
    *,
    scores_rows: bool,
) -> None:
    """Raise ConfigError for mistakes of the evaluators and the rows that show before anything runs."""
    known, directory = document.eval.evaluators, document.file.resolve().parent
    used = {name: known[name] for name in names if name in known}
    check_evaluators(used, directory)
    config = document.eval.general.dataset or JsonDataset()
    if scores_rows and not config.structure.disable:
        where = str(dataset or config.file_path or "eval.general.dataset")
        column = config.structure.answer_key
        check_answers(items, used, directory, column=column, where=where)


async def _not_run(input: Any) -> Any:
    raise ConfigError("--skip_workflow: the workflow is not run")


async def dataset_items(
    builder: Builder, dataset: Path | None = None, *, reps: int = 1
) -> list[EvalInputItem]:
    """The items of the document's dataset, or of the file that replaces it."""
    config = builder.document.eval.general.dataset
    loader = await builder.get_dataset_loader(config) if config is not None else None
    near = builder.document.file.parent
    return load_items(config, dataset, reps=reps, loader=loader, near=near)


async def _evaluator(builder: Builder, name: str) -> Evaluator:
    evaluator = await builder.get_evaluator(name)
    method = getattr(evaluator, "evaluate_item", None)
    if not inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"eval.evaluators.{name}: its factory yielded {type(evaluator).__name__}; it must yield "
            "an object with `async def evaluate_item(self, item)`, or an EvaluatorInfo"
        )
    return evaluator


def _prepare(function: str, file: Path) -> Prepare:
    where = "eval.general.output.custom_pre_eval_process_function"
    return load_target(as_target(function), file.resolve().parent, where=where)


def _check_item(item: Any) -> None:
    if not isinstance(item, EvalInputItem):
        raise RolloutError(
            f"custom_pre_eval_process_function returned {type(item).__name__}; it must return the "
            "EvalInputItem it was given, or a copy of it"
        )


# ---- hone eval --------------------------------------------------------------------------------


def evaluate(options: EvalOptions) -> EvalSummary:
    """`hone eval`: run the workflow over the dataset, score it, and write the files."""
    options.check()
    try:
        return run_loop(_evaluate(options))
    except KeyboardInterrupt:
        if options.reps == 1:
            log.warning("interrupted; --skip_completed_entries continues from here")
        else:
            log.warning("interrupted; finished items are in %s of the output directory", FINISHED)
        raise


async def _evaluate(options: EvalOptions) -> EvalSummary:
    began = time.monotonic()
    document = read(options.config_file, options.override)
    general = document.eval.general
    keep = options.skip_workflow or options.skip_completed_entries
    async with build(document) as builder:
        run = await evaluation(
            builder,
            dataset=options.dataset,
            result_json_path=options.result_json_path,
            reps=options.reps,
            timeout_s=document.finetuning.rollout_timeout_s,
            skip_workflow=options.skip_workflow,
            endpoint=(options.endpoint, options.endpoint_timeout) if options.endpoint else None,
        )
        if options.reps == 1 and run.compares():
            log.warning(
                "an evaluator compares the runs of each row, but each row runs only once; set --reps, "
                "for example --reps 4"
            )
        structure = (general.dataset or JsonDataset()).structure
        with closing(OutputDir(general, structure)) as output:
            # Only now, because an evaluation that cannot start must not remove an earlier one's
            # files.
            output.prepare(document.eval.evaluators, keep=keep, config_file=document.file)
            output.write_config(document, options)
            results = await _run_into(output, run, options)
            whole, files = output.write(results.results, results.evaluation_results)
    return summary_of(results, whole, files, time.monotonic() - began)


async def _run_into(
    output: OutputDir, run: Evaluation, options: EvalOptions
) -> EvaluationRunOutput:
    """Run and score the items; each result is written to disk at once."""
    keep = options.skip_workflow or options.skip_completed_entries
    items = output.filled(run.items, runs=not options.skip_workflow) if keep else run.items
    with Progress("eval") as bar:
        bar.update(total=len(items))

        def done(result: ItemResult) -> None:
            output.add(result)
            bar.update(done=bar.done + 1)

        return await run.run(
            items,
            on_result=done,
            rerun=lambda item: (
                not options.skip_workflow and not (keep and item.output_obj is not None)
            ),
        )
