"""DPO and SFT by hand, beside TRL's own code, and beside plain autograd on unshared sequences."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.learner.learner import Learner
from hone.learner.loss import RowLabels, row_loss
from hone.learner.preference import preference, step_pairs
from hone.learner.samples import make_samples
from hone.models.decoder import Decoder
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

DPO, SFT = TrainConfig(loss="dpo"), TrainConfig(loss="sft")
BESIDE: dict[str, Any] = {"learning_rate": 0, "max_grad_norm": 1e9, "row_tokens": 12}
"""Changes nothing, clips nothing, and packs into several rows."""


def group(*answers: tuple[list[int], float], prompt: tuple[int, ...] = (5, 17, 300)):
    return TrajectoryGroup(
        [
            Trajectory(calls=[Call(prompt_ids=list(prompt), completion_ids=ids)], reward=reward)
            for ids, reward in answers
        ]
    )


GROUPS = [
    group(([7, 8, 9], 0.2), ([7, 8, 40, 41], 1.0), ([60], 0.0), ([7, 2], 0.5)),
    group(([90, 91], 0.0), ([92, 93, 94], 2.0), ([95], 1.0), prompt=(5, 17, 44, 45)),
    TrajectoryGroup(  # a conversation of two turns against one of one turn, in another order
        [
            Trajectory(calls=[Call(prompt_ids=[5, 17, 50], completion_ids=[51, 52])], reward=0),
            Trajectory(
                calls=[
                    Call(prompt_ids=[5, 17, 50], completion_ids=[51, 53]),
                    Call(prompt_ids=[5, 17, 50, 51, 53, 6], completion_ids=[54, 55]),
                ],
                reward=1,
            ),
        ]
    ),
]


def samples(groups: list[TrajectoryGroup], config: TrainConfig):
    return make_samples(groups, config, vocab=512, max_positions=512)


def pairs(rewards: list[float], config: TrainConfig) -> list[list[int]]:
    made = samples([group(*(([9, i], r) for i, r in enumerate(rewards)))], config)
    trajectories = [sample.trajectory for sample in made.samples]
    return [[trajectories[i] for i in pair] for pair in step_pairs(made.samples).tolist()]


def test_best_and_worst_are_a_pair_or_every_two_with_unequal_rewards():
    assert pairs([0.2, 1.0, 0.0, 0.5], DPO) == [[1, 2]]
    assert pairs([0.0, 1.0, 0.0, 1.0], DPO) == [[1, 0]]  # the first of equal ones
    every = pairs([0.0, 1.0, 0.5, 0.5], TrainConfig(loss="dpo", dpo_pairs="all"))
    assert sorted(every) == [[1, 0], [1, 2], [1, 3], [2, 0], [3, 0]]


def test_what_is_in_no_pair_is_dropped_and_counted():
    made = samples([GROUPS[0], group(([1], 1.0), ([2], 1.0))], DPO)
    assert [(s.group, s.trajectory) for s in made.samples] == [(0, 1), (0, 2)]
    # [7, 8, 9] and [7, 2] of the first group; both answers of the second
    assert made.dropped == {"not_in_pair": 5, "flat_group": 2} and made.flat_groups == 1
    # an answer without tokens can be in no pair, and its rival is in none then
    assert not samples([group(([1], 1.0), ([], 0.0))], DPO).samples


def test_dpo_by_hand():
    # Sequences 0 and 1 with labels [0, 0, 1]; log-ratios 2 - 0.5 = 1.5 and -0.5; beta 0.2:
    # implicit rewards 0.3 and -0.1, margin 0.4, loss ln(1 + e^-0.4) = 0.5130153,
    # slope beta x sigmoid(-0.4) = 0.2 x 0.4013123 = 0.0802625
    policy = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    reference = torch.tensor([-3.0, -1.5, -2.5], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1])
    config = TrainConfig(loss="dpo", dpo_beta=0.2)
    result = preference(policy, reference, sequence, torch.tensor([[0, 1]]), config)
    assert result.loss == pytest.approx(0.5130153)
    assert result.advantage.tolist() == pytest.approx([0.0802625, 0.0802625, -0.0802625])
    assert result.sums == pytest.approx(
        {"chosen_reward": 0.3, "rejected_reward": -0.1, "reward_margin": 0.4, "reward_accuracy": 1}
    )


def test_sft_trains_every_trajectory_whatever_reward_and_temperature(decoder: Decoder, make_lora):
    greedy = [Call(prompt_ids=[5], completion_ids=[6, 7], temperature=0, logprobs=[-1.0, -1.0])]
    given = [TrajectoryGroup([Trajectory(calls=greedy)]), group(([8], 1.0), ([9], 1.0))]
    learner = Learner(decoder, make_lora(decoder), base_model="tiny")
    metrics = learner.train(given, SFT).metrics
    assert metrics["learn/labels"] == metrics["learn/labels_without_logprob"] == 4
    assert metrics["learn/rollouts"] == 3 and "learn/ratio" not in metrics


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "dpo", "beta": 0.1}, "Set dpo_beta"),
        ({"loss": "sft", "credit": "per_call"}, "credit is 'per_call', which has no effect"),
        ({"dpo_beta": 0.2}, "dpo_beta is 0.2, which has no effect on loss 'grpo'"),
        ({"dr_grpo_tokens": 9}, "dr_grpo_tokens is 9, which has no effect on loss 'grpo'"),
        ({"loss": "dapo", "unit": "call"}, "unit is 'call', which has no effect on loss 'dapo'"),
        ({"loss": "cispo", "unit": "call"}, "unit is 'call', which has no effect on loss 'cispo'"),
        ({"epsilon_high": -0.5}, "epsilon_high\n.*greater than or equal to 0"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**keys)


# ---- against plain autograd on unshared sequences -------------------------------------------------


def unshared(model: Any, groups: list[TrajectoryGroup]) -> list[Tensor]:
    """The summed log-probability of each sample's completions, each call in a pass of its own."""

    def score(call: Call) -> Tensor:
        ids, start = torch.tensor(call.prompt_ids + call.completion_ids), len(call.prompt_ids)
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        return logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum()

    return [
        torch.stack([score(c) for c in trajectory.calls]).sum()
        for group in groups
        for trajectory in group
    ]


