"""Validate loaded values: the document, or every problem in them.

In:   the values that load.py read, and the document's class
Out:  the document, or None and a list of Problems

Names are checked on the values as loaded, not on the validated document: a misspelt reward is
reported together with a misspelt key, not after it.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hone.config import shape
from hone.config.base import Strict
from hone.config.load import Loaded
from hone.config.problems import Path, Problem, dotted, named
from hone.errors import did_you_mean
from hone.files.redact import is_secret

D = TypeVar("D", bound=BaseModel)

SECTION_OF = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}
"""For `finetuning.X`, the section whose keys it may name."""
WORKFLOW = "<workflow>"
"""A name that every list of targets may contain, besides functions."""

ATTEMPTS = 20
"""Maximum number of attempts; each may reveal errors that earlier ones hid."""

_SHORT = {
    "dict_type": "expected a block of keys",
    "model_type": "expected a block of keys",
    "model_attributes_type": "expected a block of keys",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "none_required": "expected null",
    "path_type": "expected a path",
}


def check(loaded: Loaded, root: type[D]) -> tuple[D | None, list[Problem]]:
    """The document, or None and its problems. A problem that load.py reported is not repeated."""
    document, problems = None, []
    try:
        document = root.model_validate(loaded.data)
    except ValidationError as error:
        problems = _translated(error.errors(include_url=False), loaded, root)
    suspects = dict(_suspects(root, loaded.data))
    problems = [p for p in problems if p.path not in suspects]
    problems += [Problem(loaded.place(p), p, m) for p, m in suspects.items()]
    problems += _names(loaded, root)
    reported = [p.path for p in loaded.problems if p.path]
    fresh = [p for p in problems if not any(p.path[: len(r)] == r for r in reported)]
    ordered = sorted([*loaded.problems, *fresh], key=lambda p: (p.place.file, p.place.line or 0))
    return document, list(dict.fromkeys(ordered))


def salvage(loaded: Loaded, root: type[D]) -> D | None:
    """The document without its wrong keys, so that the rest of it can be checked.

    A wrong key is removed; a block that needs it is removed as a whole.
    """
    data = copy.deepcopy(loaded.data)
    for _ in range(ATTEMPTS):
        try:
            return root.model_validate(data)
        except ValidationError as error:
            wrong = {_path(detail, data) for detail in error.errors(include_url=False)}
        # List elements from last to first, so that the indices of the others stay valid.
        for path in sorted(wrong, key=lambda p: [str(part).zfill(9) for part in p], reverse=True):
            if not path:
                return None
            _remove(data, path)
    return None


def _remove(data: Any, path: Path) -> None:
    """Remove a key, or the block that lacks it."""
    *above, last = path
    block: Any = data
    outer: tuple[Any, str | int] | None = None
    for part in above:
        outer, block = (block, part), shape.item(block, part)
    if last in (block if isinstance(block, dict) else range(len(block or ()))):
        del block[last]
    elif outer is not None:
        container, key = outer
        del container[key]


def _translated(
    errors: Sequence[ErrorDetails], loaded: Loaded, root: type[BaseModel]
) -> list[Problem]:
    """One problem for each place; pydantic reports a union's failure once per member."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_path(error, loaded.data), []).append(error)
    problems = []
    for path, here in by_path.items():
        deeper = any(p[: len(path)] == path and p != path for p in by_path)
        if deeper and isinstance(here[0]["input"], Mapping) and here[0]["type"] != "value_error":
            continue  # an error inside the intended member of the union is clearer
        messages = list(dict.fromkeys(_message(e, path, loaded, root) for e in here))
        got, same = _common(messages)
        message = got + " or ".join(same) if same else "; ".join(messages)
        problems.append(Problem(loaded.place(path), path, message))
    return problems


def _common(messages: list[str]) -> tuple[str, list[str]]:
    """'got X; expected A' and 'got X; expected B' as 'got X; expected ' and [A, B]."""
    heads = {m.partition("expected ")[0] for m in messages}
    if len(messages) < 2 or len(heads) > 1 or not all("expected " in m for m in messages):
        return "", []
    return heads.pop() + "expected ", [m.partition("expected ")[2] for m in messages]


def _path(error: ErrorDetails, data: Any) -> Path:
    """pydantic's location without the names of union members and validators."""
    path: list[str | int] = []
    last = len(error["loc"]) - 1
    for i, part in enumerate(error["loc"]):
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            path.append(part)
            data = shape.item(data, part)
        elif i == last and error["type"] == "missing":
            path.append(part)
    return tuple(path)


def _message(error: ErrorDetails, path: Path, loaded: Loaded, root: type[BaseModel]) -> str:
    kind, text = error["type"], error["msg"]
    if kind == "extra_forbidden":
        return _unknown_key(path, loaded, root)
    if kind == "missing":
        return "is missing"
    if kind in ("value_error", "assertion_error"):
        return text.partition(", ")[2]
    if kind in ("block", "no_type", "unknown_type"):
        return text
    what = _SHORT.get(kind) or text.replace("Input should be ", "expected ", 1)
    what = what.partition(", unable to parse")[0]
    hidden = path and is_secret(str(path[-1]))
    return f"got {'something else' if hidden else named(error['input'])}; {what}"


