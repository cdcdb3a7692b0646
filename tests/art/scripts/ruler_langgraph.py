"""A LangGraph agent whose rollouts RULER scores, in the style of ART's integration.

In:   argv: the base model, the address of a hone server, the address of a judge
Out:  one line: the step, the rewards, the roles of one trajectory, the tools it was given
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys

from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

import hone.art as art
from hone.art.langgraph import init_chat_model, wrap_rollout
from hone.art.rewards import ruler_score_group
from hone.art.serverless.backend import ServerlessBackend


@tool
def look_up(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


async def rollout(model: art.Model, question: str) -> art.Trajectory:
    agent = create_react_agent(init_chat_model(model.name, max_tokens=4), [look_up])
    request = {"messages": [("system", "Be brief."), ("user", question)]}
    await agent.ainvoke(request, config={"recursion_limit": 10})
    return art.Trajectory(reward=0, metadata={"question": question})


async def main(base_model: str, address: str, judge: str) -> None:
    model = art.TrainableModel(name="weather", project="langgraph", base_model=base_model)
    backend = ServerlessBackend(api_key="any", base_url=address)
    await model.register(backend)
    params = {"api_base": judge, "api_key": "any"}

    async def score(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
        return await ruler_score_group(group, "openai/judge", extra_litellm_params=params)

    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(wrap_rollout(model, rollout)(model, city) for _ in range(3))
            for city in ("Is it raining in Oslo?", "Is it dry in Lima?")
        ),
        after_each=score,
    )
    result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
    first = groups[0].trajectories[0]
    seen = {
        "step": result.step,
        "counts": result.counts,
        "rewards": [[one.reward for one in group] for group in groups],
        "roles": [message["role"] for message in first.messages()],
        "tools": [one["function"]["name"] for one in first.tools or ()],
    }
    print(json.dumps(seen))
    await model.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
