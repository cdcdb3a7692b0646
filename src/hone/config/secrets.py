"""Keep secrets out of the files that a run or an evaluation writes.

In:   a configuration as it was read, the options of the command line, the environment
Out:  the same values with every secret replaced by HIDDEN

A secret is the value of a key, an option or an environment variable with a secret name (redact.py).
It is hidden wherever it occurs: a header or an address may contain it too. The password of an
address is a secret under any name, and so is every header of a logger, since services choose their
names. What a run writes besides its configuration goes through redact.py, which learns the values
from `add_secrets_of`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hone.files.redact import HIDDEN, SecretValues, add_secrets, is_secret, redact_urls, url_secrets

Path = tuple[str, ...]
"""The keys that lead to a value."""


class Secrets:
    """The secrets in a command's configuration, options and environment."""

    def __init__(self, data: Any = None, overrides: Iterable[tuple[str, str]] = ()) -> None:
        """`data` is the configuration as it was read; `overrides` are the values of `-o`."""
        values = [*_values(data), *(v for key, v in overrides if _holds_secret(_path(key)))]
        self._values = SecretValues()
        self._values.add(values)

    def hide(self, value: Any, name: str = "") -> Any:
        """A value without its secrets; `name` is the key that holds it, dotted if it is nested."""
        return self._hide(value, _path(name))

    def _hide(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {str(key): self._hide(inner, (*path, str(key))) for key, inner in value.items()}
        if value and _holds_secret(path):
            return HIDDEN
        if isinstance(value, list | tuple):
            return [self._hide(inner, (*path, str(i))) for i, inner in enumerate(value)]
        if not isinstance(value, str):
            return value if isinstance(value, bool | int | float | None) else str(value)
        return redact_urls(self._values.hide(value))

    def hide_arguments(self, arguments: Sequence[str]) -> list[str]:
        """The arguments of a command without the secrets among them."""
        shown: list[str] = []
        for index, argument in enumerate(arguments):
            key = arguments[index - 1] if index >= 2 else ""
            is_value = index >= 2 and arguments[index - 2] in ("-o", "--override")
            shown.append(self.hide(argument, key if is_value else ""))
        return shown


def add_secrets_of(data: Any) -> None:
    """Hide the secrets of a configuration in every text that this process writes."""
    add_secrets(_values(data))


def _path(name: str) -> Path:
    return tuple(name.split("."))


def _holds_secret(path: Path) -> bool:
    return is_secret(path[-1]) or ("loggers" in path and "headers" in path[:-1])


def _values(data: Any, path: Path = ()) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, inner in data.items():
            yield from _values(inner, (*path, str(key)))
    elif isinstance(data, list | tuple):
        for inner in data:
            yield from _values(inner, path)
    elif isinstance(data, str):
        if path and _holds_secret(path):
            yield data
        yield from url_secrets(data)
