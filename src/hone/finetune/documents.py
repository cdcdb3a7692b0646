"""Read the files that `hone finetune` names, with everything that is wrong in them.

In:   FinetuneRunConfig: the configuration, the validation's own one, files of examples
Out:  valid Documents, or ConfigProblems with every mistake of all the files, each with its place

A file that is not YAML, or not there, hides nothing of the others. Datasets are read and the user's
modules are imported, as the run will do it; no function of theirs is called, and no server is
contacted. What only the server can know of a base model is left to the server.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.check import is_run, lacking, salvage
from hone.config.load import Loaded
from hone.config.problems import ConfigProblems, Place, Problem
from hone.config.problems import Path as Keys
from hone.config.schema import Document, FinetuneRunConfig, examine
from hone.errors import ConfigError, did_you_mean
from hone.evaluation.datasets import (
    WHERE,
    CsvDataset,
    JsonDataset,
    JsonlDataset,
    MissingQuestion,
    ParquetDataset,
    XlsDataset,
    load_items,
)
from hone.finetune.adapter_config import art_config_of
from hone.finetune.checks import Check, check_document, failures
from hone.finetune.fingerprint import Target, targets_of
from hone.workflow.target import load_target

if TYPE_CHECKING:
    from hone.config.base import DatasetBaseConfig

FILES = (JsonDataset, JsonlDataset, CsvDataset, ParquetDataset, XlsDataset)
DATASET = ("eval", "general", "dataset")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATH = ("/", "./", "../", "~")


def read_documents(options: FinetuneRunConfig) -> tuple[Document, Document | None]:
    """The run's document, and the validation's if the command names a file of its own for it."""
    assert options.config_file is not None, "the command line requires it"
    document, problems = examine_run(
        options.config_file, options.override, dataset=options.dataset, resources=True
    )
    reward = reward_of(document)
    validating, held_out = None, document
    if options.validation_config_file is not None:
        validating, wrong = _examine_validation(options.validation_config_file, options, reward)
        held_out, problems = validating, [*problems, *wrong]
    problems += check_file("--dataset", options.dataset, document, reward)
    problems += check_file("--validation_dataset", options.validation_dataset, held_out, reward)
    if document is not None and not (options.validation_dataset or options.validation_config_file):
        problems += _stops_without_validation(document)
    if document is None or problems:
        raise ConfigProblems(problems)
    if not document.finetuning.enabled:
        raise ConfigError(
            f"{document.file}: Finetuning is not enabled in the provided configuration. Set "
            "finetuning.enabled: true."
        )
    return document, validating


def _examine_validation(
    file: Path, options: FinetuneRunConfig, reward: str | None
) -> tuple[Document | None, list[Problem]]:
    """As much of the validation's file as can be read, and everything wrong with it."""
    try:
        loaded, document, wrong = examine(file, options.override)
    except ConfigProblems as error:
        return None, error.problems
    readable = document or salvage(loaded, Document)
    if readable is None:
        return None, wrong
    readable.remember(loaded)
    checks = check_validation(readable, options.validation_dataset, reward)
    return readable, [*wrong, *unreported(checks, loaded, wrong)]


def _stops_without_validation(document: Document) -> list[Problem]:
    """Early stopping without a validation set, which would never stop anything."""
    path = ("finetuning", "early_stopping")
    if document.finetuning.early_stopping is None:
        return []
    message = (
        "watches val/reward, and this run has no validation set; name one with "
        "--validation_dataset FILE, or remove the key"
    )
    return [Problem(document.loaded.place(path), path, message)]


def read_run(
    file: Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    dataset: Path | None = None,
    resources: bool = False,
) -> Document:
    """Read a file; one that enables finetuning must also have all that `hone finetune` needs.

    Raises ConfigProblems with everything that is wrong, each with its place.
    """
    document, problems = examine_run(file, overrides, dataset=dataset, resources=resources)
    if document is None or problems:
        raise ConfigProblems(problems)
    return document


def examine_run(
    file: Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    dataset: Path | None = None,
    resources: bool = False,
) -> tuple[Document | None, list[Problem]]:
    """As much of the file as can be read, and everything wrong with it.

    `dataset` is what the command names instead of the file's; `resources`: also check what the
    file refers to. One broken block hides nothing of the others.
    """
    try:
        loaded, document, wrong = examine(file, overrides)
    except ConfigProblems as error:  # not YAML, or not there
        return None, error.problems
    readable = document or salvage(loaded, Document)
    if readable is not None:
        readable.remember(loaded)
    checks, unread = list[Check](), list(wrong)
    if is_run(loaded):
        wrong += lacking(loaded, has_dataset=dataset is not None)
        if readable is not None:
            broken = set() if document else {problem.path[0] for problem in unread if problem.path}
            checks += [one for one in check_document(readable) if not _reads(one) & broken]
            checks += [] if dataset is not None else [_names_dataset(readable)]
    elif not loaded.data:
        message = "the file is empty; expected keys such as `llms:` and `workflow:`"
        wrong.append(Problem(loaded.place(()), (), message))
    if readable is not None and resources:
        checks += check_resources(readable, dataset)
    return readable, [*wrong, *unreported(checks, loaded, wrong)]


