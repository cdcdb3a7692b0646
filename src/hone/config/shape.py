"""The type of each path of a document, and the values that name other components.

In:   the document's class, a path, and the values there
Out:  the type at that path; every value that names another component

The values are needed as well, because the class of a block is named by its `_type`. So
`-o trainer_adapters.art.backend.port 7624` sets a number, for a plugin's adapter too.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from hone.config.base import ComponentRef, Names
from hone.config.problems import Path
from hone.config.registry import TOOLKIT_REFERENCES, ByType, find, type_key

LISTS = (list, tuple, set, frozenset, Sequence)
Section = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The type of a key that does not exist."""


UNKNOWN = Unknown()


def options(annotation: Any, value: Any) -> Iterator[Any]:
    """The types a value may have: the members of unions, and the class that `_type` names."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        for note in notes:
            if isinstance(note, ByType):
                yield Block(note.kind, value)
                return
            if isinstance(note, Names):
                yield note
        yield from options(inner, value)
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from options(member, value)
    else:
        yield annotation


class Block:
    """A block whose class is named by its `_type`."""

    def __init__(self, kind: str, value: Any) -> None:
        self.kind = kind
        self.model: type[BaseModel] | None = None
        if isinstance(value, Mapping) and (key := type_key(value)) is not None:
            component = find(kind, str(value[key]))
            self.model = component.model if component else None


def below(annotation: Any, key: str | int, value: Any) -> Any:
    """The type of `value[key]`, where `value` is of this type; UNKNOWN if it has no such key."""
    for option in options(annotation, value):
        if option is Any:
            return Any
        if isinstance(option, Block):
            if (key in ("_type", "type") and option.model is None) or key == "_type":
                return str
            option = option.model
            if option is None:
                return Any
        origin, args = get_origin(option) or option, get_args(option)
        if isinstance(origin, type) and issubclass(origin, BaseModel):
            if key in origin.model_fields:
                return field_type(origin, str(key))
            if origin.model_config.get("extra") == "allow":
                return Any
        elif origin is dict or origin is Mapping:
            return args[1] if args else Any
        elif origin in LISTS and isinstance(key, int):
            return args[0] if args else Any
    return UNKNOWN


def field_type(model: type[BaseModel], name: str) -> Any:
    """The annotation of a field, with the metadata that pydantic stores separately."""
    field = model.model_fields[name]
    notes = tuple(note for note in field.metadata if isinstance(note, ByType | Names))
    return Annotated[field.annotation, *notes] if notes else field.annotation


def at(root: Any, path: Path, data: Any) -> Any:
    """The type at a path of the document."""
    for key in path:
        root = below(root, key, data)
        data = item(data, key)
    return root


def item(value: Any, key: str | int) -> Any:
    """`value[key]`, or None."""
    if isinstance(value, list):
        return value[key] if isinstance(key, int) and key < len(value) else None
    return value.get(key) if isinstance(value, Mapping) else None


def models(annotation: Any, value: Any) -> list[type[BaseModel]]:
    """The classes that could validate a block."""
    classes = []
    for option in options(annotation, value):
        model = option.model if isinstance(option, Block) else option
        if isinstance(model, type) and issubclass(model, BaseModel):
            classes.append(model)
    return classes


def names(
    annotation: Any, value: Any, path: Path = ()
) -> Iterator[tuple[Path, list[Section], str]]:
    """Each value that names another component: its path, the sections it may be in, the name."""
    if isinstance(value, str):
        sections = [s for option in options(annotation, value) if (s := _section_of(option))]
        if sections:
            yield path, sections, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from names(below(annotation, key, value), inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from names(below(annotation, i, value), inner, (*path, i))


def _section_of(option: Any) -> Section | None:
    """The section whose keys are the values of this type; None for other types."""
    if isinstance(option, Names):
        return option.section
    if isinstance(option, type) and issubclass(option, ComponentRef):
        return option.section
    return TOOLKIT_REFERENCES.get(option) if isinstance(option, type) else None
