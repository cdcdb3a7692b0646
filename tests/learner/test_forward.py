"""The trie against the unshared computation: the same loss and the same gradients.

The oracle runs every call by itself, causally, with all logits, through autograd's own graph.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hone.learner.forward import row_logprobs
from hone.learner.loss import RowLabels, row_loss, weights
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.types import TrainConfig

VOCAB = 512


def random_samples(seed: int, *, depth: int = 6) -> list[Sample]:
    """Calls along a random trie: branches at up to `depth` levels, repeats, conversations."""
    rng = np.random.default_rng(seed)
    calls: list[LabelledCall] = []

    def grow(path: list[int], level: int) -> None:
        path = path + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        if len(path) > 1 and (level == depth or rng.random() < 0.5):
            for _ in range(rng.integers(1, 3)):  # identical completions
                prompt = int(rng.integers(1, len(path)))
                count = len(path) - prompt
                places = np.flatnonzero(rng.random(count) < 0.8)
                calls.append(
                    LabelledCall(
                        ids=np.array(path),
                        prompt=prompt,
                        places=places if len(places) else np.array([count - 1]),
                        logprobs=rng.normal(-5, 1, count),
                        exact=bool(rng.random() < 0.8),
                        temperature=float(rng.choice([1.0, 0.7])),
                        advantage=float(rng.uniform(0.5, 1.5)),
                    )
                )
        if level < depth:
            for _ in range(rng.integers(1, 3) if len(calls) < 24 else 1):
                grow(path, level + 1)

    grow([], 1)
    # Several calls of one rollout, wherever in the trie they lie.
    order = rng.permutation(len(calls))
    cuts = np.sort(rng.integers(0, len(calls), 3))
    parts = [part for part in np.split(order, cuts) if len(part)]
    return [Sample(0, i, tuple(calls[c] for c in part)) for i, part in enumerate(parts)]


def unshared_logprobs(decoder: Decoder, lora: Lora, samples: list[Sample]) -> Tensor:
    """Of every label in order, one call at a time."""

    def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1).reshape(q.shape[2], -1)

    values = []
    for call in (call for sample in samples for call in sample.calls):
        ids = torch.from_numpy(call.ids)
        hidden = decoder.hidden_for_training(ids, torch.arange(len(ids)), causal, lora)
        logprobs = (decoder.logits(hidden) / call.temperature).log_softmax(-1)
        at = call.prompt + torch.from_numpy(call.places)
        values.append(logprobs[at - 1, ids[at]])
    return torch.cat(values)


def gradients(lora: Lora) -> Tensor:
    grads = []
    for _, leaf in lora.parameters():
        assert leaf.grad is not None
        grads.append(leaf.grad.flatten())
        leaf.grad = None
    return torch.cat(grads)


def compare(
    decoder: Decoder, lora: Lora, samples: list[Sample], config: TrainConfig
) -> tuple[float, float]:
    """Error of the loss, relative; of the gradient, relative to its norm."""
    lora.trainable_()
    new = unshared_logprobs(decoder, lora, samples)
    assert config.row_tokens is not None
    batch = pack(samples, row_tokens=config.row_tokens)
    labels = batch.labels
    noise = torch.from_numpy(np.random.default_rng(1).normal(0, 0.2, len(labels)))
    old = (new.detach().double() + noise).clamp(max=0)
    weight = weights(labels, config)

    def pick(at: Tensor) -> RowLabels:
        return RowLabels(
            old=old[at], sampler=labels.sampler_logprob[at], exact=labels.exact[at],
            advantage=labels.advantage[at], weight=weight[at], reference=old[at] - 0.1,
        )  # fmt: skip

    expected, _ = row_loss(new, pick(torch.arange(len(labels))), config)
    expected.backward()
    expected_grad = gradients(lora)
    actual = 0.0
    for row in batch.rows:
        logprobs, _ = row_logprobs(decoder, row, labels, lora)
        loss, _ = row_loss(logprobs, pick(row.label), config)
        loss.backward()
        actual += loss.item()
    error = (gradients(lora) - expected_grad).norm() / expected_grad.norm()
    return abs(actual / expected.item() - 1), error.item()


@settings(deadline=None, max_examples=10, derandomize=True)  # tolerances are not proofs
@given(
    seed=st.integers(0, 10**6),
    row_tokens=st.sampled_from([1, 60, 1000]),
    loss=st.sampled_from(["grpo", "dapo", "dr_grpo", "cispo"]),
    beta=st.sampled_from([0.0, 0.1]),
)
def test_trie_equals_unshared_in_float64(
    decoder64: Decoder, make_lora: Callable[..., Lora], seed, row_tokens, loss, beta
):
    config = TrainConfig(loss=loss, row_tokens=row_tokens, beta=beta)
    errors = compare(decoder64, make_lora(decoder64), random_samples(seed), config)
    assert max(errors) < 1e-6, errors


@settings(deadline=None, max_examples=10, derandomize=True)  # tolerances are not proofs
@given(seed=st.integers(0, 10**6), row_tokens=st.sampled_from([1, 60, 1000]))
def test_trie_equals_unshared_in_float32(
    decoder: Decoder, make_lora: Callable[..., Lora], seed, row_tokens
):
    config = TrainConfig(row_tokens=row_tokens)
    loss_error, grad_error = compare(decoder, make_lora(decoder), random_samples(seed), config)
    assert loss_error < 1e-6 and grad_error < 1e-5, (loss_error, grad_error)


def test_the_random_tries_are_what_they_claim():
    def levels(seed: int) -> int:
        (row,) = pack(random_samples(seed), row_tokens=10**6).rows
        parents = [s.ancestors[-1][1] if s.ancestors else -1 for s in row.segments]
        depth: dict[int, int] = {-1: 0}
        for segment, parent in zip(row.segments, parents, strict=True):
            depth[segment.stop] = depth[parent] + 1
        return max(depth.values())

    # cut ones and deep ones do occur
    assert max(levels(seed) for seed in range(40)) == 6
    assert len(pack(random_samples(3), row_tokens=60).rows) > 1
    labels = pack(random_samples(3), row_tokens=60).labels
    assert not labels.exact.all() and labels.exact.any()
    assert len(labels.rollout.unique()) < len(labels.call.unique())


@pytest.mark.parametrize("windows", [(4, None), (1, 7), (3, 3)])
def test_sliding_windows(decoder64: Decoder, make_lora: Callable[..., Lora], windows):
    """An ancestor at distance >= window is invisible, on every layer by its own window."""
    config = dataclasses.replace(decoder64.config, windows=windows)
    short = Decoder(
        config, embedding=decoder64.embedding, head=decoder64.head, norm=decoder64.norm,
        layers=decoder64.layers,
    )  # fmt: skip
    lora = make_lora(decoder64)
    samples = random_samples(11)

    def windowed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, window = len(q), windows[layer] or len(q)
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        mask = (distance >= 0) & (distance < window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(n, -1)

    batch = pack(samples, row_tokens=50)
    for row in batch.rows:
        logprobs, _ = row_logprobs(short, row, batch.labels, lora)
        for value, label in zip(logprobs, row.label.tolist(), strict=True):
            call = [c for s in samples for c in s.calls][int(batch.labels.call[label])]
            first = int((batch.labels.call < batch.labels.call[label]).sum())
            at = call.prompt + int(call.places[label - first])
            ids = torch.from_numpy(call.ids[:at])
            hidden = short.hidden_for_training(ids, torch.arange(at), windowed, lora)
            expected = (short.logits(hidden[-1]) / call.temperature).log_softmax(-1)[call.ids[at]]
            assert value.item() == pytest.approx(expected.item(), abs=1e-9)
        break


def test_a_pass_without_gradients_gives_the_bits_of_one_with_them(
    decoder: Decoder, make_lora: Callable[..., Lora]
):
    lora = make_lora(decoder).trainable_()
    batch = pack(random_samples(5), row_tokens=1000)
    with torch.no_grad():
        before, _ = row_logprobs(decoder, batch.rows[0], batch.labels, lora)
        assert not before.requires_grad
        for _, leaf in lora.parameters():
            leaf.mul_(1.5)
        after, _ = row_logprobs(decoder, batch.rows[0], batch.labels, lora)
    live, _ = row_logprobs(decoder, batch.rows[0], batch.labels, lora)
    assert live.requires_grad
    assert torch.equal(after, live) and not torch.equal(before, after)
