"""Tic-tac-toe: the rules, and what every position is worth.

In:   a board: nine characters, X, O, or the digit of a free cell ("1234X6789")
Out:  who has won, what is free, what a player can expect

A value is kept under the board and the player it is for. Kept under the board and whose turn it
is, it would be right for X-games or for O-games of one process, whichever asked first. Every game
is searched to its end, without bounds: a bound that is taken for a value is wrong later.
"""

from functools import cache
from statistics import fmean

EMPTY = "123456789"
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def winner(board: str) -> str | None:
    """X or O, if either has three in a row."""
    for line in LINES:
        a, b, c = (board[int(i)] for i in line)
        if a == b == c:  # free cells differ from each other
            return a
    return None


def free(board: str) -> list[str]:
    """The digits of the free cells."""
    return [cell for cell in board if cell.isdigit()]


def turn(board: str) -> str:
    """Who moves next; X began."""
    return "X" if board.count("X") == board.count("O") else "O"


@cache
def worth(board: str, mark: str) -> float:
    """What `mark` gets from here with the best moves against random ones: 1 won, 0.5 drawn, 0 lost.

    Exactly 1 only where the win cannot be prevented, for a random opponent finds every defence.
    """
    if won := winner(board):
        return float(won == mark)
    mover = turn(board)
    values = [worth(board.replace(cell, mover), mark) for cell in free(board)]
    if not values:
        return 0.5
    return max(values) if mover == mark else fmean(values)
