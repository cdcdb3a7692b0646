"""Logits -> drawn tokens, each with the log-probability the learner will be compared with.

In:   logits [B, vocab]; for every drawing the row it draws from, how, and its own random stream
Out:  SampledTokens

Draws are by Gumbel noise in two levels: first a block of the vocabulary, then a token in it. The
distribution is exact, and a draw changes only where two perturbed scores are a rounding error
apart. Inverse-CDF sampling flips 6% of 32-token completions when the batch around a row changes,
because every one of 49,152 boundaries moves a little; this flips none that we could find.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hone.inference.base import SampledToken, Sampling


@dataclass(frozen=True, slots=True)
class Drawing:
    """A way of being sampled, and the stream the noise comes from."""

    sampling: Sampling
    stream: np.random.Generator


def stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample: a function of its seed and index, not of the batch."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, sample]))


def block_size(vocab: int) -> int:
    """Tokens per block: about the root of the vocabulary, so both levels are short."""
    return 1 << math.ceil(math.log2(math.sqrt(vocab)))


def draw(logits: Tensor, places: Sequence[int], rows: Sequence[Drawing]) -> list[SampledToken]:
    """One token for every drawing, from its place's row of logits [B, vocab], which are overwritten."""
    scores, ways, of = _ways(logits.float(), places, rows)
    index = torch.tensor(of, device=scores.device)
    size = block_size(scores.shape[1])
    drawn = _blocks(scores, size)  # [ways, blocks, size]
    # As logsumexp over the last axis, in one pass; a block's first score is always finite.
    block_lse = scores[:, ::size] - drawn.log_softmax(-1)[:, :, 0]  # [ways, blocks]
    lse = block_lse.logsumexp(-1)  # [ways]
    masked_lse: dict[int, float] = {}
    if narrowed := [i for i, way in enumerate(ways) if way.narrowed]:
        keep = _narrow(scores[narrowed], [ways[i] for i in narrowed])
        drawn = drawn.clone()
        drawn[narrowed] = _blocks(keep, size)
        block_lse[narrowed] = drawn[narrowed].logsumexp(-1)
        masked_lse = dict(zip(narrowed, block_lse[narrowed].logsumexp(-1).tolist(), strict=True))
    blocks = block_lse.shape[1]
    noise = _noise(rows, blocks, size).to(scores.device)
    chosen = (block_lse[index] + noise[:, :blocks]).argmax(-1)
    ids = chosen * size + (drawn[index, chosen] + noise[:, blocks:]).argmax(-1)
    # The block with the largest sum need not hold the largest token.
    if greedy := [i for i, row in enumerate(rows) if row.sampling.temperature == 0]:
        ids[greedy] = scores[index[greedy]].argmax(-1)
    picked = scores[index, ids]
    logprobs, picks = (picked - lse[index]).tolist(), picked.tolist()
    alternatives = _alternatives(scores, lse, of, rows)
    return [
        SampledToken(
            id=token,
            logprob=logprobs[i],
            masked_logprob=picks[i] - masked_lse[of[i]] if of[i] in masked_lse else None,
            top=alternatives.get(i, ()),
        )
        for i, token in enumerate(ids.tolist())
    ]


def _ways(
    logits: Tensor, places: Sequence[int], rows: Sequence[Drawing]
) -> tuple[Tensor, list[Sampling], list[int]]:
    """Logits [ways, vocab] over their temperatures, how each is narrowed, and which a drawing uses.

    Drawings of one place that are sampled alike use one row; mostly that is the row there is.
    """
    numbers: dict[tuple[object, ...], int] = {}
    of: list[int] = []
    firsts: list[int] = []
    for i, (place, row) in enumerate(zip(places, rows, strict=True)):
        way = row.sampling
        key = (place, way.temperature or 1.0, way.top_k, way.top_p, way.min_p)
        of.append(numbers.setdefault(key, len(numbers)))
        if of[-1] == len(firsts):
            firsts.append(i)
    wanted = [places[i] for i in firsts]
    if wanted != list(range(len(logits))):
        logits = logits[torch.tensor(wanted, device=logits.device)]
    ways = [rows[i].sampling for i in firsts]
    temperatures = [way.temperature or 1.0 for way in ways]
    if any(t != 1.0 for t in temperatures):
        logits /= torch.tensor(temperatures, device=logits.device)[:, None]
    return logits, ways, of


def _blocks(logits: Tensor, size: int) -> Tensor:
    short = -logits.shape[1] % size
    if short:
        logits = F.pad(logits, (0, short), value=-math.inf)
    return logits.view(len(logits), -1, size)


def _noise(rows: Sequence[Drawing], blocks: int, size: int) -> Tensor:
    """Gumbel noise [B, blocks + size], each row's from its own stream."""
    uniform = np.full((len(rows), blocks + size), 0.5)
    for i, row in enumerate(rows):
        if row.sampling.temperature > 0:
            uniform[i] = row.stream.random(blocks + size)
    tiny = np.finfo(np.float64).tiny
    noise = -np.log(-np.log(np.maximum(uniform, tiny)))
    return torch.from_numpy(noise.astype(np.float32))


def _narrow(logits: Tensor, ways: Sequence[Sampling]) -> Tensor:
    """Scores with what top-k, then top-p, then min-p exclude set to -inf; the best always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    device = logits.device
    top_k = torch.tensor([w.top_k if w.top_k > 0 else vocab for w in ways], device=device)
    top_p = torch.tensor([w.top_p for w in ways], device=device)
    min_p = torch.tensor([w.min_p for w in ways], device=device)
    rank = torch.arange(vocab, device=device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -math.inf)
    probs = ordered.softmax(-1)
    # A token stays while the mass before it is below top_p, so the one that crosses it stays too.
    before = probs.double().cumsum(-1) - probs
    out = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    out[:, 0] = False
    ordered = ordered.masked_fill(out, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _alternatives(
    scores: Tensor, lse: Tensor, of: Sequence[int], rows: Sequence[Drawing]
) -> dict[int, tuple[tuple[int, float], ...]]:
    wanted = [i for i, row in enumerate(rows) if row.sampling.top_logprobs]
    if not wanted:
        return {}
    most = max(rows[i].sampling.top_logprobs for i in wanted)
    used = torch.tensor([of[i] for i in wanted], device=scores.device)
    values, ids = (scores[used] - lse[used][:, None]).topk(most, -1)
    return {
        i: tuple(zip(ids[j].tolist(), values[j].tolist(), strict=True))[
            : rows[i].sampling.top_logprobs
        ]
        for j, i in enumerate(wanted)
    }
