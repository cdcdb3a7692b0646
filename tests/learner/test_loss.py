"""Every loss by hand, and beside TRL's own code on the same tensors."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.learner.loss import RowLabels, importance, k3, penalised, row_loss, weights
from hone.learner.samples import make_samples
from hone.learner.trie import Labels, pack
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig


def table(rollout: list[int], call: list[int] | None = None) -> Labels:
    m = len(rollout)
    return Labels(
        target=torch.zeros(m, dtype=torch.int64),
        call=torch.tensor(call or rollout),
        rollout=torch.tensor(rollout),
        sampler_logprob=torch.zeros(m, dtype=torch.float64),
        exact=torch.ones(m, dtype=torch.bool),
        temperature=torch.ones(m, dtype=torch.float64),
        advantage=torch.ones(m, dtype=torch.float64),
    )


def row(
    old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    sampler: Tensor | None = None,
    reference: Tensor | None = None,
) -> RowLabels:
    return RowLabels(
        old=old, sampler=old if sampler is None else sampler,
        exact=torch.ones(len(old), dtype=torch.bool), advantage=advantage, weight=weight,
        reference=reference,
    )  # fmt: skip


def log(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


ONES = torch.ones(2, dtype=torch.float64)


def test_gain_is_capped_and_loss_is_not():
    # ratios 1.5 and 0.5, epsilon 0.2, advantage 1: min(1.5, 1.2) + min(0.5, 0.8) = 1.7
    loss, sums = row_loss(log(0.6, 0.2), row(log(0.4, 0.4), ONES, ONES / 2), TrainConfig())
    assert loss.item() == pytest.approx(-0.85)
    assert sums["clip_frac"] == 1 and sums["ratio"].item() == pytest.approx(2.0)
    # advantage -1: min(-1.5, -1.2) + min(-0.5, -0.8) = -2.3
    loss, _ = row_loss(log(0.6, 0.2), row(log(0.4, 0.4), -ONES, ONES / 2), TrainConfig())
    assert loss.item() == pytest.approx(1.15)


def test_epsilon_high_moves_the_upper_bound_only():
    config = TrainConfig(loss="dapo", epsilon_high=0.3)
    loss, _ = row_loss(log(0.6, 0.2), row(log(0.4, 0.4), ONES, ONES), config)
    assert loss.item() == pytest.approx(-(1.3 + 0.5))


def test_cispo_caps_the_ratio_and_keeps_the_gradient():
    new = log(0.6, 0.2).requires_grad_()
    # ratios 6 and 0.5; the cap is 1 + 4 = 5: -(5 log 0.6 + 0.5 log 0.2)
    loss, sums = row_loss(new, row(log(0.1, 0.4), ONES, ONES), TrainConfig(loss="cispo"))
    assert loss.item() == pytest.approx(5 * 0.5108256 + 0.5 * 1.6094379)
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-5.0, -0.5])
    assert sums["clip_frac"] == 1


def test_cispo_bounds_the_ratio_below_where_epsilon_is_set_as_art_does():
    # ratios 0.5, 6 and 6, advantages 1, 1 and -1; bounds 1 - 0.2 = 0.8 and 1 + 4 = 5
    new = log(0.2, 0.6, 0.6).requires_grad_()
    labels = row(
        log(0.4, 0.1, 0.1), torch.tensor([1.0, 1.0, -1.0]).double(), torch.ones(3).double()
    )
    loss, sums = row_loss(new, labels, TrainConfig(loss="cispo", epsilon=0.2))
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-0.8, -5.0, 5.0])
    assert sums["clip_frac"] == 3  # the ratio of a negative advantage is bounded, too


def test_weights_by_hand():
    labels = table([0, 0, 0, 1], call=[0, 0, 1, 2])
    # two rollouts of 3 and 1 labels
    assert weights(labels, TrainConfig(loss="grpo")).tolist() == pytest.approx(
        [1 / 6] * 3 + [1 / 2]
    )
    # three calls of 2, 1 and 1 labels
    by_call = weights(labels, TrainConfig(loss="grpo", unit="call"))
    assert by_call.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert weights(labels, TrainConfig(loss="dapo")).tolist() == [0.25] * 4
    assert weights(labels, TrainConfig(loss="cispo")).tolist() == [0.25] * 4
    dr = TrainConfig(loss="dr_grpo", dr_grpo_tokens=50)
    assert weights(labels, dr).tolist() == pytest.approx([1 / 100] * 4)


def test_importance_is_truncated_and_one_where_unknown():
    old, sampler = log(0.6, 0.2, 0.3), torch.tensor([0.2, 0.4, float("nan")]).double().log()
    exact = torch.tensor([True, True, False])
    # 0.6 / 0.2 = 3 is cut to 2; 0.2 / 0.4 = 0.5
    assert importance(old, sampler, exact, 2.0).tolist() == pytest.approx([2, 0.5, 1])
    assert importance(old, sampler, exact, None).tolist() == [1, 1, 1]


def test_importance_multiplies_the_policy_term_and_not_the_divergence():
    new = log(0.4, 0.4)
    labels = row(new, ONES, ONES, sampler=log(0.8, 0.1), reference=log(0.2, 0.8))
    # ratio 1; importance 0.5 and min(4, 2) = 2; k3 with r = 1/2: 0.5 + ln 2 - 1, r = 2: 2 - ln 2 - 1
    loss, sums = row_loss(new, labels, TrainConfig(beta=0.1))
    assert loss.item() == pytest.approx(-2.5 + 0.1 * (0.1931472 + 0.3068528))
    assert sums["kl"].item() == pytest.approx(0.5)
    # mismatch: r = pi_old / pi_sampler = 0.5 and 4: (0.5 + ln 2 - 1) + (4 - ln 4 - 1)
    assert sums["mismatch_kl"].item() == pytest.approx(0.1931472 + 1.6137056)


def test_labels_without_a_sampler_value_do_not_poison_the_sums():
    labels = RowLabels(
        old=log(0.4), sampler=torch.tensor([float("nan")]).double(), exact=torch.tensor([False]),
        advantage=ONES[:1], weight=ONES[:1], reference=None,
    )  # fmt: skip
    loss, sums = row_loss(log(0.4), labels, TrainConfig())
    assert loss.item() == pytest.approx(-1) and sums["mismatch_kl"] == 0 and "kl" not in sums


def test_k3_is_zero_at_equality_and_never_negative():
    assert k3(log(0.3), log(0.3)).item() == 0
    assert k3(log(0.3), log(0.6)).item() == pytest.approx(2 - 0.6931472 - 1)


def test_penalty_moves_advantage_between_tokens():
    # kl = ln 2 and 0, mean ln 2 / 2, coefficient 2: 1 - ln 2, 1 + ln 2; their sum stays
    moved = penalised(ONES, log(0.4, 0.4), log(0.2, 0.4), 2.0)
    assert moved.tolist() == pytest.approx([1 - 0.6931472, 1 + 0.6931472])


def trl_loss(logps: Tensor, inputs: dict[str, Tensor], loss: str, **settings: Any) -> Tensor:
    """TRL's `_compute_loss` on given log-probabilities, without its model or its dataset."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        importance_sampling_level="token",
        loss_type=loss,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        **settings,
    )
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")  # of TRL's imports
@pytest.mark.parametrize("beta", [0.0, 0.07])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_equals_trl(loss: str, beta: float):
    pytest.importorskip("trl", exc_type=ImportError)
    generator = torch.Generator().manual_seed(5)
    lengths, width = torch.tensor([7, 3, 1, 5]), 7
    mask = torch.arange(width)[None, :] < lengths[:, None]

    def draw(scale: float) -> Tensor:
        return torch.randn(4, width, generator=generator, dtype=torch.float64) * scale

    old = -draw(2.0).abs()
    new, sampler, reference = old + draw(0.3), old + draw(0.4), old + draw(0.3)
    advantage = torch.tensor([1.5, -0.5, 0.7, -1.7], dtype=torch.float64)
    theirs = new.clone().requires_grad_()
    expected = trl_loss(
        theirs,
        {
            "prompt_ids": torch.zeros(4, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(4, 1, dtype=torch.int64),
            "completion_ids": torch.zeros(4, width, dtype=torch.int64),
            "completion_mask": mask.long(),
            "advantages": advantage,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "importance_sampling_ratio": torch.exp(old - sampler).clamp(max=2.0),
            "num_items_in_batch": mask.sum().double(),
        },
        loss,
        beta=beta,
        epsilon_low=0.2,
        # TRL gives cispo the cap itself, hone how far above 1 it lies
        epsilon_high=1.2 if loss == "cispo" else 0.25,
        max_completion_length=50,
    )
    config = TrainConfig(
        loss=loss,  # pyright: ignore[reportArgumentType]
        beta=beta,
        epsilon_high=0.2 if loss == "cispo" else 0.25,
        dr_grpo_tokens=50 if loss == "dr_grpo" else 1024,
    )
    rollout = torch.arange(4)[:, None].expand(4, width)[mask]
    ours = new[mask].clone().requires_grad_()
    labels = row(
        old[mask], advantage[rollout], weights(table(rollout.tolist()), config),
        sampler=sampler[mask], reference=reference[mask],
    )  # fmt: skip
    actual, _ = row_loss(ours, labels, config)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    expected.backward()
    actual.backward()
    assert theirs.grad is not None and ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad[mask], rtol=1e-10, atol=1e-15)


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")  # of TRL's imports
def test_dr_grpo_equals_trl_from_rewards_to_loss():
    pytest.importorskip("trl", exc_type=ImportError)
    rewards, lengths = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64), [2, 1, 3]
    mask = torch.arange(3)[None, :] < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    # As TRL computes advantages where scale_rewards is "none", which it advises for this loss.
    inputs = {
        "prompt_ids": torch.zeros(3, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(3, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(3, 3, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": rewards - rewards.mean(),
        "old_per_token_logps": zeros,
        "importance_sampling_ratio": torch.ones(3, 3, dtype=torch.float64),
        "num_items_in_batch": mask.sum().double(),
    }
    expected = trl_loss(
        zeros, inputs, "dr_grpo", beta=0.0, epsilon_low=0.2, epsilon_high=0.2,
        max_completion_length=50,
    )  # fmt: skip
    config = TrainConfig(loss="dr_grpo", dr_grpo_tokens=50, importance_cap=None)
    group = TrajectoryGroup(
        trajectories=[
            Trajectory(calls=[Call(prompt_ids=[1], completion_ids=[2] * n)], reward=float(reward))
            for n, reward in zip(lengths, rewards, strict=True)
        ]
    )
    made = make_samples([group], config, vocab=10, max_positions=10)
    labels = pack(made.samples, row_tokens=100).labels
    flat = torch.zeros(6, dtype=torch.float64)
    actual, _ = row_loss(flat, row(flat, labels.advantage, weights(labels, config)), config)
    # -(2 x 2 - 1 x 1 - 1 x 3) / (3 x 50) = 0, and with the first alone -4 / 150
    assert actual.item() == pytest.approx(expected.item(), abs=1e-15) == pytest.approx(0, abs=1e-12)
    assert (labels.advantage * weights(labels, config))[:2].sum().item() == pytest.approx(4 / 150)
