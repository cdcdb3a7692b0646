"""The learner on a CUDA device: the same step as on the CPU, within float32."""

from pathlib import Path

import pytest
import torch

from hone.learner.learner import Learner
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig


def job() -> list[TrajectoryGroup]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 512, (count,), generator=generator).tolist()

    groups = []
    for _ in range(3):
        prompt = ids(30)
        groups.append(
            TrajectoryGroup(
                trajectories=[
                    Trajectory(
                        calls=[
                            Call(prompt_ids=prompt, completion_ids=ids(12), logprobs=[-6.0] * 12)
                        ],
                        reward=float(i % 3),
                    )
                    for i in range(6)
                ]
            )
        )
    return groups


@pytest.mark.gpu
def test_a_step_on_cuda_equals_one_on_the_cpu(tiny_llama_dir: Path):
    config = TrainConfig(learning_rate=1e-3, beta=0.1, row_tokens=100)
    results = {}
    for device in ("cpu", "cuda"):
        decoder = Decoder.load(tiny_llama_dir, device=device)
        lora = Lora.init(decoder.config, seed=1, device=device)
        learner = Learner(decoder, lora, base_model="tiny")
        metrics = learner.train(job(), config).metrics
        results[device] = metrics, [t.detach().cpu() for _, t in learner.lora.parameters()]
    (cpu, ours), (cuda, theirs) = results["cpu"], results["cuda"]
    for name in ("learn/loss", "learn/grad_norm", "learn/entropy"):
        assert cuda[name] == pytest.approx(cpu[name], rel=1e-4), name
    for a, b in zip(ours, theirs, strict=True):
        # Adam's first step is lr x sign: only where a gradient is rounding may the sign differ.
        assert ((a - b).abs() > 1e-5).float().mean() < 0.01
