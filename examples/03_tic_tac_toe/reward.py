"""Rewards for a game: `won` for reports, `shaped` for training.

In:   the result of a game, and the values of its answers
Out:  a number between 0 and 1, or slightly below 0 if every answer was illegal

A random opponent does not punish most bad moves. The values of the moves assume perfect play and
say more about a game than its result.
"""

from statistics import fmean

from hone.capture.base import Step

RESULTS = {"Win!": 1.0, "Draw!": 0.5, "Lose!": 0.0, "Forfeit!": 0.0}


def won(output: str) -> float:
    """1 for a win; 0 for a loss, a draw or a forfeit."""
    return float(output == "Win!")


def shaped(output: str, steps: list[Step]) -> float:
    """The mean of the result and the average value of the answers."""
    values = [step.value for step in steps if step.value is not None]
    return (RESULTS[output] + fmean(values)) / 2
