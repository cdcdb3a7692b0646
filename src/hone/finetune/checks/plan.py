"""The size of a run, and the output of `hone finetune --dry-run`. Makes no connection.

In:   the run's document and the validation's, the options of the command line
Out:  a Plan: rollouts, jobs and optimizer steps; lines to print
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hone.config.build import DEFAULT_CONCURRENCY, build
from hone.config.schema import Document, FinetuneRunConfig
from hone.errors import HoneError
from hone.evaluation.base import EvalInputItem
from hone.evaluation.run import dataset_items
from hone.files.event_log import FILE
from hone.files.event_log import read as read_events
from hone.finetune.adapter_config import adapter_config_of
from hone.finetune.builder import num_generations
from hone.finetune.checks.overlap import overlap
from hone.finetune.dataset_builder import dataset_config_of
from hone.finetune.journal import check_free, plan_start
from hone.finetune.resume import RunState, rounds_of
from hone.report.text import counted, duration
from hone.train_config import TrainConfig

PREFLIGHT = 2
"""Rollouts before the first epoch that are not used for training."""
HARDLY = 1e-3
"""Smallest learning rate x optimizer steps that can change the model's answers. AdamW moves each
weight by about the learning rate per step; the demo needs about 1e-2."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run, if every group can be trained."""

    examples: int
    """Examples per epoch."""
    generations: int
    epochs: int
    rounds: int
    """Rounds per epoch."""
    rollouts: int
    """Training rollouts of all epochs, without retries and validation."""
    round_sizes: tuple[int, ...]
    """Rollouts of each round of an epoch."""
    validation_sizes: tuple[int, ...]
    """Rollouts of each validation; the last is that of the first and the best step, side by side."""
    jobs: int
    optimizer_steps: int
    learning_rate: float | None
    """None for a plugin's adapter."""
    moved: float = 0.0
    """Approximate largest change of a weight."""

    @property
    def validation_rollouts(self) -> int:
        """Rollouts of all validations, if the run does not stop early."""
        return sum(self.validation_sizes)

    @property
    def is_too_small(self) -> bool:
        """Whether the learning rate and the number of steps are too small to change the model."""
        return 0 < self.moved < HARDLY

    def __str__(self) -> str:
        work = (
            f"{counted(self.epochs, 'epoch')} x {counted(self.rounds, 'round')}, "
            f"{counted(self.rollouts, 'rollout')}, {counted(self.jobs, 'job')}, "
            f"{counted(self.optimizer_steps, 'optimizer step')}"
        )
        if self.learning_rate is None:
            return f"{work}, if every group can be trained"
        rate = self.learning_rate
        text = (
            f"{work} at learning_rate {rate:g}: each weight moves by about {self.moved:.1e} at most"
        )
        if not self.is_too_small:
            return text
        return (
            f"{text}, which can hardly move the model. Raise training.learning_rate (its default is "
            f"{TrainConfig().learning_rate:g}), finetuning.num_epochs, or the number of examples; or lower "
            "training.groups_per_optimizer_step."
        )


