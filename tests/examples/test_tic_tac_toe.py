"""examples/03_tic_tac_toe: the rules, the solver beside another one, the agent move by move."""

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.examples.conftest import EXAMPLES, scripted

from hone.capture.base import Step
from hone.capture.scope import recorded
from hone.config.schema import read
from hone.finetune.checks.documents import read_run

FOLDER = EXAMPLES / "03_tic_tac_toe"
EMPTY = "123456789"
Example = Callable[[str, str], ModuleType]


@pytest.fixture(scope="module")
def game(example: Example) -> Any:
    return example("03_tic_tac_toe", "game")


@pytest.fixture(scope="module")
def agent(example: Example, game: Any) -> Any:
    return example("03_tic_tac_toe", "agent")


@pytest.fixture(scope="module")
def reward(example: Example) -> Any:
    return example("03_tic_tac_toe", "reward")


# The solver, beside two that share nothing with it: cells as a grid of -1, 0, 1, plain recursion
# for whoever is to move, no table.


def has_lost(grid: list[list[int]], mover: int) -> bool:
    """Whether whoever is to move faces three in a row."""
    sums = [sum(row) for row in grid] + [sum(column) for column in zip(*grid, strict=True)]
    sums += [sum(grid[i][i] for i in range(3)), sum(grid[i][2 - i] for i in range(3))]
    return -3 * mover in sums


def after_each(grid: list[list[int]], mover: int, search: Callable[[], float]) -> list[float]:
    """What `search` says after every move."""
    results = []
    for r in range(3):
        for c in range(3):
            if grid[r][c] == 0:
                grid[r][c] = mover
                results.append(search())
                grid[r][c] = 0
    return results


def forced(grid: list[list[int]], mover: int) -> float:
    """What whoever is to move can enforce: 1 won, 0 drawn, -1 lost."""
    if has_lost(grid, mover):
        return -1
    return max(after_each(grid, mover, lambda: -forced(grid, -mover)), default=0)


def expected(grid: list[list[int]], mover: int, best: int) -> float:
    """For `best`, who moves best, where the other moves at random: 1 won, 0 drawn, -1 lost."""
    if has_lost(grid, mover):
        return -1 if mover == best else 1
    values = after_each(grid, mover, lambda: expected(grid, -mover, best))
    if not values:
        return 0
    return max(values) if mover == best else sum(values) / len(values)


def positions(game: Any) -> Iterator[str]:
    """Every board that can occur, breadth first."""
    seen, layer = {game.EMPTY}, [game.EMPTY]
    while layer:
        yield from layer
        following: list[str] = []
        for board in layer:
            if game.winner(board):
                continue
            for cell in game.free(board):
                after = board.replace(cell, game.turn(board))
                if after not in seen:
                    seen.add(after)
                    following.append(after)
        layer = following


def grid(board: str) -> list[list[int]]:
    cells = [{"X": 1, "O": -1}.get(cell, 0) for cell in board]
    return [cells[:3], cells[3:6], cells[6:]]


def test_there_are_as_many_positions_as_is_known(game: Any):
    boards = list(positions(game))
    assert len(boards) == 5478
    # Known, too: 958 boards end a game; 626 won by X, 316 by O, 16 drawn.
    over = [b for b in boards if game.winner(b) or not game.free(b)]
    assert len(over) == 958
    assert [sum(game.winner(b) == w for b in over) for w in ("X", "O", None)] == [626, 316, 16]


