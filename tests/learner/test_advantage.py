"""Rewards to advantages, with numbers computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learner.advantage import advantages
from hone.trajectory import call_values, is_flat


def test_mean_is_subtracted_and_spread_divided_out():
    # 1 0 0 1: mean 1/2, population variance 1/4, standard deviation 1/2
    assert advantages([[1.0], [0.0], [0.0], [1.0]], scale=False) == [[0.5], [-0.5], [-0.5], [0.5]]
    scaled = advantages([[1.0], [0.0], [0.0], [1.0]], scale=True)
    assert scaled is not None
    # 0.5 / (0.5 + 1e-6)
    assert [row[0] for row in scaled] == pytest.approx([0.999998, -0.999998, -0.999998, 0.999998])


def test_population_and_not_sample_deviation():
    # 3 0 0: mean 1, variance (4 + 1 + 1) / 3 = 2
    scaled = advantages([[3.0], [0.0], [0.0]], scale=True)
    assert scaled is not None
    assert scaled[0][0] == pytest.approx(2 / 2**0.5, rel=1e-5)


def test_calls_are_compared_at_the_same_index():
    # column 0: 1 3 -> mean 2; column 1: 5 only, compared with itself
    assert advantages([[1.0, 5.0], [3.0]], scale=False) == [[-1.0, 0.0], [1.0]]


def test_equal_rewards_have_no_advantage_even_with_rounding():
    assert advantages([[0.3], [0.1 + 0.2]], scale=True) is None
    assert advantages([[0.0], [0.0]], scale=True) is None
    assert advantages([[5.0]], scale=True) is None
    assert advantages([], scale=True) is None
    assert not is_flat([1000.0, 1000.1])
    assert not is_flat([0.0, 1e-9])  # relative: small rewards are still rewards


def test_credit():
    assert call_values(7.0, None, "outcome") == [7.0]
    assert call_values(7.0, [1.0, 2.0, 4.0], "per_call") == [1.0, 2.0, 4.0]
    assert call_values(7.0, [1.0, 2.0, 4.0], "return_to_go") == [7.0, 6.0, 4.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.booleans())
def test_advantages_add_up_to_zero(rewards: list[float], scale: bool):
    result = advantages([[r] for r in rewards], scale=scale)
    if result is None:
        assert is_flat(rewards)
    else:
        assert sum(row[0] for row in result) == pytest.approx(0, abs=1e-6)
        best = max(range(len(rewards)), key=rewards.__getitem__)
        assert result[best][0] == max(row[0] for row in result) > 0
