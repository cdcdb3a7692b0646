"""The NeMo Agent Toolkit's own adapter, 1.6.0, from initialize to a completed job.

In:   argv: the server's port, the base model
Out:  one JSON object on stdout's last line: what the client saw
"""
# pyright: reportMissingImports=false
# nat is installed in the environment this runs in, not in hone's.

import asyncio
import json
import sys
from typing import Any

from nat.data_models.finetuning import (
    EpisodeItem,
    FinetuneConfig,
    Trajectory,
    TrajectoryCollection,
)
from nat.plugins.openpipe.config import ARTTrainerAdapterConfig
from nat.plugins.openpipe.trainer_adapter import ARTTrainerAdapter
from openai import AsyncOpenAI

ASKED = [{"role": "user", "content": "the wind is"}]
PROMPTS = ("the weather", "take the coat")


async def main(port: str, base_model: str) -> dict[str, Any]:
    saw: dict[str, Any] = {}
    config = ARTTrainerAdapterConfig.model_validate(
        {
            "backend": {
                "ip": "127.0.0.1",
                "port": int(port),
                "name": "nat-run",
                "project": "proof",
                "base_model": base_model,
                "delete_old_checkpoints": True,
                "engine_args": {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1},
            },
            # The adapter sends 5e-05 in its place; the server is to find this one.
            "training": {"learning_rate": 1e-3, "beta": 0.01},
        }
    )
    adapter = ARTTrainerAdapter(config)
    await adapter.initialize(FinetuneConfig())
    # Where NAT's own `llms:` entry points, whatever the server says.
    client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="default")
    saw["first_step"] = await adapter.model.get_step()
    saw["before"] = await answer(client)
    saw["jobs"] = []
    for epoch in (1, 2):
        ref = await adapter.submit(await collect(client, f"epoch-{epoch}"))
        ended = await adapter.wait_until_complete(ref, poll_interval=0.2)
        saw["jobs"].append([str(ended.status), ended.message])
    saw["step"] = await adapter.model.get_step()
    saw["after"] = await answer(client)
    return saw


async def collect(client: Any, run_id: str) -> Any:
    """Two examples of four generations, as NAT's builder makes them of a workflow's calls."""

    async def one(prompt: str, index: int) -> Any:
        completion = await client.chat.completions.create(
            model="nat-run",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": prompt},
            ],
            max_tokens=8,
        )
        reply = completion.choices[0]
        return Trajectory(
            episode=[
                EpisodeItem(role="system", content="Be brief."),
                EpisodeItem(role="user", content=prompt),
                EpisodeItem(
                    role="assistant",
                    content=reply.message.content or "",
                    logprobs=reply.logprobs.model_dump(),
                ),
            ],
            reward=float(index % 2),
        )

    return TrajectoryCollection(
        trajectories=[
            list(await asyncio.gather(*(one(prompt, index) for index in range(4))))
            for prompt in PROMPTS
        ],
        run_id=run_id,
    )


async def answer(client: Any) -> dict[str, Any]:
    completion = await client.chat.completions.create(
        model="nat-run", messages=ASKED, max_tokens=8, temperature=0
    )
    content = completion.choices[0].logprobs.content
    return {"tokens": [one.token for one in content], "logprobs": [one.logprob for one in content]}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
