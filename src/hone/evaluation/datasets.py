"""Load the items of an evaluation from a dataset of the YAML or a file of the command line.

In:   a DatasetBaseConfig (json, jsonl, csv, parquet, xls, custom, or a plugin's), or a path
Out:  EvalInputItems in the order of the rows, each id once

Groups, journals and curricula are keyed by id. A row without an id gets its number in the file, so
that filters do not renumber the others. Two rows with the same id are an error: their rewards would
be mixed up.
"""

import json
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from hone.config.base import DatasetBaseConfig, EvalFilterConfig
from hone.config.registry import register_dataset_loader
from hone.errors import ConfigError, HoneError
from hone.evaluation import rows
from hone.evaluation.base import DatasetLoader, EvalInput, EvalInputItem
from hone.evaluation.rows import Row
from hone.evaluation.steps import events_of, read_steps, seconds_of
from hone.workflow.target import error_at, load_target

log = logging.getLogger("hone")

WHERE = "eval.general.dataset"


class MissingQuestion(ConfigError):
    """No row has the column of the workflow's input; `columns` are those that the rows have."""

    def __init__(self, message: str, columns: Sequence[str]) -> None:
        super().__init__(message)
        self.columns = columns


class JsonDataset(DatasetBaseConfig, name="json"):
    """A JSON file with a list of objects."""


class JsonlDataset(DatasetBaseConfig, name="jsonl"):
    """A file with an object on each line."""


class CsvDataset(DatasetBaseConfig, name="csv"):
    """A file of comma-separated values whose first line names the columns; all values are text."""


class ParquetDataset(DatasetBaseConfig, name="parquet"):
    """A Parquet file."""


class XlsDataset(DatasetBaseConfig, name="xls"):
    """The first sheet of an Excel workbook, .xlsx or .xls; its first row names the columns."""


FILE_DATASETS = (JsonDataset, JsonlDataset, CsvDataset, ParquetDataset, XlsDataset)
"""Datasets that are read from a file."""


class CustomDataset(DatasetBaseConfig, name="custom"):
    """The rows that your own function returns."""

    function: str
    """`package.module.function` or `package.module:function`; it is called with `file_path` and
    `kwargs`, and returns an EvalInput or a list of rows."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""


class FileLoader:
    """Reads rows in one format; csv and xls also read a second one, by file extension."""

    def __init__(self, kind: str) -> None:
        self._read = {
            "json": rows.read_json,
            "jsonl": rows.read_jsonl,
            "csv": lambda path: (
                rows.read_tsv(path) if path.suffix == ".tsv" else rows.read_csv(path)
            ),
            "parquet": rows.read_parquet,
            "xls": lambda path: (
                rows.read_xls(path) if path.suffix == ".xls" else rows.read_xlsx(path)
            ),
        }[kind]

    def load(self, path: Path | None) -> list[Row]:
        if path is None:
            raise ConfigError(f"{WHERE}.file_path: missing; name the file, or use --dataset FILE")
        return self._read(path)


class FunctionLoader:
    """Calls a function of the user."""

    def __init__(self, config: CustomDataset, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._function = load_target(
            as_target(config.function), directory, where=f"{WHERE}.function"
        )

    def load(self, path: Path | None) -> list[Row] | EvalInput:
        try:
            dataset = self._function(path, **self._config.kwargs)
        except HoneError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ConfigError(
                f"{WHERE}.function: {self._config.function} failed: "
                f"{error_at(error, self._directory)}"
            ) from error
        is_rows = isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset)
        if not is_rows and not isinstance(dataset, EvalInput):
            raise ConfigError(
                f"{WHERE}.function: {self._config.function} returned {type(dataset).__name__}; it "
                "must return a hone.evaluation.base.EvalInput, or a list of dicts"
            )
        return dataset


async def file_loader(config: DatasetBaseConfig, builder: Any) -> AsyncIterator[FileLoader]:
    yield FileLoader(config.type_name)


for _file in FILE_DATASETS:
    register_dataset_loader(config_type=_file)(file_loader)


@register_dataset_loader(config_type=CustomDataset)
async def function_loader(config: CustomDataset, builder: Any) -> AsyncIterator[FunctionLoader]:
    yield FunctionLoader(config, builder.document.file.resolve().parent)


def as_target(function: str) -> str:
    """NeMo Agent Toolkit's `module.function` as `module:function`."""
    place, dot, name = function.rpartition(".")
    return f"{place}:{name}" if dot and ":" not in function else function


def load_items(
    config: DatasetBaseConfig | None,
    override: Path | None = None,
    *,
    reps: int = 1,
    loader: DatasetLoader | None = None,
    near: Path | None = None,
) -> list[EvalInputItem]:
    """The items of the configured dataset, or of the file that replaces it.

    Args:
        config: its structure and filters apply to `override` too.
        override: a file of any known type, by its extension; the function of a `custom` dataset
            gets its path.
        reps: repeat each item this many times, as ID_rep0, ID_rep1, ...
        loader: the loader of a dataset that is not built in.
        near: a relative `file_path` is looked up here if it is not under the current directory.
    """
    if config is None and override is None:
        raise ConfigError(
            f"{WHERE}: there is none; add one with its `_type`, or use --dataset FILE"
        )
    shape = config or JsonDataset()
    path = override or _locate(shape.file_path, near)
    if override is not None and not override.exists():
        raise ConfigError(f"--dataset {override}: no such file")
    where = str(path or WHERE)
    try:
        if override is not None and not isinstance(shape, CustomDataset):
            dataset: list[Row] | EvalInput = rows.read(override)
        else:
            dataset = (loader or _built_in(shape, near)).load(path)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); name a file") from None
    if isinstance(dataset, EvalInput):
        items = dataset.eval_input_items
    else:
        items = _items(dataset, shape, where)
    _check_ids(items, [f"item {n}" for n in range(1, len(items) + 1)], where)
    if not items:
        raise ConfigError(f"{where}: no row is left to run; look at the file and at {WHERE}.filter")
    if reps == 1:
        return items
    return [
        item.copy_with_updates(id=f"{item.id}_rep{rep}", example=item.id)
        for rep in range(reps)
        for item in items
    ]


