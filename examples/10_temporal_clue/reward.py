"""Rewards for an answer: `right_parts` for training, `solved` for reports.

In:   the agent's answer, and the solution from the dataset: "person, weapon, room, time"
Out:  a number between 0 and 1

Only what follows the last "Answer:" counts, so that the reasoning is free.
"""

from puzzles import Solution, score


def right_parts(output: str, expected: str) -> float:
    """The share of the four parts that are right."""
    _, marker, answer = output.rpartition("Answer:")
    person, weapon, room, time = expected.split(", ")
    solution: Solution = (person, weapon, room, time)
    return score(answer, solution) if marker else 0.0


def solved(output: str, expected: str) -> float:
    """1 if all four parts are right."""
    return float(right_parts(output, expected) == 1.0)
