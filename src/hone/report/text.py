"""Numbers as text.

In:   rewards, changes with their intervals, seconds, counts
Out:  text
"""

from hone.report.estimate import Estimate
from hone.report.history import Validation

MINUS = "\u2212"


def number(value: float | None) -> str:
    """A reward, with two decimals."""
    if value is None:
        return "none"
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return "0.00" if text == "-0.00" else text.replace("-", MINUS)


def signed(value: float) -> str:
    return f"{'' if value < 0 else '+'}{number(value)}"


def interval(change: Estimate, *, paired: bool = True) -> str:
    """A change with its interval; `paired`: it is a mean over the changes of examples."""
    if known := ends(change):
        return f"{signed(change.mean)} (95% interval {known})"
    if change.n < 2 or not paired:
        return signed(change.mean)
    if change.low is None and change.mean == 0:
        return f"{signed(change.mean)} (no example changed)"
    nearly = "" if change.low is None else "nearly "
    return f"{signed(change.mean)} (all examples changed {nearly}alike)"


def ends(change: Estimate) -> str:
    """The interval of a change; empty if it has none, or none that two decimals can show."""
    if change.low is None or change.high is None or signed(change.low) == signed(change.high):
        return ""
    return f"{signed(change.low)} to {signed(change.high)}"


def p_value(change: Estimate) -> str:
    """The p value as text; empty if it is not known."""
    if change.p is None:
        return ""
    return "p < 0.001" if change.p < 0.001 else f"p = {change.p:.{3 if change.p < 0.1 else 2}f}"


def failed(validation: Validation) -> str:
    """Policy failures and examples without a reward; empty for none."""
    text, n = "", validation.policy_failures
    if n and validation.failure_rate is not None:
        reward = number(validation.failure_reward)
        share = f"{validation.failure_rate:.0%}"
        text = f", {counted(n, 'policy failure')} ({share}), each counted as {reward}"
    if validation.unscored:
        text += f", {validation.unscored} of {validation.num_examples} examples not scored"
    return text


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = max(0, round(seconds))
    if whole < 10 and seconds != whole:
        return f"{max(seconds, 0):.1f} s"
    units = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")]
    units.append((whole % 60, "s"))
    largest = next((i for i, (n, _) in enumerate(units) if n), -1)
    return " ".join(f"{n} {unit}" for n, unit in units[largest:][:2] if n) or "0 s"


def have(number: int) -> str:
    """A number with its verb: `1 has` or `2 have`."""
    return f"{number:,} {'has' if number == 1 else 'have'}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
