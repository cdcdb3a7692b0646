"""The sampler: logits to sampled tokens with their log-probabilities.

In:   logits [B, vocab]; for every sample its row, its settings and its own random stream
Out:  SampledTokens

logit_bias, penalties, min_tokens and the constraint change the logits, as in vLLM; then the
temperature divides them, and top-k, top-p and min-p exclude tokens. The sampler reports both
log-probabilities of a token: before all of these changes, and after them.

A draw adds Gumbel noise in two levels: first it picks a block of the vocabulary, then a token in it.
The distribution is exact, and a draw changes only where two perturbed scores are a rounding error
apart. Inverse-CDF sampling flips 6% of 32-token completions when the batch around a row changes,
because every one of 49,152 boundaries moves a little; with Gumbel noise, none flipped in our tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hone.inference.base import SampledToken, Sampling
from hone.inference.grammar import Matcher


@dataclass(frozen=True, slots=True)
class SampleState:
    """The settings of one sample, and its random stream."""

    sampling: Sampling
    stream: np.random.Generator
    prompt_ids: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)
    """The tokens drawn so far."""
    matcher: Matcher | None = None
    """Which tokens the constraint allows next."""


def random_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample: a function of its seed and index, not of the batch."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, sample]))


def block_size(vocab: int) -> int:
    """Tokens per block: about the root of the vocabulary, so both levels are short."""
    return 1 << math.ceil(math.log2(math.sqrt(vocab)))


def draw(logits: Tensor, rows: Sequence[int], samples: Sequence[SampleState]) -> list[SampledToken]:
    """One token for every sample, from its row of the logits [B, vocab], which are overwritten."""
    scores, firsts, used = _distributions(logits.float(), rows, samples)
    index = torch.tensor(used, device=scores.device)
    size = block_size(scores.shape[1])
    blocks = _blocks(scores, size)  # [D, blocks, size]
    # The same as logsumexp over the last axis, in one pass; a block's first score is always finite.
    block_lse = scores[:, ::size] - blocks.log_softmax(-1)[:, :, 0]  # [D, blocks]
    lse = block_lse.logsumexp(-1)  # [D]
    masked, forced = _masked(scores, firsts)
    masked_lse: dict[int, float] = {}
    if masked:
        narrowed = list(masked)
        blocks = blocks.clone()
        blocks[narrowed] = _blocks(torch.stack(list(masked.values())), size)
        block_lse[narrowed] = blocks[narrowed].logsumexp(-1)
        masked_lse = dict(zip(narrowed, block_lse[narrowed].logsumexp(-1).tolist(), strict=True))
    num_blocks = block_lse.shape[1]
    noise = _noise(samples, num_blocks, size).to(scores.device)
    block = (block_lse[index] + noise[:, :num_blocks]).argmax(-1)
    ids = block * size + (blocks[index, block] + noise[:, num_blocks:]).argmax(-1)
    # The block with the largest sum need not hold the largest token.
    if greedy := [i for i, sample in enumerate(samples) if sample.sampling.temperature == 0]:
        ids[greedy] = blocks[index[greedy]].flatten(1).argmax(-1)
    drawn = scores[index, ids]
    drawn_from = blocks.flatten(1)[index, ids].tolist()
    logprobs = (drawn - lse[index]).tolist()
    top = _top_logprobs(scores, lse, used, samples)
    return [
        SampledToken(
            id=token,
            logprob=logprobs[i],
            masked_logprob=drawn_from[i] - masked_lse[used[i]] if used[i] in masked_lse else None,
            forced=used[i] in forced,
            top=top.get(i, ()),
        )
        for i, token in enumerate(ids.tolist())
    ]


def _distributions(
    logits: Tensor, rows: Sequence[int], samples: Sequence[SampleState]
) -> tuple[Tensor, list[SampleState], list[int]]:
    """Distinct distributions: logits [D, vocab] over temperature, a sample of each, one per sample.

    Samples of one row have drawn the same tokens. With equal settings they share a distribution, so
    D is usually B. Samples with a constraint do not share, because each has its own matcher.
    """
    numbers: dict[tuple[object, ...], int] = {}
    used: list[int] = []
    firsts: list[int] = []
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        key = (row, *_shape(sample.sampling), None if sample.matcher is None else i)
        used.append(numbers.setdefault(key, len(numbers)))
        if used[-1] == len(firsts):
            firsts.append(i)
    wanted = [rows[i] for i in firsts]
    if wanted != list(range(len(logits))):
        logits = logits[torch.tensor(wanted, device=logits.device)]
    first_samples = [samples[i] for i in firsts]
    temperatures = [sample.sampling.temperature or 1.0 for sample in first_samples]
    if any(t != 1.0 for t in temperatures):
        logits /= torch.tensor(temperatures, device=logits.device)[:, None]
    return logits, first_samples, used


def _shape(sampling: Sampling) -> tuple[object, ...]:
    """All settings that change a distribution."""
    return (
        sampling.temperature or 1.0,
        *(sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature == 0),
        *(sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty),
        *(sampling.logit_bias, sampling.min_tokens),
    )


def _masked(scores: Tensor, samples: Sequence[SampleState]) -> tuple[dict[int, Tensor], set[int]]:
    """The masked scores of rows where they differ; and rows whose constraint allows one token."""
    masked: dict[int, Tensor] = {}
    forced: set[int] = set()
    for i, sample in enumerate(samples):
        adjusted = _adjusted(scores[i], sample)
        if len(sample.ids) < sample.sampling.min_tokens:
            ends = [token for token in sample.sampling.stop_ids if token < scores.shape[1]]
            adjusted = scores[i].clone() if adjusted is None else adjusted
            adjusted[ends] = -math.inf
        if sample.matcher is not None:
            allowed = sample.matcher.allowed()
            count = np.count_nonzero(allowed)
            if count < len(allowed):
                excluded = torch.from_numpy(~allowed).to(scores.device)
                adjusted = (scores[i] if adjusted is None else adjusted).masked_fill(
                    excluded, -math.inf
                )
            if count == 1:
                forced.add(i)
        if adjusted is not None:
            masked[i] = adjusted
    if truncating := [i for i, sample in enumerate(samples) if sample.sampling.truncates]:
        rows = torch.stack([masked.get(i, scores[i]) for i in truncating])
        masked |= zip(
            truncating, _narrow(rows, [samples[i].sampling for i in truncating]), strict=True
        )
    return masked, forced


def _adjusted(scores: Tensor, sample: SampleState) -> Tensor | None:
    """Scores [vocab] after logit_bias and penalties; None if these change nothing.

    They are defined for logits, and scores are logits over the temperature.
    """
    sampling = sample.sampling
    scale = 1 / (sampling.temperature or 1.0)
    repeated = bool(sample.ids or sampling.repetition_penalty != 1.0)
    if not sampling.logit_bias and not (sampling.penalizes and repeated):
        return None
    device, adjusted = scores.device, scores.clone()
    if sampling.logit_bias:
        tokens, bias = zip(*sampling.logit_bias, strict=True)
        adjusted[list(tokens)] += torch.tensor(bias, device=device) * scale
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sample.prompt_ids, *sample.ids}), device=device)
        if len(seen):
            before, penalty = adjusted[seen], sampling.repetition_penalty
            adjusted[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if sample.ids and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = np.unique(sample.ids, return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        adjusted[torch.from_numpy(tokens).to(device)] -= (
            torch.from_numpy(penalties.astype(np.float32)).to(device) * scale
        )
    return adjusted


def _blocks(logits: Tensor, size: int) -> Tensor:
    padding = -logits.shape[1] % size
    if padding:
        logits = F.pad(logits, (0, padding), value=-math.inf)
    return logits.view(len(logits), -1, size)


def _noise(samples: Sequence[SampleState], blocks: int, size: int) -> Tensor:
    """Gumbel noise [samples, blocks + size], each row from its sample's own stream."""
    uniform = np.full((len(samples), blocks + size), 0.5)
    for i, sample in enumerate(samples):
        if sample.sampling.temperature > 0:
            uniform[i] = sample.stream.random(blocks + size)
    tiny = np.finfo(np.float64).tiny
    noise = -np.log(-np.log(np.maximum(uniform, tiny)))
    return torch.from_numpy(noise.astype(np.float32))


