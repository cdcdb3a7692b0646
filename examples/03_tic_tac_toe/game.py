"""Tic-tac-toe: the rules, and the value of every position.

In:   a board: nine characters, X, O, or the digit of a free cell ("1234X6789")
Out:  the winner, the free cells, the value of a position for a player

Values are cached by board and player. Cached by board alone, they would be those of X games or of O
games, whichever came first in the process. Every game is searched to its end without pruning: a
pruned search returns bounds, and a cached bound is not a value.
"""

from functools import cache
from statistics import fmean

EMPTY = "123456789"
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def winner(board: str) -> str | None:
    """X or O if either has three in a row, else None."""
    for line in LINES:
        a, b, c = (board[int(i)] for i in line)
        if a == b == c:  # free cells differ from each other
            return a
    return None


def free(board: str) -> list[str]:
    """The digits of the free cells."""
    return [cell for cell in board if cell.isdigit()]


def turn(board: str) -> str:
    """The player to move; X starts."""
    return "X" if board.count("X") == board.count("O") else "O"


@cache
def worth(board: str, mark: str) -> float:
    """Expected result for `mark` with best moves against random ones: 1 won, 0.5 drawn, 0 lost.

    It is exactly 1 only if the win cannot be prevented: a random opponent can make any move.
    """
    if won := winner(board):
        return float(won == mark)
    mover = turn(board)
    values = [worth(board.replace(cell, mover), mark) for cell in free(board)]
    if not values:
        return 0.5
    return max(values) if mover == mark else fmean(values)