def unreported(
    checks: Sequence[Check], loaded: Loaded, problems: Sequence[Problem]
) -> Iterator[Problem]:
    """Failed checks as problems, unless the same block has one already."""
    paths = {problem.path for problem in problems}
    for check in failures(checks):
        if not any(_within(check.path, path) or _within(path, check.path) for path in paths):
            paths.add(check.path)
            yield Problem(loaded.place(check.path), check.path, check.message)


_READS = {
    "reward": {"eval", "finetuning"},
    "target functions": {"functions", "finetuning"},
    "target model": {"llms", "trainer_adapters", "finetuning"},
    "group size": {"trajectory_builders", "trainer_adapters", "finetuning"},
}
"""Sections that a check of the whole document compares: one that is broken tells it nothing."""


def _reads(check: Check) -> set[str]:
    return _READS.get(check.name, set())


def _within(path: Keys, block: Keys) -> bool:
    return bool(block) and path[: len(block)] == block


# ---- what a document refers to ------------------------------------------------------------------


def check_resources(document: Document, dataset: Path | None = None) -> list[Check]:
    """What is missing or does not fit; `dataset` is the file that the command names instead."""
    checks = [*_functions(document), *_base_model(document)]
    if dataset is None:
        checks += _dataset(document, reward_of(document))
    return checks


def check_validation(document: Document, dataset: Path | None, reward: str | None) -> list[Check]:
    """What a validation's own document lacks; `reward` is the evaluator that the run trains by."""
    checks, scores = list(_functions(document)), document.eval.evaluators
    if document.workflow is None:
        message = "is missing, so there is nothing to validate; add the workflow of the run's file"
        checks.append(Check("workflow", False, message, path=("workflow",)))
    if reward is not None and reward not in scores:
        message = (
            f"has no {reward!r}, the reward of the run (finetuning.reward_function). It has: "
            f"{', '.join(scores) or 'nothing'}."
        )
        checks.append(Check("reward", False, message, path=("eval", "evaluators")))
    if dataset is None and document.eval.general.dataset is None:
        message = "is missing; add it, or name the examples with --validation_dataset FILE"
        checks.append(Check("dataset", False, message, path=DATASET))
    return [*checks, *(_dataset(document, reward) if dataset is None else ())]


def check_file(
    option: str, file: Path | None, document: Document | None, reward: str | None = None
) -> list[Problem]:
    """What is wrong with a file of examples that the command names, read as the document says."""
    config = None if document is None else document.eval.general.dataset
    if file is None:
        return []
    place = Place(f"{option} {file}")
    if not file.exists():
        return [Problem(place, (), "no such file")]
    if config is not None and not isinstance(config, FILES):
        return []  # a function, or a plugin's loader, reads the file
    columns, error = _read(config or JsonDataset(), file, None)
    problems = []
    if error is not None:
        line, message = _at_line(str(error), file)
        problems.append(Problem(Place(place.file, line), (), message))
    if document is not None and config is not None:
        misfits = _misfits(document, config, columns, reward)
        problems += [Problem(place, (), check.message) for check in misfits]
    return problems


def reward_of(document: Document | None) -> str | None:
    """The evaluator that a run trains by."""
    reward = None if document is None else document.finetuning.reward_function
    return None if reward is None else reward.name


# ---- functions ----------------------------------------------------------------------------------


def _functions(document: Document) -> Iterator[Check]:
    """Whether each function of the user's is there and can be imported."""
    directory = document.file.resolve().parent
    for path, target in _all_targets(document):
        try:
            fn = load_target(target, directory)
        except ConfigError as error:
            yield Check("function", False, str(error).removeprefix("target: "), path=path)
            continue
        if not callable(fn):
            message = f"{target!r} is {type(fn).__name__}, not a function"
            yield Check("function", False, message, path=path)


def _all_targets(document: Document) -> list[Target]:
    """Those of a run, and those of evaluators that it does not train by."""
    scores = {
        ("eval", "evaluators", name, "target"): getattr(config, "target", None)
        for name, config in document.eval.evaluators.items()
        if config.type_name == "python"
    }
    others = [Target(path, target) for path, target in scores.items() if isinstance(target, str)]
    return list(dict.fromkeys([*targets_of(document), *others]))


# ---- datasets -----------------------------------------------------------------------------------


def _names_dataset(document: Document) -> Check:
    """Whether a dataset that is read from a file names one."""
    name, dataset = "dataset", document.eval.general.dataset
    if not isinstance(dataset, FILES) or dataset.file_path is not None:
        return Check(name, True, "the dataset says what it is read from")
    return Check(
        name,
        False,
        f"is missing, and a dataset of type {dataset.type_name!r} is read from a file; name it, or "
        "start the run with --dataset FILE",
        path=("eval", "general", "dataset", "file_path"),
    )


