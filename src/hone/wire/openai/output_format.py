"""The output format that a request asks for: response_format, and vLLM's keys for it.

In:   response_format, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar
Out:  OutputFormat, or None for free text; BadRequest names the key

`json_object` is the JSON schema of any object, and a choice is a regular expression, so there are
three kinds. A grammar is Lark as the library llguidance reads it, or GBNF as llama.cpp reads it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hone.errors import BadRequest
from hone.wire.errors import brief
from hone.wire.json import check_depth

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
VLLM_KEYS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
MAX_NESTING = 64
"""Maximum nesting of objects and lists in a JSON schema; vLLM's limit."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of an answer's text."""

    kind: Literal["json_schema", "regex", "grammar"]
    value: Any
    """A JSON schema as an object; a regular expression; a grammar."""
    param: str
    """The key of the request that set it, for error messages."""


def output_format(request: Mapping[str, Any]) -> OutputFormat | None:
    """The output format of a request. Raises BadRequest if it is invalid, or if there are two."""
    sent = {key: request.get(key) for key in ("response_format", *VLLM_KEYS)}
    named = [_read(key, value) for key, value in sent.items() if value is not None]
    formats = [form for form in named if form is not None]
    if len(formats) > 1:
        one, other = formats[0].param, formats[1].param
        raise BadRequest(f"{one}: {other} is there too; send one of them", param=one)
    return formats[0] if formats else None


def _read(key: str, value: Any) -> OutputFormat | None:
    if key == "response_format":
        return _response_format(value, key)
    if key == "structured_outputs":
        return _structured_outputs(value, key)
    return _format(key.removeprefix("guided_"), value, key)


def _response_format(value: Any, key: str) -> OutputFormat | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _format("json_object", True, key)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _format("json", schema, f"{key}.json_schema.schema")
        case {"type": "json_schema"}:
            return _format("json", None, f"{key}.json_schema.schema")
    raise BadRequest(
        f"{key}: expected {{'type': 'text'}}, {{'type': 'json_object'}} or {{'type': 'json_schema', "
        f"'json_schema': {{'name': ..., 'schema': ...}}}}, got {brief(value)}",
        param=key,
    )


def _structured_outputs(value: Any, key: str) -> OutputFormat:
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    sent = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    if len(sent) != 1 or not sent.keys() <= {*kinds}:
        raise BadRequest(
            f"{key}: expected an object with one of {', '.join(kinds)}, got {brief(value)}",
            param=key,
        )
    ((kind, inner),) = sent.items()
    return _format(kind, inner, f"{key}.{kind}")


def _format(kind: str, value: Any, key: str) -> OutputFormat:
    if kind == "json_object" and value is True:
        return OutputFormat("json_schema", dict(ANY_OBJECT), key)
    if kind == "json":
        return OutputFormat("json_schema", _schema(value, key), key)
    if kind == "choice":
        texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
        if not texts or not value:
            raise BadRequest(f"{key}: expected a list of texts, got {brief(value)}", param=key)
        return OutputFormat("regex", "|".join(map(_escaped, value)), key)
    if kind in ("regex", "grammar") and isinstance(value, str) and value.strip():
        return OutputFormat("regex" if kind == "regex" else "grammar", value, key)
    expected = "true" if kind == "json_object" else "text that is not empty"
    raise BadRequest(f"{key}: expected {expected}, got {brief(value)}", param=key)


def _schema(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, str):  # vLLM accepts JSON text too
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = brief(value)
    if not isinstance(value, Mapping):
        raise BadRequest(f"{key}: expected a JSON schema, got {brief(value)}", param=key)
    check_nesting(value, key)
    return dict(value)


def check_nesting(schema: Mapping[str, Any], key: str) -> None:
    """Refuse a schema that is nested more deeply than compilers of schemas can follow."""
    try:
        check_depth(schema, MAX_NESTING)
    except ValueError:
        raise BadRequest(
            f"{key}: nested more than {MAX_NESTING} levels deep; flatten it", param=key
        ) from None


def _escaped(text: str) -> str:
    """The text as a regular expression in Rust's syntax."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text).replace("\n", r"\n")
