"""A training loop as ART's users write it, with the real openpipe-art 0.5.4.

In:   argv: the server's address, the base model
Out:  one JSON object on stdout's last line: what the client saw
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# art is installed in the environment this runs in, not in hone's, and is not the folder tests/art.

import asyncio
import json
import sys
from typing import Any

import art
import httpx

PROMPTS = ("the weather", "take the coat")
ASKED = [{"role": "user", "content": "the wind is"}]


async def main(address: str, base_model: str) -> dict[str, Any]:
    saw: dict[str, Any] = {}
    backend = art.Backend(base_url=address)
    model = art.TrainableModel(
        name="agent",
        project="proof",
        base_model=base_model,
        _internal_config={"engine_args": {"gpu_memory_utilization": 0.5}, "peft_args": {"r": 4}},
    )
    await backend.register(model)
    saw["first_step"] = await backend._get_step(model)
    saw["base_models"] = httpx.get(f"{address}/health").json()["base_models"]
    await model.register(backend)
    saw["inference"] = [
        model.inference_base_url,
        model.inference_api_key,
        model.get_inference_name(),
    ]

    before = await answer(model, "agent")
    for step in (1, 2):
        groups = await gather(model, worth=float(step - 1))
        await model.log(groups, split="val")
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
        saw[f"step_{step}"] = await model.get_step()
    saw["before"], saw["after"] = before, await answer(model, "agent")
    saw["untrained"] = await answer(model, "agent@0")

    flat = [
        art.TrajectoryGroup(
            art.Trajectory(messages_and_choices=t.messages_and_choices, reward=1.0) for t in group
        )
        for group in groups
    ]
    await model.train(flat)
    saw["step_flat"], saw["flat"] = await model.get_step(), await answer(model, "agent")

    saw["refused"] = await refusal(model, groups)
    saw["other"] = await one_more(backend, base_model, "agent", "elsewhere", train=False)
    saw["odd"] = await one_more(backend, base_model, "my agent/v2", "board games", train=True)
    await model.delete_checkpoints()
    await backend.close()
    saw["step_after_close"] = await model.get_step()
    return saw


async def one_more(
    backend: Any, base_model: str, name: str, project: str, *, train: bool
) -> list[Any]:
    """The step of another model, and what it answered before any training."""
    model = art.TrainableModel(name=name, project=project, base_model=base_model)
    await model.register(backend)
    untrained = await answer(model, name)
    if train:
        groups = await gather(model, worth=0.0)
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
    return [await model.get_step(), untrained]


async def gather(model: Any, worth: float) -> list[Any]:
    """Two groups of four, each with different rewards, `worth` + 0.5 in the mean."""

    async def rollout(prompt: str, index: int) -> Any:
        messages = [{"role": "user", "content": prompt}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8
        )
        choice = completion.choices[0]
        return art.Trajectory(
            messages_and_choices=[*messages, choice],
            reward=worth + index % 2,
            metrics={"tokens": len(choice.logprobs.content)},
        )

    return await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(prompt, index) for index in range(4)) for prompt in PROMPTS
    )


async def answer(model: Any, name: str) -> dict[str, Any]:
    """A greedy answer with its log-probabilities, which nobody asked for and ART's users get."""
    completion = await model.openai_client().chat.completions.create(
        model=name, messages=ASKED, max_tokens=8, temperature=0
    )
    content = completion.choices[0].logprobs.content
    return {"tokens": [one.token for one in content], "logprobs": [one.logprob for one in content]}


async def refusal(model: Any, groups: list[Any]) -> int:
    """The status a tampered trajectory is answered with, before any stream."""
    choice = groups[0].trajectories[0].messages_and_choices[1].model_copy(deep=True)
    choice.logprobs.content[0].logprob = 7.0
    wrong = art.Trajectory(messages_and_choices=[ASKED[0], choice], reward=1.0)
    try:
        await model.train([art.TrajectoryGroup([wrong])])
    except httpx.HTTPStatusError as error:
        return error.response.status_code  # 0.5.4 has closed the body before anyone could read it
    return 200


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