def _narrow(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Set what top-k, then top-p, then min-p exclude to -inf; the best token always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    device = logits.device
    top_k = torch.tensor([s.top_k if s.top_k > 0 else vocab for s in settings], device=device)
    top_p = torch.tensor([s.top_p for s in settings], device=device)
    min_p = torch.tensor([s.min_p for s in settings], device=device)
    rank = torch.arange(vocab, device=device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -math.inf)
    probs = ordered.softmax(-1)
    # A token stays while the mass before it is below top_p, so the one that crosses it stays too.
    before = probs.double().cumsum(-1) - probs
    excluded = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    excluded[:, 0] = False
    ordered = ordered.masked_fill(excluded, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _top_logprobs(
    scores: Tensor, lse: Tensor, used: Sequence[int], samples: Sequence[SampleState]
) -> dict[int, tuple[tuple[int, float], ...]]:
    counts = {i: s.sampling.top_logprobs for i, s in enumerate(samples) if s.sampling.top_logprobs}
    if not counts:
        return {}
    index = torch.tensor([used[i] for i in counts], device=scores.device)
    values, ids = (scores[index] - lse[index][:, None]).topk(max(counts.values()), -1)
    return {
        i: tuple(zip(ids[j].tolist(), values[j].tolist(), strict=True))[:count]
        for j, (i, count) in enumerate(counts.items())
    }
