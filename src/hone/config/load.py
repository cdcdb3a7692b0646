"""Load a YAML file: plain values, and the file and line of each.

In:   a file; the environment; the files that `base:` and `file://` name
Out:  Loaded: nested dicts and lists, and file:line of every key

The YAML is NeMo Agent Toolkit's: `1e-6` is a number, `${VAR}` and `${VAR:-default}` come from the
environment, `base: other.yml` is merged under this file, and a string `file://prompt.md` is
replaced by that file's text. A value from the environment has no type until the schema gives it
one: an API key of digits stays text, and a port becomes a number.
"""

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hone.config.problems import ConfigProblems, Place, Problem
from hone.config.problems import Path as Keys

TEXT_SUFFIXES = (".txt", ".md", ".j2", ".jinja2", ".jinja", ".prompt", ".tpl", ".template")
"""Extensions of files that `file://` may name."""

MAX_REPEATED_VALUES = 100_000
"""How many values the aliases of a file may repeat. Nested aliases multiply: eight lines can stand
for a billion values."""

_VARIABLE = re.compile(r"\$?\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}\n]*))?\}")
# Placeholder for a ${...} while YAML is parsed: its number between two private-use characters. In the
# text itself, its braces would end a flow list, and a default could contain ": ".
_STAND_IN = re.compile("\ue000([0-9]+)\ue001")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Yaml(yaml.SafeLoader):
    """PyYAML's YAML 1.1, with the numbers of 1.2 and without dates and sexagesimals."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the keys of `<<: *block` before the others; of equal keys, only the last is left."""
        super().flatten_mapping(node)
        node.value = list({_identity(key): (key, value) for key, value in node.value}.values())