def _built_in(config: DatasetBaseConfig, near: Path | None) -> DatasetLoader:
    if isinstance(config, CustomDataset):
        return FunctionLoader(config, near or Path.cwd())
    assert config.type_name in {"json", "jsonl", "csv", "parquet", "xls"}, (
        f"{config.type_name}: a dataset that is not built in comes with its loader"
    )
    return FileLoader(config.type_name)


def _locate(path: Path | None, near: Path | None) -> Path | None:
    """The path as written if it exists, otherwise relative to `near`."""
    if path is None:
        return None
    places = [path] if near is None or path.is_absolute() else [path, near / path]
    for place in places:
        if place.exists():
            return place
    looked = " or ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise ConfigError(f"{WHERE}.file_path: there is no {looked}; fix the path, or use --dataset")


# ---- rows to items ----------------------------------------------------------------------------


def _items(dataset: Sequence[Row], config: DatasetBaseConfig, where: str) -> list[EvalInputItem]:
    columns = sorted({str(column) for row in dataset for column in row})
    selected = {n: r for n, r in enumerate(dataset, 1) if _matches(r, config.filter, columns)}
    structure = config.structure
    if not structure.disable:
        if selected and structure.question_key not in columns:
            raise MissingQuestion(
                f"{where}: no row has a {structure.question_key!r}; there are: "
                f"{', '.join(columns)}. Name the column of the workflow's input in "
                f"{WHERE}.structure.question_key.",
                columns,
            )
        blank = [n for n, row in selected.items() if _blank(row.get(structure.question_key))]
        if blank:
            _warn_of_blank(where, structure.question_key, tuple(blank), len(selected))
        for n in blank:
            del selected[n]
    items = [_item(row, n, config, f"{where}: row {n}") for n, row in selected.items()]
    _check_ids(items, [f"row {n}" for n in selected], where)
    return items


@cache  # warn once: a command reads its dataset twice, to check it and to run on it
def _warn_of_blank(where: str, column: str, blank: Sequence[int], total: int) -> None:
    log.warning(
        "%s: %d of %d rows have no %s and are left out: %s",
        *(where, len(blank), total, column),
        ", ".join(map(str, blank[:10])) + (" ..." if len(blank) > 10 else ""),
    )


def _item(row: Row, number: int, config: DatasetBaseConfig, where: str) -> EvalInputItem:
    structure = config.structure
    id = row.get(config.id_key)
    common: dict[str, Any] = {
        "id": str(number) if _blank(id) else _id(id),
        "full_dataset_entry": row,
        "row_number": number,
    }
    if structure.disable:
        return EvalInputItem(input_obj=json.dumps(row, ensure_ascii=False), **common)
    trajectory = row.get(structure.trajectory_key) or []
    expected = row.get(structure.expected_trajectory_key) or []
    if not isinstance(expected, list):
        raise ConfigError(
            f"{where}: its {structure.expected_trajectory_key} is {expected!r}; it must be a list"
        )
    calls, steps = read_steps(trajectory, f"{where}: its {structure.trajectory_key}")
    return EvalInputItem(
        input_obj=row[structure.question_key],
        expected_output_obj=row.get(structure.answer_key),
        output_obj=row.get(structure.generated_answer_key),
        expected_trajectory=expected,
        trajectory=calls,
        events=events_of(trajectory),
        steps=steps,
        # The row is from the workflow_output.json of an earlier evaluation if it has calls.
        seconds=seconds_of(row) if trajectory else None,
        **common,
    )


def _id(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _blank(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_ids(items: Sequence[EvalInputItem], names: Sequence[str], where: str) -> None:
    seen: dict[str, str] = {}
    for item, name in zip(items, names, strict=True):
        if item.id in seen:
            raise ConfigError(
                f"{where}: {seen[item.id]} and {name} both have the id {item.id!r}; give each row "
                f"its own id, or name another column in {WHERE}.id_key"
            )
        seen[item.id] = name


def _matches(row: Mapping[str, Any], filter: EvalFilterConfig, columns: Sequence[str]) -> bool:
    allow = filter.allowlist.field if filter.allowlist else {}
    deny = filter.denylist.field if filter.denylist else {}
    for name, entries in (("allowlist", allow), ("denylist", deny)):
        for column in entries:
            if column not in columns:
                raise ConfigError(
                    f"{WHERE}.filter.{name}.field.{column}: no row has such a column; there are: "
                    f"{', '.join(columns)}"
                )
    return all(_any(row.get(c), values) for c, values in allow.items()) and not any(
        _any(row.get(c), values) for c, values in deny.items()
    )


def _any(value: Any, patterns: Sequence[Any]) -> bool:
    return any(fnmatchcase(str(value), str(pattern)) for pattern in patterns)
