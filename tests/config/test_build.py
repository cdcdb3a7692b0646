"""build.py: components are built at first use, once, and closed in reverse order, also after a failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pydantic import Field
from tests.prose import Prose, place_of

from hone.config.build import Builder, Served, build
from hone.config.policy import Trained, address_of
from hone.config.registry import (
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    FunctionRef,
    register_evaluator,
    register_function,
)
from hone.config.schema import read
from hone.errors import ConfigError, NotInThisVersion

Write = Callable[..., Path]

happened: list[str] = []
"""What the factories of this file did, in order."""


@pytest.fixture(autouse=True)
def nothing_happened() -> None:
    happened.clear()


class Part(FunctionBaseConfig, name="test_build_part"):
    """Notes when it is made and closed."""

    label: str
    needs: list[FunctionRef] = Field(default_factory=list)
    hidden: list[str] = Field(default_factory=list)
    """Needed as well, but not visible in the configuration."""
    fails: str = ""
    """`making` or `closing`."""


@register_function(config_type=Part)
async def part(config: Part, builder: Builder) -> AsyncIterator[object]:
    needed = [await builder.get_function(name) for name in (*config.needs, *config.hidden)]
    await asyncio.sleep(0)
    if config.fails == "making":
        raise RuntimeError(f"{config.label} cannot be made")
    happened.append(f"made {config.label}")

    async def say(text: str) -> str:
        inner = [await one(text) for one in needed]
        return f"{config.label}({text}){''.join(inner)}"

    yield say
    happened.append(f"closed {config.label}")
    if config.fails == "closing":
        raise RuntimeError(f"{config.label} cannot be closed")


class Odd(FunctionBaseConfig, name="test_build_odd"):
    """A factory with a mistake in it."""

    yields: int


@register_function(config_type=Odd)
async def odd(config: Odd, builder: Builder) -> AsyncIterator[object]:
    for _ in range(config.yields):
        yield lambda text: text


class Scored(EvaluatorBaseConfig, name="test_build_scored"):
    """Not an evaluator at all; only its name counts here."""


@register_evaluator(config_type=Scored)
async def scored(config: Scored, builder: Builder) -> AsyncIterator[object]:
    yield "an evaluator"


YAML = """
functions:
  a: {_type: test_build_part, label: a, needs: [b, c]}
  b: {_type: test_build_part, label: b, needs: [c]}
  c: {_type: test_build_part, label: c}
workflow: {_type: test_build_part, label: w, needs: [a]}
eval:
  general: {max_concurrency: 3, output_dir: out}
  evaluators: {reward: {_type: test_build_scored}}