def _identity(key: yaml.Node) -> Hashable:
    return (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key


_UNWANTED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int"}
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rules if tag not in _UNWANTED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The values of a file, with everything it refers to filled in."""

    file: Path
    data: dict[str, Any]
    places: dict[Keys, Place]
    """File and line of each key and list element, by its path."""
    untyped: dict[Keys, str] = field(default_factory=dict)
    """Paths of values that are text because they come from the environment or the command line."""
    problems: list[Problem] = field(default_factory=list)
    """Problems beyond YAML syntax: variables that are not set, files that do not exist."""

    def place(self, path: Keys) -> Place:
        """File and line of a key, or of the nearest block around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(str(self.file))


def load(file: Path) -> Loaded:
    """Read a file and its `base:` files; raises ConfigProblems if one of them is not YAML."""
    return _load(Path(file), ())


def parsed(text: str) -> Any:
    """A scalar as YAML reads it; text that YAML cannot read stays text."""
    loader = _Yaml("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        node = yaml.ScalarNode(tag, text)
        return _constructed(loader, node)
    except (yaml.YAMLError, ValueError):
        return text
    finally:
        loader.dispose()


def _load(file: Path, above: tuple[Path, ...]) -> Loaded:
    chain = (*above, file.resolve())
    if file.resolve() in above:
        names = " -> ".join(f.name for f in chain)
        raise _refused(file, f"the files name each other in a circle: {names}", path=("base",))
    reader = _Reader(file)
    loaded = reader.read()
    base = loaded.data.pop("base", None)
    if base is None:
        return loaded
    line, path = loaded.place(("base",)).line, ("base",)
    if not isinstance(base, str):
        raise _refused(file, f"got {base!r}; expected the name of a YAML file", line, path)
    under = file.parent / base
    if not under.is_file():
        message = f"no file {str(under)!r}; it is looked for beside {file}"
        raise _refused(file, message, line, path)
    return _merge(_load(under, chain), loaded)


def _merge(under: Loaded, over: Loaded) -> Loaded:
    """Blocks are merged key by key; any other value of `over` replaces that of `under`."""
    places, untyped = dict(under.places), dict(under.untyped)

    def put(below: Any, above: Any, path: Keys) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            merged = dict(below)
            for key, value in above.items():
                merged[key] = put(below[key], value, (*path, key)) if key in below else value
            return merged
        for gone in [p for p in places if p[: len(path)] == path]:
            places.pop(gone)
            untyped.pop(gone, None)
        return above

    data = put(under.data, over.data, ())
    places.update(over.places)
    untyped.update(over.untyped)
    return Loaded(over.file, data, places, untyped, [*under.problems, *over.problems])


class _Reader:
    """Reads one file: YAML nodes become values, and the place of each is recorded."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.variables: list[re.Match[str]] = []
        self.out = Loaded(file, {}, {}, {}, [])
        self.visited: set[yaml.Node] = set()
        self.repeated_values = 0

    def read(self) -> Loaded:
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise _refused(self.file, "there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise _refused(self.file, f"cannot be read as text: {error}") from None
        self.loader = _Yaml(_VARIABLE.sub(self._stand_in, text))
        try:
            node = self.loader.get_single_node()
            data = {} if node is None else self._value(node, (), ())
        except yaml.YAMLError as error:
            raise self._syntax(error) from None
        except RecursionError:
            message = "nested too deeply; flatten its lists and blocks"
            raise _refused(self.file, message) from None
        finally:
            self.loader.dispose()
        if data is None:
            data = {}
        if not isinstance(data, dict):
            message = f"the document is {_kind(data)}; expected keys such as `llms:`"
            raise _refused(self.file, message, 1)
        self.out.data.update(data)
        return self.out

    def _stand_in(self, match: re.Match[str]) -> str:
        self.variables.append(match)
        return f"\ue000{len(self.variables) - 1}\ue001"

    def _syntax(self, error: yaml.YAMLError) -> ConfigProblems:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        line = None if mark is None else mark.line + 1
        hint = "; indent with spaces" if "'\\t'" in what else ""
        return _refused(self.file, f"not YAML: {what}{hint}", line)

    def _value(self, node: yaml.Node, path: Keys, above: tuple[yaml.Node, ...]) -> Any:
        line = node.start_mark.line + 1
        self.out.places.setdefault(path, Place(str(self.file), line))
        if any(node is n for n in above):
            raise _refused(self.file, "this block holds an alias to itself", line)
        if node in self.visited:
            self._count_repeated(path)
        self.visited.add(node)
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(n, (*path, i), above) for i, n in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), node
        return self._scalar(node, path)

    def _count_repeated(self, path: Keys) -> None:
        self.repeated_values += 1
        if self.repeated_values > MAX_REPEATED_VALUES:
            message = (
                f"aliases of this file repeat more than {MAX_REPEATED_VALUES} values; "
                "alias fewer or smaller blocks"
            )
            raise _refused(self.file, message, self.out.place(path[:1]).line, path[:1])

    def _mapping(
        self, node: yaml.MappingNode, path: Keys, above: tuple[yaml.Node, ...]
    ) -> dict[Any, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                key, line = self._key(key_node, path), key_node.start_mark.line + 1
                if key in lines:
                    message = f"written twice, on lines {lines[key]} and {line}; keep one of them"
                    self._problem((*path, key), line, message)
                lines[key] = line
        self.loader.flatten_mapping(node)
        block: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            self.out.places[*path, key] = Place(str(self.file), key_node.start_mark.line + 1)
            block[key] = self._value(value_node, (*path, key), above)
        return block

    def _key(self, node: yaml.Node, path: Keys) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            message = "a key is a block; expected a name (a value that starts with '{' or '[' wants quotes)"
            raise _refused(self.file, message, node.start_mark.line + 1)
        if _STAND_IN.search(node.value):
            return self._substituted(node.value, path, node.start_mark.line + 1)
        return self.loader.construct_object(node)

    def _scalar(self, node: yaml.ScalarNode, path: Keys) -> Any:
        line = node.start_mark.line + 1
        if not _STAND_IN.search(node.value):
            value = _constructed(self.loader, node)
        else:
            value = self._substituted(node.value, path, line)
            if node.style is None and value is not None:
                self.out.untyped[path] = value
        if isinstance(value, str) and value.startswith("file://"):
            return self._text_of(value, path, line)
        return value

    def _substituted(self, text: str, path: Keys, line: int) -> str | None:
        missing: list[str] = []
        empty: list[str] = []

        def value(match: re.Match[str]) -> str:
            variable = self.variables[int(match[1])]
            if variable[0].startswith("$$"):  # $${x} is an escaped ${x}
                return variable[0][1:]
            text_value = os.environ.get(variable[1])
            if not text_value and variable[2] is not None:
                return variable[2]
            if not text_value:
                (missing if text_value is None else empty).append(variable[1])
            return text_value or ""

        done = _STAND_IN.sub(value, text)
        problems = [(name, "is not set in the environment; set it") for name in missing]
        if not done:  # it could mean the key's default: for base_url, OpenAI's own address
            problems += [(name, "is empty in the environment; give it a value") for name in empty]
        for name, reason in problems:
            self._problem(path, line, f"${{{name}}} {reason}, or write ${{{name}:-DEFAULT}}")
        return None if problems else done

    def _text_of(self, value: str, path: Keys, line: int) -> str | None:
        name = Path(value.removeprefix("file://"))
        if name.suffix not in TEXT_SUFFIXES:
            self._problem(
                path,
                line,
                f"{value!r} is not a text file that hone reads; it may end in {_listed()}",
            )
            return None
        try:
            return (self.file.parent / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._problem(path, line, f"{value!r} cannot be read from {self.file.parent}: {reason}")
            return None

    def _problem(self, path: Keys, line: int, message: str) -> None:
        self.out.problems.append(Problem(Place(str(self.file), line), path, message))


def _refused(file: Path, message: str, line: int | None = None, path: Keys = ()) -> ConfigProblems:
    """The one problem of a file that cannot be loaded."""
    return ConfigProblems([Problem(Place(str(file), line), path, message)])


def _constructed(loader: _Yaml, node: yaml.ScalarNode) -> Any:
    digits = node.value.lstrip("+-")
    if node.tag == "tag:yaml.org,2002:int" and digits.startswith("0o"):  # YAML 1.2's octals
        number = int(digits[2:].replace("_", ""), 8)
        return -number if node.value.startswith("-") else number
    return loader.construct_object(node)


def _listed() -> str:
    return ", ".join(TEXT_SUFFIXES[:-1]) + f" or {TEXT_SUFFIXES[-1]}"


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r}"
