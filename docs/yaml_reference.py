"""Every section and component of the YAML as Markdown, from the schema and the registry.

In:   config/schema.py's Document; the components that hone itself registers
Out:  the text of docs/reference/config.md, up to the table of training defaults

Whatever the schema accepts stands here, and nothing else: the tables are made of the fields, the
sentences are the strings under them.
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
}
"""Where the components of a kind stand."""

SIGN = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "at least"} | {
    "max_length": "at most"
}

READING = f"""\
A file says what is run, how it is scored and how it is trained. `hone validate --config_file F`
reports everything that is wrong with it, with file and line; `hone info components` lists what
`_type` can name, plugins included.

- Numbers may be written `1e-6`. `${{VAR}}` is a variable of the environment, `${{VAR:-default}}` one
  with a default; a variable that is not set is an error. `$${{VAR}}` is the text `${{VAR}}`.
- `base: other.yml` puts this file over that one; blocks are merged key by key.
- A value `file://prompt.md` is that file's text ({", ".join(f"`{s}`" for s in TEXT_SUFFIXES)}).
- `-o a.b.c VALUE` sets a key from the command line, typed by this schema. `a.b.0` is an element of
  a list; a key with a dot in it stands in quotes: `-o 'llms."my.model".temperature' 0`.
- Unknown keys are errors. What the originals have and hone does not is refused by name."""


def yaml_reference() -> list[str]:
    """Sections in the order of the document, then the components by kind."""
    plugins.discover()
    lines = ["## The file", "", READING, "", *_section(Document, "The sections")]
    told: set[type[BaseModel]] = set()
    for name, field in Document.model_fields.items():
        for model in _blocks(field.annotation):
            lines += _with_inner(model, (name,), told)
    for kind, where in SECTION.items():
        lines += [f"## Components of {where}", "", f"Kind `{kind}`.", ""]
        for found in registry.known(kind):
            if found.package == "hone":
                lines += _section(found.config_type, f"`_type: {found.name}`", found.summary, 3)
                lines += _inner(found.config_type, (), told, 3)
    return lines


def _with_inner(
    model: type[BaseModel], path: tuple[str, ...], told: set[type[BaseModel]], level: int = 2
) -> Iterator[str]:
    """A block and the blocks in it, once: those of every dataset are the same."""
    if model not in told:
        told.add(model)
        yield from _section(model, f"`{'.'.join(path)}:`", level=level)
        yield from _inner(model, path, told, level)


def _inner(
    model: type[BaseModel], path: tuple[str, ...], told: set[type[BaseModel]], level: int
) -> Iterator[str]:
    for name, field in _fields(model):
        for block in _blocks(field.annotation):
            yield from _with_inner(block, (*path, name), told, level + 1)


def _section(
    model: type[BaseModel], title: str, said: str | None = None, level: int = 2
) -> Iterator[str]:
    yield from ("#" * level + f" {title}", "", said or " ".join((model.__doc__ or "").split()), "")
    fields = list(_fields(model))
    if fields:
        yield from ("| key | type | default | |", "|---|---|---|---|")
        for name, field in fields:
            yield f"| `{name}` | {_type(field_type(model, name))} | {_default(field)} | {_said(field)} |"
        yield ""
    if model.model_config.get("extra") == "allow":
        yield from ("Any other key is sent with every request.", "")
    if issubclass(model, Strict) and model.not_yet:
        refused = ", ".join(f"`{key}`" for key in model.not_yet)
        yield from (f"Not in this version: {refused}.", "")


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    return ((n, f) for n, f in model.model_fields.items() if not f.exclude)


def _said(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if not text:
        text = " ".join(
            " ".join((model.__doc__ or "").split()) for model in _blocks(field.annotation)
        )
    bounds = ", ".join(filter(None, map(bound, field.metadata)))
    return (f"{text} ({bounds})" if bounds else text).replace("|", "\\|")


def bound(item: object) -> str:
    """`Ge(ge=1)` as `>= 1`; other notes of a field say nothing to a reader."""
    if isinstance(item, ByType | Names) or not type(item).__module__.startswith("annotated_types"):
        return ""
    name, _, value = repr(item).split("(", 1)[1].rstrip(")").partition("=")
    return f"{SIGN.get(name, name)} {value}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, Path | Enum):
        value = str(value)
    return "" if value is None or value == {} else f"`{json.dumps(value, default=str)}`"


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    """The blocks of keys that a field holds itself; those found by `_type` are components."""
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
                return f"{note.kind} by `_type`"
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
        return "block"
    if origin is dict:
        return f"{_type(args[1])}, each under a name"
    return _plain(annotation)


def _plain(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, ComponentRef):
        return f"a key of `{'.'.join(annotation.section)}`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    names = {str: "text", SecretStr: "text", Path: "path", int: "whole number", float: "number"}
    names |= {
        bool: "true or false",
        Any: "anything",
        JsonValue: "anything",
        dict: "block",
        list: "list",
    }
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))
