"""`hone finetune --dry-run`: what would run, and how much of it. Makes no connection.

In:   the run's document and the validation's, what the command said beside them
Out:  lines for a reader; what the configuration alone shows to be wrong
"""

from collections.abc import Iterator
from pathlib import Path

from hone.config.build import build
from hone.config.schema import Document, FinetuneRunConfig
from hone.errors import HoneError
from hone.evaluation.run import dataset_items
from hone.event_log import FILE
from hone.event_log import read as read_events
from hone.finetune.adapter_config import art_config_of
from hone.finetune.checks import Check, Plan, check_document, check_movement, plan
from hone.finetune.journal import RunFingerprint, check_free, plan_start
from hone.finetune.resume import RunState
from hone.report.text import counted

PREFLIGHT = 2
"""Rollouts before the first epoch that are not used for training."""


async def dry_run(
    document: Document,
    validating: Document | None,
    options: FinetuneRunConfig,
    fingerprint: RunFingerprint,
    *,
    fresh: bool,
) -> tuple[list[str], list[Check]]:
    """What to say, and what is wrong; `validating` is the validation's own document, if any."""
    examples = await _count(document, options.dataset)
    held_out = 0
    if validating is not None or options.validation_dataset is not None:
        held_out = await _count(validating or document, options.validation_dataset)
    planned = plan(document, examples)
    start, state, refused = _start(document, fingerprint, fresh=fresh)
    checks = [*check_document(document), check_movement(planned), *refused]
    lines = [
        *_where(document),
        f"examples      {examples}, of which {planned.examples} an epoch, "
        f"{counted(planned.generations, 'rollout')} each",
        f"training      {counted(planned.epochs, 'epoch')} of {counted(planned.rounds, 'round')}: "
        f"{counted(planned.rollouts, 'rollout')} of at least one model call, "
        f"{counted(planned.jobs, 'job')}, {counted(planned.optimizer_steps, 'optimizer step')}",
        *_validation(document, options, held_out),
        *start,
        *(() if state is None else _left(planned, state, options, held_out)),
        f"output        {document.finetuning.output_dir}",
    ]
    wrong = [check for check in checks if not check.ok]
    lines += [f"warning       {check.message}" for check in checks if check.ok and check.warning]
    return lines, wrong


def _where(document: Document) -> Iterator[str]:
    adapter = art_config_of(document)
    if adapter is None:
        other = document.trainer_adapters.get(document.finetuning.trainer_adapter or "")
        yield f"backend       {'none' if other is None else other.type_name}"
        return
    server = adapter.backend
    at = f"at {server.ip}:{server.port}" if server.ip else f"on a server of its own ({server.root})"
    yield f"model         {server.project}/{server.name} over {server.base_model} {at}"


def _validation(document: Document, options: FinetuneRunConfig, held_out: int) -> Iterator[str]:
    if not held_out:
        yield "validation    none (--validation_dataset)"
        return
    epochs, reps = document.finetuning.num_epochs, document.finetuning.validation.reps
    at = sorted({*range(0, epochs, options.validation_interval), epochs})
    yield (
        f"validation    {counted(held_out, 'example')} x {reps} after {', '.join(map(str, at))} "
        f"epochs: {held_out * reps * len(at)} rollouts"
    )
    if len(at) > 2 and not document.finetuning.validation.greedy:
        yield (
            f"              and {2 * held_out * reps} at the end, where the best step and the first "
            "answer anew"
        )


def _start(
    document: Document, fingerprint: RunFingerprint, *, fresh: bool
) -> tuple[list[str], RunState | None, list[Check]]:
    """Which run it is and, if it goes on, where it stands; or why the run refuses to start."""
    config = document.finetuning
    try:
        check_free(config.output_dir)
        start = plan_start(config.output_dir, fingerprint, fresh=fresh)
    except HoneError as error:
        refused = Check("run", False, str(error))
        return ["run           refuses to start; see below"], None, [refused]
    preflight = f"preflight     {PREFLIGHT} rollouts of one example, and one token from each model"
    if start.resumed is None:
        aside = f"; the one before is moved to {start.aside}" if start.aside else ""
        return [preflight, f"run           a new one{aside}"], None, []
    run_id, state = start.resumed.run_id, RunState(config, read_events(config.output_dir / FILE))
    if state.is_finished(config.num_epochs):
        return [f"run           {run_id} is finished, nothing to do"], None, []
    done = sum(map(state.is_done, range(config.num_epochs)))
    epochs = counted(done, "epoch") + (" is" if done == 1 else " are")
    goes_on = f"run           goes on with {run_id}, of which {epochs} done"
    return [*([] if state.history.rounds else [preflight]), goes_on], state, []


def _left(planned: Plan, state: RunState, options: FinetuneRunConfig, held_out: int) -> list[str]:
    """What a run that goes on still does; at most, because rollouts of an open round are kept."""
    epochs = [epoch for epoch in range(planned.epochs) if not state.is_done(epoch)]
    rollouts = planned.examples * planned.generations * len(epochs)
    line = (
        f"left          {counted(len(epochs), 'epoch')}: at most {counted(rollouts, 'rollout')}, "
        f"{counted(planned.rounds * len(epochs), 'job')}"
    )
    at = [epoch for epoch in epochs if epoch % options.validation_interval == 0]
    at = [epoch for epoch in (*at, planned.epochs) if not state.is_validated(epoch)]
    if held_out and at:
        answers = held_out * state.config.validation.reps * len(at)
        line += f"; validation after {', '.join(map(str, at))} epochs: {answers} rollouts"
    return [line]


async def _count(document: Document, dataset: Path | None) -> int:
    async with build(document) as builder:
        return len(await dataset_items(builder, dataset))