def dpo_loss(model: Any, groups: list[TrajectoryGroup], config: TrainConfig) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        base = unshared(model, groups)
    policy = unshared(model, groups)
    reference = base if config.dpo_reference == "base" else [s.detach() for s in policy]
    rewards = [trajectory.reward for one in groups for trajectory in one]
    group_of = [g for g, one in enumerate(groups) for _ in one]
    every = [
        (i, j)
        for i in range(len(rewards))
        for j in range(len(rewards))
        if group_of[i] == group_of[j] and rewards[i] > rewards[j]
    ]
    if config.dpo_pairs == "best_worst":
        every = [
            max(p, key=lambda ij: rewards[ij[0]] - rewards[ij[1]])
            for p in _by_group(every, group_of)
        ]
    margins = [(policy[i] - reference[i]) - (policy[j] - reference[j]) for i, j in every]
    return -logsigmoid(config.dpo_beta * torch.stack(margins)).mean()


def _by_group(every: list[tuple[int, int]], group_of: list[int]) -> list[list[tuple[int, int]]]:
    return [[p for p in every if group_of[p[0]] == g] for g in dict.fromkeys(group_of)]


def sft_loss(model: Any, groups: list[TrajectoryGroup], config: TrainConfig) -> Tensor:
    calls = [c for one in groups for trajectory in one for c in trajectory.calls]
    return -torch.stack(unshared(model, groups)).sum() / sum(len(c.completion_ids) for c in calls)