def _dataset(document: Document, reward: str | None) -> Iterator[Check]:
    """Whether the file is there, has rows, and has the columns that are named or needed."""
    config = document.eval.general.dataset
    if not isinstance(config, FILES) or config.file_path is None:
        return
    columns, error = _read(config, None, document.file.parent)
    if error is not None:
        is_column = isinstance(error, MissingQuestion)
        path = (*DATASET, *(("structure", "question_key") if is_column else ("file_path",)))
        message = str(error).removeprefix(f"{WHERE}.file_path: ")
        yield Check("dataset", False, message, path=path)
    yield from _misfits(document, config, columns, reward)


def _misfits(
    document: Document,
    config: "DatasetBaseConfig",
    columns: Sequence[str],
    reward: str | None,
) -> Iterator[Check]:
    """Columns that the configuration names, or the reward needs, and no row has."""
    structure = config.structure
    if structure.disable or not columns:
        return
    written = structure.model_fields_set
    for key in ("answer_key", "expected_trajectory_key"):
        column = getattr(structure, key)
        if key in written and column not in columns:
            yield _no_column(column, columns, (*DATASET, "structure", key))
    if "id_key" in config.model_fields_set and config.id_key not in columns:
        yield _no_column(config.id_key, columns, (*DATASET, "id_key"))
    if "answer_key" not in written and structure.answer_key not in columns:
        yield from _expected(document, structure.answer_key, columns, reward)


def _expected(
    document: Document, column: str, columns: Sequence[str], reward: str | None
) -> Iterator[Check]:
    """A reward function that takes what no row has."""
    config = document.eval.evaluators.get(reward or "")
    target = getattr(config, "target", None)
    if config is None or config.type_name != "python" or not isinstance(target, str):
        return
    try:
        fn = load_target(target, document.file.resolve().parent)
        takes = inspect.signature(fn).parameters
    except (ConfigError, TypeError, ValueError):
        return  # reported with the functions
    if "expected" in takes and takes["expected"].default is inspect.Parameter.empty:
        path = (*DATASET, "structure", "answer_key")
        missing = _no_column(column, columns, path).message
        yield Check("dataset", False, f"{target} takes `expected`, and {missing}", path=path)


def _no_column(column: str, columns: Sequence[str], path: Keys) -> Check:
    maybe = did_you_mean(column, columns)
    message = f"no row has a {column!r}.{maybe} There are: {', '.join(columns)}."
    return Check("dataset", False, message, path=path)


def _read(
    config: Any, override: Path | None, near: Path | None
) -> tuple[Sequence[str], ConfigError | None]:
    """The columns of a dataset, and why it cannot be used; no columns where it cannot be read."""
    try:
        rows = [item.full_dataset_entry for item in load_items(config, override, near=near)]
    except ConfigError as error:
        return (error.columns if isinstance(error, MissingQuestion) else ()), error
    return sorted({str(column) for row in rows if isinstance(row, dict) for column in row}), None


def _at_line(message: str, file: Path) -> tuple[int | None, str]:
    """The line and the rest of `FILE:LINE: ...` or `FILE: ...`."""
    match = re.fullmatch(rf"{re.escape(str(file))}(?::(\d+))?: (.*)", message, re.DOTALL)
    if match is None:
        return None, message
    return int(match[1]) if match[1] else None, match[2]


# ---- base models --------------------------------------------------------------------------------


def _base_model(document: Document) -> Iterator[Check]:
    """Whether a server of this run's own can know the name; another machine's paths are its own."""
    adapter = art_config_of(document)
    if adapter is None or adapter.backend.ip is not None:
        return
    name, wrong = adapter.backend.base_model, None
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        wrong = None if path.is_file() else _not_a_model(path)
    elif name.startswith(_PATH) or name.endswith(".gguf"):
        wrong = f"there is no {path.absolute()}"
    elif not _HUB.fullmatch(name):
        wrong = _unknown(name)
    if wrong is not None:
        key = ("trainer_adapters", document.finetuning.trainer_adapter or "", "backend")
        yield Check("base model", False, wrong, path=(*key, "base_model"))


def _not_a_model(path: Path) -> str | None:
    if (path / "config.json").is_file() or any(path.glob("*.gguf")):
        return None
    return f"{path.absolute()} holds neither config.json nor a .gguf file, so it is no model"


def _unknown(name: str) -> str | None:
    from hone.models.known import KNOWN  # here, because only this needs it

    names = list(KNOWN)
    if name in names:
        return None
    maybe = did_you_mean(name, names)
    return (
        f"{name!r} is not a model that hone knows, a directory, or a name on the hub "
        f"(ORGANISATION/MODEL).{maybe} `hone models list` shows what is known."
    )
