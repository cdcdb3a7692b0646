"""Plain packing: whole sequences laid end to end, each attending to itself; no trie.

In:   hone's learner (its decoder, adapter, head and optimizer) and groups
Out:  one optimizer step

What packing implementations do: fill rows up to the same token budget with whole sequences in the
order they come, one causal attention call per sequence, positions from 0 in each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from hone.learner.body import DecoderBody
from hone.learner.learner import Learner
from hone.learner.logprobs import Queries, label_logprobs
from hone.learner.trie import ROW
from hone.models.decoder import Attend
from hone.trajectory import TrajectoryGroup
from hone.types import Call, TrainConfig


def packed_step(learner: Learner, groups: Sequence[TrajectoryGroup], config: TrainConfig) -> int:
    """Forward, backward, clip, AdamW; says how many tokens it learned from."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    calls = [(t.calls[0], float(a)) for t, a in zip(trajectories, advantages, strict=True)]
    learner.optimizer.zero_grad()
    for row in _rows(calls, config.row_tokens or ROW):
        _loss(learner, row, config, sequences=len(calls)).backward()
    leaves = [leaf for _, leaf in learner.optimizer.parameters]
    clip_grad_norm_(leaves, config.max_grad_norm)
    learner.optimizer.step(learning_rate=config.learning_rate, weight_decay=config.weight_decay)
    return sum(len(call.prompt_ids) + len(call.completion_ids) for call, _ in calls)


def _rows(calls: list[tuple[Call, float]], budget: int) -> list[list[tuple[Call, float]]]:
    rows: list[list[tuple[Call, float]]] = []
    used = budget
    for call, advantage in calls:
        size = len(call.prompt_ids) + len(call.completion_ids)
        if used + size > budget:
            rows.append([])
            used = 0
        rows[-1].append((call, advantage))
        used += size
    return rows


def _loss(
    learner: Learner, row: list[tuple[Call, float]], config: TrainConfig, *, sequences: int
) -> Tensor:
    ids, positions, node, advantage, weight, sampler = [], [], [], [], [], []
    bounds: list[tuple[int, int]] = []
    for call, value in row:
        start, size = len(ids), len(call.prompt_ids) + len(call.completion_ids)
        labels = len(call.completion_ids)
        ids += call.prompt_ids + call.completion_ids
        positions += range(size)
        first = start + len(call.prompt_ids) - 1
        node += range(first, first + labels)
        advantage += [value] * labels
        weight += [1 / (labels * sequences)] * labels
        sampler += call.logprobs or []
        bounds.append((start, start + size))
    token_ids = torch.tensor(ids)
    body = learner.body
    assert isinstance(body, DecoderBody), "plain packing is written for hone's own decoder"
    hidden = body.decoder.hidden_for_training(
        token_ids, torch.tensor(positions), _causal(bounds), learner.lora
    )
    queries = Queries(
        node=torch.tensor(node),
        temperature=torch.ones(len(node)),
        label_query=torch.arange(len(node)),
        target=token_ids[torch.tensor(node) + 1],
    )
    new = label_logprobs(hidden, body.head, queries)[0].double()
    old, gain = new.detach(), torch.tensor(advantage, dtype=torch.float64)
    ratio = torch.exp(new - old)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    term = -torch.minimum(ratio * gain, ratio.clamp(low, high) * gain)
    cap = torch.exp(old - torch.tensor(sampler, dtype=torch.float64)).clamp(max=2.0)
    return (torch.tensor(weight, dtype=torch.float64) * term * cap).sum()


def _causal(bounds: list[tuple[int, int]]) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None],
                k[a:b].transpose(0, 1)[None],
                v[a:b].transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=q.shape[1] != k.shape[1],
            )[0].transpose(0, 1)
            for a, b in bounds
        ]
        return torch.cat(parts).reshape(len(q), -1)

    return attend