class Span(NamedTuple):
    """Seconds from the shortest to the longest."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high < 1.5 * self.low:
            return duration(self.high)
        return f"{duration(self.low)} to {duration(self.high)}"

    @property
    def meaning(self) -> str:
        """Why it is uncertain."""
        if self.high < 1.5 * self.low:
            return "if all take that long"
        return "the longer time if more at a time are no faster"


def rollout_time(planned: Plan, *, seconds: float, concurrency: int) -> Span:
    """Rough time of all rollouts, if two of them at a time took `seconds` each.

    At best, `concurrency` rollouts at a time take as long as two, and each round waits for its last
    one. At worst, two already used all of the engine, and more at a time are no faster.
    """
    sizes = [*planned.round_sizes * planned.epochs, *planned.validation_sizes]
    low = sum(math.ceil(size / concurrency) for size in sizes) * seconds
    high = math.ceil(sum(sizes) / min(concurrency, PREFLIGHT)) * seconds
    return Span(low, max(low, high))


def validated_epochs(epochs: int, interval: int) -> list[int]:
    """The numbers of epochs after which a run validates."""
    return sorted({*range(0, epochs, interval), epochs})


def plan(
    document: Document, examples: int, *, validation_examples: int = 0, interval: int = 5
) -> Plan:
    """The size of a run over this many examples; `interval`: epochs between validations."""
    config, adapter = document.finetuning, adapter_config_of(document)
    of_epoch = min(config.examples_per_epoch or examples, examples)
    rounds = rounds_of(range(of_epoch), config.groups_per_step)
    generations = 0 if dataset_config_of(document) else num_generations(document) or 1
    at_once = adapter.training.groups_per_optimizer_step if adapter else of_epoch or 1
    steps = sum(math.ceil(len(examples) / at_once) for examples in rounds)
    rate = adapter.training.learning_rate if adapter else None
    falls = adapter is not None and adapter.training.schedule == "linear"
    held_out = validation_examples * config.validation.reps
    validations = [held_out] * len(validated_epochs(config.num_epochs, interval))
    validations.append(2 * held_out)  # the first step and the best, side by side
    return Plan(
        examples=of_epoch,
        generations=generations,
        epochs=config.num_epochs,
        rounds=len(rounds),
        rollouts=of_epoch * generations * config.num_epochs,
        round_sizes=tuple(len(one) * generations for one in rounds),
        validation_sizes=tuple(validations if held_out else ()),
        jobs=len(rounds) * config.num_epochs,
        optimizer_steps=steps * config.num_epochs,
        learning_rate=rate,
        moved=(rate or 0.0) * steps * config.num_epochs * (0.5 if falls else 1.0),
    )


async def dry_run(
    document: Document,
    validation: Document | None,
    options: FinetuneRunConfig,
    fingerprint: Mapping[str, Any],
    *,
    fresh: bool,
) -> tuple[list[str], str | None]:
    """Lines to print, and the reason if the run would refuse to start.

    `validation` is the document of --validation_config_file.
    """
    training, validated = await _items(document, options.dataset), list[EvalInputItem]()
    if validation is not None or options.validation_dataset is not None:
        validated = await _items(validation or document, options.validation_dataset)
    examples, held_out = len(training), len(validated)
    planned = plan(document, examples)
    config, refusal = document.finetuning, None
    each, rollouts = "conversations of the dataset", ""
    if planned.generations:
        each = f"{counted(planned.generations, 'rollout')} each"
        rollouts = f"{counted(planned.rollouts, 'rollout')} of at least one model call, "
    lines = [
        _backend(document),
        f"examples      {examples}, of which {planned.examples} an epoch, {each}",
        f"training      {counted(planned.epochs, 'epoch')} of {counted(planned.rounds, 'round')}: "
        f"{rollouts}{counted(planned.jobs, 'job')}, {counted(planned.optimizer_steps, 'optimizer step')}",
        *_validation(document, options, held_out),
        _concurrency(document),
    ]
    try:
        check_free(config.output_dir)
        start = plan_start(config.output_dir, fingerprint, fresh=fresh)
    except HoneError as error:
        lines.append("run           refuses to start; see below")
        refusal = str(error)
    else:
        if start.resumed is not None:
            state = RunState(config, read_events(config.output_dir / FILE))
            lines += _left(start.resumed.run_id, planned, state, options, held_out)
        else:
            aside = f"; the one before is moved to {start.aside}" if start.aside else ""
            lines += [_preflight(planned), f"run           a new one{aside}"]
    lines.append(f"output        {config.output_dir}")
    if planned.is_too_small:
        lines.append(f"warning       {planned}")
    if (warning := overlap(training, validated).warning) is not None:
        lines.append(f"warning       {warning}")
    return lines, refusal


def _backend(document: Document) -> str:
    adapter = adapter_config_of(document)
    if adapter is None:
        other = document.trainer_adapters.get(document.finetuning.trainer_adapter or "")
        return f"backend       {'none' if other is None else other.type_name}"
    server = adapter.backend
    at = f"at {server.ip}:{server.port}" if server.ip else f"on its own server ({server.root})"
    return f"model         {server.project}/{server.name} over {server.base_model} {at}"


def _concurrency(document: Document) -> str:
    written = document.eval.general.max_concurrency
    if written is not None:
        return f"concurrency   {counted(written, 'rollout')} at a time"
    if adapter_config_of(document) is None or document.finetuning.allow_foreign_endpoint:
        return f"concurrency   {counted(DEFAULT_CONCURRENCY, 'rollout')} at a time"
    return "concurrency   as many rollouts at a time as keep the engine busy (max_concurrency)"


def _preflight(planned: Plan) -> str:
    rollouts = f"{PREFLIGHT} rollouts of one example, and " if planned.generations else ""
    return f"preflight     {rollouts}one token from each model"


def _validation(document: Document, options: FinetuneRunConfig, held_out: int) -> Iterator[str]:
    if not held_out:
        yield "validation    none (--validation_dataset)"
        return
    reps = document.finetuning.validation.reps
    at = validated_epochs(document.finetuning.num_epochs, options.validation_interval)
    yield (
        f"validation    {counted(held_out, 'example')} x {reps} after {', '.join(map(str, at))} "
        f"epochs: {held_out * reps * len(at)} rollouts"
    )
    yield (
        f"              and {2 * held_out * reps} at the end, where the first step and the best answer "
        "side by side"
    )


def _left(
    run_id: str, planned: Plan, state: RunState, options: FinetuneRunConfig, held_out: int
) -> Iterator[str]:
    """What a resumed run still has to do, at most; some rollouts may be finished already."""
    if state.is_finished(planned.epochs):
        yield f"run           {run_id} is finished, nothing to do"
        return
    if not state.history.rounds:
        yield _preflight(planned)
    epochs = [epoch for epoch in range(planned.epochs) if not state.is_done(epoch)]
    yield f"run           resumes {run_id}, of which {state.epochs_done(planned.epochs)} done"
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
    yield line


async def _items(document: Document, dataset: Path | None) -> Sequence[EvalInputItem]:
    async with build(document) as builder:
        return await dataset_items(builder, dataset)
