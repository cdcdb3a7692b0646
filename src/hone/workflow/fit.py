"""Convert one input to the arguments of a function, according to its annotations.

In:   a function's signature; an input: text, JSON text, a dict, a model, anything
Out:  the arguments to call it with; the schema of what it takes

Datasets contain text and rows, tool calls JSON text, agents objects: the annotations decide which
of these the function gets. An input that does not fit raises pydantic's ValidationError, which
counts as a failure of the policy if the model has answered before (workflow/failure.py).
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
"""Positional and keyword arguments."""

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ANY = inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY, annotation=Any)


@dataclass(frozen=True, slots=True)
class Fit:
    """What one function takes."""

    name: str
    parameters: tuple[inspect.Parameter, ...]
    """With annotations resolved; without `*args` and `**kwargs`."""
    schema: type[BaseModel] | None
    """The model that is the only parameter, or a model of several parameters; otherwise None."""
    declared: type[BaseModel] | None
    """The schema that the author declared: the function gets an instance of it."""

    @classmethod
    def of(
        cls, name: str, fn: Callable[..., Any], declared: type[BaseModel] | None = None
    ) -> "Fit":
        parameters = _parameters(fn)
        if declared is not None:
            return cls(name, parameters, declared, declared)
        if len(parameters) == 1:
            annotation = parameters[0].annotation
            return cls(name, parameters, annotation if _is_model(annotation) else None, None)
        return cls(name, parameters, _schema(name, parameters) if parameters else None, None)

    def arguments(self, input: Any, *, by_name: bool = False) -> Arguments:
        """The input as arguments; with `by_name` it is a dict of them already."""
        try:
            if self.declared is not None:
                return (_as_model(self.declared, input),), {}
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
            # The input is the value of the one parameter without a default, or of the first one.
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
        if self.declared is not None:
            return self.declared.__name__
        return ", ".join(str(p) for p in self.parameters)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Its signature with resolved annotations; an annotation that names nothing becomes Any."""
    try:
        return inspect.signature(fn, eval_str=True)
    except (NameError, TypeError, AttributeError):
        written = inspect.signature(fn)
    parameters = [
        p.replace(annotation=Any) if isinstance(p.annotation, str) else p
        for p in written.parameters.values()
    ]
    return written.replace(parameters=parameters)


def _parameters(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        every = signature_of(fn).parameters.values()
    except ValueError:  # a function written in C, without a signature
        return (_ANY,)
    named = [p for p in every if p.kind not in _MANY]
    if not named and every:
        return (_ANY,)
    return tuple(p.replace(annotation=Any) if p.annotation is p.empty else p for p in named)


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
    """The input, converted to the parameter's annotation."""
    wanted = parameter.annotation
    if wanted is Any or wanted is object:
        return input
    if wanted is str:
        return input if isinstance(input, str) else as_text(input)
    if _is_model(wanted):
        return _as_model(wanted, input)
    try:
        adapter = TypeAdapter(wanted)
    except PydanticUserError:
        return input  # a user's class that pydantic has no schema for
    try:
        return adapter.validate_python(input)
    except ValidationError:
        value = _json(input) if isinstance(input, str) else None
        if value is None:
            raise
        return adapter.validate_python(value)


def _as_model(wanted: type[BaseModel], input: Any) -> BaseModel:
    if isinstance(input, wanted):
        return input
    fields = _object(input)
    if fields is None:
        required = [name for name, field in wanted.model_fields.items() if field.is_required()]
        if len(required) == 1:
            return wanted.model_validate({required[0]: input}, by_name=True)
    return wanted.model_validate(input if fields is None else fields)


def as_text(input: Any) -> str:
    """The input as text: JSON of a model, a dict or a list, otherwise str(); None is refused."""
    if isinstance(input, BaseModel):
        return input.model_dump_json()
    if isinstance(input, dict | list | tuple):
        return json.dumps(input, ensure_ascii=False, default=str)
    return TypeAdapter(str).validate_python(input) if input is None else str(input)


def _object(input: Any) -> dict[str, Any] | None:
    """The input as a dict of fields, read from JSON if it is text; None if it is no object."""
    if isinstance(input, BaseModel):
        return input.model_dump()
    value = _json(input) if isinstance(input, str) else input
    return dict(value) if isinstance(value, Mapping) else None


def _json(text: str) -> Any:
    """The value of JSON text; None if the text is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        return None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
