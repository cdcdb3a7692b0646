"""report/text.py: numbers as people read them."""

from hone.report.estimate import Estimate
from hone.report.text import counted, duration, ends, interval, number, signed


def test_rewards_have_two_digits_and_no_negative_zero():
    assert [number(v) for v in (0.125, -0.5, 0.0, -0.004, -1234.5, None)] == [
        *("0.12", "\u22120.50", "0.00", "0.00", "\u22121,234", "none")
    ]
    assert [signed(v) for v in (0.5, -0.5, 0.0, -0.004)] == ["+0.50", "\u22120.50", "+0.00", "0.00"]


def test_changes_name_their_interval_where_there_is_one():
    assert interval(Estimate(0.25, -0.5, 1.0, 7)) == "+0.25 (95% interval \u22120.50 to +1.00)"
    assert interval(Estimate(0.25, None, None, 1)) == "+0.25"


def test_an_interval_without_width_is_not_printed_as_one():
    assert interval(Estimate(0.5, None, None, 8)) == "+0.50 (all examples changed alike)"
    assert interval(Estimate(0.0, None, None, 8)) == "+0.00 (no example changed)"
    narrow = Estimate(0.5, 0.4999, 0.5001, 8)
    assert interval(narrow) == "+0.50 (all examples changed nearly alike)"
    assert ends(narrow) == "" == ends(Estimate(0.5, None, None, 8))
    assert interval(Estimate(0.5, None, None, 8), paired=False) == "+0.50"


def test_the_two_largest_units_of_time():
    # 3 h 4 min 5 s are 11045 s; 3 d 2 h are 266400 s.
    assert [duration(s) for s in (0.25, 9, 61.2, 120, 11045, 266400)] == [
        *("0.2 s", "9 s", "1 min 1 s", "2 min", "3 h 4 min", "3 d 2 h")
    ]


def test_singular_and_plural():
    assert [counted(n, "epoch") for n in (0, 1, 2000)] == ["0 epochs", "1 epoch", "2,000 epochs"]
