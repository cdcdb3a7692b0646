"""Numbers as text.

In:   rewards, changes with their intervals, seconds, counts
Out:  text
"""

from hone.report.estimate import Estimate
from hone.report.validations import Validation

MINUS = "\u2212"


def number(value: float | None) -> str:
    """A reward, with two decimals."""
    if value is None:
        return "none"
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return "0.00" if text == "-0.00" else text.replace("-", MINUS)


def interval(change: Estimate) -> str:
    """A change with its interval."""
    if change.low is None or change.high is None:
        return signed(change.mean)
    ends = f"{signed(change.low)} to {signed(change.high)}"
    return f"{signed(change.mean)} (95% interval {ends})"


def p_value(change: Estimate) -> str:
    """Empty if the p value is not known."""
    if change.p is None:
        return ""
    if change.p < 0.001:
        return "p < 0.001"
    return f"p = {change.p:.{3 if change.p < 0.1 else 2}f}"


def failed(validation: Validation) -> str:
    """Policy failures and examples without a reward; empty for none."""
    unscored = ""
    if validation.unscored:
        unscored = f", {validation.unscored} of {validation.num_examples} examples not scored"
    if not validation.policy_failures or validation.failure_rate is None:
        return unscored
    n, rate = validation.policy_failures, validation.failure_rate
    worth = number(validation.failure_reward)
    return f", {counted(n, 'policy failure')} ({rate:.0%}), each counted as {worth}{unscored}"


def signed(value: float) -> str:
    return f"{'' if value < 0 else '+'}{number(value)}"


def duration(seconds: float) -> str:
    """The two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s" if whole >= 10 or seconds == whole else f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def when(epochs: int) -> str:
    """When a policy was measured that was trained for so many epochs."""
    return f"after {counted(epochs, 'epoch')}" if epochs else "before training"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
