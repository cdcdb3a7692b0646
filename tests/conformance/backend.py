"""What every backend must do, as one suite: subclass BackendConformance and give it yours.

In:   a `backend` fixture, and a `tiny_model` its server can load
Out:  failures that name the promise broken
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.patience import PATIENCE_S

import hone
from hone import TrainableModel, Trajectory, TrajectoryGroup
from hone.backends.base import Backend
from hone.errors import ConfigError, Conflict, HoneError, Unprocessable
from hone.types import Call

NewModel = Callable[..., TrainableModel]
MESSAGES: list[Any] = [{"role": "user", "content": "Say a number."}]


def token_groups(
    count: int = 2, *, rewards: tuple[float, ...] = (1.0, 0.0), step: int = 0
) -> list[Any]:
    """Groups that carry their tokens, all different, as that step would have sampled them."""

    def call(g: int, i: int) -> Call:
        prompt = [1, 20, 30 + g]
        return Call(prompt_ids=prompt, completion_ids=[40 + i], logprobs=[-5.0], step=step)

    return [
        TrajectoryGroup(
            Trajectory(calls=[call(g, i)], reward=reward) for i, reward in enumerate(rewards)
        )
        for g in range(count)
    ]


async def chat(model: TrainableModel, step: int | None = None, **options: Any) -> Any:
    """One choice of the model, as its OpenAI client returns it."""
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step),
        messages=MESSAGES,
        **{"max_tokens": 6, "logprobs": True, **options},
    )
    return answer.choices[0]


class BackendConformance:
    """Promises of a Backend. Each test makes its own model, so the server may be shared."""

    @pytest_asyncio.fixture
    async def new_model(self, tiny_model: Path) -> AsyncIterator[NewModel]:
        """Makes models nobody has used yet; their connections are closed at the end."""
        made: list[TrainableModel] = []

        def make(base_model: Path = tiny_model, **fields: Any) -> TrainableModel:
            name = f"agent-{secrets.token_hex(4)}"
            fields = {"name": name, "project": "suite", "base_model": str(base_model), **fields}
            made.append(TrainableModel(rank=4, **fields))
            return made[-1]

        yield make
        for model in made:
            await model.close()

    def test_it_is_a_backend(self, backend: Any):
        assert isinstance(backend, Backend)

    async def test_a_model_registers_again_and_answers(self, backend: Backend, new_model: NewModel):
        model = new_model()
        for _ in range(2):
            await model.register(backend)
        assert await model.get_step() == 0
        choice = await chat(model)
        assert len(choice.token_ids) == len(choice.logprobs.content) > 0
        assert choice.policy_step == 0

    async def test_the_same_name_for_another_model_is_refused(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await backend.register(model)
        with pytest.raises(Conflict, match=model.name):
            await backend.register(model.model_copy(update={"rank": 5}))

    async def test_a_base_model_that_is_not_there_is_an_error_and_no_wait(
        self, backend: Backend, new_model: NewModel, tmp_path: Path
    ):
        model = new_model(tmp_path / "nowhere")
        with pytest.raises(HoneError, match="nowhere"):
            await asyncio.wait_for(model.register(backend), PATIENCE_S)

    async def test_every_form_of_a_trajectory_trains_the_next_step(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)

        async def by_rollout() -> Trajectory:
            async with hone.rollout(backend=backend) as rollout:
                choice = await chat(model, temperature=1.0)
            return rollout.trajectory(reward=sum(choice.token_ids) / 1000)

        async def by_choice() -> Trajectory:
            choice = await chat(model, temperature=1.0)
            reward = sum(choice.token_ids) / 1000
            return Trajectory(messages_and_choices=[*MESSAGES, choice], reward=reward)

        sampled = [TrajectoryGroup(make() for _ in range(4)) for make in (by_rollout, by_choice)]
        groups = await hone.gather_trajectory_groups(sampled, pbar_desc=None)
        before = await chat(model, temperature=0.0)
        result = await model.train([*groups, *token_groups()], learning_rate=5e-3)
        assert (result.step, await model.get_step(), result.reason) == (1, 1, None)
        assert result.metrics["learn/learning_rate"] == 5e-3
        assert result.metrics["learn/rollouts"] == 12
        after = await chat(model, temperature=0.0)
        assert after.policy_step == 1
        old = await chat(model, step=0, temperature=0.0)
        assert old.policy_step == 0
        assert old.token_ids == before.token_ids
        assert _logprobs(after) != _logprobs(before), "the served answer did not change"

    async def test_conversations_train_by_their_text(self, backend: Backend, new_model: NewModel):
        """ART's train_sft: one optimizer step per batch, one published step per call."""
        model = new_model(defaults={"beta": 0.05})  # for the other losses
        await model.register(backend)
        reply = {"role": "assistant", "content": "seven"}
        conversations = [Trajectory(messages_and_choices=[*MESSAGES, reply])] * 5
        config = hone.TrainSFTConfig(learning_rate=[1e-3, 5e-3, 3e-3], batch_size=2)
        first = await model.train_sft(conversations, config)
        assert (first.step, first.reason) == (1, None) and first.counts == {"from_text": 5}
        # batches of 2, 2 and 1; their mean rate
        assert first.metrics["learn/optimizer_steps"] == 3
        assert first.metrics["learn/learning_rate"] == pytest.approx(3e-3)
        second = await backend.train_sft(model, conversations)
        assert second.metrics["learn/loss"] < first.metrics["learn/loss"]
        assert second.metrics["learn/learning_rate"] == 5e-5

    async def test_the_better_of_two_conversations_is_preferred(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)

        def conversation(text: str, reward: float) -> Trajectory:
            reply = {"role": "assistant", "content": text}
            return Trajectory(messages_and_choices=[*MESSAGES, reply], reward=reward)

        pair = [TrajectoryGroup([conversation("no number", 0.0), conversation("seven", 1.0)])]
        first = await model.train(pair, loss="dpo", learning_rate=5e-3, plot_tensors=True)
        assert first.metrics["learn/loss"] == pytest.approx(0.6931472, abs=1e-5)
        second = await model.train(pair, loss="dpo", learning_rate=5e-3)
        assert second.metrics["learn/reward_margin"] > first.metrics["learn/reward_margin"]
        assert second.metrics["learn/reward_accuracy"] == 1 and second.step == 2

    async def test_the_model_s_defaults_count_unless_the_job_says_otherwise(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model(defaults={"learning_rate": 3e-4})
        await model.register(backend)
        config = hone.TrainConfig(learning_rate=1e-4)
        requests: list[dict[str, Any]] = [
            {},
            {"config": config},
            {"config": config, "learning_rate": 2e-4},
        ]
        used = [
            (await backend.train(model, token_groups(step=step), **keys)).metrics
            for step, keys in enumerate(requests)
        ]
        assert [metrics["learn/learning_rate"] for metrics in used] == [3e-4, 1e-4, 2e-4]

    async def test_equal_rewards_teach_nothing_and_it_says_so(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)
        result = await model.train(token_groups(rewards=(1.0, 1.0)))
        assert result.step == 0
        assert result.reason

    async def test_what_cannot_be_trained_is_refused_with_its_place(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)
        nobody = TrajectoryGroup([Trajectory(rollout="no-such-rollout", reward=r) for r in (0, 1)])
        with pytest.raises(Unprocessable) as caught:
            await model.train([*token_groups(1), nobody])
        first = caught.value.fields[0]
        assert first.path[:4] == ("groups", 1, "trajectories", 0)
        with pytest.raises(ConfigError, match="no such key"):
            await model.train(token_groups(), learning_rte=1)
        assert await model.get_step() == 0

    async def test_cancelling_leaves_the_step_and_the_next_job_runs(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)
        long = backend.train(model, token_groups(300), groups_per_optimizer_step=1)
        task = asyncio.create_task(long)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await model.get_step() == 0
        assert (await model.train(token_groups())).step == 1

    async def test_the_newest_and_the_best_step_are_kept(
        self, backend: Backend, new_model: NewModel
    ):
        model = new_model()
        await model.register(backend)
        for step, reward in enumerate((0.1, 0.9, 0.5, 0.2)):
            if step:
                groups = token_groups(step=step - 1)
                assert (await model.train(groups, learning_rate=1e-3)).step == step
            written = await model.log([Trajectory(reward=reward)], split="val")
            assert written == {"val/reward": reward, "val/exception_rate": 0.0}
        assert await model.delete_checkpoints() == [0, 2]
        assert [c.step for c in await backend.checkpoints(model)] == [1, 3]
        assert await model.delete_checkpoints("val/none") == [1], "no best by that name"
        assert (await chat(model)).policy_step == 3


def _logprobs(choice: Any) -> list[float]:
    return [token.logprob for token in choice.logprobs.content]
