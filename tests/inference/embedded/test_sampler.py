"""Draws: exact distribution, and no dependence on rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.inference.base import SampledToken, Sampling
from hone.inference.embedded.sampler import SampleState, block_size, draw, random_stream
from hone.inference.grammar import Matcher


def rows(count: int, **way: float) -> list[SampleState]:
    return [SampleState(Sampling(seed=0, **way), random_stream(0, i)) for i in range(count)]  # type: ignore[arg-type]


def test_block_size_is_about_the_root():
    # sqrt(49152) = 221.7 -> 256; sqrt(151936) = 389.8 -> 512; sqrt(512) = 22.6 -> 32
    assert [block_size(v) for v in (49152, 151936, 512)] == [256, 512, 32]


def test_logprobs_are_scaled_by_the_temperature():
    # Logits ln 1, ln 4 at temperature 2 are ln 1, ln 2: probabilities 1/3 and 2/3.
    (token,) = draw(torch.tensor([[0.0, math.log(4)]]), [0], rows(1, temperature=2.0))
    assert token.logprob == pytest.approx(math.log((1 + token.id) / 3), abs=1e-6)


def test_narrowing_by_hand():
    # Probabilities .5 .25 .125 .125; top_k 3 leaves .875; then top_p .7 keeps .5/.875 = .571 and
    # the next, which crosses .7; so .75 is the mass left.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    seen = {}
    for i in range(64):
        (token,) = draw(
            logits.clone(), [0], [SampleState(Sampling(top_k=3, top_p=0.7), random_stream(1, i))]
        )
        seen[token.id] = token
    assert set(seen) == {0, 1}
    assert seen[1].logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert seen[1].masked_logprob == pytest.approx(math.log(0.25 / 0.75), abs=1e-6)


def test_greedy_is_the_mode_even_where_its_block_is_light():
    # 64 tokens in blocks of 8: token 5 is the largest, but the block of 8..15 sums to more.
    logits = torch.full((1, 64), -20.0)
    logits[0, 5] = 1.0
    logits[0, 8:16] = 0.9
    (token,) = draw(logits, [0], rows(1, temperature=0.0))
    assert token.id == 5


def test_rounding_of_logits_does_not_change_draws():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 49152, generator=generator) * 3
    noisy = logits + torch.randn(logits.shape, generator=generator) * 5e-7
    one = [t.id for t in draw(logits.clone(), range(256), rows(256))]
    two = [t.id for t in draw(noisy, range(256), rows(256))]
    assert one == two


def test_samples_of_one_row_draw_as_if_each_had_a_row_of_its_own():
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)) * 3
    rows = [2, 0, 0, 2, 0, 0, 2]
    temperatures = [1.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.5]
    top_k = [0, 0, 0, 5, 0, 0, 0]

    def states() -> list[SampleState]:
        ways = zip(temperatures, top_k, strict=True)
        return [
            SampleState(Sampling(temperature=t, top_k=k, top_logprobs=2), random_stream(7, i))
            for i, (t, k) in enumerate(ways)
        ]

    shared = draw(logits.clone(), rows, states())
    own = draw(logits[rows].clone(), range(7), states())
    assert [t.id for t in shared] == [t.id for t in own]
    for one, other in zip(shared, own, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert one.masked_logprob == pytest.approx(other.masked_logprob, abs=1e-6)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
    expected = logits.log_softmax(-1)
    assert shared[1].logprob == pytest.approx(expected[0, shared[1].id].item(), abs=1e-5)
    assert shared[3].masked_logprob is not None and shared[0].masked_logprob is None


def test_a_stream_depends_on_seed_and_sample_only():
    assert random_stream(3, 1).random() == random_stream(3, 1).random()
    assert (
        len(
            {
                random_stream(3, 1).random(),
                random_stream(3, 2).random(),
                random_stream(4, 1).random(),
            }
        )
        == 3
    )


class Fixed(Matcher):
    """Allows the same tokens at every place."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.error = ""

    def allowed(self) -> np.ndarray:
        return self.mask


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 70),
    temperature=st.sampled_from([1.0, 0.5, 2.0, 0.0]),
    data=st.data(),
)
def test_a_mask_renormalises_and_an_empty_one_changes_nothing(
    seed: int, vocab: int, temperature: float, data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    mask = np.zeros(vocab, dtype=bool)
    mask[list(allowed)] = True

    def drawn(matcher: Matcher | None) -> SampledToken:
        sampling = Sampling(temperature=temperature)
        (token,) = draw(
            logits.clone(), [0], [SampleState(sampling, random_stream(seed, 0), matcher=matcher)]
        )
        return token

    token, plain = drawn(Fixed(mask)), drawn(None)
    logprobs = (logits[0] / (temperature or 1.0)).log_softmax(-1)
    assert token.id in allowed and token.forced == (len(allowed) == 1)
    assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=1e-4)
    if len(allowed) < vocab:
        expected = logprobs[token.id] - logprobs[sorted(allowed)].logsumexp(-1)
        assert token.masked_logprob == pytest.approx(float(expected), abs=1e-4)
    else:
        assert token == plain
    assert drawn(Fixed(np.ones(vocab, dtype=bool))) == plain


def test_masked_draws_have_the_renormalised_frequencies():
    # Probabilities .5 .25 .125 .125 without the first: .5 .25 .25 of the rest.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    mask = np.array([False, True, True, True])
    states = [
        SampleState(Sampling(), random_stream(5, i), matcher=Fixed(mask)) for i in range(4000)
    ]
    ids = [token.id for token in draw(logits, [0] * 4000, states)]
    # Standard deviations: sqrt(4000 * .25) = 32 and sqrt(4000 * .1875) = 27; four of them.
    assert ids.count(0) == 0
    assert abs(ids.count(1) - 2000) < 128
    assert abs(ids.count(2) - 1000) < 110


def test_penalties_and_bias_by_hand():
    # Logits 2, -1, 0, 1 at temperature 2; prompt 0, answer 1 1 3; penalties: repetition 2, presence
    # 0.5, frequency 0.25; bias +1 on 2.
    sampling = Sampling(
        temperature=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((2, 1.0),),
    )
    state = SampleState(sampling, random_stream(0, 0), prompt_ids=[0], ids=[1, 1, 3])
    (token,) = draw(torch.tensor([[2.0, -1.0, 0.0, 1.0]]), [0], [state])
    # 2 / 2;  -1 * 2 - 0.5 - 2 * 0.25;  0 + 1;  1 / 2 - 0.5 - 0.25
    after = torch.tensor([1.0, -3.0, 1.0, -0.25]) / 2
    assert token.masked_logprob == pytest.approx(float(after.log_softmax(-1)[token.id]), abs=1e-6)
    before = torch.tensor([2.0, -1.0, 0.0, 1.0]) / 2
    assert token.logprob == pytest.approx(float(before.log_softmax(-1)[token.id]), abs=1e-6)
    # Nothing was drawn yet, so presence and frequency change nothing.
    first = SampleState(Sampling(presence_penalty=1.0), random_stream(0, 0))
    (token,) = draw(torch.zeros(1, 4), [0], [first])
    assert token.masked_logprob is None