def peft_gradients(
    directory: Path, base: Path, dtype: torch.dtype, loss: Any
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient by the adapter in `directory`, by PEFT and autograd."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # In bfloat16 first: the weights that the learner computes with, in exact arithmetic.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).double()
    model = PeftModel.from_pretrained(plain, directory, is_trainable=True).double()
    value = loss(model)
    value.backward()
    names = {n.replace(".default", ""): p for n, p in model.named_parameters()}
    return value.item(), {n: p.grad for n, p in names.items() if p.grad is not None}


def learner_gradients(learner: Learner, directory: Path) -> dict[str, Tensor]:
    """The gradients of a job that changed nothing, under PEFT's names."""
    with torch.no_grad():
        for _, leaf in learner.optimizer.parameters:
            assert leaf.grad is not None
            leaf.copy_(leaf.grad)
    learner.lora.save(directory, base_model="tiny")
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize(
    ("config", "loss"),
    [
        (TrainConfig(loss="dpo", dpo_beta=0.5, **BESIDE), dpo_loss),
        (TrainConfig(loss="dpo", dpo_pairs="all", **BESIDE), dpo_loss),
        (TrainConfig(loss="dpo", dpo_reference="job", **BESIDE), dpo_loss),
        (TrainConfig(loss="sft", **BESIDE), sft_loss),
    ],
    ids=["dpo", "dpo-all-pairs", "dpo-from-the-job", "sft"],
)
def test_gradients_are_those_of_unshared_autograd(
    config: TrainConfig, loss: Any, dtype: torch.dtype, close: float,
    tiny_llama_dir: Path, make_lora: Any, tmp_path: Path,
):  # fmt: skip
    decoder = Decoder.load(tiny_llama_dir, dtype=dtype)
    lora = make_lora(Decoder.load(tiny_llama_dir), size=0.3)
    learner = Learner(decoder, lora, base_model="tiny")
    learner.save(tmp_path)
    expected, theirs = peft_gradients(
        tmp_path, tiny_llama_dir, dtype, lambda model: loss(model, GROUPS, config)
    )
    result = learner.train(GROUPS, config)
    assert result.metrics["learn/micro_batches"] > 1  # and still shared
    assert result.metrics["learn/shared_tokens"] > 0
    assert result.metrics["learn/loss"] == pytest.approx(expected, rel=close)
    ours = learner_gradients(learner, tmp_path)
    assert ours.keys() == theirs.keys()
    both = [torch.cat([g[n].double().flatten() for n in sorted(theirs)]) for g in (ours, theirs)]
    assert ((both[0] - both[1]).norm() / both[1].norm()).item() < close
    # what the gradient norm says is what was compared
    assert result.metrics["learn/grad_norm"] == pytest.approx(both[1].norm().item(), rel=close)


@pytest.mark.parametrize("loss", ["dpo", "sft"])
def test_nothing_depends_on_packing_order_or_micro_batches(
    decoder64: Decoder, make_lora: Any, loss: Any
):
    def run(given: list[TrajectoryGroup], row_tokens: int) -> tuple[Tensor, dict[str, float]]:
        learner = Learner(decoder64, make_lora(decoder64), base_model="tiny")
        config = TrainConfig(loss=loss, row_tokens=row_tokens, max_grad_norm=1e9)
        metrics = learner.train(given, config).metrics
        return torch.cat([grad.flatten() for grad in learner.optimizer.grads]), metrics

    expected, metrics = run(GROUPS, 10**6)
    mixed = [TrajectoryGroup(one.trajectories[::-1]) for one in reversed(GROUPS)]
    for given, row_tokens in ((GROUPS, 1), (mixed, 10**6), (mixed, 10)):
        actual, other = run(given, row_tokens)
        assert ((actual - expected).norm() / expected.norm()).item() < 1e-9
        assert other["learn/loss"] == pytest.approx(metrics["learn/loss"], rel=1e-9)


def test_every_optimizer_step_uses_the_policy_that_the_one_before_left(
    decoder: Decoder, make_lora: Any
):
    """Two steps over the same pair: the second sees the margin that the first made."""

    def run(*given: TrajectoryGroup) -> tuple[dict[str, float], list[Tensor]]:
        learner = Learner(decoder, make_lora(decoder, size=0.0), base_model="tiny")
        config = TrainConfig(loss="dpo", learning_rate=1e-2, groups_per_optimizer_step=1)
        metrics = learner.train(list(given), config).metrics
        return metrics, list(learner.optimizer.snapshot().values())

    one, _ = run(GROUPS[0])
    # an adapter that changes nothing yet: margin 0, loss ln 2
    assert one["learn/loss"] == pytest.approx(0.6931472) and one["learn/reward_margin"] == 0
    two, state = run(GROUPS[0], GROUPS[0])
    assert two["learn/optimizer_steps"] == two["learn/pairs"] == 2
    assert two["learn/loss"] < 0.69 and two["learn/reward_margin"] > 0.01
    assert two["learn/reward_accuracy"] == 0.5  # of no margin at first, of a positive one then
    assert two["learn/chosen_reward"] > two["learn/rejected_reward"]
    again = run(GROUPS[0], GROUPS[0])[1]
    assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True))


