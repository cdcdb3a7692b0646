"""ART's loop with the real openpipe-art 0.5.17 or 0.5.18 and hone as its backend.

In:   argv: the server's address, the base model
Out:  one JSON object on stdout's last line: what the client saw
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# art is installed in the environment this runs in, not in hone's, and is not the folder tests/art.

import asyncio
import importlib.metadata
import json
import sys
import warnings
from typing import Any

import art
import litellm

from hone.art import ArtBackend
from hone.art.utils.litellm import convert_litellm_choice_to_openai

PROMPTS = ("the weather", "take the coat")
ASKED = [{"role": "user", "content": "the wind is"}]


async def main(address: str, base_model: str) -> dict[str, Any]:
    version = importlib.metadata.version("openpipe-art")
    saw: dict[str, Any] = {"version": version}
    backend: Any = ArtBackend(address)
    model = art.TrainableModel(
        name="my agent/v2",
        project=f"new art {version}",
        base_model=base_model,
        _internal_config={"peft_args": {"r": 4}, "trainer_args": {"learning_rate": 1e-3}},
    )
    await model.register(backend)
    saw["first_step"] = await model.get_step()
    saw["name"] = model.get_inference_name()
    before = await answer(model)
    for step in (1, 2):
        groups = await gather(model)
        result = await backend.train(model, groups, loss_fn="ppo", normalize_advantages=True)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        await model.log(split="val", step=result.step, metrics={"reward": -float(step)})
        saw[f"step_{step}"] = [result.step, await model.get_step()]
        saw["counts"] = result.counts
    if hasattr(model, "train"):  # removed in 0.5.18
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await model.train(await gather(model), config=art.TrainConfig(learning_rate=1e-3))
        saw["trained_by_model"] = await model.get_step()
    saw["before"], saw["after"] = before, await answer(model)
    saw["untrained"] = await answer(model, step=0)
    flat = [
        art.TrajectoryGroup(
            [art.Trajectory(messages_and_choices=t.messages_and_choices, reward=1.0) for t in group]
        )
        for group in groups
    ]
    newest = await model.get_step()
    saw["flat"] = (await backend.train(model, flat)).step - newest
    await model.delete_checkpoints()
    saw["kept"] = [one.step for one in await backend.checkpoints(model)]
    try:
        await backend.train(model, groups, adam_params={"beta1": 0.5})
    except ValueError as refused:
        saw["refused"] = str(refused)
    saw["litellm"] = await answer_by_litellm(model)
    await backend.close()
    return saw


async def answer_by_litellm(model: Any) -> list[bool]:
    """Whether a choice of LiteLLM keeps its log-probabilities and the id of its recorded call."""
    params = model.litellm_completion_params()
    completion = await litellm.acompletion(**params, messages=ASKED, max_tokens=4)
    choice: Any = convert_litellm_choice_to_openai(completion.choices[0])
    return [bool(choice.logprobs.content), bool(choice.call_id)]


async def gather(model: Any) -> list[Any]:
    async def rollout(prompt: str, index: int) -> Any:
        messages = [{"role": "user", "content": prompt}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8
        )
        choice = completion.choices[0]
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=float(index % 2))

    return await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(prompt, index) for index in range(4)) for prompt in PROMPTS
    )


async def answer(model: Any, step: int | None = None) -> dict[str, Any]:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=ASKED, max_tokens=8, temperature=0
    )
    content = completion.choices[0].logprobs.content
    return {"tokens": [one.token for one in content], "logprobs": [one.logprob for one in content]}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
