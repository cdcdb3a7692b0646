"""What a game was worth.

In:   the result of a game, and the values of its answers
Out:  a number between 0 and 1 (or a little less than 0, where every answer was illegal)

Against an opponent that moves at random, most bad moves go unpunished. The values of the moves,
which are those of perfect play, say more about a game than its result does.
"""

from statistics import fmean

from hone.capture.base import Step

RESULTS = {"Win!": 1.0, "Draw!": 0.5, "Lose!": 0.0, "Forfeit!": 0.0}


def won(output: str) -> float:
    """1 for a game won; neither a draw nor a forfeit is one."""
    return float(output == "Win!")


def shaped(output: str, steps: list[Step]) -> float:
    """Half the result, half the mean value of the answers."""
    values = [step.value for step in steps if step.value is not None]
    return (RESULTS[output] + fmean(values)) / 2
