"""Markdown for every section and component of the YAML, from the schema and the registry.

In:   config/schema.py's Document; the components that hone itself registers
Out:  the text of docs/reference/config.md, up to the table of training defaults

The page lists exactly what the schema accepts: the tables come from the fields, the descriptions from
the docstrings under them.
"""

import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue, SecretStr
from pydantic.fields import FieldInfo

from hone.config import plugins, registry
from hone.config.base import ComponentRef, Names, Strict
from hone.config.load import TEXT_SUFFIXES
from hone.config.registry import ByType
from hone.config.schema import Document
from hone.config.shape import field_type

SECTION = {
    "function": "`functions:` and `workflow:`",
    "llm_provider": "`llms:`",
    "evaluator": "`eval.evaluators:`",
    "dataset_loader": "`eval.general.dataset:`",
    "trajectory_builder": "`trajectory_builders:`",
    "trainer_adapter": "`trainer_adapters:`",
    "trainer": "`trainers:`",
    "logger": "`loggers:`",
}
"""Section of the YAML for each kind of component."""

SIGN = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "at least"} | {
    "max_length": "at most"
}

READING = f"""\
A configuration file states what to run, how to score it and how to train it. `hone validate
--config_file F` reports every problem with file and line. `hone info components` lists the values
of `_type`, including those of plugins.

- Numbers may be written as `1e-6`. `${{VAR}}` is an environment variable, `${{VAR:-default}}` one
  with a default. A variable that is not set, or that leaves the value empty, is an error without a
  default; `${{VAR:-}}` allows it. `$${{VAR}}` is the text `${{VAR}}`.
- `base: other.yml` loads that file first and merges this file into it, key by key.
- The value `file://prompt.md` is replaced by the text of that file. Allowed extensions:
  {", ".join(f"`{s}`" for s in TEXT_SUFFIXES)}.
- `-o a.b.c VALUE` overrides a key on the command line; the schema determines its type. `a.b.0` is a
  list element. Quote a key that contains a dot: `-o 'llms."my.model".temperature' 0`. `null`
  removes a value; `""` is the empty text.
- Unknown keys are errors. Keys of NeMo Agent Toolkit that hone does not support are refused by
  name."""


def yaml_reference() -> list[str]:
    """Sections in the order of the document, then the components by kind."""
    plugins.discover()
    lines = ["## File format", "", READING, "", *_section(Document, "Sections")]
    written: set[type[BaseModel]] = set()
    for name, field in Document.model_fields.items():
        for model in _blocks(field.annotation):
            lines += _with_inner(model, (name,), written)
    for kind, where in SECTION.items():
        lines += [f"## Components of {where}", "", f"Kind `{kind}`.", ""]
        for component in registry.known(kind):
            if component.package == "hone":
                title = f"`_type: {component.name}`"
                lines += _section(component.config_type, title, component.summary, 3)
                lines += _inner(component.config_type, (), written, 3)
    return lines


def _with_inner(
    model: type[BaseModel], path: tuple[str, ...], written: set[type[BaseModel]], level: int = 2
) -> Iterator[str]:
    """A block and its inner blocks, unless already written: all datasets share some blocks."""
    if model not in written:
        written.add(model)
        yield from _section(model, f"`{'.'.join(path)}:`", level=level)
        yield from _inner(model, path, written, level)


def _inner(
    model: type[BaseModel], path: tuple[str, ...], written: set[type[BaseModel]], level: int
) -> Iterator[str]:
    for name, field in _fields(model):
        for block in _blocks(field.annotation):
            yield from _with_inner(block, (*path, name), written, level + 1)


def _section(
    model: type[BaseModel], title: str, summary: str | None = None, level: int = 2
) -> Iterator[str]:
    summary = summary or " ".join((model.__doc__ or "").split())
    yield from ("#" * level + f" {title}", "", summary, "")
    fields = list(_fields(model))
    if fields:
        yield from ("| key | type | default | description |", "|---|---|---|---|")
        for name, field in fields:
            kind, default = _type(field_type(model, name)), _default(field)
            yield f"| `{name}` | {kind} | {default} | {_description(field)} |"
        yield ""
    if model.model_config.get("extra") == "allow":
        yield from ("Any other key is sent with every request.", "")
    if issubclass(model, Strict) and model.not_yet:
        refused = ", ".join(f"`{key}`" for key in model.not_yet)
        yield from (f"Not in this version: {refused}.", "")


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    return ((n, f) for n, f in model.model_fields.items() if not f.exclude)


def _description(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if not text:
        text = " ".join(
            " ".join((model.__doc__ or "").split()) for model in _blocks(field.annotation)
        )
    bounds = ", ".join(filter(None, map(bound, field.metadata)))
    return (f"{text} ({bounds})" if bounds else text).replace("|", "\\|")


def bound(item: object) -> str:
    """`Ge(ge=1)` as `>= 1`; an empty string for other annotations."""
    if isinstance(item, ByType | Names) or not type(item).__module__.startswith("annotated_types"):
        return ""
    name, _, value = repr(item).split("(", 1)[1].rstrip(")").partition("=")
    return f"{SIGN.get(name, name)} {value}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.json_schema_extra, dict) and "default" in field.json_schema_extra:
        return f"`{json.dumps(field.json_schema_extra['default'])}`"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, Path | Enum):
        value = str(value)
    return "" if value is None or value == {} else f"`{json.dumps(value, default=str)}`"


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    """The blocks of keys in a field; blocks selected by `_type` are components and not included."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if not any(isinstance(note, ByType) for note in args[1:]):
            yield from _blocks(args[0])
    elif origin in (Union, types.UnionType, list, dict):
        for one in args:
            yield from _blocks(one)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for note in args[1:]:
            if isinstance(note, ByType):
                return f"{note.kind} (by `_type`)"
            if isinstance(note, Names):
                return f"a key of `{'.'.join(note.section)}`"
        return _type(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in args if a is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (list, tuple, set, frozenset):
        return f"list of {_type(args[0])}"
    if origin is dict and (args[1] is JsonValue or args[1] is Any):
        return "mapping"
    if origin is dict:
        return f"mapping of name to {_type(args[1])}"
    return _plain(annotation)


def _plain(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, ComponentRef):
        return f"a key of `{'.'.join(annotation.section)}`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    names = {str: "string", SecretStr: "string", Path: "path", int: "integer", float: "number"}
    names |= {
        bool: "boolean",
        Any: "any value",
        JsonValue: "any value",
        dict: "mapping",
        list: "list",
    }
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))