def _unknown_key(path: Path, loaded: Loaded, root: type[BaseModel]) -> str:
    *above, key = path
    block = loaded.data
    for part in above:
        block = shape.item(block, part)
    fields: list[str] = []
    for model in shape.models(shape.at(root, tuple(above), loaded.data), block):
        if issubclass(model, Strict) and key in model.not_yet:
            return f"not in this version of hone; {model.not_yet[str(key)]}"
        fields += [name for name, field in model.model_fields.items() if not field.exclude]
    maybe = did_you_mean(str(key), fields)
    return f"unknown key {key!r}.{maybe} Known: {', '.join(fields) or 'none'}."


def _suspects(annotation: Any, value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Keys that pydantic accepts although they are wrong.

    They are the keys that hone fills in, misspelt keys of a block that takes extra keys, and numbers
    that are true or false, which pydantic reads as 1 and 0.
    """
    if isinstance(value, bool) and _is_number(shape.options(annotation, value)):
        expected = "a number (YAML reads yes, no, on and off as true and false)"
        yield path, f"got {value!r}; expected {expected}"
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _suspects(shape.below(annotation, i, value), inner, (*path, i))
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        yield from _suspects(shape.below(annotation, key, value), inner, (*path, key))
        for model in shape.models(annotation, value):
            field = model.model_fields.get(key)
            if field is not None and field.exclude:
                yield (*path, key), "is filled in by hone; remove it"
            elif model.model_config.get("extra") == "allow" and field is None and key != "_type":
                maybe = did_you_mean(str(key), model.model_fields, cutoff=0.81)
                if maybe:
                    yield (*path, key), f"unknown key {key!r}.{maybe}"


def _is_number(options: Iterable[Any]) -> bool:
    """Whether a value of these types can be a number and not a boolean."""
    members = [m for o in options for m in (get_args(o) if get_origin(o) is Literal else (o,))]
    is_boolean = any(m in (bool, Any) or isinstance(m, bool) for m in members)
    return not is_boolean and any(m in (int, float) for m in members)


def _names(loaded: Loaded, root: type[BaseModel]) -> Iterator[Problem]:
    """Names of components that do not exist, and functions that need each other."""
    needs: dict[str, list[str]] = {}
    for path, sections, name in shape.names(root, loaded.data):
        keys = {key: None for section in sections for key in _keys(loaded, section)}
        if name not in keys and not _is_in_group(loaded, name, sections):
            maybe, where = did_you_mean(name, keys), " or ".join(map(dotted, sections))
            message = f"{where} has no {name!r}.{maybe} It has: {', '.join(keys) or 'nothing'}."
            yield Problem(loaded.place(path), path, message)
        elif path[0] == "functions" and ("functions",) in sections:
            needs.setdefault(str(path[1]), []).append(name)
    circle = _circle(needs)
    if circle:
        path = ("functions", circle[0])
        message = f"functions need each other in a circle: {' -> '.join(circle)}"
        yield Problem(loaded.place(path), path, message)


def _keys(loaded: Loaded, section: tuple[str, ...]) -> list[str]:
    block: Any = loaded.data
    for key in section:
        block = shape.item(block, key)
    return [str(key) for key in block] if isinstance(block, Mapping) else []


def _is_in_group(loaded: Loaded, name: str, sections: Sequence[tuple[str, ...]]) -> bool:
    """Whether it names a function of one of the toolkit's function groups: GROUP__FUNCTION."""
    groups = _keys(loaded, ("function_groups",)) if ("functions",) in sections else []
    return any(name.startswith((f"{group}__", f"{group}.")) for group in groups)


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        done.add(name)
        return next((c for n in needs.get(name, ()) if (c := walk(n, [*above, name]))), [])

    return next((c for name in needs if (c := walk(name, []))), [])


# ---- what a run needs -----------------------------------------------------------------------


def is_run(loaded: Loaded) -> bool:
    """Whether the file says `finetuning.enabled: true`; a value from the environment is text."""
    return str(shape.item(loaded.data.get("finetuning"), "enabled")).lower() == "true"


def unnamed(loaded: Loaded) -> list[Problem]:
    """The parts of a run that are not named.

    FinetuneConfig makes the same check, which pydantic skips after any other error.
    """
    block = loaded.data.get("finetuning")
    if not is_run(loaded) or not isinstance(block, Mapping):
        return []
    missing = [part for part in SECTION_OF if block.get(part) is None]
    path = ("finetuning",)
    return [Problem(loaded.place(path), path, not_named(missing))] if missing else []


def not_named(parts: Sequence[str]) -> str:
    """The message for parts of a run that are not set."""
    verb = "is" if len(parts) == 1 else "are"
    sections = ", ".join(f"`{SECTION_OF[part]}`" for part in parts)
    return f"enabled is true, but {', '.join(parts)} {verb} not set; name a key of {sections}"
