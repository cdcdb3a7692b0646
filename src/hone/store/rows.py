"""Read the JSON of stored rows, which another version of hone may have written.

In:   the text of a column, and the value it holds
Out:  the value; StateError for a row that cannot be read

Keys that a later version added are ignored, and kept when a job is written again: going back to an
older version and forth loses nothing. One row that cannot be read must not hide the others: a listing
leaves it out and logs it, and only a request for that row gets the error.
"""

import json
import logging
from collections.abc import Callable, Iterable
from sqlite3 import Row
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from hone.errors import StateError
from hone.files.logs import say
from hone.store.database import Store

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


def read_row(kind: type[Model], text: str | bytes, where: str) -> Model:
    """The value of a column; `where` names the row. Raises StateError."""
    try:
        return kind.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise unreadable(where, error) from None


def dump_row(value: BaseModel, before: str | None) -> str:
    """JSON of a value, with the keys of the row before that this version does not know."""
    if before is None or not (unknown := unknown_keys(value, json.loads(before))):
        return value.model_dump_json()
    dumped = value.model_dump(mode="json")
    for path, old in unknown.items():
        *parents, key = path
        table = dumped
        for parent in parents:
            table = table[parent]
        table[key] = old
    return to_json(dumped, inf_nan_mode="null").decode()


def unknown_keys(value: BaseModel, stored: Any) -> dict[tuple[str, ...], Any]:
    """What the stored JSON of a value has under keys that this version does not know, by path."""
    unknown: dict[tuple[str, ...], Any] = {}
    for key, old in stored.items() if isinstance(stored, dict) else ():
        if key not in type(value).model_fields:
            unknown[key,] = old
        elif isinstance(inner := getattr(value, key), BaseModel):
            unknown |= {(key, *path): rest for path, rest in unknown_keys(inner, old).items()}
    return unknown


def unreadable(where: str, error: Exception) -> StateError:
    """The error for a row that cannot be read."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        why = f"{key}: {first['msg']}" if key else first["msg"]
    else:
        why = str(error) or type(error).__name__
    return StateError(
        f"{where}: its row in state.sqlite cannot be read ({why}). It is damaged, or was written by a "
        "newer hone: upgrade hone, or restore a backup. Everything else is not affected."
    )


def readable(store: Store, rows: Iterable[Row], read: Callable[[Row], Value]) -> list[Value]:
    """The values of the rows that can be read; the others are logged, once for each."""
    values = []
    for row in rows:
        try:
            values.append(read(row))
        except StateError as error:
            if str(error) not in store.reported:
                store.reported.add(str(error))
                say("a row was left out", level=logging.ERROR, why=str(error))
    return values
