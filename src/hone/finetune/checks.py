"""Checks of the configuration alone: its mistakes, and how much there is to do.

In:   the Document of a file; how many examples its dataset has
Out:  Checks, each with what to change if it failed; a Plan

A valid Document may still be no run. Checked here is what would only show once a run has been paid
for, such as a target that no call can match, or groups in which nothing can be compared.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hone.config.check import WORKFLOW
from hone.config.policy import (
    TRAINABLE,
    address_of,
    choose_policy,
    describe,
    openai_url,
    sent_name,
)
from hone.config.problems import Path as Keys
from hone.config.problems import dotted
from hone.config.schema import Document
from hone.errors import ConfigError
from hone.evaluation.datasets import (
    CsvDataset,
    JsonDataset,
    JsonlDataset,
    ParquetDataset,
    XlsDataset,
)
from hone.finetune.adapter_config import ARTTrainerAdapterConfig, art_config_of
from hone.finetune.builder import ARTTrajectoryBuilderConfig
from hone.report.text import counted

FILES = (JsonDataset, JsonlDataset, CsvDataset, ParquetDataset, XlsDataset)
HARDLY = 1e-3
"""learning rate x optimizer steps under which a run moves the model too little to be seen. AdamW
moves each weight by about the learning rate a step; the demo's task turns at about 1e-2."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    message: str
    """What is true; if it is not ok, what to change."""
    warning: bool = False
    """It is ok, and the user should still read the message."""
    path: Keys = ()
    """The key to change, where it is one of the file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, if every group could be trained."""

    examples: int
    """Examples per epoch."""
    generations: int
    epochs: int
    rounds: int
    """Rounds per epoch."""
    rollouts: int
    """Training rollouts of all epochs, without retries and validation."""
    jobs: int
    optimizer_steps: int
    learning_rate: float | None
    """None for an adapter that is not hone's."""
    falling: bool = False
    """The learning rate falls to 0 over the run."""


def failures(checks: Sequence[Check]) -> list[Check]:
    """The checks that failed."""
    return [check for check in checks if not check.ok]


def plan(document: Document, examples: int) -> Plan:
    """How many rollouts, jobs and optimizer steps the configuration means for so many examples."""
    config, adapter = document.finetuning, art_config_of(document)
    of_epoch = min(config.examples_per_epoch or examples, examples)
    of_round = min(config.groups_per_step or of_epoch, of_epoch)
    rounds = math.ceil(of_epoch / of_round) if of_round else 0
    generations = _generations(document) or 1
    at_once = adapter.training.groups_per_optimizer_step if adapter else of_epoch or 1
    last = of_epoch - of_round * (rounds - 1)
    steps = sum(math.ceil(n / at_once) for n in [of_round] * (rounds - 1) + [last] if n > 0)
    return Plan(
        examples=of_epoch,
        generations=generations,
        epochs=config.num_epochs,
        rounds=rounds,
        rollouts=of_epoch * generations * config.num_epochs,
        jobs=rounds * config.num_epochs,
        optimizer_steps=steps * config.num_epochs,
        learning_rate=adapter.training.learning_rate if adapter else None,
        falling=adapter is not None and adapter.training.schedule == "linear",
    )


def check_movement(planned: Plan) -> Check:
    """Whether so many steps at this learning rate can be seen in what the model says."""
    name, rate = "movement", planned.learning_rate
    work = (
        f"{counted(planned.epochs, 'epoch')} x {counted(planned.rounds, 'round')}, "
        f"{counted(planned.rollouts, 'rollout')}, {counted(planned.jobs, 'job')}, "
        f"{counted(planned.optimizer_steps, 'optimizer step')}"
    )
    if rate is None:
        return Check(name, True, f"{work}, if every group can be trained")
    moved = rate * planned.optimizer_steps * (0.5 if planned.falling else 1.0)
    message = f"{work} at learning_rate {rate:g}: each weight moves by about {moved:.1e} at most"
    if not 0 < moved < HARDLY:
        return Check(name, True, message)
    default = " (this adapter's own default is 5e-5)" if rate < 5e-5 else ""
    return Check(
        name,
        True,
        f"{message}, which can hardly move the model. Raise training.learning_rate{default}, "
        "finetuning.num_epochs, or the number of examples; or lower "
        "training.groups_per_optimizer_step.",
        warning=True,
    )


def check_document(document: Document) -> list[Check]:
    """Reward, targets and group sizes; contacts nobody."""
    return [
        _reward(document),
        _target_functions(document),
        _target_model(document),
        _group_size(document),
    ]


