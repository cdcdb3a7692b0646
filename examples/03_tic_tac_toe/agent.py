"""One game of tic-tac-toe: a model against an opponent that moves at random.

In:   "X 17": the model's mark, and the seed of the opponent
Out:  Win!, Lose!, Draw!, or Forfeit! where TRIES answers in a row named no free cell

Every answer is valued when it is given, with hone.step; `credit: per_call` trains each by its own.
"""

import random
from typing import Any

from game import EMPTY, free, turn, winner, worth

import hone

TRIES = 2
ILLEGAL = -0.5
SYSTEM = "You play tic-tac-toe as {}. Answer with the number of a free cell."
# The one example: without it a small model answers in prose, and never makes a move to learn from.
EXAMPLE = ("1O34X67X9", "3")


async def play(game: str, llm: Any) -> str:
    """Play one game; the conversation grows with every move."""
    mark, seed = game.split()
    opponent = random.Random(int(seed))
    messages = [
        {"role": "system", "content": SYSTEM.format(mark)},
        {"role": "user", "content": show(EXAMPLE[0])},
        {"role": "assistant", "content": EXAMPLE[1]},
    ]
    board = EMPTY
    while free(board) and not winner(board):
        if turn(board) != mark:
            board = board.replace(opponent.choice(free(board)), turn(board))
            continue
        cell = await _move(board, messages, llm)
        if cell is None:
            return "Forfeit!"
        board = board.replace(cell, mark)
        hone.step("move", value=worth(board, mark), board=board)
    won = winner(board)
    return "Draw!" if won is None else "Win!" if won == mark else "Lose!"


async def _move(board: str, messages: list[dict[str, str]], llm: Any) -> str | None:
    """A free cell, if the model names one; what was said is added to the messages."""
    said = ""
    for _ in range(TRIES):
        messages.append({"role": "user", "content": said + show(board)})
        completion = await llm.client.chat.completions.create(
            model=llm.model, messages=messages, **llm.params
        )
        answer = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        if answer.strip() in free(board):
            return answer.strip()
        hone.step("illegal", value=ILLEGAL, answer=answer)
        said = "Not free.\n"
    return None


def show(board: str) -> str:
    """Three rows; a free cell is its number. Without spaces: they would double the tokens."""
    return "\n".join(board[i : i + 3] for i in (0, 3, 6))
