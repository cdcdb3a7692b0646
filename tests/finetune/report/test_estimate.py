"""finetune/report/estimate.py: intervals of known distributions, and gains paired by example."""

import math

import pytest

from hone.finetune.report.estimate import Estimate, changes, estimate, gain


def test_nothing_has_no_mean_and_one_example_no_interval():
    assert estimate([]) is None
    assert estimate([0.5]) == Estimate(0.5, None, None, 1)


def test_two_examples_span_both():
    # A resample of [0, 1] has mean 0, 0.5 or 1 with chances 1/4, 1/2, 1/4, so the 2.5% and the
    # 97.5% quantile are 0 and 1.
    assert estimate([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)


def test_four_examples_follow_the_binomial():
    # The mean of a resample of [0, 0, 0, 1] is k/4 with k binomial(4, 1/4): P(k <= 2) = 0.949 and
    # P(k <= 3) = 0.996, so the 97.5% quantile is 3/4; P(k = 0) = 0.316, so the 2.5% one is 0.
    assert estimate([0.0, 0.0, 0.0, 1.0]) == Estimate(0.25, 0.0, 0.75, 4)


def test_many_examples_follow_the_normal_distribution():
    # 400 of which half are 1: the standard error is sqrt(0.25 / 400) = 0.025, times 1.96 = 0.049.
    found = estimate([0.0, 1.0] * 200)
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 - 0.049, abs=0.003)
    assert found.high == pytest.approx(0.5 + 0.049, abs=0.003)


def test_equal_values_have_an_interval_without_width():
    third = 0.1 + 0.2
    assert estimate([third] * 7) == Estimate(third, third, third, 7)


def test_the_same_seed_says_the_same():
    values = [math.sin(i) for i in range(50)]
    assert estimate(values) == estimate(values)
    assert estimate(values) != estimate(values, seed=1)


def test_a_gain_pairs_examples_and_each_counts_once():
    before = {"a": [0.0, 1.0], "b": [0.25], "gone": [1.0], "empty": []}
    after = {"a": [1.0], "b": [0.25, 0.75], "new": [0.0], "empty": [1.0]}
    # a: 1 - 0.5 = 0.5; b: 0.5 - 0.25 = 0.25; the others are not in both. Mean 0.375.
    assert changes(before, after) == {"a": 0.5, "b": 0.25}
    found = gain(before, after)
    assert found is not None
    assert (found.mean, found.n) == (0.375, 2)


def test_pairing_sees_what_means_alone_would_not():
    # Examples from 0 to 0.98 that each gain 0.01: a change far smaller than they differ, and sure.
    before = {str(i): [i / 50] for i in range(50)}
    after = {str(i): [i / 50 + 0.01] for i in range(50)}
    found = gain(before, after)
    assert found is not None and found.certain
    assert found.mean == pytest.approx(0.01)
    assert found.low == pytest.approx(0.01) and found.high == pytest.approx(0.01)


def test_no_pairs_no_gain():
    assert gain({"a": [1.0]}, {"b": [1.0]}) is None


@pytest.mark.parametrize(
    ("low", "high", "n", "certain"),
    [
        (0.1, 0.5, 6, True),
        (-0.5, -0.1, 6, True),
        (0.0, 0.5, 64, False),
        (-0.1, 0.5, 64, False),
        (0.1, 0.5, 5, False),  # five coins that agree are no rarity: 2 * (1/2)**5 = 6%
        (None, None, 1, False),
    ],
)
def test_when_a_gain_is_certain(low, high, n, certain):
    assert Estimate(0.3, low, high, n).certain is certain