def _reward(document: Document) -> Check:
    name, reward = "reward", document.finetuning.reward_function
    known, path = document.eval.evaluators, ("finetuning", "reward_function")
    if reward is None:
        return Check(
            name,
            False,
            f"finetuning.reward_function is not set; name one of {_list(known)}",
            path=path,
        )
    if reward.name in known:
        return Check(name, True, f"the reward is what evaluator {reward.name!r} says")
    return Check(
        name,
        False,
        f"finetuning.reward_function.name is {reward.name!r}, and eval.evaluators has no such "
        f"key.{_guess(reward.name, known)} There are: {_list(known)}.",
        path=(*path, "name"),
    )


def _target_functions(document: Document) -> Check:
    wanted = document.finetuning.target_functions
    known = (WORKFLOW, *document.functions)
    for i, target in enumerate(wanted):
        if target not in known:
            return Check(
                "target functions",
                False,
                f"finetuning.target_functions names {target!r}, and `functions` has no such "
                f"key.{_guess(target, known)} There are: {_list(known)}. As it is, the run would "
                "end with 'No trajectories collected for epoch'.",
                path=("finetuning", "target_functions", i),
            )
    every = WORKFLOW in wanted
    what = "every call of a rollout" if every else f"calls made by {_list(wanted)}"
    return Check("target functions", True, f"{what} can be trained")


def _target_model(document: Document) -> Check:
    name, wanted = "target model", document.finetuning.target_model
    adapter = art_config_of(document)
    if wanted is None:
        if adapter is not None:
            return _policy(document, adapter)
        return Check(name, True, "calls to the model in training, by whatever name")
    names = {key: getattr(llm, "model_name", None) for key, llm in document.llms.items()}
    known = [*names, *(model for model in names.values() if model)]
    if adapter is not None:
        backend = adapter.backend
        known += [backend.base_model, backend.name, f"{backend.project}/{backend.name}"]
    known = list(dict.fromkeys(known))
    if wanted not in known:
        return Check(
            name,
            False,
            f"finetuning.target_model is {wanted!r}, which is neither a key of `llms` nor the name "
            f"of a model.{_guess(wanted, known)} There are: {_list(known)}. As it is, the run would "
            "end with 'No trajectories collected for epoch'.",
            path=("finetuning", "target_model"),
        )
    if adapter is None:
        return Check(name, True, f"calls that ask for {wanted!r}")
    return _policy(document, adapter)


def _policy(document: Document, adapter: ARTTrainerAdapterConfig) -> Check:
    """Whether it is clear which entry of `llms` is trained, as far as the file alone tells."""
    name, trained = "target model", adapter.backend.trained()
    try:
        policy = choose_policy(document, trained)
    except ConfigError as error:
        addresses = {
            address_of(openai_url(llm))
            for llm in document.llms.values()
            if llm.type_name != TRAINABLE or getattr(llm, "base_url", None) is not None
        }
        if len(addresses) <= 1:
            return Check(name, False, str(error), path=("finetuning", "target_model"))
        return Check(name, True, "known once the training server has said where it answers")
    message = describe(document, trained, policy)
    alike = [
        key
        for key, llm in document.llms.items()
        if key != policy and sent_name(llm, trained, is_policy=False) in trained.names
    ]
    if policy is None or not alike:
        return Check(name, True, message)
    return Check(
        name,
        True,
        f"llms.{policy} and {_list(alike)} ask for the model in training, so calls of all of them "
        f"are trained. To train one only, let the others ask for {trained.base_model!r} or "
        f"{trained.name}@0, the base weights.",
        warning=True,
    )


def _group_size(document: Document) -> Check:
    name, generations = "group size", _generations(document)
    if generations is None:
        return Check(name, True, "the trajectory builder is a plugin's own")
    path = ("trajectory_builders", document.finetuning.trajectory_builder or "", "num_generations")
    key = dotted(path)
    smallest, adapter = document.finetuning.min_group_size, art_config_of(document)
    if generations == 1:
        if adapter is None or adapter.training.baseline == "batch":
            return Check(name, True, "each rollout is compared with the mean of its batch")
        return Check(
            name,
            False,
            f"{key} is 1, so a group has nothing to compare its only rollout with, and nothing can "
            "be learned. Set it to 2 or more (8 gives a good signal), or set training.baseline: "
            f"batch in trainer_adapters.{document.finetuning.trainer_adapter}, which compares with "
            "the mean of the batch.",
            path=path,
        )
    if generations < smallest:
        return Check(
            name,
            False,
            f"{key} is {generations} but finetuning.min_group_size is {smallest}, so every group "
            "would be dropped; raise the first or lower the second",
            path=path,
        )
    return Check(name, True, f"{generations} rollouts of each example are compared")


def _generations(document: Document) -> int | None:
    named = document.trajectory_builders.get(document.finetuning.trajectory_builder or "")
    return named.num_generations if isinstance(named, ARTTrajectoryBuilderConfig) else None


def _guess(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _list(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
