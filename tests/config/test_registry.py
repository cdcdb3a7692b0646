"""registry.py: what may be registered, under which names, and the errors for other names."""

import re
from collections.abc import AsyncIterator

import pytest
from tests.prose import Prose

from hone.config import plugins, registry
from hone.config.build import Builder
from hone.config.registry import (
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    TrainerConfig,
    register_evaluator,
    register_function,
    register_trainer,
)
from hone.errors import ConfigError


class Doubler(FunctionBaseConfig, name="test_registry_doubler"):
    """Doubles text."""

    times: int = 2


@register_function(config_type=Doubler, framework_wrappers=["langchain"])
async def doubler(config: Doubler, builder: Builder) -> AsyncIterator[object]:
    async def double(text: str) -> str:
        return text * config.times

    yield double


def test_a_component_is_found_by_its_name_and_by_its_package():
    component = registry.find("function", "test_registry_doubler")
    assert component is not None
    assert (component.config_type, component.factory) == (Doubler, doubler)
    assert (component.kind, component.name, component.summary) == (
        "function",
        "test_registry_doubler",
        "Doubles text.",
    )
    assert registry.find("function", f"{component.package}/test_registry_doubler") is component
    assert registry.find("function", "elsewhere/test_registry_doubler") is None
    assert registry.find("evaluator", "test_registry_doubler") is None


KNOWN = re.compile(r"(?<=Known: ).*")
"""What other tests of this process registered is among them."""


def test_the_decorated_function_is_unchanged():
    assert doubler.__name__ == "doubler" and Doubler.type_name == "test_registry_doubler"


def test_a_name_is_registered_once(prose: Prose):
    class Again(FunctionBaseConfig, name="test_registry_doubler"):
        pass

    with pytest.raises(ConfigError) as error:
        register_function(Again)(doubler)  # pyright: ignore[reportArgumentType]  # any factory will do
    prose(error)


def test_a_configuration_of_another_kind_is_refused(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        register_evaluator(Doubler)
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        register_trainer(Doubler)
    prose(caught)


def test_a_configuration_without_a_name_is_refused(prose: Prose):
    class Nameless(EvaluatorBaseConfig):
        pass

    with pytest.raises(ConfigError) as caught:
        register_evaluator(Nameless)
    prose(caught)


def test_a_factory_must_yield(prose: Prose):
    class Returns(FunctionBaseConfig, name="test_registry_returns"):
        pass

    async def factory(config: Returns, builder: Builder) -> object:
        return None

    with pytest.raises(ConfigError) as caught:
        register_function(Returns)(factory)  # pyright: ignore[reportArgumentType]  # the mistake
    prose(caught)
    assert registry.find("function", "test_registry_returns") is None


def test_the_error_for_an_unknown_name_lists_the_known_ones(prose: Prose):
    message = registry.unknown("function", "test_registry_dubler")
    prose(message, known=KNOWN)
    names = message.partition("Known: ")[2]
    assert "python" in names and names.endswith(".")


def test_the_documents_names_are_those_of_hones_components():
    plugins.discover()
    names = [(kind, *pair) for kind, table in registry.ALIASES.items() for pair in table.items()]
    assert len(names) == 3
    for kind, theirs, ours in names:
        component = registry.find(kind, theirs)
        assert component is registry.find(kind, ours) is registry.find(kind, f"hone/{theirs}")
        assert component is not None and component.name == ours
        assert theirs not in {known.name for known in registry.known(kind)}
        assert registry.is_alias(kind, {"_type": theirs}) and not registry.is_alias(
            kind, {"_type": ours}
        )


def test_a_former_name_is_unknown_and_a_misspelt_one_is_guessed(prose: Prose):
    plugins.discover()
    message = registry.unknown("trajectory_builder", "dataset_traj_builder")
    prose(message, known=KNOWN)
    assert {"conversations", "rollouts"} <= set(re.findall(r"\w+", message.partition("Known: ")[2]))
    assert {"dpo", "rl", "sft"} <= set(
        re.findall(r"\w+", registry.unknown("trainer", "dpo_trainer"))
    )
    assert "Did you mean 'openpipe_art_trainer'?" in registry.unknown(
        "trainer", "openpipe_art_traner"
    )


def test_a_plugin_cannot_have_a_name_of_the_documents(prose: Prose):
    class Theirs(TrainerConfig, name="openpipe_art_trainer"):
        pass

    plugins.discover()
    with pytest.raises(ConfigError) as error:
        register_trainer(Theirs)(doubler)  # pyright: ignore[reportArgumentType]  # any factory will do
    prose(error)
