"""Fit one input to the parameters of a function.

In:   a function's signature; an input: text, JSON text, a dict, a model, anything
Out:  the arguments to call it with; the schema of what it takes

Datasets hold text and rows, tool calls hold JSON text, agents hold objects: a function says with
its annotations which of them it wants. What does not fit raises pydantic's ValidationError, which
after an answer of the model counts as the model's doing (workflow/run.py).
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import from_json

from hone.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named."""

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Fit:
    """What one function takes."""

    name: str
    parameters: tuple[inspect.Parameter, ...]
    """With annotations resolved; `*args` and `**kwargs` left out."""
    schema: type[BaseModel] | None
    """Of a model that is the only parameter, or of several parameters together."""
    given: type[BaseModel] | None
    """The schema, where the author gave one: the function gets an instance of it."""

    @classmethod
    def of(cls, name: str, fn: Callable[..., Any], given: type[BaseModel] | None = None) -> "Fit":
        parameters = _parameters(name, fn)
        if given is not None:
            return cls(name, parameters, given, given)
        if len(parameters) == 1:
            annotation = parameters[0].annotation
            return cls(name, parameters, annotation if _is_model(annotation) else None, None)
        return cls(name, parameters, _schema(name, parameters) if parameters else None, None)

    def arguments(self, input: Any, *, by_name: bool = False) -> Arguments:
        """The input as arguments; `by_name`: it is a dict of them already."""
        try:
            if self.given is not None:
                return (_as_model(self.given, input),), {}
            if len(self.parameters) > 1:
                return self._call(self._several(input))
            only = next(iter(self.parameters), None)
            if only is None:
                return (), {}
            one = input[only.name] if by_name and set(input) == {only.name} else input
            return self._call({only.name: _fitted(only, one)})
        except ValidationError as error:
            error.add_note(f"function {self.name!r} takes {self._takes()}; it was given {input!r}")
            raise

    def _several(self, input: Any) -> dict[str, Any]:
        assert self.schema is not None, self
        names = {p.name for p in self.parameters}
        required = [p for p in self.parameters if p.default is p.empty]
        fields = _object(input)
        fits = fields is not None and {p.name for p in required} <= set(fields) <= names
        if not fits and len(required) <= 1:
            # Text for the one parameter that must be given, or for the first.
            only = required[0] if required else self.parameters[0]
            return {only.name: _fitted(only, input)}
        checked = self.schema.model_validate(input if fields is None else fields)
        values = (getattr(checked, field) for field in self.schema.model_fields)
        return {p.name: value for p, value in zip(self.parameters, values, strict=True)}

    def _call(self, values: dict[str, Any]) -> Arguments:
        by_place = [p.name for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
        positional = tuple(values.pop(name) for name in by_place if name in values)
        return positional, values

    def _takes(self) -> str:
        if self.given is not None:
            return self.given.__name__
        return ", ".join(str(p) for p in self.parameters)


def _parameters(name: str, fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        signature = inspect.signature(fn)
    except ValueError:  # written in C without one
        return (inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY, annotation=Any),)
    try:
        hints = get_type_hints(fn if inspect.isroutine(fn) else type(fn).__call__)
    except (NameError, TypeError, AttributeError):
        hints = {}  # annotations that name nothing here; the input is passed as it is
    found = [p for p in signature.parameters.values() if p.kind not in _MANY]
    if not found and any(p.kind in _MANY for p in signature.parameters.values()):
        return (inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY, annotation=Any),)
    return tuple(p.replace(annotation=_annotation(p, hints)) for p in found)


def _annotation(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    raw = parameter.annotation
    if raw is parameter.empty:
        return Any
    return hints.get(parameter.name, Any if isinstance(raw, str) else raw)


def _schema(name: str, parameters: tuple[inspect.Parameter, ...]) -> type[BaseModel]:
    """A model with a field per parameter, in their order."""
    fields: dict[str, Any] = {}
    for place, p in enumerate(parameters):
        default = ... if p.default is p.empty else p.default
        # pydantic keeps names with an underscore in front, and those of its own methods, to itself.
        reserved = p.name.startswith("_") or hasattr(BaseModel, p.name)
        field = f"parameter_{place}" if reserved else p.name
        fields[field] = (
            p.annotation,
            Field(default, alias=p.name, validation_alias=p.name) if reserved else default,
        )
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    try:
        return create_model(name, __config__=config, **fields)
    except PydanticUserError as error:
        raise ConfigError(
            f"function {name!r}: its parameters cannot be made a schema: {error}"
        ) from error


def _fitted(parameter: inspect.Parameter, input: Any) -> Any:
    """The input as the parameter's annotation wants it."""
    wanted = parameter.annotation
    if wanted is Any or wanted is object:
        return input
    if wanted is str:
        return input if isinstance(input, str) else _as_text(input)
    if _is_model(wanted):
        return _as_model(wanted, input)
    try:
        adapter = TypeAdapter(wanted)
    except PydanticUserError:
        return input  # a class of the user's own, about which pydantic knows nothing
    try:
        return adapter.validate_python(input)
    except ValidationError:
        if isinstance(input, str):
            read = _json(input)
            if read is not None:
                return adapter.validate_python(read)
        raise


def _as_model(wanted: type[BaseModel], input: Any) -> BaseModel:
    if isinstance(input, wanted):
        return input
    fields = _object(input)
    if fields is None:
        required = [name for name, field in wanted.model_fields.items() if field.is_required()]
        if len(required) == 1:
            return wanted.model_validate({required[0]: input}, by_name=True)
    return wanted.model_validate(input if fields is None else fields)


def _as_text(input: Any) -> str:
    if isinstance(input, BaseModel):
        return input.model_dump_json()
    if isinstance(input, dict | list | tuple):
        return json.dumps(input, ensure_ascii=False, default=str)
    return TypeAdapter(str).validate_python(input) if input is None else str(input)


def _object(input: Any) -> dict[str, Any] | None:
    """The input as an object: itself, or what it says in JSON; None if it is none."""
    if isinstance(input, BaseModel):
        return input.model_dump()
    read = _json(input) if isinstance(input, str) else input
    return dict(read) if isinstance(read, Mapping) else None


def _json(text: str) -> Any:
    """What the text says in JSON; None if it is none."""
    try:
        return from_json(text)
    except ValueError:
        return None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
