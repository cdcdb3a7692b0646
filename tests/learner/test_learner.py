"""Jobs through the learner: what they change, what they must not, and what they report."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.prose import Prose
from torch import Tensor

from hone.errors import Cancelled, ConfigError, NonFinite
from hone.learner.forward import row_logprobs
from hone.learner.learner import JobProgress, Learner
from hone.learner.samples import by_optimizer_step, make_samples
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

MakeGroup = Callable[..., TrajectoryGroup]
MakeLora = Callable[..., Lora]


@pytest.fixture
def learner(decoder: Decoder, make_lora: MakeLora) -> Learner:
    return Learner(decoder, make_lora(decoder), base_model="tiny")


@pytest.fixture
def groups(make_group: MakeGroup) -> list[TrajectoryGroup]:
    """Three groups of four on prompts with a common head, rewards 1 0 0 0, 0 1 0 0, 0 0 1 0."""
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(512) for _ in range(n)]

    head = ids(5)
    return [
        make_group(
            head + ids(7),
            [ids(rng.randint(1, 6)) for _ in range(4)],
            [float(i == g) for i in range(4)],
        )
        for g in range(3)
    ]


def copies(learner: Learner) -> list[Tensor]:
    return list(learner.optimizer.snapshot().values())


def gradient(learner: Learner) -> Tensor:
    return torch.cat([grad.flatten() for grad in learner.optimizer.grads])


@torch.no_grad()
def logprobs(learner: Learner, groups: list[TrajectoryGroup], config: TrainConfig) -> Tensor:
    made = make_samples(groups, config, vocab=512, max_positions=512)
    (row,) = (batch := pack(made.samples, row_tokens=10**6)).rows
    values, _ = row_logprobs(learner.body, row, batch.labels, learner.lora)
    ordered = torch.empty_like(values)
    ordered[row.label] = values
    return ordered.double()


def test_a_step_moves_probability_towards_the_better_answer(learner: Learner, groups):
    config = TrainConfig(learning_rate=1e-2)
    before = logprobs(learner, groups, config)
    result = learner.train(groups, config)
    after = logprobs(learner, groups, config)
    made = make_samples(groups, config, vocab=512, max_positions=512)
    advantage = pack(made.samples, row_tokens=100).labels.advantage
    assert ((after - before) * advantage).sum() > 0
    assert result.steps == 1 and result.reason == ""
    metrics = result.metrics
    assert metrics["learn/ratio"] == 1.0 and metrics["learn/clip_frac"] == 0.0
    assert metrics["learn/labels"] == metrics["learn/labels_exact"] == len(before)
    # k3 of pi_old against the recorded -6 of every token
    difference = before + 6.0
    expected = (difference.exp() - difference - 1).mean().item()
    assert metrics["learn/mismatch_kl"] == pytest.approx(expected, rel=1e-6)
    assert 0 < metrics["learn/entropy"] < 6.3  # ln 512 = 6.24
    assert metrics["learn/computed_tokens"] < metrics["learn/logical_tokens"]
    assert {"learn/forward_s", "learn/backward_s", "learn/optimizer_s"} <= metrics.keys()
    assert result.sha256 == learner.lora.sha256


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_nothing_depends_on_packing_order_or_micro_batches(
    decoder64: Decoder, make_lora, groups, loss
):
    def run(given: list[TrajectoryGroup], row_tokens: int) -> tuple[Tensor, dict[str, float]]:
        learner = Learner(decoder64, make_lora(decoder64), base_model="tiny")
        config = TrainConfig(
            loss=loss, row_tokens=row_tokens, max_grad_norm=1e9, beta=0.1, kl_penalty_coef=0.1
        )
        metrics = learner.train(given, config).metrics
        return gradient(learner), metrics

    expected, metrics = run(groups, 10**6)
    mixed = [
        TrajectoryGroup(trajectories=group.trajectories[::-1]) for group in reversed(groups)
    ]  # fmt: skip
    for given, row_tokens in ((groups, 1), (groups, 30), (mixed, 10**6), (mixed, 25)):
        actual, other = run(given, row_tokens)
        assert ((actual - expected).norm() / expected.norm()).item() < 1e-9
        for name in ("loss", "mismatch_kl", "kl", "entropy", "ratio", "clip_frac", "grad_norm"):
            assert other[f"learn/{name}"] == pytest.approx(
                metrics[f"learn/{name}"], rel=1e-9, abs=1e-12
            )
    assert run(groups, 1)[1]["learn/micro_batches"] > metrics["learn/micro_batches"] == 1


def test_calls_of_several_adapters_share_the_trie_and_train_alike(
    decoder: Decoder, make_lora, groups
):
    def run(*steps: int) -> tuple[list[Tensor], float]:
        turn = itertools.cycle(steps)

        def sampled(t: Trajectory) -> Trajectory:
            calls = [call.model_copy(update={"step": next(turn)}) for call in t.calls]
            return Trajectory(calls=calls, reward=t.reward)

        made = [TrajectoryGroup(trajectories=[*map(sampled, g.trajectories)]) for g in groups]
        learner = Learner(decoder, make_lora(decoder), base_model="tiny")
        metrics = learner.train(made, TrainConfig(learning_rate=1e-3)).metrics
        return copies(learner), metrics["learn/computed_tokens"]

    one, computed = run(4)
    several, again = run(4, 2, 3)  # who sampled a token decides neither its place nor its weight
    assert computed == again
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def test_the_same_job_gives_the_same_bits(decoder: Decoder, make_lora, groups):
    def run() -> list[Tensor]:
        learner = Learner(decoder, make_lora(decoder), base_model="tiny")
        learner.train(groups, TrainConfig(learning_rate=1e-3, groups_per_optimizer_step=1))
        return copies(learner)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_old_is_the_policy_at_the_start_of_the_job(decoder: Decoder, make_lora, groups):
    two = groups[:2]
    config = TrainConfig(learning_rate=1e-2, groups_per_optimizer_step=1)
    whole = Learner(decoder, make_lora(decoder), base_model="tiny")
    result = whole.train(two, config)
    assert result.steps == 2
    # By hand: after one step on the first group, the second is compared with the start.
    stepped = Learner(decoder, make_lora(decoder), base_model="tiny")
    start = logprobs(stepped, two, config)
    stepped.train(two[:1], config)
    count = len(logprobs(stepped, two[:1], config))
    moved = (logprobs(stepped, two, config) - start)[count:].exp()
    assert not torch.allclose(moved, torch.ones_like(moved), atol=1e-3)
    expected = (count + moved.sum().item()) / len(start)
    assert result.metrics["learn/ratio"] == pytest.approx(expected, rel=1e-5)
    assert result.metrics["learn/clip_frac"] > 0


def test_groups_are_assigned_to_steps_in_order_and_flat_ones_do_not_count(
    learner: Learner, groups, make_group
):
    flat = make_group([1, 2], [[3], [4]], [1.0, 1.0])
    seen: list[JobProgress] = []
    config = TrainConfig(groups_per_optimizer_step=2)
    result = learner.train([groups[0], flat, *groups[1:], flat], config, on_progress=seen.append)
    assert result.steps == 2  # groups 0 and 2, then 3
    assert result.metrics["learn/flat_groups"] == 2 and result.dropped == {"flat_group": 4}
    assert seen == [
        JobProgress("old", 1, 2, 0, 1, 0, 3),  # for the first step, the pass that trains gives them
        JobProgress("train", 0, 2, 0, 1, 1, 3),
        JobProgress("train", 1, 2, 0, 1, 2, 3),
    ]
    # Both steps are scored by the reference, and the second by the old policy too.
    seen.clear()
    learner.train(
        [groups[0], *groups[1:]], config.model_copy(update={"beta": 0.1}), on_progress=seen.append
    )
    assert [(p.done, p.total) for p in seen] == [(done, 5) for done in range(5)]


@pytest.mark.parametrize(
    ("groups", "most", "sizes"),
    [(17, 8, [6, 6, 5]), (16, 8, [8, 8]), (9, 8, [5, 4]), (3, 8, [3]), (5, 1, [1] * 5), (0, 8, [])],
)
def test_groups_are_divided_evenly(make_group: MakeGroup, groups: int, most: int, sizes: list[int]):
    config = TrainConfig(groups_per_optimizer_step=most)
    made = make_samples(
        [make_group([1, 2 + g], [[3], [4]], [0.0, 1.0]) for g in range(groups)],
        config, vocab=512, max_positions=512,
    )  # fmt: skip
    dealt = [sorted({sample.group for sample in step}) for step in by_optimizer_step(made, config)]
    assert [len(step) for step in dealt] == sizes
    assert [g for step in dealt for g in step] == list(range(groups))


def test_every_group_flat_takes_no_step_and_says_why(learner: Learner, make_group: MakeGroup):
    before = copies(learner)
    result = learner.train([make_group([1, 2], [[3], [4]], [1.0, 1.0])], TrainConfig())
    assert result.steps == 0
    assert result.reason == "no gradient step: 1 of 1 groups have equal rewards"
    assert result.movement.tokens == () and "learn/loss" not in result.metrics
    assert all(torch.equal(a, b) for a, b in zip(before, copies(learner), strict=True))


def test_reference_is_the_base_model_and_only_when_asked(decoder: Decoder, make_lora, groups):
    def metrics(**config) -> dict[str, float]:
        learner = Learner(decoder, make_lora(decoder), base_model="tiny")
        return learner.train(groups, TrainConfig(**config)).metrics

    assert "learn/kl" not in metrics() and "learn/reference_s" not in metrics()
    with_beta = metrics(beta=0.5)
    # A fresh adapter is the base model: its log-probabilities are the reference's.
    base = Learner(decoder, Lora.init(decoder.config), base_model="tiny")
    moved = Learner(decoder, make_lora(decoder), base_model="tiny")
    difference = logprobs(base, groups, TrainConfig()) - logprobs(moved, groups, TrainConfig())
    expected = (difference.exp() - difference - 1).mean().item()
    assert with_beta["learn/kl"] == pytest.approx(expected, rel=1e-4)
    assert with_beta["learn/grad_norm"] != pytest.approx(metrics()["learn/grad_norm"], rel=1e-3)
    assert metrics(kl_penalty_coef=0.5)["learn/grad_norm"] != pytest.approx(
        metrics()["learn/grad_norm"], rel=1e-3
    )


def test_unknown_and_inexact_logprobs_are_counted_and_weigh_one(decoder, make_lora, groups):
    def run(**change: object) -> dict[str, float]:
        changed = [
            TrajectoryGroup(
                trajectories=[
                    Trajectory(
                        calls=[Call(**{**c.model_dump(), **change}) for c in t.calls],
                        reward=t.reward,
                    )
                    for t in group.trajectories
                ]
            )
            for group in groups
        ]
        learner = Learner(decoder, make_lora(decoder), base_model="tiny")
        return learner.train(changed, TrainConfig()).metrics

    unknown, inexact = run(logprobs=None), run(exact=False)
    labels = unknown["learn/labels"]
    assert unknown["learn/labels_without_logprob"] == inexact["learn/labels_inexact"] == labels
    assert "learn/mismatch_kl" not in unknown and "learn/mismatch_kl" not in inexact
    assert unknown["learn/grad_norm"] == inexact["learn/grad_norm"] != run()["learn/grad_norm"]


def test_gradients_are_clipped_by_the_global_norm(learner: Learner, groups):
    result = learner.train(groups, TrainConfig(max_grad_norm=1e-3))
    assert result.metrics["learn/grad_norm"] > 1e-3
    assert gradient(learner).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("loss", ["cispo", "grpo"])
def test_a_non_finite_job_changes_nothing(
    prose: Prose, learner: Learner, groups, make_group, loss: str
):
    huge = make_group([1, 2, 3], [[4, 5], [6, 7]], [1.7e308, 0.0])
    learner.train(groups, TrainConfig(learning_rate=1e-2))  # so that there are moments to lose
    before = copies(learner)
    config = TrainConfig(
        loss=loss, learning_rate=1e-2,  # pyright: ignore[reportArgumentType]
        scale_rewards=False, groups_per_optimizer_step=1, importance_cap=None
    )  # fmt: skip
    with pytest.raises(NonFinite) as caught:
        learner.train([*groups[:2], huge], config)
    prose(caught)
    with pytest.raises(NonFinite) as caught:
        learner.train(groups[:1], TrainConfig(learning_rate=1e39))
    prose(caught)
    assert all(torch.equal(a, b) for a, b in zip(before, copies(learner), strict=True))


def test_cancelling_takes_effect_before_the_next_row_and_changes_nothing(
    prose: Prose, learner: Learner, groups
):
    before = copies(learner)
    seen: list[JobProgress] = []
    with pytest.raises(Cancelled) as caught:
        learner.train(
            groups,
            TrainConfig(learning_rate=1e-2, groups_per_optimizer_step=1),
            on_progress=seen.append,
            should_stop=lambda: bool(seen) and (seen[-1].phase, seen[-1].step) == ("train", 0),
        )
    prose(caught)
    assert all(torch.equal(a, b) for a, b in zip(before, copies(learner), strict=True))


def test_save_load_save_is_byte_equal_and_training_goes_on_bit_for_bit(
    decoder: Decoder, make_lora, groups, tmp_path: Path
):
    config = TrainConfig(learning_rate=1e-2)
    straight = Learner(decoder, make_lora(decoder), base_model="tiny")
    straight.train(groups, config)
    straight.save(tmp_path / "one")
    resumed = Learner(decoder, Lora.init(decoder.config), base_model="tiny")
    resumed.load(tmp_path / "one")
    resumed.save(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    straight.train(groups, config)
    resumed.train(groups, config)
    assert all(torch.equal(a, b) for a, b in zip(copies(straight), copies(resumed), strict=True))


def test_an_adapter_without_its_optimizer_is_no_continuation(
    prose: Prose, learner: Learner, tmp_path: Path
):
    learner.lora.save(tmp_path, base_model="tiny")
    with pytest.raises(ConfigError) as caught:
        learner.load(tmp_path)
    prose(caught)
    learner.load(tmp_path, optimizer=False)


def test_peft_loads_the_adapter_and_gives_the_same_logits(
    learner: Learner, groups, tiny_llama_dir: Path, tmp_path: Path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner.train(groups, TrainConfig(learning_rate=1e-2))
    learner.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    ids = torch.arange(40).mul(7).remainder(512)
    with torch.no_grad():
        plain = base(ids[None]).logits[0].log_softmax(-1)
        model = PeftModel.from_pretrained(base, tmp_path)
        theirs = model(ids[None]).logits[0].log_softmax(-1)
    call = Call(prompt_ids=ids[:1].tolist(), completion_ids=ids[1:].tolist())
    other = Call(prompt_ids=[1], completion_ids=[2])
    group = TrajectoryGroup(
        trajectories=[Trajectory(calls=[call], reward=1), Trajectory(calls=[other], reward=0)]
    )
    ours = logprobs(learner, [group], TrainConfig())[: len(ids) - 1]
    picked = theirs[torch.arange(len(ids) - 1), ids[1:]].double()
    torch.testing.assert_close(ours, picked, rtol=1e-4, atol=1e-4)
    assert (theirs - plain).abs().max() > 0.1  # the adapter does something


def test_movement_tells_the_new_adapter_from_the_old(learner: Learner, groups):
    config = TrainConfig(learning_rate=1e-2)
    start = learner.lora
    frozen = Lora(
        start.config,
        {
            key: (a.detach().clone(), tuple(p.detach().clone() for p in b))
            for key in start.config.adapted
            for a, b in [start.factors(key)]
        },
        rank=start.rank,
        alpha=start.alpha,
    )
    movement = learner.train(groups, config).movement
    moves = [abs(token.after - token.before) for token in movement.tokens]
    assert max(moves) > 1e-3
    places = {(token.sequence, token.place) for token in movement.tokens}
    others = {(token.sequence, token.place) for token in movement.others}
    assert others and not places & others
    assert any(place < 4 for _, place in others), "prompts are looked at too"
    for token in movement.tokens[:5] + movement.others[:5]:
        ids = list(movement.sequences[token.sequence])
        prompt, target = ids[: token.place], ids[token.place]
        call = Call(prompt_ids=prompt, completion_ids=[target])
        other = Call(prompt_ids=[511], completion_ids=[2])
        group = TrajectoryGroup(
            trajectories=[Trajectory(calls=[call], reward=1), Trajectory(calls=[other], reward=0)]
        )
        old = Learner(learner.body, frozen, base_model="tiny")
        assert logprobs(old, [group], config)[0].item() == pytest.approx(token.before, abs=1e-4)
        assert logprobs(learner, [group], config)[0].item() == pytest.approx(token.after, abs=1e-4)
    assert learner.train(groups, config, probe=False).movement.tokens == ()


def test_a_tiny_model_learns(decoder: Decoder):
    """Sampling by hand, one token a rollout: the reward is an even id below 256."""
    learner = Learner(decoder, Lora.init(decoder.config), base_model="tiny")
    generator = torch.Generator().manual_seed(0)
    prompt = [5, 17, 300, 42]
    config = TrainConfig(learning_rate=1e-2)
    everything = TrajectoryGroup(
        trajectories=[
            Trajectory(calls=[Call(prompt_ids=prompt, completion_ids=[i])], reward=float(i == 0))
            for i in range(512)
        ]
    )

    def rewards() -> tuple[TrajectoryGroup, float]:
        probs = logprobs(learner, [everything], config).exp()
        ids = torch.multinomial(probs, 32, replacement=True, generator=generator).tolist()
        scored = [(i, float(i < 256 and i % 2 == 0)) for i in ids]
        calls = [
            (Call(prompt_ids=prompt, completion_ids=[i], logprobs=[probs[i].log().item()]), reward)
            for i, reward in scored
        ]
        group = TrajectoryGroup(
            trajectories=[Trajectory(calls=[call], reward=reward) for call, reward in calls]
        )
        return group, sum(reward for _, reward in scored) / len(scored)

    curve = []
    for _ in range(15):
        group, mean = rewards()
        curve.append(mean)
        learner.train([group], config, probe=False)
    assert curve[0] < 0.6 and sum(curve[-3:]) / 3 > 0.9, curve


@pytest.mark.parametrize("groups_per_step", [3, 1])
def test_logprobs_of_labels_are_those_before_the_job(
    learner: Learner, groups: list[TrajectoryGroup], groups_per_step: int
):
    config = TrainConfig(
        learning_rate=0.1, groups_per_optimizer_step=groups_per_step, row_tokens=20
    )
    expected = logprobs(learner, groups, config)
    assert learner.train(groups, TrainConfig(learning_rate=0.0)).logprobs is None
    values = learner.train(groups, config, label_logprobs=True).logprobs
    assert values == pytest.approx(expected.tolist(), abs=1e-5)
    moved = logprobs(learner, groups, config) - expected
    assert moved.abs().max() > 0.01
