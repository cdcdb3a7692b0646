"""Convert any value to JSON text.

In:   the output of a workflow or of an evaluator, a row of a dataset
Out:  JSON that every reader accepts; a value that JSON cannot hold becomes text

A result is never lost because it cannot be written: keys that are not text, values that contain
themselves, NaN and objects whose `__str__` fails become text.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

DEPTH = 100
"""Lists and objects nested deeper are cut, because readers have limits too."""
_DIGITS = 4000
"""Python neither writes nor reads integers of more than 4300 digits."""


def dumps(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """JSON text of the value; never raises, whatever the value holds."""
    how: dict[str, Any] = {"indent": indent, "ensure_ascii": ensure_ascii, "allow_nan": False}
    with suppress(Exception):  # a user's class may raise anything
        if not _too_deep(value):
            return json.dumps(value, default=as_json, **how)
    return json.dumps(_repaired(value, ()), **how)


def plain(value: Any) -> Any:
    """The value as JSON values; what JSON and UTF-8 cannot represent becomes text."""
    # Half a surrogate pair, as `json.loads` makes of a lone \\ud800, becomes a question mark.
    return json.loads(dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def as_json(value: Any) -> Any:
    """A value that json cannot write: a model by its fields, anything else as text."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return as_text(value)


def as_text(value: Any) -> str:
    """str() of a value, even if its `__str__` fails."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  # a user's class may raise anything
        return f"<{type(value).__name__}, whose str() failed: {type(error).__name__}>"


def _too_deep(value: Any) -> bool:
    """Whether it is nested deeper than DEPTH; a value that occurs twice is visited once a level."""
    level = {id(value): value}
    for _ in range(DEPTH + 1):
        inside = [
            v.values() if isinstance(v, dict) else v
            for v in level.values()
            if isinstance(v, dict | list | tuple)
        ]
        level = {id(inner): inner for inners in inside for inner in inners}
    return bool(level)


def _repaired(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < _DIGITS * 3 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if id(value) in above:
        return "<holds itself>"
    if len(above) > DEPTH:
        return f"<nested deeper than {DEPTH}>"
    inside = (*above, id(value))
    with suppress(Exception):  # as in dumps()
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, Mapping):
            return {_key(key): _repaired(inner, inside) for key, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_repaired(inner, inside) for inner in value]
    return as_text(value)


def _key(key: Any) -> str:
    plain = key is None or isinstance(key, bool | int | float)
    return json.dumps(key) if plain else as_text(key)
