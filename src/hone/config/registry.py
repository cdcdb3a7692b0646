"""Components that a YAML file can name: (kind, `_type`) -> configuration class and factory.

In:   `@register_function(config_type=MyConfig)` over an async generator that yields the instance
Out:  the class that schema.py validates a block with, and the factory that build.py calls

A `_type` is registered once. With two of the same name, the import order would decide which reward
a run is trained on.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hone.config import plugins
from hone.config.base import (
    ComponentConfig,
    ComponentRef,
    DatasetBaseConfig,
    EvaluatorBaseConfig,
    EvaluatorRef,
    FunctionBaseConfig,
    FunctionRef,
    LLMBaseConfig,
    LLMRef,
    LoggerBaseConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from hone.config.problems import named
from hone.errors import ConfigError, did_you_mean

__all__ = [
    "BASES",
    "KINDS",
    "ByType",
    "ComponentConfig",
    "ComponentRef",
    "DatasetBaseConfig",
    "EvaluatorBaseConfig",
    "EvaluatorRef",
    "FunctionBaseConfig",
    "FunctionRef",
    "LLMBaseConfig",
    "LLMRef",
    "LoggerBaseConfig",
    "Registered",
    "TrainerAdapterConfig",
    "TrainerConfig",
    "TrajectoryBuilderConfig",
    "find",
    "known",
    "register_dataset_loader",
    "register_evaluator",
    "register_function",
    "register_llm_provider",
    "register_logger",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
]

BASES: dict[str, type[ComponentConfig]] = {
    "function": FunctionBaseConfig,
    "llm_provider": LLMBaseConfig,
    "evaluator": EvaluatorBaseConfig,
    "dataset_loader": DatasetBaseConfig,
    "trajectory_builder": TrajectoryBuilderConfig,
    "trainer_adapter": TrainerAdapterConfig,
    "trainer": TrainerConfig,
    "logger": LoggerBaseConfig,
}
"""Each kind, and the class its configurations derive from."""

KINDS = tuple(BASES)

_CUSTOMIZER = (
    "trains with the NeMo Customizer, a hosted product that hone does not call. Train on preference "
    "pairs with a trainer of `_type: dpo` instead, a trajectory builder of `_type: rollouts` and a "
    "trainer adapter of `_type: hone_server`"
)
_TOOLKIT = (
    "belongs to NeMo Agent Toolkit, which is not installed in this environment: pip install "
    "'hone-rl[nat]'"
)
_LATER = "is not in this version of hone"

REFUSED: dict[str, dict[str, str]] = {
    "function": dict.fromkeys(
        ["react_agent", "reasoning_agent", "rewoo_agent", "router_agent", "tool_calling_agent"],
        _TOOLKIT,
    ),
    "llm_provider": dict.fromkeys(
        [
            "aws_bedrock",
            "azure_openai",
            "dynamo",
            "huggingface",
            "huggingface_inference",
            "litellm",
            "nim",
            "oci",
        ],
        _TOOLKIT,
    ),
    "evaluator": dict.fromkeys(
        [
            "langsmith",
            "langsmith_custom",
            "langsmith_judge",
            "ragas",
            "red_teaming_evaluator",
            "tunable_rag_evaluator",
        ],
        _TOOLKIT,
    ),
    "dataset_loader": {"langsmith": _LATER},
    "trajectory_builder": {"dpo_traj_builder": _CUSTOMIZER},
    "trainer_adapter": {"nemo_customizer_trainer_adapter": _CUSTOMIZER},
    "trainer": {"nemo_customizer_trainer": _CUSTOMIZER},
    "logger": {},
}
"""Types of NeMo Agent Toolkit that hone does not have, by kind, and what to do about each."""

ALIASES: dict[str, dict[str, str]] = {
    "trajectory_builder": {"openpipe_art_traj_builder": "rollouts"},
    "trainer_adapter": {"openpipe_art_trainer_adapter": "hone_server"},
    "trainer": {"openpipe_art_trainer": "rl"},
}
"""Names that NeMo Agent Toolkit's documents have for components of hone, by kind. They load for
ever."""

C = TypeVar("C", bound=ComponentConfig)
Factory = Callable[[C, Any], AsyncIterator[Any]]
"""Takes its configuration and the `config.build.Builder`."""
Decorator = Callable[[Factory[C]], Factory[C]]


@dataclass(frozen=True, slots=True)
class Registered:
    """One component that a YAML file can name."""

    kind: str
    name: str
    """The value of `_type`."""
    config_type: type[ComponentConfig]
    factory: Factory[Any]
    """Yields the instance; the code after the `yield` closes it."""
    package: str
    """The Python package that registered it."""
    toolkit_type: type[BaseModel] | None = None
    """The configuration class of NeMo Agent Toolkit, for components of that toolkit."""

    @property
    def model(self) -> type[BaseModel]:
        """The class whose fields are the keys of its block."""
        return self.toolkit_type or self.config_type

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        text = inspect.getdoc(self.factory) or self.model.__dict__.get("__doc__") or ""
        return text.strip().partition("\n")[0]


_components: dict[tuple[str, str], Registered] = {}
_toolkit: dict[tuple[str, str], Registered] = {}
"""Components of NeMo Agent Toolkit whose name hone or one of its plugins has too, by that name."""

TOOLKIT_REFERENCES: dict[type, tuple[str, ...]] = {}
"""Reference types of NeMo Agent Toolkit, such as its `LLMRef`, and the section of their keys."""

WRAPPERS: dict[str, Callable[[str, Any], Any]] = {}
"""By kind, a function that makes the component from key and instance; else it is the instance."""


def register_function(config_type: type[C], framework_wrappers: Sequence[str] = ()) -> Decorator[C]:
    """The instance is an async callable with annotations, or a `workflow.function.Function`.

    `framework_wrappers` is accepted so that functions written for NeMo Agent Toolkit load.
    """
    del framework_wrappers
    return _register("function", config_type)


def register_llm_provider(config_type: type[C]) -> Decorator[C]:
    """The instance is a `workflow.llm.LLM`."""
    return _register("llm_provider", config_type)


def register_evaluator(config_type: type[C]) -> Decorator[C]:
    """The instance is an `evaluation.base.Evaluator`, or an `EvaluatorInfo`."""
    return _register("evaluator", config_type)


def register_dataset_loader(config_type: type[C]) -> Decorator[C]:
    """The instance has `load(path) -> list[dict]`."""
    return _register("dataset_loader", config_type)


def register_trajectory_builder(config_type: type[C]) -> Decorator[C]:
    """The instance is a `finetune.base.TrajectoryBuilder`."""
    return _register("trajectory_builder", config_type)


def register_trainer_adapter(config_type: type[C]) -> Decorator[C]:
    """The instance is a `finetune.base.TrainerAdapter`."""
    return _register("trainer_adapter", config_type)


def register_trainer(config_type: type[C]) -> Decorator[C]:
    """The instance is a `finetune.base.Trainer`."""
    return _register("trainer", config_type)


def register_logger(config_type: type[C]) -> Decorator[C]:
    """The instance is a `loggers.base.Sink`; the factory gets the `loggers.base.Run`, not a Builder."""
    return _register("logger", config_type)


def _register(kind: str, config_type: type[C]) -> Decorator[C]:
    where = f"{config_type.__module__}.{config_type.__qualname__}"
    base = BASES[kind]
    if not issubclass(config_type, base):
        raise ConfigError(
            f"{where}: configures a component of kind {kind}; derive it from {base.__name__}"
        )
    if not config_type.type_name:
        raise ConfigError(
            f'{where}: has no name; write class {config_type.__name__}({base.__name__}, name="...")'
        )

    def decorate(factory: Factory[C]) -> Factory[C]:
        if not inspect.isasyncgenfunction(factory):
            raise ConfigError(
                f"{where}: its factory {getattr(factory, '__qualname__', factory)} is not an async "
                f"generator; write `async def ...(config, builder): yield instance`"
            )
        key = kind, config_type.type_name
        existing = _components.get((kind, own_name(kind, key[1])))
        if existing is not None:
            raise ConfigError(
                f"{where}: {kind} {key[1]!r} is already registered, by "
                f"{existing.config_type.__module__}.{existing.config_type.__qualname__}; rename one of them"
            )
        package = factory.__module__.partition(".")[0]
        _components[key] = Registered(kind, key[1], config_type, factory, package)
        return factory

    return decorate


def own_name(kind: str, name: str) -> str:
    """hone's name of a component, for one of ALIASES; any other name as it is."""
    return ALIASES.get(kind, {}).get(name, name)


