"""Apply `-o a.b.c value` and text from the environment as values of the schema's types.

In:   dotted paths and text; the document's class
Out:  the loaded values, changed; problems for paths that do not exist

The schema decides what text means, not the text: `-o llms.m.model_name 7` is the name "7", and `-o
finetuning.num_epochs 7` the number. Element 1 of a list is `a.b.1`; a key that contains a dot is
quoted.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from hone.config import shape
from hone.config.base import ComponentRef, Names
from hone.config.load import Loaded, parsed
from hone.config.problems import Path, Place, Problem, dotted, named

_PART = re.compile(r"""(?:"([^"]*)"|'([^']*)'|([^."']+))(?:\.|$)""")
_TEXT = (str, FilePath, SecretStr)


def apply(
    loaded: Loaded, overrides: Sequence[tuple[str, str]], root: type[BaseModel]
) -> list[Problem]:
    """Give untyped text its type, then set each override in turn."""
    for path, text in loaded.untyped.items():
        _store(loaded.data, path, typed(shape.at(root, path, loaded.data), text))
    problems = []
    for key, text in overrides:
        place = Place(f"-o {key}")
        path = _split(key)
        data, places = copy.deepcopy(loaded.data), dict(loaded.places)
        message = _set(loaded, path, text, root, place) if path else "expected a key such as a.b.c"
        if message is not None:
            # Undo it, or the blocks created on the way would be reported as problems too.
            loaded.data.clear()
            loaded.data.update(data)
            loaded.places.clear()
            loaded.places.update(places)
            problems.append(Problem(place, (), message))
    return problems


def _split(key: str) -> Path:
    parts, end = [], 0
    while end < len(key):
        match = _PART.match(key, end)
        if match is None or match.end() == end:
            return ()
        parts.append(next(part for part in match.groups() if part is not None))
        end = match.end()
    return () if key.endswith(".") else tuple(parts)


def _set(loaded: Loaded, keys: Path, text: str, root: type[BaseModel], place: Place) -> str | None:
    """Walk to the last block, creating blocks of the schema; returns what is wrong, or None."""
    value: Any = loaded.data
    annotation: Any = root
    path: Path = ()
    for i, part in enumerate(keys):
        key = _key(part, value)
        if isinstance(value, list):
            if not isinstance(key, int) or key > len(value):
                size = f"{dotted(path)!r} has {len(value)} elements"
                return f"{size}; expected a number from 0 to {len(value)}, got {part!r}"
        elif not isinstance(value, dict):
            return f"{dotted(path)!r} is {named(value)}, which has no keys"
        annotation = shape.below(annotation, key, value)
        path = (*path, key)
        if i == len(keys) - 1:
            _forget(loaded, path)
            new = typed(annotation, text)
            # YAML reads an empty value as null; on the command line it is text, or does not fit.
            _put(value, key, "" if new is None and not text else new)
        else:
            if shape.item(value, key) is None:
                _put(value, key, [] if _is_list(annotation, value) else {})
                loaded.places[path] = place
            value = shape.item(value, key)
    loaded.places[path] = place
    return None


def _key(part: str | int, value: Any) -> str | int:
    """A part of a path as a key of the value: digits are a list's index, or a numeric key."""
    if isinstance(part, str) and part.isdigit() and not (isinstance(value, dict) and part in value):
        number = int(part)
        if isinstance(value, list) or (isinstance(value, dict) and number in value):
            return number
    return part


def _is_list(annotation: Any, value: Any) -> bool:
    kinds = [get_origin(o) or o for o in shape.options(annotation, value)]
    return any(kind in shape.LISTS for kind in kinds) and dict not in kinds


def _put(holder: Any, key: str | int, value: Any) -> None:
    if key == len(holder) and isinstance(holder, list):
        holder.append(value)
        return
    holder[key] = value


def _store(data: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def _forget(loaded: Loaded, path: Path) -> None:
    """Drop the places and problems under a value that is replaced."""
    for old in [p for p in loaded.places if p[: len(path)] == path and p != path]:
        del loaded.places[old]
    loaded.problems[:] = [p for p in loaded.problems if p.path[: len(path)] != path]


def typed(annotation: Any, text: str) -> Any:
    """Text as a value of the schema's type; text that does not fit is left for the validation."""
    wanted = [o for o in shape.options(annotation, None) if not isinstance(o, Names)]
    if type(None) in wanted and text.strip() in ("null", "~", "None"):
        return None
    holders = [o for o in wanted if _holds(o)]
    if holders and text.lstrip()[:1] in ("[", "{"):
        try:
            return _of_node(annotation, yaml.compose(text, Loader=yaml.SafeLoader))
        except (yaml.YAMLError, RecursionError):  # an alias to itself, thousands of brackets
            return text
    lists = [o for o in wanted if (get_origin(o) or o) in shape.LISTS]
    if lists and not any(_is_text(o) for o in wanted):
        element = shape.below(lists[0], 0, [])
        return [typed(element, part.strip()) for part in text.split(",") if part.strip()]
    if any(_is_text(o) for o in wanted):
        return _or_other(wanted, text)
    return parsed(text)


def _or_other(wanted: Sequence[Any], text: str) -> Any:
    """Text, unless it reads as another of the types: a number for `int | str`."""
    value = parsed(text)
    return value if type(value) in wanted else text


def _holds(option: Any) -> bool:
    origin = get_origin(option) or option
    if option is Any or isinstance(option, shape.Block) or origin in (*shape.LISTS, dict, Mapping):
        return True
    return isinstance(origin, type) and issubclass(origin, BaseModel)


def _is_text(option: Any) -> bool:
    if get_origin(option) is Literal:
        return all(isinstance(value, str) for value in get_args(option))
    return isinstance(option, type) and issubclass(option, (*_TEXT, ComponentRef))


def _of_node(annotation: Any, node: yaml.Node | None) -> Any:
    """A list or block in brackets; each scalar in it is converted separately."""
    if isinstance(node, yaml.SequenceNode):
        return [_of_node(shape.below(annotation, i, []), n) for i, n in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        plain = {k.value: v for k, v in node.value}
        seen = {k: v.value for k, v in plain.items() if isinstance(v, yaml.ScalarNode)}
        return {k: _of_node(shape.below(annotation, k, seen), v) for k, v in plain.items()}
    assert isinstance(node, yaml.ScalarNode), node
    return node.value if node.style else typed(annotation, node.value)
