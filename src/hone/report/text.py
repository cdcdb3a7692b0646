"""Numbers as people read them.

In:   rewards, changes with their intervals, seconds, counts
Out:  text
"""

from hone.report.estimate import Estimate
from hone.report.validations import Validation

MINUS = "\u2212"


def number(value: float | None) -> str:
    """A reward in words."""
    if value is None:
        return "none"
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return "0.00" if text == "-0.00" else text.replace("-", MINUS)


def interval(found: Estimate) -> str:
    """A change with its interval, in words."""
    change = signed(found.mean)
    if found.low is None or found.high is None:
        return change
    return f"{change} (95% interval {signed(found.low)} to {signed(found.high)})"


def p_value(found: Estimate) -> str:
    """How often chance alone makes such a change, in words; empty where that is not known."""
    if found.p is None:
        return ""
    return (
        "p < 0.001"
        if found.p < 0.001
        else f"p = {found.p:.3f}"
        if found.p < 0.1
        else f"p = {found.p:.2f}"
    )


def failed(validation: Validation) -> str:
    """Failures of the model and examples without a reward, in words; empty for none."""
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
    """Of something measured when so many epochs were trained."""
    return f"after {counted(epochs, 'epoch')}" if epochs else "before the training"


def counted(number: int, noun: str) -> str:
    """With its plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
