"""What is computed: prompts of real English, groups of completions, an adapter that is not zero.

In:   a tokenizer's encode, shapes, a seed
Out:  lists of token ids and TrajectoryGroups, the same for everybody who is measured

Every prompt begins differently and every repeat has prompts of its own, so that what a prefix cache
saves is the prompt shared by the n samples of one request, as in training, and nothing else.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call

Encode = Callable[[str], list[int]]

TOWNS = (
    "Amsterdam", "Bergen", "Cork", "Dresden", "Evora", "Fez", "Ghent", "Hobart",
    "Izmir", "Jena", "Kyoto", "Lima", "Malmo", "Nantes", "Oslo", "Perth",
)  # fmt: skip
"""Different first letters, hence different first tokens in any tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """How much is sampled at a time."""

    prompts: int = 8
    n: int = 8
    prompt_tokens: int = 100
    new_tokens: int = 32

    @property
    def sampled_tokens(self) -> int:
        return self.prompts * self.n * self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainShape:
    """How much is learned from in one optimizer step."""

    groups: int = 1
    group_size: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 32

    @property
    def sequences(self) -> int:
        return self.groups * self.group_size

    @property
    def logical_tokens(self) -> int:
        """As an unshared computation counts them: every completion with its whole prompt."""
        return self.sequences * (self.prompt_tokens + self.completion_tokens)


def prompts(encode: Encode, count: int, tokens: int, *, seed: int) -> list[list[int]]:
    """So many prompts of exactly so many tokens, no two of which begin with the same one."""
    assert count <= len(TOWNS), f"{count} prompts, {len(TOWNS)} ways to begin one"
    return [
        _text_ids(encode, f"{TOWNS[i]} {rng.randrange(10**9)}:", tokens, rng)
        for i in range(count)
        for rng in [random.Random(f"{seed} {i}")]
    ]


def groups(encode: Encode, shape: TrainShape, *, seed: int) -> list[TrajectoryGroup]:
    """Groups of one prompt each with different completions; rewards 0 and 1 in turn.

    A group of one is compared with the others (`baseline: batch`), so its reward differs from its
    neighbour's.
    """
    made = []
    for g, prompt in enumerate(prompts(encode, shape.groups, shape.prompt_tokens, seed=seed)):
        trajectories = []
        for i in range(shape.group_size):
            rng = random.Random(f"{seed} completion {g} {i}")
            completion = _text_ids(encode, f"{TOWNS[i]}.", shape.completion_tokens, rng)
            call = Call(
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[-2.0 - rng.random() for _ in completion],
            )
            trajectories.append(Trajectory(calls=[call], reward=float((g + i) % 2)))
        made.append(TrajectoryGroup(trajectories=trajectories))
    return made


def save_adapter(model: Path, directory: Path, *, rank: int = 8, seed: int = 1) -> str:
    """A random adapter over all linear layers whose B is not zero, in PEFT's format; its hash."""
    import torch

    from hone.models.architecture import DecoderConfig
    from hone.models.lora import Lora

    lora = Lora.init(DecoderConfig.read(model), rank=rank)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.01, generator=generator)
    lora.save(directory, base_model=str(model))
    return lora.sha256


def sequences(groups: Sequence[TrajectoryGroup]) -> list[dict[str, Any]]:
    """The same groups as a peer takes them: one row per completion, its advantage worked out."""
    rows = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        mean, spread = fmean(rewards), pstdev(rewards)
        for trajectory in group.trajectories:
            call = trajectory.calls[0]
            rows.append(
                {
                    "ids": call.prompt_ids + call.completion_ids,
                    "prompt": len(call.prompt_ids),
                    "logprobs": call.logprobs,
                    "advantage": (trajectory.reward - mean) / (spread + 1e-6),
                }
            )
    return rows


def _text_ids(encode: Encode, text: str, tokens: int, rng: random.Random) -> list[int]:
    while len(ids := encode(text)) < tokens:
        text += " " + _sentence(rng)
    return ids[:tokens]


def _sentence(rng: random.Random) -> str:
    who, did, what, where, then = (rng.choice(words) for words in _WORDS)
    return f"{who} {did} {what} {where}, and {then}."


_WORDS = (
    (
        "The night porter", "A retired surveyor", "My neighbour's daughter", "The ferry's engineer",
        "An apprentice baker", "The village librarian", "A tired geologist", "The new accountant",
        "Our football coach", "The woman from the archive", "A travelling piano tuner",
    ),
    (
        "found", "repaired", "quietly returned", "photographed", "sold", "measured twice",
        "forgot about", "described at length", "wrapped in newspaper", "tried to explain",
    ),
    (
        "the brass compass", "a letter without a stamp", "three crates of pears", "the broken clock",
        "an old tide table", "the minutes of the meeting", "a map of the drains", "the second key",
        "a recipe for plum jam", "the weather station's logbook", "seven glass bottles",
    ),
    (
        "behind the railway station", "before the rain began", "in the reading room",
        "at the end of the pier", "during the long intermission", "under the kitchen stairs",
        "on the way to the harbour", "in front of the whole council",
    ),
    (
        "nobody asked why", "the dog slept through all of it", "the bill arrived on Tuesday",
        "it was colder than anyone had expected", "that settled the argument for a while",
        "the lights went out on the third floor", "someone began to sing", "the tea had gone cold",
    ),
)  # fmt: skip
