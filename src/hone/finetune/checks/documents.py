"""Read the files that `hone finetune` names, and report every mistake in them.

In:   FinetuneRunConfig: the configuration, that of the validation, dataset files
Out:  valid Documents, or ConfigProblems with the mistakes of all files, each with its place

A valid Document may not be enough for a run. Datasets are read and the user's modules are imported,
as in the run; none of their functions is called, and no server is contacted. A file or block that
cannot be read does not hide mistakes in the others.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hone.config.check import WORKFLOW, is_run, salvage
from hone.config.policy import address_of, choose_policy, needs_training_server, openai_url
from hone.config.problems import ConfigProblems, Mistakes, Place, Problem
from hone.config.schema import Document, FinetuneRunConfig, examine
from hone.errors import ConfigError, did_you_mean
from hone.evaluation.datasets import FILE_DATASETS
from hone.evaluation.mistakes import signature_mistake
from hone.finetune.adapter_config import adapter_config_of
from hone.finetune.builder import num_generations
from hone.finetune.checks.dataset import (
    DATASET,
    check_file,
    dataset_mistakes,
)
from hone.finetune.checks.overlap import same_dataset
from hone.finetune.fingerprint import code_of, targets_of
from hone.finetune.objectives import objective_mistakes
from hone.workflow.target import load_target

_NAMED = re.compile(r"""\bfunction\(\s*["']([!-~]+?)["']\s*\)""")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATH = ("/", "./", "../", "~")


def read_documents(options: FinetuneRunConfig) -> tuple[Document, Document | None]:
    """The run's document, and that of --validation_config_file."""
    assert options.config_file is not None, "the command line requires it"
    validates = bool(options.validation_dataset or options.validation_config_file)
    document, problems = _examine(
        options.config_file,
        options.override,
        lambda document: _run_mistakes(
            document, options.dataset, validates=validates, endpoint=options.endpoint
        ),
    )
    reward = None if document is None else document.finetuning.reward_name
    validation, held_out = None, document
    if options.validation_config_file is not None:
        validation, wrong = _examine(
            options.validation_config_file,
            options.override,
            lambda document: _validation_mistakes(
                document, options.validation_dataset, reward, endpoint=options.endpoint
            ),
        )
        held_out, problems = validation, [*problems, *wrong]
    problems += check_file("--dataset", options.dataset, document, reward, trained=True)
    problems += check_file("--validation_dataset", options.validation_dataset, held_out, reward)
    if document is not None and validates and not problems:
        option = "--validation_dataset" if options.validation_dataset else "validation"
        if (message := same_dataset(options, document, validation)) is not None:
            problems.append(Problem(Place(option), (), message))
    if document is None or problems:
        raise ConfigProblems(problems)
    if not document.finetuning.enabled:
        raise ConfigError(
            f"{document.file}: Finetuning is not enabled in the provided configuration. Set "
            "finetuning.enabled: true."
        )
    return document, validation


def read_run(
    file: Path, overrides: Sequence[tuple[str, str]] = (), *, dataset: Path | None = None
) -> Document:
    """Read a file; one that enables finetuning must have all that `hone finetune` needs.

    Raises ConfigProblems with every mistake. `dataset` replaces the file's dataset.
    """
    document, problems = _examine(file, overrides, lambda one: _run_mistakes(one, dataset))
    if document is None or problems:
        raise ConfigProblems(problems)
    return document


def _examine(
    file: Path, overrides: Sequence[tuple[str, str]], check: Callable[[Document], Mistakes]
) -> tuple[Document | None, list[Problem]]:
    """The parts of a file that can be read, and every mistake in it."""
    try:
        loaded, document, problems = examine(file, overrides)
    except ConfigProblems as error:  # not YAML, or missing
        return None, error.problems
    readable = document or salvage(loaded, Document)
    if readable is None:
        return None, problems
    readable.remember(loaded)
    reported = [problem.path for problem in problems]
    for path, message in check(readable):
        if not any(other[: len(path)] == path for other in reported):
            problems.append(Problem(loaded.place(path), path, message))
    return readable, problems


# ---- the document ------------------------------------------------------------------------------


def _run_mistakes(
    document: Document,
    dataset: Path | None,
    *,
    validates: bool = True,
    endpoint: str | None = None,
) -> Mistakes:
    """Mistakes of the run's file; `validates`: the command names held-out examples."""
    if is_run(document.loaded):
        scores = ", ".join(document.eval.evaluators) or "there is none yet"
        yield from _missing(document, dataset, "--dataset", endpoint)
        if document.finetuning.reward_name is None:
            yield (
                ("finetuning", "reward_function"),
                f"is missing; name one of eval.evaluators ({scores}), as reward_function: "
                "{name: ...}",
            )
        yield from _target_mistakes(document, endpoint)
        yield from _group_size(document)
        yield from objective_mistakes(document)
    elif not document.loaded.data:
        yield (), "the file is empty; expected keys such as `llms:` and `workflow:`"
    if document.finetuning.early_stopping is not None and not validates:
        yield (
            ("finetuning", "early_stopping"),
            "watches val/reward, and this run has no validation set; name one with "
            "--validation_dataset FILE, or remove the key",
        )
    yield from _function_mistakes(document)
    for index, logger in enumerate(document.loggers):
        if (problem := logger.problem()) is not None:
            yield ("loggers", index), problem
    yield from _base_model(document)
    if dataset is None:
        reward, trained = document.finetuning.reward_name, is_run(document.loaded)
        yield from dataset_mistakes(document, reward, trained=trained)


def _validation_mistakes(
    document: Document, dataset: Path | None, reward: str | None, *, endpoint: str | None = None
) -> Mistakes:
    """Mistakes of the validation's file; `reward` is the evaluator that computes the rewards."""
    scores = document.eval.evaluators
    yield from _missing(document, dataset, "--validation_dataset", endpoint)
    if reward is not None and reward not in scores:
        yield (
            ("eval", "evaluators"),
            f"has no {reward!r}, the reward of the run (finetuning.reward_function). It has: "
            f"{', '.join(scores) or 'nothing'}.",
        )
    yield from _function_mistakes(document)
    if dataset is None:
        yield from dataset_mistakes(document, reward)


def _missing(
    document: Document, dataset: Path | None, option: str, endpoint: str | None
) -> Mistakes:
    """A workflow and examples, which every run needs; `option` names a file instead."""
    config = document.eval.general.dataset
    if document.workflow is None and endpoint is None:
        yield (
            ("workflow",),
            "is missing, so there is nothing to run. Add `workflow:` with a `_type`; `hone info "
            "components -t function` lists them",
        )
    if config is None and dataset is None:
        yield (
            DATASET,
            "is missing, so there is nothing to run on. Add `dataset: {_type: json, file_path: "
            f"FILE}}`, or name the examples with {option} FILE",
        )
    if isinstance(config, FILE_DATASETS) and config.file_path is None and dataset is None:
        yield (
            (*DATASET, "file_path"),
            f"is missing, and a dataset of type {config.type_name!r} is read from a file; name it, "
            f"or name the examples with {option} FILE",
        )


def _named_in_code(document: Document) -> list[str]:
    """Names that the run's own code sets with `hone.function`."""
    directory = document.file.resolve().parent
    files = [file for path in code_of(document) if (file := directory / path).is_file()]
    names = [_NAMED.findall(file.read_text(encoding="utf-8", errors="replace")) for file in files]
    return sorted({name for in_file in names for name in in_file})


def _target_mistakes(document: Document, endpoint: str | None) -> Mistakes:
    """Targets that no call can match, so that no trajectory would be collected."""
    config, adapter = document.finetuning, adapter_config_of(document)
    functions = [WORKFLOW, *_keys(document, "functions")]
    blocks = [document.workflow, *document.functions.values()]
    open_ended = bool(endpoint or document.function_groups) or any(
        block is not None and block.names_functions for block in blocks
    )
    if not open_ended and set(config.target_functions) - set(functions):
        functions += _named_in_code(document)
    for i, name in enumerate(config.target_functions):
        if name not in functions and not open_ended:
            yield (
                ("finetuning", "target_functions", i),
                f"functions has no {name!r}, so no call can be trained."
                f"{did_you_mean(name, functions)} There are: {', '.join(map(repr, functions))}.",
            )
    if [*document.llms] != _keys(document, "llms"):
        return  # the target may be the entry that is broken
    wanted, path = config.target_model, ("finetuning", "target_model")
    models = [getattr(llm, "model_name", None) for llm in document.llms.values()]
    known = [*document.llms, *(model for model in models if model)]
    if adapter is not None:
        known += [adapter.backend.base_model, *sorted(adapter.backend.trained().names)]
    if wanted is not None and wanted not in known:
        yield (
            path,
            f"is {wanted!r}, which is neither a key of `llms` nor the name of a model."
            f"{did_you_mean(wanted, known)} There are: {', '.join(map(repr, dict.fromkeys(known)))}.",
        )
    elif adapter is not None:
        try:
            choose_policy(document, adapter.backend.trained())
        except ConfigError as error:
            placed = [e for e in document.llms.values() if not needs_training_server(e)]
            if len({address_of(openai_url(entry)) for entry in placed}) <= 1:
                yield path, str(error)  # otherwise the server reports which one it is


def _group_size(document: Document) -> Mistakes:
    """Groups that are too small to compare anything."""
    config, adapter, count = (
        document.finetuning,
        adapter_config_of(document),
        num_generations(document),
    )
    path = ("trajectory_builders", config.trajectory_builder or "", "num_generations")
    if count is None:
        return
    if count == 1 and adapter is not None and adapter.training.baseline != "batch":
        yield (
            path,
            "is 1, so a group has nothing to compare its only rollout with, and nothing can be "
            "learned. Set it to 2 or more (8 gives a good signal), or set training.baseline: batch "
            f"in trainer_adapters.{config.trainer_adapter}, which compares with the mean of the "
            "batch.",
        )
    elif 1 < count < config.min_group_size:
        yield (
            path,
            f"is {count} but finetuning.min_group_size is {config.min_group_size}, so every group "
            "would be dropped; raise the first or lower the second",
        )


def _keys(document: Document, section: str) -> list[str]:
    """The keys of a section, including those of broken blocks."""
    block = document.loaded.data.get(section)
    return [str(key) for key in block] if isinstance(block, Mapping) else []


# ---- what it refers to --------------------------------------------------------------------------


def _function_mistakes(document: Document) -> Mistakes:
    """The user's functions that do not exist, cannot be imported, or cannot be called."""
    for path, target in targets_of(document, document.eval.evaluators):
        try:
            function = load_target(target, document.file.resolve().parent)
        except ConfigError as error:
            yield path, str(error).removeprefix("target: ")
            continue
        if not callable(function):
            yield path, f"{target!r} is {type(function).__name__}, not a function"
    for name, config in document.eval.evaluators.items():
        if (message := signature_mistake(config, document.file.resolve().parent)) is not None:
            yield ("eval", "evaluators", name, "target"), message.removeprefix("target ")


def _base_model(document: Document) -> Mistakes:
    """A base model that the run's own server cannot load; a running one has its own paths."""
    adapter = adapter_config_of(document)
    if adapter is None or adapter.backend.ip is not None:
        return
    from hone.models.known import KNOWN  # imported here: nothing else needs it

    name = adapter.backend.base_model
    path, wrong = Path(os.path.expanduser(name)), None
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            wrong = f"{path.absolute()} holds neither config.json nor a .gguf file, so it is not a model"
    elif name.startswith(_PATH) or name.endswith(".gguf"):
        wrong = None if path.is_file() else f"there is no {path.absolute()}"
    elif name not in KNOWN and not _HUB.fullmatch(name):
        wrong = (
            f"{name!r} is not a model that hone knows, a directory, or a name on the hub "
            f"(ORGANISATION/MODEL).{did_you_mean(name, KNOWN)} `hone models list` shows what is "
            "known."
        )
    if wrong is not None:
        key = ("trainer_adapters", document.finetuning.trainer_adapter or "", "backend")
        yield (*key, "base_model"), wrong
