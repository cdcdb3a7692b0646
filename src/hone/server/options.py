"""Turn every field of Settings into an option of `hone serve`.

In:   a command function that takes `**options`
Out:  the same function with one option for each field of Settings, and Settings from its values

The help of an option is the docstring of its field, so a new setting is reachable and documented
as soon as it exists. Values are checked by Settings itself; an error names the option.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hone.errors import ConfigError
from hone.server.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])

_ENVIRONMENT = {"api_key": "HONE_API_KEY"}
_METAVARS = {
    "trust_network": "CIDR",
    "forwarded_allow_ips": "CIDR",
    "allowed_hosts": "HOST",
    "allowed_origins": "ORIGIN",
    "allow_base_models": "MODEL",
}


def flag(field: str) -> str:
    """The option that sets a field."""
    return "--" + field.replace("_", "-")


def settings_options(**defaults: Any) -> Callable[[Command], Command]:
    """Give a command every option of Settings; `defaults` replace those of the fields."""

    def add_options(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            _parameter(name, field, defaults.get(name, field.default))
            for name, field in Settings.model_fields.items()
        ]
        setattr(command, "__signature__", signature.replace(parameters=[*own, *options]))  # noqa: B010
        command.__annotations__ |= {option.name: option.annotation for option in options}
        return command

    return add_options


def read_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from the values of the options; a wrong one is a ConfigError that names it."""
    # An option that was not given and has no default is None; so is a list that is empty.
    values = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        # A key that is refused may still be somebody's key.
        value = "" if name == "api_key" else f" {first['input']!r}"
        raise ConfigError(f"{flag(name)}{value}: {message}") from None


def _parameter(name: str, field: FieldInfo, default: Any) -> inspect.Parameter:
    kind, metavar = _type_of(field.annotation)
    option = typer.Option(
        f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name),
        help=" ".join((field.description or "").split()),
        envvar=_ENVIRONMENT.get(name),
        metavar=_METAVARS.get(name, metavar),
        show_default=default not in (None, ()),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[kind | None if default in (None, ()) else kind, option],
    )


def _type_of(annotation: Any) -> tuple[Any, str | None]:
    """The type typer reads an option as, and what stands for its value in the help."""
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not NoneType]
        return _type_of(inner[0]) if len(inner) == 1 else (str, None)
    if get_origin(annotation) is tuple:
        return list[str], None
    if get_origin(annotation) is Literal:
        return str, "|".join(map(str, get_args(annotation)))
    return (annotation if annotation in (bool, int, float, Path) else str), None
