"""A problem of a configuration: its file and line, its key, and what to change.

In:   errors of a document, and the place of each key
Out:  Problems, and ConfigProblems, which raises all of them at once

A problem names the place that the author can change: a key that came from `base:` names the line in
the base file, and one that came from `-o` names the option.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hone.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the document."""
Mistakes = Iterator[tuple[Path, str]]
"""Keys, and for each what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written."""

    file: str
    """A file as it was named, or the option `-o KEY`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration."""

    place: Place
    path: Path
    message: str

    def __str__(self) -> str:
        key = dotted(self.path)
        if not key or self.place.file == f"-o {key}":
            return f"{self.place}: {self.message}"
        return f"{self.place}: {key}: {self.message}"


class ConfigProblems(ConfigError):
    """All problems of a configuration, one a line, in the order of each file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        distinct = list(dict.fromkeys(problems))
        files = list(dict.fromkeys(problem.place.file for problem in distinct))
        self.problems = sorted(
            distinct, key=lambda one: (files.index(one.place.file), one.place.line or 0)
        )
        super().__init__("\n".join(map(str, self.problems)))


def dotted(path: Iterable[str | int]) -> str:
    """A path as `-o` takes it: keys that contain a dot are quoted."""
    return ".".join(f'"{key}"' if "." in str(key) else str(key) for key in path)


def named(value: Any, limit: int = 60) -> str:
    """A value as an error shows it, shortened."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
