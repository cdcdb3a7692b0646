"""Puzzles about a murder in a house: who did it, with what, where and when.

In:   a seed and a level
Out:  a Puzzle: the text with its clues, and the only solution that the clues allow; `rows` makes a
      dataset of them

All courses of events of a level are enumerated (`Cases`), and a clue is the set of those in which it
is true. Clues are added until one solution is left; those that are not needed are then removed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations, product

import numpy as np
from numpy.typing import NDArray

PEOPLE = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana")
WEAPONS = ("rope", "knife", "lamp", "poison", "vase", "hammer", "sword", "scarf")
ROOMS = ("hall", "study", "attic", "cellar", "kitchen", "garden", "library", "tower")
TIMES = ("8:00", "9:00", "10:00", "11:00")

SIZES = {1: (2, 2, 2), 2: (3, 2, 2), 3: (3, 3, 2), 4: (3, 3, 3)}
"""People, rooms and times of each level."""

Mask = NDArray[np.bool_]
Ints = NDArray[np.int8]
Solution = tuple[str, str, str, str]
"""The murderer, the weapon, the room, the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """One puzzle; `solution` is the only one that the clues in `text` allow."""

    text: str
    clues: tuple[str, ...]
    solution: Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the people, weapons, rooms and times of a puzzle are called."""

    people: list[str]
    weapons: list[str]
    rooms: list[str]
    times: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """All courses of events of a level, N of them."""

    place: Ints  # [N, people, times] the room of a person at a time
    weapon: Ints  # [N, people] what a person carries
    who: Ints  # [N] the murderer
    when: Ints  # [N] the time of the murder
    where: Ints  # [N] its room, where the murderer is the only person at that time

    @property
    def solutions(self) -> NDArray[np.int64]:
        """A number per case; equal numbers are equal solutions. [N]"""
        used = self.weapon[np.arange(len(self.who)), self.who]
        number = np.zeros(len(self.who), dtype=np.int64)
        for part in (self.who, used, self.where, self.when):
            number = number * 10 + part
        return number


@cache
def enumerate_cases(level: int) -> Cases:
    """Every way in which the people can move and carry weapons, with every possible murder."""
    people, rooms, times = SIZES[level]
    place = np.array(list(product(range(rooms), repeat=people * times)), dtype=np.int8)
    place = place.reshape(-1, people, times)
    weapon = np.array(list(permutations(range(people))), dtype=np.int8)
    parts: list[Cases] = []
    for who, when in product(range(people), range(times)):
        same_room = (place[:, :, when] == place[:, who, when, None]).sum(1)
        alone = place[same_room == 1]
        moves = np.repeat(alone, len(weapon), axis=0)
        ones = np.ones(len(moves), dtype=np.int8)
        parts.append(
            Cases(
                place=moves,
                weapon=np.tile(weapon, (len(alone), 1)),
                who=ones * who,
                when=ones * when,
                where=moves[:, who, when],
            )
        )
    fields = {name: [getattr(part, name) for part in parts] for name in Cases.__slots__}
    return Cases(**{name: np.concatenate(arrays) for name, arrays in fields.items()})


def statements(cases: Cases, names: Names) -> Iterator[tuple[str, Mask, bool]]:
    """Every clue that can be stated: its text, and the cases in which it is true.

    The flag says that it is about the murder itself and answers a part of the question directly.
    """
    for p, person in enumerate(names.people):
        for w, weapon in enumerate(names.weapons):
            yield f"{person} carried the {weapon}.", cases.weapon[:, p] == w, False
        for t, time in enumerate(names.times):
            for r, room in enumerate(names.rooms):
                text = f"{person} was in the {room} at {time}."
                yield text, cases.place[:, p, t] == r, False
        for a, b in combinations(range(len(names.times)), 2):
            same = cases.place[:, p, a] == cases.place[:, p, b]
            between = f"{names.times[a]} and {names.times[b]}"
            yield f"{person} was in the same room at {between}.", same, False
            yield f"{person} was in different rooms at {between}.", ~same, False
        yield f"{person} is innocent.", cases.who != p, True
    for p, q in combinations(range(len(names.people)), 2):
        for t, time in enumerate(names.times):
            same = cases.place[:, p, t] == cases.place[:, q, t]
            pair = f"{names.people[p]} and {names.people[q]}"
            yield f"{pair} were in the same room at {time}.", same, False
            yield f"{pair} were in different rooms at {time}.", ~same, False
    for r, room in enumerate(names.rooms):
        yield f"The murder happened in the {room}.", cases.where == r, True
        for t, time in enumerate(names.times):
            at = cases.place[np.arange(len(cases.who)), cases.who, t] == r
            yield f"The murderer was in the {room} at {time}.", at, False
    for t, time in enumerate(names.times):
        yield f"The murder happened at {time}.", cases.when == t, True


def make_puzzle(seed: int, level: int = 1) -> Puzzle:
    """The puzzle of this seed and level; the same arguments give the same puzzle.

    From level 3 on, the time or the room of the murder, or that someone is innocent, is stated only
    if the other clues leave more than one solution.
    """
    rng = random.Random(f"{seed} {level}")
    people, rooms, times = SIZES[level]
    names = Names(
        people=rng.sample(PEOPLE, people),
        weapons=rng.sample(WEAPONS, people),
        rooms=rng.sample(ROOMS, rooms),
        times=list(TIMES[:times]),
    )
    cases = enumerate_cases(level)
    case = rng.randrange(len(cases.who))
    true = [clue for clue in statements(cases, names) if clue[1][case]]
    rng.shuffle(true)
    if level >= 3:
        true.sort(key=lambda clue: clue[2])
    clues = _enough(cases, [(text, mask) for text, mask, _ in true])
    rng.shuffle(clues)
    who, when = int(cases.who[case]), int(cases.when[case])
    return Puzzle(
        text=_text(names, clues),
        clues=tuple(clues),
        solution=(
            names.people[who],
            names.weapons[cases.weapon[case, who]],
            names.rooms[cases.where[case]],
            names.times[when],
        ),
    )


def rows(file_path: object = None, *, first: int, count: int, level: int) -> list[dict[str, str]]:
    """The puzzles of `count` seeds as a dataset of hone; there is no file to read."""
    puzzles = {seed: make_puzzle(seed, level) for seed in range(first, first + count)}
    return [
        {"id": f"{level}-{seed}", "question": puzzle.text, "answer": ", ".join(puzzle.solution)}
        for seed, puzzle in puzzles.items()
    ]


def _enough(cases: Cases, clues: list[tuple[str, Mask]]) -> list[str]:
    """Clues from the start of the list that leave one solution, none of which can be left out."""
    solutions = cases.solutions
    left = np.ones(len(solutions), dtype=np.bool_)
    used: list[tuple[str, Mask]] = []
    for text, mask in clues:
        if not (left & ~mask).any():
            continue
        left &= mask
        used.append((text, mask))
        if _one_solution(solutions[left]):
            break
    assert _one_solution(solutions[left]), [text for text, _ in used]
    for clue in reversed(used.copy()):
        rest = [np.ones_like(left), *(mask for text, mask in used if text != clue[0])]
        if _one_solution(solutions[np.logical_and.reduce(rest)]):
            used.remove(clue)
    return [text for text, _ in used]


def _one_solution(solutions: NDArray[np.int64]) -> bool:
    return bool((solutions == solutions[0]).all())


def _text(names: Names, clues: list[str]) -> str:
    return "\n".join(
        (
            f"People: {', '.join(names.people)}. Each carried one weapon: {', '.join(names.weapons)}.",
            f"Rooms: {', '.join(names.rooms)}. Times: {', '.join(names.times)}.",
            "The murderer was alone in the room at the time of the murder.",
            *clues,
            "Who, weapon, room, time?",
        )
    )


def score(answer: str, solution: Solution) -> float:
    """The share of the four parts that are right; 0 if the answer does not have four parts."""
    parts = [part.strip(" .").lower() for part in answer.strip().split(",")]
    if len(parts) != len(solution):
        return 0.0
    right = [part == true.lower() for part, true in zip(parts, solution, strict=True)]
    return sum(right) / len(right)
