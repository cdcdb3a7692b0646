"""report/estimate.py: intervals and p values by hand; how often equal policies look different."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hone.report.estimate import (
    ALPHA,
    Estimate,
    changes,
    estimate,
    gain,
    sign_flip_p,
    unpaired_gain,
)


def pairs(deltas: list[float]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Rewards of examples that change by so much."""
    return (
        {str(i): [0.0] for i in range(len(deltas))},
        {str(i): [d] for i, d in enumerate(deltas)},
    )


# ---- intervals ------------------------------------------------------------------------------------


def test_nothing_has_no_mean_and_one_example_no_interval():
    assert estimate([]) is None
    assert estimate([0.5]) == Estimate(0.5, None, None, 1)


def test_an_interval_is_students():
    # Mean 2; four squares of 1 over 3; t(0.975, 3 degrees of freedom) = 3.1824.
    result = estimate([1.0, 1.0, 3.0, 3.0])
    assert result is not None
    spread = (4 / 3) ** 0.5
    assert result.low == pytest.approx(2 - 3.1824 * spread / 2, abs=1e-3)
    assert result.high == pytest.approx(2 + 3.1824 * spread / 2, abs=1e-3)


def test_a_mean_of_rewards_between_0_and_1_stays_there():
    # t(0.975, 1 degree) = 12.7, so the interval of two examples would reach from -5.9 to 6.9.
    assert estimate([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)
    wider = estimate([0.0, 2.0])
    assert wider is not None and wider.low is not None and wider.low < -10


def test_equal_values_have_no_interval():
    """Without any spread nothing says how far the mean is from that of other examples."""
    third = 0.1 + 0.2
    assert estimate([third] * 7) == Estimate(third, None, None, 7)
    result = gain(*pairs([0.5] * 8))
    # Eight changes of one sign: p = 2 / 2**8.
    assert result is not None and result.p == pytest.approx(2 / 2**8)
    assert (result.mean, result.low, result.high, result.n) == (0.5, None, None, 8)
    apart = unpaired_gain({f"a{i}": [0.0] for i in range(5)}, {f"b{i}": [1.0] for i in range(5)})
    assert apart is not None and apart.p == pytest.approx(2 / 252)
    assert (apart.mean, apart.low, apart.high, apart.n) == (1.0, None, None, 5)


# ---- changes --------------------------------------------------------------------------------------


def test_a_gain_pairs_examples_and_each_counts_once():
    before = {"a": [0.0, 1.0], "b": [0.25], "gone": [1.0], "empty": []}
    after = {"a": [1.0], "b": [0.25, 0.75], "new": [0.0], "empty": [1.0]}
    # a: 1 - 0.5 = 0.5; b: 0.5 - 0.25 = 0.25; the others are not in both. Mean 0.375.
    assert changes(before, after) == {"a": 0.5, "b": 0.25}
    result = gain(before, after)
    assert result is not None
    assert (result.mean, result.n) == (0.375, 2)
    # Four sign patterns: 0.75, 0.25, -0.25, -0.75. One is as large, so p = 2 * 1/4.
    assert result.p == pytest.approx(0.5)


def test_rewards_between_0_and_1_change_by_at_most_1():
    result = gain({"a": [0.0], "b": [0.0]}, {"a": [0.25], "b": [1.0]})
    assert result is not None and (result.low, result.high) == (-1.0, 1.0)
    wide = gain({"a": [0.0], "b": [0.0]}, {"a": [0.5], "b": [2.0]})
    assert wide is not None and wide.high is not None and wide.high > 2
    # So they do between different examples: two of 0 and 0.5, then two of 0.5 and 1.
    apart = unpaired_gain({"a": [0.0], "b": [0.5]}, {"c": [0.5], "d": [1.0]})
    assert apart is not None and (apart.low, apart.high) == (-1.0, 1.0)


def test_no_pairs_no_gain():
    assert gain({"a": [1.0]}, {"b": [1.0]}) is None


@pytest.mark.parametrize(
    ("deltas", "p"),
    [
        ([1.0] * 5, 2 / 2**5),  # five of one sign are not certain
        ([1.0] * 6, 2 / 2**6),  # six are
        ([-1.0] * 6, 2 / 2**6),
        ([1.0] * 6 + [0.0] * 4, 2 / 2**6),  # examples that did not change say nothing
        # Of 2**7 patterns the sum is 7 in one and 5 in seven: 2 * 8 / 128.
        ([1.0] * 6 + [-1.0], 2 * 8 / 2**7),
        ([0.0] * 8, 1.0),
        # As large as the sum 3.7: all positive, or 0.1 flipped for 3.5, which is not. p = 2 / 2**7.
        ([0.6] * 6 + [0.1], 2 / 2**7),
    ],
)
def test_p_values_by_counting(deltas: list[float], p: float):
    result = gain(*pairs(deltas))
    assert result is not None
    assert result.p == pytest.approx(p)
    assert result.certain is (p <= 0.05)


def test_pairing_sees_what_means_alone_would_not():
    # Examples from 0 to 0.98 that each gain 0.01: a change far smaller than they differ, and sure.
    before = {str(i): [i / 50] for i in range(50)}
    after = {str(i): [i / 50 + 0.01] for i in range(50)}
    result = gain(before, after)
    assert result is not None and result.certain
    assert result.mean == pytest.approx(0.01)
    assert result.low == pytest.approx(0.01) and result.high == pytest.approx(0.01)


def test_a_step_chosen_among_several_must_be_better_by_more():
    before, after = pairs([1.0] * 6 + [0.0] * 2)
    other = changes(*pairs([1.0] * 5 + [-1.0] + [0.0] * 2))
    alone, chosen = gain(before, after), gain(before, after, others=[other])
    assert alone is not None and chosen is not None
    # Flips that make one of the two changes 6: all as they are, or the sixth alone. 2 * 2 / 2**6.
    assert alone.p == pytest.approx(2 / 2**6)
    assert chosen.p == pytest.approx(4 / 2**6) and not chosen.certain
    assert (chosen.mean, chosen.low, chosen.high) == (alone.mean, alone.low, alone.high)
    # Copies of one policy are one policy.
    copies = gain(before, after, others=[changes(before, after)] * 2)
    assert copies is not None and copies.p == pytest.approx(alone.p)
    # The p value is that of `after`, also where another policy changed by more. Its change is 4, the
    # other's 6. Flips of six examples that make one of them at least 4: none or one of the six
    # flipped (7), or the last two flipped, which are not in `after` (1). 2 * 8 / 2**6.
    smaller = gain(*pairs([1.0] * 4 + [0.0] * 4), others=[changes(before, after)])
    assert smaller is not None and smaller.p == pytest.approx(0.25)


def test_different_examples_are_compared_by_their_means():
    before = {f"a{i}": [i / 10] for i in range(5)}
    after = {f"b{i}": [1 + i / 10] for i in range(5)}
    result = unpaired_gain(before, after)
    assert result is not None and result.low is not None and result.high is not None
    assert result.mean == pytest.approx(1.0) and result.n == 5
    # 10 over 5 = 252 ways to deal ten rewards out; one is as extreme, in each direction.
    assert result.p == pytest.approx(2 / 252)
    # Variances of 0.025 over 5 each: a standard error of 0.1, 8 degrees of freedom, t = 2.306.
    assert result.low == pytest.approx(1 - 0.2306, abs=1e-3)
    assert unpaired_gain({"a": [1.0]}, {}) is None
    assert unpaired_gain({"a": [1.0]}, {"b": [0.5]}) == Estimate(-0.5, None, None, 1)


# ---- how often chance alone is certain ------------------------------------------------------------

DRAWS = 2000
REWARDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape) ** 2,
    "0 or 1": lambda rng, shape: (rng.random(size=shape) < 0.4).astype(float),
}


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("n", [6, 10, 24])
def test_equal_policies_are_told_apart_in_at_most_6_percent(n: int, rewards: str):
    rng = np.random.default_rng(n)
    arms = REWARDS[rewards](rng, (DRAWS, 2, n))
    p = sign_flip_p(arms[:, 1:] - arms[:, :1])
    assert np.mean(p <= ALPHA) <= 0.06
    # What a report says is that very number.
    before, after = ({str(i): [float(r)] for i, r in enumerate(arm)} for arm in arms[0])
    result = gain(before, after)
    assert result is not None and result.p == pytest.approx(p[0])


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize(("n", "alike"), [(6, False), (10, False), (10, True)])
def test_the_best_of_five_equal_policies_is_told_apart_in_at_most_6_percent(
    n: int, alike: bool, rewards: str
):
    """Also where the steps of a run answer alike, as those of a small learning rate do."""
    rng = np.random.default_rng(n)
    arms = REWARDS[rewards](rng, (DRAWS, 6, n))
    if alike:
        arms[:, 2:] = np.where(rng.random(size=(DRAWS, 4, n)) < 0.9, arms[:, 1:2], arms[:, 2:])
    changed = arms[:, 1:] - arms[:, :1]
    assert np.mean(sign_flip_p(changed) <= ALPHA) <= 0.06
    if not alike and (n, rewards) == (10, "normal"):  # and without it the test would be wrong
        best = np.take_along_axis(changed, changed.mean(-1).argmax(-1)[:, None, None], 1)
        assert np.mean(sign_flip_p(best) <= ALPHA) > 0.06


def test_a_true_gain_is_found():
    # Half of 24 examples become right: the p value of 12 of one sign is 2 / 2**12.
    result = gain(*pairs([1.0] * 12 + [0.0] * 12))
    assert result is not None and result.p is not None
    assert result.p <= 0.005 and result.excludes_zero


def test_scipy_is_loaded_when_a_number_needs_it():
    code = "import sys, hone.report.estimate; print('scipy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
