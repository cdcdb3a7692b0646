"""Read a file of rows as one dict per row: json, jsonl, csv, parquet, xlsx, xls.

In:   a path
Out:  its rows in order, columns by name, values that JSON can hold; an empty cell is None

A row that cannot be read is an error with file and line, and is never skipped: a run must train on
exactly the dataset that its author sees. pyarrow, openpyxl and xlrd are imported only
for the formats that need them.
"""

import csv
import datetime
import decimal
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.errors import ConfigError

Row = dict[str, Any]


def read_json(path: Path) -> list[Row]:
    """A list of objects."""
    try:
        content = json.loads(path.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        more = ""
        if error.msg == "Extra data":
            more = ". Several values one after another are JSON Lines: name the file .jsonl"
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}{more}") from None
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{path}", error) from None
    if not isinstance(content, list):
        raise ConfigError(
            f"{path}: holds {_kind(content)}; a JSON dataset is a list of objects, one a row"
        )
    for place, row in enumerate(content, 1):
        _check_object(row, f"{path}: row {place}")
    return content


def read_jsonl(path: Path) -> list[Row]:
    """An object on each line; blank lines are skipped."""
    rows = []
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            more = ". A file that is one JSON value is named .json" if len(rows) == 0 else ""
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg}{more}") from None
        except (ValueError, RecursionError) as error:
            raise _unreadable(f"{path}:{number}", error) from None
        _check_object(row, f"{path}:{number}")
        rows.append(row)
    return rows


def read_csv(path: Path, delimiter: str = ",") -> list[Row]:
    """A header, then rows of text; an empty cell is None."""
    try:
        with _long_fields(), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            lines = ((reader.line_num, line) for line in reader if line)
            return _table(path, lines, empty=lambda cell: cell == "")
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}") from None


def read_tsv(path: Path) -> list[Row]:
    """Like `read_csv`, with tabs."""
    return read_csv(path, "\t")


def read_parquet(path: Path) -> list[Row]:
    """A table; nested columns become lists and objects."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise _missing(path, "pyarrow") from None
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not Parquet: {error}") from None
    return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]


def read_xlsx(path: Path) -> list[Row]:
    """The first sheet; its first row names the columns. A formula gives its last value."""
    try:
        import openpyxl
        from openpyxl.utils.exceptions import InvalidFileException
    except ImportError:
        raise _missing(path, "openpyxl") from None
    from zipfile import BadZipFile

    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except (BadZipFile, KeyError, InvalidFileException) as error:
        raise ConfigError(f"{path}: not an Excel workbook (.xlsx): {error}") from None
    try:
        return _table(path, enumerate(book.worksheets[0].iter_rows(values_only=True), 1))
    finally:
        book.close()


def read_xls(path: Path) -> list[Row]:
    """The first sheet of a workbook in the format of Excel 97 to 2003."""
    try:
        import xlrd
        from xlrd.biffh import XLRDError
    except ImportError:
        raise _missing(path, "xlrd") from None
    try:
        book = xlrd.open_workbook(str(path), on_demand=True)
    except XLRDError as error:
        raise ConfigError(f"{path}: not an Excel 97-2003 workbook (.xls): {error}") from None

    def value(cell: Any) -> Any:
        if cell.ctype in (xlrd.XL_CELL_EMPTY, xlrd.XL_CELL_BLANK, xlrd.XL_CELL_ERROR):
            return None
        if cell.ctype == xlrd.XL_CELL_DATE:
            return xlrd.xldate_as_datetime(cell.value, book.datemode)
        if cell.ctype == xlrd.XL_CELL_BOOLEAN:
            return bool(cell.value)
        # The format has no integers: 7 is stored as 7.0.
        whole = cell.ctype == xlrd.XL_CELL_NUMBER and cell.value.is_integer()
        return int(cell.value) if whole else cell.value

    with book:
        sheet = book.sheet_by_index(0)
        lines = ([value(cell) for cell in sheet.row(n)] for n in range(sheet.nrows))
        return _table(path, enumerate(lines, 1))


READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".xlsx": read_xlsx,
    ".xlsm": read_xlsx,
    ".xls": read_xls,
}


def read(path: Path) -> list[Row]:
    """The rows of a file; its extension names the format."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: its extension names no known format; known: {', '.join(READERS)}. "
            "Rename it, or name a dataset with its `_type` in eval.general.dataset."
        )
    return reader(path)


def plain(value: Any) -> Any:
    """A value that JSON can hold: times as ISO text, decimals as numbers, bytes as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def _table(
    path: Path,
    lines: Iterable[tuple[int, Iterable[Any]]],
    empty: Callable[[Any], bool] = lambda cell: cell is None,
) -> list[Row]:
    """Rows of a sheet whose first row names the columns; rows without any value are skipped."""
    numbered = iter(lines)
    header = [str(plain(cell)) if not empty(cell) else "" for cell in next(numbered, (0, ()))[1]]
    named = [name for name in header if name]
    repeated = sorted({name for name in named if named.count(name) > 1})
    if repeated:
        raise ConfigError(f"{path}: two columns are called {repeated[0]!r}; rename one of them")
    rows = []
    for number, cells in numbered:
        line = [None if empty(cell) else plain(cell) for cell in cells]
        if all(cell is None for cell in line):
            continue
        for place, cell in enumerate(line):
            if cell is not None and (place >= len(header) or not header[place]):
                raise ConfigError(
                    f"{path}:{number}: column {place + 1} holds {cell!r} but has no name in the "
                    "first row; name it, or quote the delimiter if it belongs to the text"
                )
        line += [None] * (len(header) - len(line))
        rows.append({name: cell for name, cell in zip(header, line, strict=False) if name})
    return rows


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow cells longer than the csv module's 128 KiB: conversations are."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is {_kind(row)}; each row is an object: {{...}}")


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )


def _not_text(path: Path, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
    )


def _unreadable(where: str, error: Exception) -> ConfigError:
    """JSON that Python does not read: nested too deep, or a number of thousands of digits."""
    return ConfigError(f"{where}: cannot be read: {str(error).partition(';')[0]}; fix the value")


def _missing(path: Path, package: str) -> ConfigError:
    return ConfigError(f"{path}: reading it needs {package}; pip install {package}")