def is_registered(kind: str, name: str) -> bool:
    """Whether a component of this name is registered."""
    return (kind, name) in _components


def add_toolkit_component(component: Registered) -> None:
    """Add a component of NeMo Agent Toolkit.

    One whose name is registered already is called `PACKAGE/NAME`.
    """
    key = component.kind, component.name.rpartition("/")[2]
    (_toolkit if key in _components else _components)[key] = component


def toolkit_component(kind: str, name: str) -> Registered | None:
    """The component of NeMo Agent Toolkit that has the same name as one of hone's own."""
    return _toolkit.get((kind, name))


def known(kind: str | None = None) -> list[Registered]:
    """The registered components, in the order of KINDS and then by name."""
    kinds = KINDS if kind is None else (kind,)
    return [r for k in kinds for r in sorted(_of(k), key=lambda r: r.name)]


def _of(kind: str) -> list[Registered]:
    return [r for r in (*_components.values(), *_toolkit.values()) if r.kind == kind]


def find(kind: str, name: str) -> Registered | None:
    """The component called `name`, or `package/name`; the toolkit is loaded only if it is needed."""
    component = _find(kind, name)
    if component is None and plugins.load_toolkit() is not None:
        component = _find(kind, name)
    return component


def _find(kind: str, name: str) -> Registered | None:
    package, slash, last = name.rpartition("/")
    last = own_name(kind, last)
    for table in (_components, _toolkit):
        component = table.get((kind, last))
        if component is not None and (component.package == package or not slash):
            return component
    return None


