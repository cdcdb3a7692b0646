"""Engine and learner together: one sampler's tokens, one learner's gradients, no mismatch."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conformance.engine import spelled, spelling_tokenizer
from torch import Tensor

from hone.inference.base import AdapterRef, Completion, Sampling, complete
from hone.inference.embedded.engine import EmbeddedEngine
from hone.inference.grammar import Grammars
from hone.learner.learner import Learner
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

PROMPTS = [[5, 17, 300, 42, 9 + i] for i in range(4)]


async def publish(
    engine: EmbeddedEngine, learner: Learner, directory: Path, step: int
) -> AdapterRef:
    learner.save(directory)
    adapter = AdapterRef("tiny", step, learner.lora.sha256)
    await engine.publish(adapter, directory)
    return adapter


async def rollouts(
    engine: EmbeddedEngine,
    adapter: AdapterRef,
    sampling: Sampling,
    reward: Callable[[Completion], float],
) -> list[TrajectoryGroup]:
    answers = await asyncio.gather(*(complete(engine, p, sampling, adapter) for p in PROMPTS))
    return [
        TrajectoryGroup(
            trajectories=[
                Trajectory(
                    calls=[
                        Call(
                            prompt_ids=prompt,
                            completion_ids=one.ids,
                            logprobs=one.logprobs,
                            masked_logprobs=one.masked_logprobs,
                            forced=one.forced,
                            temperature=sampling.temperature,
                            step=adapter.step,
                        )
                    ],
                    reward=reward(one),
                )
                for one in completions
            ]
        )
        for prompt, completions in zip(PROMPTS, answers, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_agree(
    decoder: Decoder, make_lora: Callable[..., Lora], tmp_path: Path, temperature: float
):
    learner = Learner(decoder, make_lora(decoder), base_model="tiny")
    engine = EmbeddedEngine(decoder, kv_budget_bytes=1 << 26)
    try:
        adapter = await publish(engine, learner, tmp_path, 1)
        sampling = Sampling(n=8, max_tokens=24, temperature=temperature, seed=1)
        groups = await rollouts(engine, adapter, sampling, lambda one: float(sum(one.ids) % 7))
    finally:
        await engine.close()
    result = learner.train(groups, TrainConfig(learning_rate=0))
    # k3 is about half the squared difference: 1e-9 bounds it by 5e-5 a token.
    assert result.metrics["learn/labels_exact"] == 4 * 8 * 24
    assert result.metrics["learn/mismatch_kl"] < 1e-9
    # Had the temperature been lost on the way, the ratio would be far from one.
    wrong = [
        TrajectoryGroup(
            trajectories=[
                Trajectory(
                    calls=[c.model_copy(update={"temperature": 0.8}) for c in t.calls],
                    reward=t.reward,
                )
                for t in group.trajectories
            ]
        )
        for group in groups
    ]
    assert learner.train(wrong, TrainConfig(learning_rate=0)).metrics["learn/mismatch_kl"] > 1e-3
    # Minus infinity, as vLLM writes it: the token weighs 1 and the metric is that of the others.
    weighed = result.metrics["learn/grad_norm"]
    call = groups[0].trajectories[0].calls[0]
    assert call.logprobs is not None
    call.logprobs[3] = -9999.0
    masked = learner.train(groups, TrainConfig(learning_rate=0)).metrics
    assert (masked["learn/labels_exact"], masked["learn/labels_inexact"]) == (4 * 8 * 24 - 1, 1)
    assert masked["learn/mismatch_kl"] < 1e-9
    assert masked["learn/grad_norm"] == pytest.approx(weighed, rel=1e-4)


async def test_forced_tokens_get_no_gradient_and_narrowed_ones_their_own_logprob(
    decoder: Decoder, make_lora: Callable[..., Lora], tmp_path: Path
):
    learner = Learner(decoder, make_lora(decoder), base_model="tiny")
    grammars = Grammars(spelling_tokenizer, decoder.config.vocab)
    engine = EmbeddedEngine(decoder, kv_budget_bytes=1 << 26, grammars=grammars)
    try:
        adapter = await publish(engine, learner, tmp_path, 1)
        # Two choices among ten tokens each; three forced tokens: the first, the third, the end.
        constraint = spelled('"<30>" /<1[0-9]>/ "<50>" /<2[0-9]>/')
        sampling = Sampling(n=8, max_tokens=9, seed=1, constraint=constraint)
        groups = await rollouts(engine, adapter, sampling, lambda one: float(one.ids[1] % 3))
    finally:
        await engine.close()

    def changed(**change: Callable[[Call], object]) -> list[TrajectoryGroup]:
        copied = [group.model_copy(deep=True) for group in groups]
        for trajectory in (t for group in copied for t in group.trajectories):
            update = {key: value(trajectory.calls[0]) for key, value in change.items()}
            trajectory.calls[0] = trajectory.calls[0].model_copy(update=update)
        return copied

    def trained(groups: list[TrajectoryGroup]) -> tuple[dict[str, float], Tensor]:
        result = learner.train(groups, TrainConfig(learning_rate=0), probe=False)
        return result.metrics, torch.cat([grad.flatten() for grad in learner.optimizer.grads])

    metrics, gradient = trained(groups)
    assert metrics["learn/labels_exact"] == 4 * 8 * 2
    assert metrics["learn/mismatch_kl"] < 1e-9
    assert gradient.abs().max() > 0

    def other_logprobs(call: Call) -> list[float]:
        assert call.logprobs is not None and call.forced == [0, 2, 4]
        return [-9.0 if i in call.forced else value for i, value in enumerate(call.logprobs)]

    _, same = trained(changed(logprobs=other_logprobs))
    assert torch.equal(same, gradient)
    metrics, labelled = trained(changed(forced=lambda call: []))
    assert metrics["learn/labels_exact"] == 4 * 8 * 5
    assert not torch.allclose(labelled, gradient)
    # The masked ones are not the policy's: training with them would correct for a mismatch.
    metrics, _ = trained(changed(logprobs=lambda call: call.masked_logprobs))
    assert metrics["learn/mismatch_kl"] > 0.1


async def test_a_tiny_model_learns_through_engine_and_learner(decoder: Decoder, tmp_path: Path):
    """Reward: the share of ids below 256 among four sampled tokens (about half by chance)."""
    learner = Learner(decoder, Lora.init(decoder.config, seed=3), base_model="tiny")
    engine = EmbeddedEngine(decoder, kv_budget_bytes=1 << 26)

    def reward(one: Completion) -> float:
        return sum(i < 256 for i in one.ids) / len(one.ids)

    curve = []
    try:
        for step in range(25):
            directory = tmp_path / str(step)
            adapter = await publish(engine, learner, directory, step)
            assert Lora.load(directory, decoder.config).sha256 == adapter.sha256
            sampling = Sampling(n=16, max_tokens=4, seed=step)
            groups = await rollouts(engine, adapter, sampling, reward)
            rewards = [t.reward for group in groups for t in group.trajectories]
            curve.append(sum(rewards) / len(rewards))
            if curve[-1] >= 0.95:
                break
            metrics = learner.train(groups, TrainConfig(learning_rate=1e-2), probe=False).metrics
            assert metrics["learn/mismatch_kl"] < 1e-8  # what was sampled is what is trained
    finally:
        await engine.close()
    assert curve[0] < 0.6 and curve[-1] >= 0.95, [round(x, 2) for x in curve]


async def test_the_engine_confirms_the_learners_movement(
    decoder: Decoder, make_lora: Callable[..., Lora], tmp_path: Path
):
    """The proof of publish: engine against learner, slope one; and zero for the old adapter."""
    learner = Learner(decoder, make_lora(decoder), base_model="tiny")
    engine = EmbeddedEngine(decoder, kv_budget_bytes=1 << 26)
    try:
        old = await publish(engine, learner, tmp_path / "0", 0)
        sampling = Sampling(n=8, max_tokens=8, seed=0, temperature=0.7)
        groups = await rollouts(engine, old, sampling, lambda one: float(one.ids[0] % 2))
        movement = learner.train(groups, TrainConfig(learning_rate=1e-3)).movement
        new = await publish(engine, learner, tmp_path / "1", 1)
        before, after = [
            (await engine.probe(movement.sequences, adapter)).logprobs for adapter in (old, new)
        ]
    finally:
        await engine.close()
    assert len(movement.tokens) == 32
    theirs, ours = torch.tensor(
        [
            (after[t.sequence][t.place - 1] - before[t.sequence][t.place - 1], t.after - t.before)
            for t in movement.tokens
        ]
    ).unbind(1)
    slope = (theirs @ ours / (ours @ ours)).item()
    assert slope == pytest.approx(1.0, abs=0.01)
