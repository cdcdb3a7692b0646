"""What the learner's tests share: a tiny decoder, adapters that do something, calls made of ids."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call

MakeLora = Callable[..., Lora]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the thread count, and tiny models gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def decoder(tiny_llama_dir: Path) -> Decoder:
    return Decoder.load(tiny_llama_dir)


@pytest.fixture(scope="session")
def decoder64(tiny_llama_dir: Path) -> Decoder:
    return Decoder.load(tiny_llama_dir, dtype=torch.float64)


@pytest.fixture(scope="session")
def make_lora() -> MakeLora:
    """An adapter whose B is not zero, so that gradients of A and both passes differ."""

    def make(decoder: Decoder, *, seed: int = 0, size: float = 0.05) -> Lora:
        plain = Lora.init(decoder.config, rank=4, alpha=8.0, seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, tensor in plain.parameters():
                if ".b" in name:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)
        keys = [
            f"{i}.{k}" for i in range(decoder.config.layers) for k in decoder.config.projections
        ]
        factors = {
            key: (a.to(decoder.dtype), tuple(part.to(decoder.dtype) for part in b))
            for key in keys
            for a, b in [plain.factors(key)]
        }
        return Lora(decoder.config, factors, rank=plain.rank, alpha=plain.alpha)

    return make


@pytest.fixture(scope="session")
def make_group() -> Callable[..., TrajectoryGroup]:
    """A group of one-call trajectories that share a prompt."""

    def make(
        prompt: Sequence[int],
        completions: Sequence[Sequence[int]],
        rewards: Sequence[float],
        *,
        logprob: float | None = -6.0,
        temperature: float = 1.0,
    ) -> TrajectoryGroup:
        calls = [
            Call(
                prompt_ids=list(prompt),
                completion_ids=list(ids),
                logprobs=None if logprob is None else [logprob] * len(ids),
                temperature=temperature,
            )
            for ids in completions
        ]
        return TrajectoryGroup(
            trajectories=[
                Trajectory(calls=[call], reward=reward)
                for call, reward in zip(calls, rewards, strict=True)
            ]
        )

    return make