"""


async def test_dependencies_are_built_first_and_once_and_closed_in_reverse(write: Write):
    async with build(read(write(YAML))) as builder:
        assert happened == []  # nothing is made before it is asked for
        workflow = await builder.get_workflow()
        assert happened == ["made c", "made b", "made a", "made w"]
        assert workflow.name == "<workflow>"
        assert await builder.get_function("c") is await builder.get_function("c")
        # w calls a; a calls b and c; b calls c.
        assert await workflow("x") == "w(x)a(x)b(x)c(x)c(x)"
    assert happened[4:] == ["closed w", "closed a", "closed b", "closed c"]


async def test_concurrent_requests_build_a_component_once(write: Write):
    async with build(read(write(YAML))) as builder:
        functions = await asyncio.gather(*(builder.get_function(n) for n in "abcabc"))
        assert functions[0] is functions[3] and functions[2] is functions[5]
        assert sorted(happened) == ["made a", "made b", "made c"]


async def test_everything_is_closed_after_a_failure(write: Write):
    with pytest.raises(ZeroDivisionError):
        async with build(read(write(YAML))) as builder:
            await builder.get_function("b")
            raise ZeroDivisionError
    assert happened == ["made c", "made b", "closed b", "closed c"]


async def test_built_components_are_closed_when_the_next_cannot_be_built(write: Write):
    file = write(YAML.replace("label: a,", "label: a, fails: making,"))
    with pytest.raises(RuntimeError, match="a cannot be made") as error:
        async with build(read(file)) as builder:
            await builder.get_workflow()
    assert happened == ["made c", "made b", "closed b", "closed c"]
    assert error.value.__notes__[0] == "while building function 'a' (_type: test_build_part)"


async def test_a_failed_close_does_not_keep_the_others_open(
    write: Write, caplog: pytest.LogCaptureFixture
):
    file = write(YAML.replace("label: a,", "label: a, fails: closing,"))
    with pytest.raises(RuntimeError, match="a cannot be closed"):
        async with build(read(file)) as builder:
            await builder.get_workflow()
    assert happened[4:] == ["closed w", "closed a", "closed b", "closed c"]
    assert "closing function 'a' failed: RuntimeError: a cannot be closed" in caplog.text


async def test_a_failed_close_does_not_hide_an_earlier_failure(write: Write):
    file = write(YAML.replace("label: a,", "label: a, fails: closing,"))
    with pytest.raises(ZeroDivisionError):
        async with build(read(file)) as builder:
            await builder.get_workflow()
            raise ZeroDivisionError


async def test_a_circle_at_run_time_is_named(prose: Prose, write: Write):
    file = write(YAML.replace("label: c}", "label: c, hidden: [a]}"))
    with pytest.raises(ConfigError) as caught:
        async with build(read(file)) as builder:
            await builder.get_workflow()
    prose(caught)


async def test_unknown_names(prose: Prose, write: Write):
    async with build(read(write(YAML))) as builder:
        with pytest.raises(ConfigError) as error:
            await builder.get_function("aa")
        prose(error)
        for get in (
            builder.get_llm,
            builder.get_evaluator,
            builder.get_trajectory_builder,
            builder.get_trainer_adapter,
        ):
            with pytest.raises(ConfigError) as caught:
                await get("x")
            prose(caught)
        with pytest.raises(ConfigError) as caught:
            builder.get_llm_config("x")
        prose(caught)


async def test_a_component_that_cannot_be_built_names_its_place_once(prose: Prose, write: Write):
    # Lines 2 to 5 hold a, b, c and the workflow; c is what cannot be made.
    file = write(YAML.strip().replace("label: c}", "label: c, hidden: [d]}"))
    with pytest.raises(ConfigError) as error:
        async with build(read(file)) as builder:
            await builder.get_workflow()
    prose(error)
    assert place_of(error) == "a.yml:4"


async def test_there_may_be_no_workflow(prose: Prose, write: Write):
    async with build(read(write("llms: {}"))) as builder:
        with pytest.raises(ConfigError) as caught:
            await builder.get_workflow()
        prose(caught)
        assert place_of(caught).endswith("a.yml")


async def test_the_clients_of_other_frameworks_are_refused_by_name(prose: Prose, write: Write):
    async with build(read(write(YAML))) as builder:
        with pytest.raises(NotInThisVersion) as caught:
            await builder.get_llm("m", wrapper_type="langchain")
        prose(caught)


async def test_without_a_value_rollouts_follow_the_engine(write: Write):
    async with build(read(write(YAML.replace("max_concurrency: 3, ", "")))) as builder:
        # Without the training server: 8 at a time, as evaluators always.
        assert (builder.get_rollout_concurrency(), builder.get_max_concurrency()) == (8, 8)
        builder.served = Served("http://s/v1", "k", "m", concurrency=64)
        assert (builder.get_rollout_concurrency(), builder.get_max_concurrency()) == (64, 8)
        builder.served = Served("http://s/v1", "k", "m")  # a plugin's server says nothing
        assert builder.get_rollout_concurrency() == 8


async def test_programs_share_the_machine(write: Write, monkeypatch: pytest.MonkeyPatch):
    own = 'workflow: {_type: command, command: ["./agent"]}\n'
    async with build(read(write(own))) as builder:
        for cores, at_a_time in {2: 8, 16: 32, 64: 64}.items():  # 2 x 2 is below the default of 8
            monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
            builder.served = Served("http://s/v1", "k", "m", concurrency=64)
            assert builder.get_rollout_concurrency() == at_a_time


async def test_evaluators_and_their_dependencies(write: Write):
    async with build(read(write(YAML))) as builder:
        assert await builder.get_evaluator("reward") == "an evaluator"
        assert builder.get_max_concurrency() == 3
        builder.served = Served("http://s/v1", "k", "m", concurrency=64)
        assert builder.get_rollout_concurrency() == 3, "what is written is honoured"
        assert builder.get_output_dir() == Path("out")


@pytest.mark.parametrize("yields", [0, 2])
async def test_a_factory_yields_once(prose: Prose, write: Write, yields: int):
    file = write(f"workflow: {{_type: test_build_odd, yields: {yields}}}")
    with pytest.raises(ConfigError) as caught:
        async with build(read(file)) as builder:
            await builder.get_workflow()
    prose(caught)


async def test_a_model_without_an_address_needs_an_adapter(prose: Prose, write: Write):
    file = write("llms: {m: {_type: trainable}}")
    async with build(read(file)) as builder:
        with pytest.raises(ConfigError) as error:
            await builder.serve()
    prose(error)
    assert place_of(error) == "a.yml"


async def test_no_server_is_contacted_if_every_model_has_an_address(write: Write):
    async with build(read(write(YAML))) as builder:
        await builder.serve()
        assert builder.served is None


async def test_rollouts_know_the_listed_exceptions_and_in_a_training_run_the_policy(write: Write):
    file = write("""\
        llms:
          policy: {_type: trainable}
          judge: {_type: openai, model_name: critic, base_url: 'http://127.0.0.1:8000/v1', api_key: k}
        finetuning: {infrastructure_exceptions: [SearchDown]}
        """)
    url = "http://127.0.0.1:8000/v1"
    trained = Trained("agent", frozenset({"agent"}), "base", frozenset({address_of(url)}))
    async with build(read(file)) as builder:
        # `hone run` and `hone eval` without a server.
        assert builder.rollout_arguments == {"infrastructure_exceptions": ["SearchDown"]}
        # With one, which step is evaluated is their own choice: any answer counts.
        builder.served = Served(url, "k", "agent", "localhost", trained)
        arguments = builder.rollout_arguments
        assert arguments["infrastructure_exceptions"] == ["SearchDown"]
        assert arguments["host"] == "localhost" and "policy" not in arguments
        builder.choose_policy()
        policy = builder.rollout_arguments["policy"]
        assert policy.hosts == {"localhost"} and policy.others == {"critic"}
        assert "agent" in policy.names and "base" in policy.names
