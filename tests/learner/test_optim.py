"""AdamW by hand for one step, and its state through a file."""

from pathlib import Path

import pytest
import torch
from tests.prose import Prose, place_of
from torch import Tensor

from hone.errors import ConfigError
from hone.learner.optim import BETAS, EPS, AdamW


def leaves(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a", torch.randn(3, 4, generator=generator).requires_grad_()),
        ("b", torch.randn(5, generator=generator).requires_grad_()),
    ]


def push(optimizer: AdamW, seed: int, *, learning_rate: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, leaf in optimizer.parameters:
        leaf.grad = torch.randn(leaf.shape, generator=generator)
    optimizer.step(learning_rate=learning_rate, weight_decay=0.01)


def test_the_first_steps_by_hand():
    leaf = torch.tensor([1.0], requires_grad=True)
    optimizer = AdamW([("x", leaf)])
    leaf.grad = torch.tensor([2.0])
    optimizer.step(learning_rate=0.1, weight_decay=0.5)
    # decay: 1 - 0.1 * 0.5 = 0.95; first step: both moments, corrected, give 2 / sqrt(4) = 1
    assert leaf.item() == pytest.approx(0.95 - 0.1)
    leaf.grad = torch.tensor([-1.0])
    optimizer.step(learning_rate=0.1, weight_decay=0.0)
    # m = 0.9 * 0.2 - 0.1 = 0.08, / (1 - 0.81) = 0.42105; v = 0.99 * 0.04 + 0.01 = 0.0496,
    # / (1 - 0.9801) = 2.49246; 0.42105 / sqrt(2.49246) = 0.26670
    assert leaf.item() == pytest.approx(0.85 - 0.026670, abs=1e-5)


def test_it_is_torchs_own_adamw_bit_for_bit():
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (700, 90), (1,)]
    first = [torch.randn(shape, generator=draw) for shape in shapes]
    ours = [leaf.clone().requires_grad_() for leaf in first]
    theirs = [leaf.clone().requires_grad_() for leaf in first]
    adam = AdamW([(str(i), leaf) for i, leaf in enumerate(ours)])
    reference = torch.optim.AdamW(
        theirs, lr=3e-3, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True
    )
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=draw)
            b.grad = a.grad.clone()
        if step == 2:
            ours[0].grad = theirs[0].grad = None  # a leaf nothing reached keeps its own count
        adam.step(learning_rate=3e-3, weight_decay=0.1)
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_a_resumed_optimizer_continues_bit_for_bit(tmp_path: Path):
    straight = AdamW(leaves())
    for seed in range(4):
        push(straight, seed)
    first = AdamW(leaves())
    push(first, 0)
    push(first, 1)
    first.save(tmp_path)
    resumed = AdamW(
        [(name, leaf.detach().clone().requires_grad_()) for name, leaf in first.parameters]
    )
    resumed.load(tmp_path)
    push(resumed, 2)
    push(resumed, 3)
    for (_, a), (_, b) in zip(straight.parameters, resumed.parameters, strict=True):
        assert torch.equal(a, b)
    for name, tensor in straight.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_save_load_save_is_byte_equal(tmp_path: Path):
    optimizer = AdamW(leaves())
    push(optimizer, 0)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    optimizer.save(tmp_path / "one")
    again = AdamW(leaves(1))
    again.load(tmp_path / "one")
    again.save(tmp_path / "two")
    one, two = ((tmp_path / d / "optimizer.safetensors").read_bytes() for d in ("one", "two"))
    assert one == two


def test_a_snapshot_brings_everything_back():
    optimizer = AdamW(leaves())
    push(optimizer, 0)
    before = optimizer.snapshot()
    push(optimizer, 1)
    assert not torch.equal(before["a"], dict(optimizer.parameters)["a"])
    optimizer.restore(before)
    now = optimizer.snapshot()
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name], now[name]) for name in before)
    assert not optimizer.grads


def test_a_state_of_another_adapter_is_refused(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        AdamW(leaves()).load(tmp_path)
    prose(caught)
    AdamW(leaves()[:1]).save(tmp_path)
    with pytest.raises(ConfigError) as caught:
        AdamW(leaves()).load(tmp_path)
    prose(caught)


def test_a_state_that_is_damaged_or_not_finite_is_refused_by_name(prose: Prose, tmp_path: Path):
    parameters = [("a", torch.ones(3, requires_grad=True))]
    optimizer = AdamW(parameters)
    optimizer.save(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError) as caught:
        optimizer.load(tmp_path)
    prose(caught)
    assert place_of(caught).endswith("optimizer.safetensors")
    file.write_bytes(whole[:-4] + b"\x00\x00\xc0\x7f")  # a NaN in float32
    with pytest.raises(ConfigError) as caught:
        optimizer.load(tmp_path)
    prose(caught)
    assert place_of(caught).endswith("optimizer.safetensors")