def test_every_label_is_what_brute_force_finds_for_either_player(game: Any):
    # Both players ask of every board: a table for "whoever asked first" is wrong for the other.
    for board in positions(game):
        mover = 1 if board.count("X") == board.count("O") else -1
        for mark, player in (("O", -1), ("X", 1)):
            label = game.worth(board, mark)
            if len(game.free(board)) > 5:
                # Without a table the search takes too long here; one move of it stands on labels
                # that were compared further down.
                after = [board.replace(c, "X" if mover == 1 else "O") for c in board if c in EMPTY]
                values = [game.worth(b, mark) for b in after]
                by_chance = max(values) if mover == player else sum(values) / len(values)
                by_chance = float(game.winner(board) == mark) if game.winner(board) else by_chance
            else:
                by_chance = (1 + expected(grid(board), mover, player)) / 2
                assert (label == 1.0) == (forced(grid(board), mover) * mover == player), board
            assert label == pytest.approx(by_chance, abs=1e-12), (board, mark)


def test_openings_are_won_where_it_is_known(game: Any):
    # Known of the game, with cells 1 2 3 / 4 5 6 / 7 8 9: after a corner O must take the centre;
    # after the centre, a corner; after a side, the centre, a corner beside X, or the side across.
    holds = {"1": "5", "3": "5", "7": "5", "9": "5", "5": "1379"}
    holds |= {"2": "1358", "4": "1756", "6": "3954", "8": "7952"}
    for first, moves in holds.items():
        assert game.worth(game.EMPTY.replace(first, "X"), "X") < 1
        for reply in set("123456789") - {first}:
            board = game.EMPTY.replace(first, "X").replace(reply, "O")
            assert (game.worth(board, "X") == 1.0) == (reply not in moves), board


def test_values_by_hand(game: Any):
    # XXO / XOX / 7O9, O to move. 7 wins 3-5-7 for O; after 9, X wins 1-4-7. At random: (0 + 1) / 2.
    assert game.worth("XXOXOX7O9", "X") == 0.5
    assert game.worth("XXOXOX7O9", "O") == 1.0
    # XOX / OOX / X89, O to move, for X. 8 wins 2-5-8; after 9, X takes 8 and it is drawn: (0 + .5) / 2.
    assert game.worth("XOXOOXX89", "X") == 0.25


# The agent


def first_free(messages: list[dict[str, Any]]) -> str:
    return next(cell for cell in messages[-1]["content"] if cell.isdigit())


async def played(agent: Any, item: str, answer: Callable[[list[dict[str, Any]]], str]):
    llm = scripted(answer)
    rollout, recorder = recorded()
    async with rollout:
        result = await agent.play(item, llm)
    return result, recorder.steps, llm.requests


async def test_a_game_is_played_to_its_end_and_every_move_is_valued(game: Any, agent: Any):
    result, steps, requests = await played(agent, "X 1", first_free)
    assert result in {"Win!", "Lose!", "Draw!"}
    assert [step.calls for step in steps] == list(range(1, len(requests) + 1))
    assert all(step.name == "move" for step in steps)
    assert [step.value for step in steps] == [game.worth(s.metadata["board"], "X") for s in steps]
    # X moves first and the conversation grows.
    assert [body["messages"][0]["role"] for body in requests] == ["system"] * len(requests)
    lengths = [len(body["messages"]) for body in requests]
    assert lengths == list(range(4, 2 * len(requests) + 3, 2))


async def test_the_opponent_is_its_seed(agent: Any):
    one, two, other = [
        [s.metadata["board"] for s in (await played(agent, item, first_free))[1]]
        for item in ("O 1", "O 1", "O 2")
    ]
    assert one == two != other


async def test_o_moves_second(game: Any, agent: Any):
    _, steps, requests = await played(agent, "O 3", first_free)
    assert requests[0]["messages"][3]["content"].count("X") == 1
    assert all(s.value == game.worth(s.metadata["board"], "O") for s in steps)


async def test_an_illegal_answer_is_valued_and_asked_again(game: Any, agent: Any):
    tries = iter(["castle"])

    def answer(messages: list[dict[str, Any]]) -> str:
        return next(tries, None) or first_free(messages)

    result, steps, requests = await played(agent, "X 1", answer)
    assert result != "Forfeit!"
    assert [(s.name, s.value, s.calls) for s in steps[:2]] == [
        ("illegal", agent.ILLEGAL, 1),
        ("move", game.worth("X23456789", "X"), 2),
    ]
    assert steps[0].metadata == {"answer": "castle"}
    assert requests[1]["messages"][-2:] == [
        {"role": "assistant", "content": "castle"},
        {"role": "user", "content": "Not free.\n123\n456\n789"},
    ]