def unknown(kind: str, name: str) -> str:
    """The message for an unknown `_type`; it names the plugins that failed to load."""
    names = [r.name for r in known(kind)]
    maybe = did_you_mean(name, names) or did_you_mean(name, ALIASES.get(kind, {}), cutoff=0.85)
    first = f"no {kind} is called {name!r}"
    reason = REFUSED[kind].get(name)
    if reason == _TOOLKIT and plugins.is_toolkit_installed():
        reason = (
            "belongs to a part of NeMo Agent Toolkit that is not installed; install its package"
        )
    if reason is not None:
        first, maybe = f"{kind} {name!r} {reason}", ""
    failures = (*plugins.discover(), *(plugins.load_toolkit() or ()))
    failed = "".join(f" Note: {reason}." for reason in failures)
    return f"{first}.{maybe} Known: {', '.join(names) or 'none'}.{failed}"


@dataclass(frozen=True, slots=True)
class ByType:
    """Annotates a block whose configuration class is named by its `_type`."""

    kind: str
    bare: bool = False
    """A plain name is read as a block with that `_type` and no other key."""

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._write, info_arg=True
            ),
        )

    def read(self, block: Any) -> ComponentConfig:
        """The block as its configuration; pydantic reports its errors under the block's path."""
        if isinstance(block, BASES[self.kind]):
            return block
        if self.bare and isinstance(block, str):
            block = {"_type": block}
        if not isinstance(block, Mapping):
            raise PydanticCustomError(
                "block", "got {got}; expected a block with `_type`", {"got": named(block)}
            )
        key = type_key(block)
        if key is None:
            names = ", ".join(r.name for r in known(self.kind))
            raise PydanticCustomError("no_type", "`_type` is missing; known: {n}", {"n": names})
        component = find(self.kind, block[key]) if isinstance(block[key], str) else None
        if component is None:
            raise ValidationError.from_exception_data(
                self.kind,
                [
                    {
                        "type": PydanticCustomError(
                            "unknown_type", "{m}", {"m": unknown(self.kind, str(block[key]))}
                        ),
                        "loc": (key,),
                        "input": block[key],
                    }
                ],
            )
        return component.config_type.model_validate({k: v for k, v in block.items() if k != key})

    @staticmethod
    def _write(config: ComponentConfig, info: SerializationInfo) -> dict[str, Any]:
        return {"_type": config.type_name, **config.model_dump(mode=info.mode)}


def is_alias(kind: str, block: Mapping[str, Any]) -> bool:
    """Whether a block names its type by one of ALIASES."""
    key = type_key(block)
    return key is not None and str(block[key]).rpartition("/")[2] in ALIASES.get(kind, {})


def type_key(block: Mapping[str, Any]) -> str | None:
    """The key that names the type: `_type`, or `type`, which NeMo Agent Toolkit accepts too."""
    return next((key for key in ("_type", "type") if key in block), None)
