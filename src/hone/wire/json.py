"""JSON objects: parsed so that they can be written again, and written compactly.

In:   JSON text of a request, of a response or of a model
Out:  dicts; the bytes of JSON

Python's parser accepts values that JSON does not allow: NaN, numbers beyond a float, lone
surrogates, unlimited nesting. Here they are errors, before they reach a file or a template.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic_core import from_json, to_json

MAX_DEPTH = 100
"""Levels of nesting; deeper ones could overflow the stack of the next reader."""


def load_object(text: str | bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The object; raises ValueError, with the reason, unless it can be written again."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {max_depth}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    body = text.encode() if isinstance(text, str) else text
    if body.count(b"{") + body.count(b"[") > max_depth:
        check_depth(value, max_depth)
    if b"\\u" in body:
        json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
    return value


def object_or_none(text: str, max_depth: int = MAX_DEPTH) -> dict[str, Any] | None:
    """The object, or None if `load_object` raises."""
    try:
        return load_object(text, max_depth)
    except ValueError:
        return None


def object_or_empty(body: bytes) -> dict[str, Any]:
    """The JSON object of a response body; empty if it is not one."""
    try:
        value = from_json(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def objects_in(text: str, decoder: json.JSONDecoder | None = None) -> Iterator[Any]:
    """The JSON objects in a model's text, in order; other text is skipped."""
    decoder = decoder or json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            end = place + 1
        else:
            yield value
        place = text.find("{", end)


def write_json(value: dict[str, Any]) -> bytes:
    """Compact JSON; numbers are read back exactly. Raises ValueError for lone surrogates."""
    # Six times as fast as `json`, which matters: every answer contains hundreds of numbers.
    return to_json(value, inf_nan_mode="null")


def check_depth(value: Mapping[str, Any], most: int) -> None:
    """Raise ValueError if objects and lists are nested more than `most` levels deep."""
    level: list[Any] = [value]
    for _ in range(most):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"JSON nested deeper than {most}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number too large for JSON")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
