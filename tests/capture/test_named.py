"""hone.function: calls carry the name of the code that makes them."""

import asyncio

import openai
import pytest
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, serving

import hone
from hone.capture.base import current
from hone.capture.scope import recorded
from hone.errors import ConfigError


async def test_calls_carry_the_path_of_the_functions_that_make_them():
    endpoint = Endpoint()
    async with serving(endpoint) as url, openai.AsyncOpenAI(base_url=url, api_key="k") as ask:

        async def call() -> None:
            await ask.chat.completions.create(model="m", messages=[{"role": "user", "content": ""}])

        @hone.function("planner")
        async def plan() -> str:
            await call()
            with hone.function("critic"):
                await call()
            return "planned"

        @hone.function("solver")
        def solve() -> str:
            with openai.OpenAI(base_url=url, api_key="k") as client:
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": ""}]
                )
            return "solved"

        rollout, recorder = recorded("r")
        with rollout, hone.function("agent"):
            assert await plan() == "planned"
            assert await asyncio.to_thread(solve) == "solved"
            await asyncio.gather(plan(), plan())
            await call()
        await plan()  # outside rollouts it does nothing
    paths = [call.function for call in recorder.calls]
    assert paths[:3] == ["agent.planner", "agent.planner.critic", "agent.solver"]
    assert sorted(paths[3:7]) == ["agent.planner"] * 2 + ["agent.planner.critic"] * 2
    assert paths[7:] == ["agent"]
    assert plan.__name__ == "plan"


async def test_one_name_may_be_open_in_several_tasks():
    named, both, left = hone.function("planner"), asyncio.Barrier(2), asyncio.Event()

    async def first() -> list[str]:
        with named:
            await both.wait()
            paths = [path()]
        left.set()
        return [*paths, path()]

    async def second() -> list[str]:
        with hone.function("critic"), named:
            await both.wait()
            await left.wait()
            with named:
                paths = [path()]
            paths.append(path())
        return [*paths, path()]

    def path() -> str:
        scope = current()
        assert scope is not None
        return scope.function

    with hone.rollout("r", function="agent"):
        assert await asyncio.gather(first(), second()) == [
            ["agent.planner", "agent"],
            ["agent.critic.planner.planner", "agent.critic.planner", "agent"],
        ]
        assert path() == "agent"


def test_generators_and_invalid_names_are_refused(prose: Prose):
    async def streaming():
        yield 1

    with pytest.raises(ConfigError) as caught:
        hone.function("x")(streaming)
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        hone.function("")
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        hone.function("my planner")
    prose(caught)
