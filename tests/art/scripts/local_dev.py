"""A local backend with options of art.dev and captured trajectories, in the style of ART's docs.

In:   argv: the base model
Out:  a line per batch: the step, the checkpoint's directory, what the job was trained with
"""

import asyncio
import sys

import hone.art as art
from hone.art.local import LocalBackend
from hone.art.trajectories import Trajectory
from hone.art.utils import iterate_dataset, limit_concurrency

QUESTIONS = ["the weather", "take the coat", "where is the station", "is it late"]


@limit_concurrency(4)
async def answer(model: art.TrainableModel, question: str) -> None:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=[{"role": "user", "content": question}],
        max_tokens=6,
    )
    trajectory = art.auto_trajectory(required=True)
    trajectory.reward = len(completion.choices[0].message.content or "") / 10
    trajectory.log("answered")


async def judged(model: art.TrainableModel, question: str) -> None:
    art.yield_trajectory(await art.capture_auto_trajectory(answer(model, question)))


def rollout(model: art.TrainableModel, question: str) -> "asyncio.Future[Trajectory]":
    return asyncio.ensure_future(art.capture_yielded_trajectory(judged(model, question)))


async def main(base_model: str) -> None:
    model = art.TrainableModel(
        name="agent/dev 1",
        project="dev config",
        base_model=base_model,
        entity="team",
        report_metrics=[],
        base_path="./.art",
        _internal_config=art.dev.InternalModelConfig(
            init_args=art.dev.InitArgs(max_seq_length=256),
            engine_args=art.dev.EngineArgs(enforce_eager=True, max_num_seqs=8),
            peft_args=art.dev.PeftArgs(r=2, lora_alpha=4),
            trainer_args=art.dev.TrainerArgs(learning_rate=1e-3, max_grad_norm=0.1),
        ),
    )
    with LocalBackend(path="./.art") as backend:
        await model.register(
            backend,
            _openai_client_config=art.dev.OpenAIServerConfig(
                server_args=art.dev.ServerArgs(tool_call_parser="hermes")
            ),
        )
        for batch in iterate_dataset(QUESTIONS, groups_per_step=2, use_tqdm=False):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, question) for _ in range(3))
                for question in batch.items
            )
            result = await backend.train(
                model,
                groups,
                loss_fn="cispo",
                normalize_advantages=False,
                advantage_balance=0.0,
                truncated_importance_sampling=None,
                save_checkpoint=True,
            )
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
            used = (await backend.job(result.job)).config
            print(
                result.step,
                result.checkpoint_path,
                used.loss,
                used.scale_rewards,
                used.importance_cap,
            )
        await model.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
