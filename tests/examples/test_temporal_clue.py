"""examples/10_temporal_clue: puzzles have one solution, by another solver; the rewards."""

from collections.abc import Callable
from itertools import permutations, product
from types import ModuleType
from typing import Any

import pytest
from tests.examples.conftest import EXAMPLES, scripted

from hone.config.schema import read

FOLDER = EXAMPLES / "10_temporal_clue"
Example = Callable[[str, str], ModuleType]


@pytest.fixture(scope="module")
def puzzles(example: Example) -> Any:
    return example("10_temporal_clue", "puzzles")


def solve(text: str, leave_out: str = "") -> set[tuple[str, ...]]:
    """All solutions of a puzzle, read from its text and searched case by case."""
    head, places, rule, *clues, question = text.splitlines()
    assert rule == "The murderer was alone in the room at the time of the murder."
    assert question == "Who, weapon, room, time?"
    people, weapons = (part.split(": ")[1].rstrip(".").split(", ") for part in head.split(". "))
    rooms, times = (part.split(": ")[1].rstrip(".").split(", ") for part in places.split(". "))
    spots = list(product(people, times))
    solutions: set[tuple[str, ...]] = set()
    for taken in product(rooms, repeat=len(spots)):
        place = dict(zip(spots, taken, strict=True))
        for carried in permutations(weapons):
            weapon = dict(zip(people, carried, strict=True))
            for who, when in spots:
                where = place[who, when]
                if sum(place[person, when] == where for person in people) > 1:
                    continue
                case = (place, weapon, who, when)
                if all(_holds(clue, *case) for clue in clues if clue != leave_out):
                    solutions.add((who, weapon[who], where, when))
    return solutions


def _holds(
    clue: str, place: dict[tuple[str, str], str], weapon: dict[str, str], who: str, when: str
) -> bool:
    """Whether a clue is true, by its words."""
    match clue.rstrip(".").split():
        case ["The", "murder", "happened", "in", "the", room]:
            return place[who, when] == room
        case ["The", "murder", "happened", "at", time]:
            return when == time
        case ["The", "murderer", "was", "in", "the", room, "at", time]:
            return place[who, time] == room
        case [person, "carried", "the", thing]:
            return weapon[person] == thing
        case [person, "is", "innocent"]:
            return who != person
        case [person, "was", "in", "the", "same", "room", "at", first, "and", second]:
            return place[person, first] == place[person, second]
        case [person, "was", "in", "different", "rooms", "at", first, "and", second]:
            return place[person, first] != place[person, second]
        case [person, "was", "in", "the", room, "at", time]:
            return place[person, time] == room
        case [a, "and", b, "were", "in", "the", "same", "room", "at", time]:
            return place[a, time] == place[b, time]
        case [a, "and", b, "were", "in", "different", "rooms", "at", time]:
            return place[a, time] != place[b, time]
    raise AssertionError(clue)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_another_solver_finds_the_same_solution_and_needs_every_clue(
    puzzles: Any, seed: int, level: int
):
    puzzle = puzzles.make_puzzle(seed, level)
    assert solve(puzzle.text) == {puzzle.solution}
    for clue in puzzle.clues:
        assert len(solve(puzzle.text, leave_out=clue)) > 1, clue


def test_another_solver_agrees_on_a_larger_puzzle(puzzles: Any):
    puzzle = puzzles.make_puzzle(0, 3)
    assert solve(puzzle.text) == {puzzle.solution}


def test_the_enumeration_is_complete(puzzles: Any):
    # Level 1: a murderer (2) and a time (2); his room then (2) is not the other's (1); both are
    # anywhere at the other time (2 x 2); weapons (2): 2 * 2 * 2 * 1 * 4 * 2 = 64.
    assert len(puzzles.enumerate_cases(1).who) == 64
    # Level 3: 3 murderers, 2 times; a room (3) and the others elsewhere (2 x 2); the other time
    # (3 ** 3); weapons (3!): 3 * 2 * 3 * 4 * 27 * 6 = 11,664.
    assert len(puzzles.enumerate_cases(3).who) == 11_664


def test_a_seed_is_a_puzzle(puzzles: Any):
    texts = [puzzles.make_puzzle(seed, 1).text for seed in range(200)]
    assert texts[:5] == [puzzles.make_puzzle(seed, 1).text for seed in range(5)]
    assert len(set(texts)) == 200


def test_higher_levels_need_more_clues(puzzles: Any):
    def clues(level: int) -> int:
        return sum(len(puzzles.make_puzzle(seed, level).clues) for seed in range(30))

    assert clues(1) < clues(2) < clues(3)


def test_hard_levels_state_the_murder_itself_only_where_it_is_needed(puzzles: Any):
    def direct(level: int) -> int:
        clues = (c for seed in range(30) for c in puzzles.make_puzzle(seed, level).clues)
        return sum("murder happened" in c or "innocent" in c for c in clues)

    assert direct(3) < direct(2) / 2


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Ada, rope, hall, 9:00", 1.0),
        (" ada,rope, Hall, 9:00.", 1.0),
        ("Ada, rope, hall, 8:00", 0.75),
        ("rope, Ada, 9:00, hall", 0.0),
        ("Ada, rope, hall", 0.0),
        ("Ada, rope, hall, 9:00, 8:00", 0.0),
        ("It was Ada.", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_share_of_right_parts(puzzles: Any, answer: str, reward: float):
    assert puzzles.score(answer, ("Ada", "rope", "hall", "9:00")) == reward


async def test_the_agent_reasons_and_its_last_answer_is_scored(example: Example, puzzles: Any):
    agent, reward = example("10_temporal_clue", "agent"), example("10_temporal_clue", "reward")
    (row,) = puzzles.rows(first=7, count=1, level=3)
    puzzle = puzzles.make_puzzle(7, 3)
    assert row == {"id": "3-7", "question": puzzle.text, "answer": ", ".join(puzzle.solution)}
    llm = scripted(lambda _: f"Answer: no one.\nSo it was:\nAnswer: {row['answer']}", max_tokens=9)
    output = await agent.solve(row["question"], llm)
    assert llm.requests[0]["messages"][-1]["content"] == puzzle.text
    assert llm.requests[0]["max_tokens"] == 9
    assert (reward.right_parts(output, row["answer"]), reward.solved(output, row["answer"])) == (
        1,
        1,
    )
    assert reward.right_parts(row["answer"], row["answer"]) == 0, "without the marker"
    three = row["answer"].rsplit(",", 1)[0] + ", noon"
    assert reward.right_parts(f"Answer: {three}", row["answer"]) == 0.75
    assert reward.solved(f"Answer: {three}", row["answer"]) == 0


def test_the_configuration_for_8b_says_that_it_is_not_trained():
    assert read(FOLDER / "config_8b.yml").workflow is not None
    assert (FOLDER / "config_8b.yml").read_text(encoding="utf-8").startswith("# NOT TRAINED")
