"""Learning in bfloat16, as on every CUDA device, against float64 on the same weights.

The gradient of a token that is nearly certain is small, and it is what keeps a policy from
collapsing: computed from rounded probabilities it was 24% off at p = 0.99 and zero at 0.999.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.families import FAMILIES
from torch import Tensor

from hone.learner.body import as_body
from hone.learner.learner import Learner, StepResult
from hone.learner.transformers_body import TransformersBody
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

VOCAB = 49152
TARGET = 31_007
PROMPT = [5, 17, 300, 44, 8, 91, 206]
CONFIG = TrainConfig(
    learning_rate=0, scale_rewards=False, importance_cap=None, max_grad_norm=1e9, row_tokens=100
)
# The second trajectory makes the advantage of the first 1 - 0.5; at temperature 0 it has no labels.
GROUP = TrajectoryGroup(
    trajectories=[
        Trajectory(calls=[Call(prompt_ids=PROMPT, completion_ids=[TARGET])], reward=1.0),
        Trajectory(calls=[Call(prompt_ids=PROMPT, completion_ids=[3], temperature=0)], reward=0.0),
    ]
)

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
probabilities = pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999, 0.9999])


class Watched(Decoder):
    """Keeps the last hidden states, with their gradients."""

    seen: Tensor

    def hidden_for_training(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = super().hidden_for_training(*args, **kwargs)
        if hidden.requires_grad:
            hidden.retain_grad()
            self.seen = hidden
        return hidden


def decoder_of(directory: Path, p: float, *, device: str, dtype: torch.dtype) -> Watched:
    """A decoder in bfloat16, then cast, that answers PROMPT with TARGET at about p."""
    plain = Decoder.load(directory, device=device, dtype=torch.bfloat16)
    config = replace(plain.config, vocab=VOCAB)
    generator = torch.Generator().manual_seed(1)
    head = (torch.randn(VOCAB, config.hidden, generator=generator) * 0.2).to(plain.embedding)

    def made(head: Tensor, dtype: torch.dtype) -> Watched:
        source = Decoder.load(directory, device=device, dtype=torch.bfloat16)
        layers = [
            replace(
                layer,
                input_norm=_cast(layer.input_norm, dtype),
                post_norm=_cast(layer.post_norm, dtype),
                **{
                    name: replace(part, weight=part.weight.to(dtype))
                    for name in ("qkv", "out", "gate_up", "down")
                    for part in [getattr(layer, name)]
                },
            )
            for layer in source.layers
        ]
        return Watched(
            config,
            embedding=source.embedding.to(dtype),
            head=head.to(dtype),
            norm=source.norm.to(dtype),
            layers=layers,
        )

    decoder = made(head, torch.bfloat16)
    learner_of(decoder).train([GROUP], CONFIG)
    state = decoder.seen[-1].detach().double()
    others = (head.double() @ state)[torch.arange(VOCAB, device=device) != TARGET].logsumexp(0)
    wanted = others + torch.tensor(p / (1 - p), dtype=torch.float64).log()
    lacking = wanted - head[TARGET].double() @ state
    head[TARGET] += (lacking * state / state.square().sum()).to(head)
    return made(head, dtype)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def learner_of(model: Decoder | TransformersBody) -> Learner:
    body = as_body(model)
    lora = Lora.init(body.layout, rank=4, alpha=8.0, seed=0, device=body.device)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in lora.parameters():
            if ".b" in name:  # not zero, so that gradients of A are not either
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return Learner(body, lora, base_model="tiny")


def trained(decoder: Decoder) -> tuple[StepResult, Tensor]:
    """One step that moves nothing, and the adapter's gradient, flat."""
    learner = learner_of(decoder)
    result = learner.train([GROUP], CONFIG, probe=False, label_logprobs=True)
    assert result.metrics["learn/labels"] == 1
    return result, torch.cat([g.flatten().double() for g in learner.optimizer.grads])


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@devices
@probabilities
def test_the_gradient_of_the_last_hidden_state_is_that_of_float64(
    tiny_llama_dir: Path, device: str, p: float
):
    decoder = decoder_of(tiny_llama_dir, p, device=device, dtype=torch.bfloat16)
    result, _ = trained(decoder)
    state = decoder.seen[-1].detach().double().requires_grad_()
    logprob = (decoder.head.double() @ state).log_softmax(0)[TARGET]
    # One sequence of one label, so its weight is 1; its advantage is 1 - 0.5; the ratio is 1.
    (-0.5 * logprob).backward()
    logprob = logprob.detach()
    assert float(-torch.expm1(logprob)) == pytest.approx(1 - p, rel=0.2), "p is not what is tested"
    assert decoder.seen.grad is not None and state.grad is not None
    assert error(decoder.seen.grad[-1].double(), state.grad) < 0.01
    assert result.logprobs is not None
    assert result.logprobs[0] == pytest.approx(float(logprob), rel=1e-3)


@devices
@probabilities
def test_the_gradient_of_the_adapter_points_where_that_of_float64_does(
    tiny_llama_dir: Path, device: str, p: float
):
    # Rounded activations change p itself, and with it the gradient's length: at 0.9999 a logit
    # of 21 that is 0.2% off makes 1 - p 4% another. So both are taken for each unit of 1 - p.
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        decoder = decoder_of(tiny_llama_dir, p, device=device, dtype=dtype)
        result, gradient = trained(decoder)
        assert result.logprobs is not None
        gradients.append(gradient / -torch.expm1(torch.tensor(result.logprobs[0])))
    assert error(*gradients) < 0.05


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_of_1e_6_moves_the_factors(make_group: Callable[..., TrajectoryGroup], joint: bool):
    """They stay float32: in bfloat16, numbers near 0.1 are 5e-4 (2**-11) apart."""
    model = FAMILIES[2].model(torch.bfloat16)
    body = TransformersBody(model, raw=model.config.to_dict())
    if joint:  # as on a GPU
        body._lora.join()
    learner = learner_of(body)
    before = [leaf.detach().clone() for _, leaf in learner.lora.parameters()]
    group = make_group([1, 5, 9], [[7, 8, 2], [7, 9, 4, 2]], [1.0, 0.0])
    learner.train([group], TrainConfig(learning_rate=1e-6))
    for (name, leaf), old in zip(learner.lora.parameters(), before, strict=True):
        assert leaf.dtype == torch.float32, name
        # Adam's first step is the learning rate times the sign of the gradient.
        assert (leaf - old).abs().median().item() == pytest.approx(1e-6, rel=0.05), name