@pytest.mark.parametrize("item", ["X 1", "O 1"])
async def test_a_game_without_a_legal_answer_is_a_forfeit_for_both_marks(agent: Any, item: str):
    result, steps, requests = await played(agent, item, lambda messages: "I resign")
    assert result == "Forfeit!"
    assert len(requests) == agent.TRIES
    assert [s.value for s in steps] == [agent.ILLEGAL] * agent.TRIES


async def test_a_taken_cell_is_illegal(agent: Any):
    answers = iter(["5"] * 10)
    result, steps, _ = await played(agent, "X 1", lambda messages: next(answers))
    assert result == "Forfeit!"
    assert [s.name for s in steps] == ["move"] + ["illegal"] * agent.TRIES


# The reward


def valued(*values: float) -> list[Step]:
    return [Step("move", value, {}, "", i) for i, value in enumerate(values, 1)]


def test_rewards_by_hand(reward: Any):
    results = ("Win!", "Draw!", "Lose!", "Forfeit!")
    assert [reward.won(result) for result in results] == [1.0, 0.0, 0.0, 0.0]
    # (1 + (0.5 + 1) / 2) / 2; (0.5 + 0.5) / 2; (0 + (0.5 - 0.5 - 0.5) / 3) / 2
    assert reward.shaped("Win!", valued(0.5, 1.0)) == 0.875
    assert reward.shaped("Draw!", valued(0.5, 0.5, 0.5)) == 0.5
    assert reward.shaped("Forfeit!", valued(0.5, -0.5, -0.5)) == pytest.approx(-1 / 12)
    with pytest.raises(KeyError):  # a failure of the agent is no lost game
        reward.shaped("Hurrah", valued(1.0))


# Files


def test_the_games_are_a_mark_and_an_opponent_and_none_is_in_both_files():
    files = {
        name: [json.loads(line) for line in (FOLDER / "data" / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    }
    expected = {"train.jsonl": range(100), "heldout.jsonl": range(1000, 1012)}
    for name, opponents in expected.items():
        assert files[name] == [
            {"id": f"{mark}-{seed}", "question": f"{mark} {seed}", "answer": "Win!"}
            for seed in opponents
            for mark in "XO"
        ]


@pytest.mark.parametrize("name", ["config.yml", "config_gpu.yml"])
def test_the_configurations_compare_games_of_one_mark_and_opponent_by_their_moves(name: str):
    config = read(FOLDER / name)
    builder: Any = config.trajectory_builders["games"]
    adapter: Any = config.trainer_adapters["server"]
    assert builder.num_generations >= 4
    assert adapter.training.credit == "per_call"


@pytest.mark.parametrize("name", ["eval_before.yml", "eval_after.yml"])
def test_hone_validate_accepts_the_evaluations(name: str):
    assert not read_run(FOLDER / name).finetuning.enabled


def test_the_evaluations_differ_in_the_model_only():
    before, after = read(FOLDER / "eval_before.yml"), read(FOLDER / "eval_after.yml")
    models: list[Any] = [config.llms["policy"] for config in (before, after)]
    assert [model.model_name for model in models] == ["tic_tac_toe@0", "tic_tac_toe"]
    adapter: Any = after.trainer_adapters["server"]
    assert adapter.backend.name == "tic_tac_toe"
    models[0].model_name = models[1].model_name
    assert models[0] == models[1]
    assert before.workflow == after.workflow
    assert before.eval.evaluators == after.eval.evaluators
    assert before.eval.general.dataset == after.eval.general.dataset


def test_it_is_small():
    assert sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")) <= 150
