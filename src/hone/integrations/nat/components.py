"""Register the component types of NeMo Agent Toolkit in hone's registry.

In:   the toolkit's entry points: nat.components, nat.plugins, nat.evaluators and two more groups
Out:  its functions, models and evaluators as components of hone

A block is checked by the toolkit's own configuration class, with one difference: an unknown key is an
error, while the toolkit drops it. If hone has a component of the same name, hone's is used.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models import component_ref
from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from hone.config import registry
from hone.config.base import (
    ComponentConfig,
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    LLMBaseConfig,
)
from hone.config.build import Builder
from hone.config.plugins import load_group
from hone.config.policy import openai_url
from hone.errors import ConfigError
from hone.integrations.nat.evaluator import ToolkitEvaluator
from hone.integrations.nat.toolkit import toolkit_of
from hone.workflow.function import FunctionInfo
from hone.workflow.llm import LLM, SECOND_LAYER, OpenAIConfig, llm_at
from hone.workflow.llm_requests import request_names

GROUPS = (
    *("nat.components", "nat.plugins", "nat.evaluators"),
    *("nat.front_ends", "nat.authentication_providers"),
)
"""Groups of entry points that register types."""


class _Checked(ComponentConfig):
    """A block that the toolkit's class validates; its keys are kept as written."""

    toolkit_type: ClassVar[type[BaseModel]]

    @model_validator(mode="before")
    @classmethod
    def _check(cls, block: Any) -> Any:
        if isinstance(block, Mapping):
            cls.toolkit_type.model_validate(block)
            unknown = [key for key in block if key not in _keys(cls.toolkit_type)]
            if unknown and cls.toolkit_type.model_config.get("extra") != "allow":
                errors = [
                    InitErrorDetails(type="extra_forbidden", loc=(key,), input=block[key])
                    for key in unknown
                ]
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return block


class ToolkitFunctionConfig(_Checked, FunctionBaseConfig):
    """A function of NeMo Agent Toolkit."""

    model_config = ConfigDict(extra="allow")


class ToolkitLLMConfig(_Checked, LLMBaseConfig):
    """A model of NeMo Agent Toolkit."""

    @model_validator(mode="before")
    @classmethod
    def _model_is_model_name(cls, block: Any) -> Any:
        if not isinstance(block, Mapping) or "model_name" in block or "model" not in block:
            return block
        return {"model_name" if key == "model" else key: value for key, value in block.items()}

    @property
    def has_openai_api(self) -> bool:
        """Only a model with a base_url: hone does not know the addresses of providers."""
        return bool(getattr(self, "base_url", None))


class ToolkitEvaluatorConfig(_Checked, EvaluatorBaseConfig):
    """An evaluator of NeMo Agent Toolkit."""

    model_config = ConfigDict(extra="allow")


async def _function(config: ToolkitFunctionConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    toolkit = await toolkit_of(builder)
    functions = builder.document.functions
    name = next((key for key, held in functions.items() if held is config), None)
    yield toolkit.workflow() if name is None else toolkit.function(name)


async def _evaluator(
    config: ToolkitEvaluatorConfig, builder: Builder
) -> AsyncIterator[ToolkitEvaluator]:
    toolkit = await toolkit_of(builder)
    evaluators = builder.document.eval.evaluators
    name = next(key for key, held in evaluators.items() if held is config)
    asks_model = any("llm" in key and value for key, value in (config.model_extra or {}).items())
    yield ToolkitEvaluator(await toolkit.evaluator(name), is_service=asks_model)


async def _llm(config: ToolkitLLMConfig, builder: Builder) -> AsyncIterator[LLM]:
    name = next(key for key, held in builder.document.llms.items() if held is config)
    if not config.has_openai_api:
        raise ConfigError(
            "has no base_url, so only functions and evaluators of NeMo Agent Toolkit "
            "can call it; for a function of hone, use _type: openai"
        )
    key = getattr(config, "api_key", None)
    llm = llm_at(_openai(config), builder, name, openai_url(config), str(key or "default"))
    yield llm
    await llm.close()


def _openai(config: ToolkitLLMConfig) -> OpenAIConfig:
    """The entry as hone's own: what both have, and parameters that OpenAI's API has a name for."""
    names = (set(OpenAIConfig.model_fields) | request_names()) - set(SECOND_LAYER)
    written = {key: held for key, held in (config.model_extra or {}).items() if key in names}
    return OpenAIConfig.model_validate(written)


_KINDS: dict[str, tuple[str, type[_Checked], Any]] = {
    "function": ("get_registered_functions", ToolkitFunctionConfig, _function),
    "llm_provider": ("get_registered_llm_providers", ToolkitLLMConfig, _llm),
    "evaluator": ("get_registered_evaluators", ToolkitEvaluatorConfig, _evaluator),
}


def register() -> tuple[str, ...]:
    """Import the toolkit's plugins and register their types; returns a message for each failure."""
    types = GlobalTypeRegistry.get()
    with types.pause_registration_changed_hooks():
        failed = [reason for group in GROUPS for reason in load_group(group)]
    for kind, (listing, base, factory) in _KINDS.items():
        for info in sorted(getattr(types, listing)(), key=lambda one: one.full_type):
            if not info.full_type.startswith("hone."):  # the bridge to hone's own functions
                registry.add_toolkit_component(_component(kind, base, factory, info))
    for reference in vars(component_ref).values():
        base = component_ref.ComponentRef
        if isinstance(reference, type) and issubclass(reference, base) and reference is not base:
            group = reference("x").component_group
            registry.TOOLKIT_REFERENCES[reference] = (str(group.value),)
    return tuple(failed)


def _component(kind: str, base: type[_Checked], factory: Any, info: Any) -> registry.Registered:
    package, _, name = info.full_type.rpartition("/")
    if registry.is_registered(kind, name):
        name = info.full_type

    class Config(base, name=name):
        toolkit_type = info.config_type

    async def build(config: Any, builder: Builder) -> AsyncIterator[Any]:
        async for instance in factory(config, builder):
            yield instance

    build.__doc__ = info.config_type.__doc__
    build.__module__ = info.config_type.__module__  # the code that the run depends on
    return registry.Registered(kind, name, Config, build, package, info.config_type)


def _keys(model: type[BaseModel]) -> set[str]:
    """The keys that a block may have: names of fields, and their other spellings."""
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        keys |= {name, *filter(None, [field.alias])}
        other = field.validation_alias
        choices = other.choices if isinstance(other, AliasChoices) else [other]
        keys |= {one for one in choices if isinstance(one, str)}
    return keys
