"""The files that `hone finetune` names -> the run's document and the validation's.

In:   FinetuneRunConfig: the configuration, the validation's own one, files of examples
Out:  two valid Documents, or ConfigProblems with everything that is wrong in all of the files

A file that is not YAML, or not there, hides nothing of the others.
"""

from pathlib import Path

from hone.config.check import salvage
from hone.config.problems import ConfigProblems, Problem
from hone.config.schema import Document, FinetuneRunConfig, examine
from hone.errors import ConfigError
from hone.finetune.checks import examine_run, unreported
from hone.finetune.resources import check_file, check_resources, check_validation, reward_of


def read_documents(config_file: Path, told: FinetuneRunConfig) -> tuple[Document, Document | None]:
    """The run's document, and the validation's if the command names a file of its own for it."""
    document, problems = examine_run(
        config_file, told.override, dataset=told.dataset, resources=check_resources
    )
    reward = reward_of(document)
    validating, held_out = None, document
    if told.validation_config_file is not None:
        validating, wrong = _examine_validation(told.validation_config_file, told, reward)
        held_out, problems = validating, [*problems, *wrong]
    problems += check_file("--dataset", told.dataset, document, reward)
    problems += check_file("--validation_dataset", told.validation_dataset, held_out, reward)
    if document is not None and not (told.validation_dataset or told.validation_config_file):
        problems += _stops_blindly(document)
    if document is None or problems:
        raise ConfigProblems(problems)
    if not document.finetuning.enabled:
        raise ConfigError(
            f"{document.file}: Finetuning is not enabled in the provided configuration. Set "
            "finetuning.enabled: true."
        )
    return document, validating


def _examine_validation(
    file: Path, told: FinetuneRunConfig, reward: str | None
) -> tuple[Document | None, list[Problem]]:
    """As much of the validation's file as can be read, and everything wrong with it."""
    try:
        loaded, document, wrong = examine(file, told.override)
    except ConfigProblems as error:
        return None, error.problems
    readable = document or salvage(loaded, Document)
    if readable is None:
        return None, wrong
    readable.remember(loaded)
    checks = check_validation(readable, told.validation_dataset, reward)
    return readable, [*wrong, *unreported(checks, loaded, wrong)]


def _stops_blindly(document: Document) -> list[Problem]:
    """Early stopping without a validation set, which would never stop anything."""
    path = ("finetuning", "early_stopping")
    if document.finetuning.early_stopping is None:
        return []
    message = (
        "watches val/reward, and this run has no validation set; name one with "
        "--validation_dataset FILE, or remove the key"
    )
    return [Problem(document.loaded.place(path), path, message)]
