"""One game of tic-tac-toe: a model against an opponent that moves at random.

In:   "X 17": the model's mark, and the seed of the opponent
Out:  Win!, Lose!, Draw!, or Forfeit! if TRIES answers in a row name no free cell

hone.step records a value for every answer; `credit: per_call` trains each answer by its own value.
"""

import random
from typing import Any

from game import EMPTY, free, turn, winner, worth

import hone

TRIES = 2
ILLEGAL = -0.5
SYSTEM = "You play tic-tac-toe as {}. Answer with the number of a free cell."
# One example. Without it, a small model answers in prose and never makes a move to learn from.
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
    """The free cell that the model names, or None; adds the conversation to `messages`."""
    notice = ""
    for _ in range(TRIES):
        messages.append({"role": "user", "content": notice + show(board)})
        completion = await llm.client.chat.completions.create(
            model=llm.model, messages=messages, **llm.params
        )
        answer = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        if answer.strip() in free(board):
            return answer.strip()
        hone.step("illegal", value=ILLEGAL, answer=answer)
        notice = "Not free.\n"
    return None


def show(board: str) -> str:
    """The board as three rows, with numbers for free cells; spaces would double the tokens."""
    return "\n".join(board[i : i + 3] for i in (0, 3, 6))