def test_learning_rates_are_of_the_optimizer_steps(decoder: Decoder, make_lora: Any):
    def run(**keys: Any) -> tuple[list[Tensor], float]:
        learner = Learner(decoder, make_lora(decoder), base_model="tiny")
        config = TrainConfig(loss="sft", groups_per_optimizer_step=1, **keys)
        metrics = learner.train(GROUPS, config).metrics
        return [leaf for _, leaf in learner.optimizer.parameters], metrics["learn/learning_rate"]

    start = [leaf.clone() for _, leaf in make_lora(decoder).parameters()]
    still, mean = run(learning_rate=1e-2, learning_rates=[0.0])
    assert mean == 0 and all(map(torch.equal, still, start))
    moved, mean = run(learning_rates=[0.0, 3e-3])  # the last one holds for the third step
    assert mean == pytest.approx(2e-3) and not all(map(torch.equal, moved, start))


# ---- against TRL ---------------------------------------------------------------------------------


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")  # of TRL's imports
@pytest.mark.parametrize("loss", ["sigmoid", "sft"])
def test_equals_trl(loss: str):
    pytest.importorskip("trl", exc_type=ImportError)
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    generator = torch.Generator().manual_seed(5)
    lengths, width = torch.tensor([7, 3, 4, 5]), 7  # two chosen, then two rejected
    mask = torch.arange(width)[None, :] < lengths[:, None]
    draw = torch.randn(2, 4, width, generator=generator, dtype=torch.float64)
    policy, reference = (-draw.abs() * mask).unbind()
    policy.requires_grad_()
    ref_chosen, ref_rejected = reference.sum(1).chunk(2)
    metrics: Any = {"train": defaultdict(list)}
    output = SimpleNamespace(
        log_probs=policy,
        **{name: torch.zeros(4, width) for name in ("entropy", "mean_logits")},
        is_top1=mask,
    )
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(training=True), _metrics=metrics, _total_train_tokens=0, _tp_size=1,
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, use_weighting=False,
        f_divergence_type="reverse_kl", loss_types=[loss], loss_weights=[1.0], beta=0.3,
    )  # fmt: skip
    whole = torch.cat([torch.zeros(4, 1, dtype=torch.bool), mask], dim=1)
    inputs = {
        "input_ids": torch.zeros(4, width + 1, dtype=torch.int64),
        "attention_mask": torch.ones(4, width + 1, dtype=torch.int64),
        "completion_mask": whole.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    expected = DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)
    expected.backward()
    assert policy.grad is not None
    sequence = torch.arange(4)[:, None].expand(4, width)[mask]
    if loss == "sft":  # TRL's is over the chosen alone
        chosen = mask.clone()
        chosen[2:] = False
        new = policy.detach()[chosen].requires_grad_()
        ones, none = torch.ones(10, dtype=torch.float64), torch.zeros(10, dtype=torch.bool)
        row = RowLabels(
            old=ones, sampler=ones, exact=none, advantage=ones,
            weight=torch.full((10,), 1 / 10, dtype=torch.float64), reference=None,
        )  # fmt: skip
        actual, _ = row_loss(new, row, SFT)
        actual.backward()
        assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(new.grad, policy.grad[chosen])
        return
    ours = preference(
        policy.detach()[mask], reference[mask], sequence, torch.tensor([[0, 2], [1, 3]]),
        TrainConfig(loss="dpo", dpo_beta=0.3),
    )  # fmt: skip
    assert ours.loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(-ours.advantage, policy.grad[mask], rtol=1e-10, atol=1e-15)
    names = {"chosen_reward": "chosen", "rejected_reward": "rejected", "reward_margin": "margins", "reward_accuracy": "accuracies"}  # fmt: skip
    for mine, theirs in names.items():
        (value,) = metrics["train"][f"rewards/{theirs}"]
        assert ours.sums[mine] / 2 == pytest.approx(value)
