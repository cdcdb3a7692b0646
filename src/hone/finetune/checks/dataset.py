"""Check the rows of a dataset before a run: that they can be read and have what the run needs.

In:   a document and its dataset, or a dataset file of the command line
Out:  mistakes, each with the key to change

Columns that are named must be in some row, and the answer that the reward requires in every row. For
the trainers `sft` and `dpo` each row must be a conversation or a pair (dataset_builder.py); such rows
are not scored. `custom` datasets are checked when the run loads them.
"""

from pathlib import Path

from hone.config.base import DatasetBaseConfig
from hone.config.problems import Mistakes, Place, Problem
from hone.config.problems import Path as Keys
from hone.config.schema import Document
from hone.errors import ConfigError, did_you_mean
from hone.evaluation.base import EvalInputItem
from hone.evaluation.datasets import (
    FILE_DATASETS,
    WHERE,
    JsonDataset,
    MissingQuestion,
    load_items,
)
from hone.evaluation.mistakes import missing_answers, needs_answer
from hone.finetune.dataset_builder import (
    ConversationBuilderConfig,
    Objective,
    dataset_config_of,
    objective_of,
)

DATASET = ("eval", "general", "dataset")


def check_file(
    option: str,
    file: Path | None,
    document: Document | None,
    reward: str | None = None,
    *,
    trained: bool = False,
) -> list[Problem]:
    """Mistakes in a dataset file of the command line, which is read as the document says.

    `trained`: it has the training examples of a run.
    """
    config = None if document is None else document.eval.general.dataset
    if file is None:
        return []
    if not file.exists():
        return [Problem(Place(f"{option} {file}"), (), "no such file")]
    if config is not None and not isinstance(config, FILE_DATASETS):
        return []  # a function, or a plugin's loader, reads the file
    problems = []
    for _, message in _row_mistakes(
        config or JsonDataset(), document, reward, file, trained=trained
    ):
        where, colon, rest = message.partition(": ")  # FILE or FILE:LINE, if the message names one
        named = colon and where.startswith(str(file))
        place = Place(f"{option} {where if named else file}")
        problems.append(Problem(place, (), rest if named else message))
    return problems


def dataset_mistakes(document: Document, reward: str | None, *, trained: bool = False) -> Mistakes:
    """Mistakes in the document's own dataset; `trained`: it has the training examples of a run."""
    config = document.eval.general.dataset
    if isinstance(config, FILE_DATASETS) and config.file_path is not None:
        yield from _row_mistakes(config, document, reward, trained=trained)


def _row_mistakes(
    config: DatasetBaseConfig,
    document: Document | None,
    reward: str | None,
    file: Path | None = None,
    *,
    trained: bool,
) -> Mistakes:
    """Mistakes: an unreadable file, and rows and columns that lack what the run needs."""
    items = []
    try:
        items = load_items(config, file, near=None if document is None else document.file.parent)
        rows = [item.full_dataset_entry for item in items]
        columns = sorted({str(name) for row in rows if isinstance(row, dict) for name in row})
    except ConfigError as error:
        columns = error.columns if isinstance(error, MissingQuestion) else ()
        key = ("structure", "question_key") if columns else ("file_path",)
        yield (*DATASET, *key), str(error).removeprefix(f"{WHERE}.file_path: ")
    needed_by = None if document is None else _answer_needed_by(document, reward)
    if trained and document is not None and (builder := dataset_config_of(document)):
        yield from _conversation_mistakes(builder, objective_of(document), items)
        needed_by = None  # its rows are not scored
    structure = config.structure
    if structure.disable or not columns:
        return
    named: list[tuple[Keys, str, str]] = [
        (("structure", key), getattr(structure, key), "")
        for key in ("answer_key", "expected_trajectory_key")
        if key in structure.model_fields_set
    ]
    if "id_key" in config.model_fields_set:
        named.append((("id_key",), config.id_key, ""))
    answer = structure.answer_key
    if needed_by and "answer_key" not in structure.model_fields_set:
        named.append((("structure", "answer_key"), answer, f"{needed_by}, and "))
    if needed_by and answer in columns:
        where = str(file or config.file_path)
        if (message := missing_answers(items, answer, needed_by, where)) is not None:
            yield (*DATASET, "file_path"), message
    for path, column, why in named:
        if column not in columns:
            near, known = did_you_mean(column, columns), ", ".join(columns)
            yield (*DATASET, *path), f"{why}no row has a {column!r}.{near} There are: {known}."


def _conversation_mistakes(
    builder: ConversationBuilderConfig,
    objective: Objective | None,
    items: list[EvalInputItem],
) -> Mistakes:
    """The first row that is not a conversation, if the run trains on conversations."""
    for item in items:
        try:
            builder.trajectories(item.id, item.full_dataset_entry, objective)
        except ConfigError as error:
            yield DATASET, str(error)
            return


def _answer_needed_by(document: Document, reward: str | None) -> str | None:
    """What requires the rows' answers: the reward, or an evaluator if there is no reward."""
    general, scores = document.eval.general, document.eval.evaluators
    if general.output is not None and general.output.custom_pre_eval_process_function:
        return None  # it may fill them in
    directory = document.file.resolve().parent
    used = scores.values() if reward is None else [scores[reward]] if reward in scores else []
    return next((why for config in used if (why := needs_answer(config, directory))), None)
