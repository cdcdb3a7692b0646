"""How many different answers the model gives: one answer to everything is not a skill.

In:   the first rollout of each example under two policies
Out:  Answers: the counts before and after, and a warning if the model now answers everything alike

A model that answers `no` to every question is right wherever that is the answer, so its reward may
rise although it no longer reads the question. Where the right answer is the same for every example,
one answer is what it should give: so there is a warning only if the answer has a low reward somewhere.
Two answers are enough for many tasks: there the warning also needs many answers before, and many low
rewards.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from hone.report.examples import ReportedRollout
from hone.report.text import counted

ALIKE = 0.9
"""Share of the examples with the same answer from which there may be a warning."""
MIN_INPUTS = 4
"""With fewer different inputs, equal answers may be chance."""
MANY_ANSWERS = 4
"""Different answers before training, from which two after it may be too few."""
LOW = 0.25
"""Share of low rewards among two answers from which there is a warning."""
LONGEST = 60
"""Number of characters of an answer that the warning quotes."""
REMEDY = (
    "It may no longer read its input. Check that the training examples do not have one right answer "
    "far more often than the others; training.beta (0.01 to 0.1) keeps the model near its base."
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to the examples that both policies answered; case and whitespace do not count."""

    examples: int
    total: int
    """Examples, including those that one of the policies did not answer."""
    before: int
    """Number of different answers."""
    after: int
    """Number of different answers."""
    most_frequent: str
    """The most frequent answer after training."""
    num_most_frequent: int
    """Number of examples with that answer."""
    num_low: int
    """Those of them with a reward in the lower half of the rewards seen."""
    collapsed: bool
    """Whether the model now gives one answer to nearly everything, and it is not right everywhere."""
    pair: tuple[str, str] | None = None
    """The two answers that the model now gives to nearly everything, although it gave many different
    ones before, if each is right for some examples and they are wrong for many."""
    num_pair: int = 0
    """Number of examples with one of these two."""
    num_pair_low: int = 0
    """Those of them with a low reward, where the same answer has a high one elsewhere."""

    @classmethod
    def of(
        cls, before: Mapping[str, ReportedRollout], after: Mapping[str, ReportedRollout]
    ) -> Self | None:
        """None if no example was answered under both policies."""
        both = [id for id in before if id in after and before[id].answered and after[id].answered]
        if not both:
            return None
        first, last = ([_plain(of[id].text) for id in both] for of in (before, after))
        (usual, before_n), (answer, n) = (Counter(x).most_common(1)[0] for x in (first, last))
        rewards = [of[id].reward for of in (before, after) for id in both]
        known = [reward for reward in rewards if reward is not None]
        middle = (min(known) + max(known)) / 2 if known else 0.0
        same = [id for id, text in zip(both, last, strict=True) if text == answer]
        same_rewards = [after[id].reward for id in same]
        # If all rewards are equal, none is low.
        low = sum(r is not None and r <= middle < max(known) for r in same_rewards)
        always = usual == answer and before_n >= ALIKE * len(both)
        inputs = {_plain(after[id].input) for id in both}
        alike = n >= ALIKE * len(both) and len(inputs) >= MIN_INPUTS
        return cls(
            examples=len(both),
            **_pair(first, last, [after[id] for id in both], middle, len(inputs)),
            total=len(before.keys() | after.keys()),
            before=len(set(first)),
            after=len(set(last)),
            most_frequent=" ".join(after[same[0]].text.split()),
            num_most_frequent=n,
            num_low=low,
            collapsed=alike and low > 0 and not always,
        )

    @property
    def sentence(self) -> str:
        """The counts in words."""
        which = counted(self.examples, "example")
        if self.examples < self.total:
            which = f"{self.examples} of {self.total} examples that both policies answered"
        return f"{which}: {counted(self.before, 'different answer')} before, {self.after} after."

    @property
    def warning(self) -> str | None:
        """None if the model did not collapse."""
        if self.collapsed:
            return self._one_answer
        return None if self.pair is None else self._two_answers

    @property
    def _one_answer(self) -> str:
        n, answer = self.num_most_frequent, _quoted(self.most_frequent)
        every = "every example" if n == self.examples else f"{n} of {self.examples} examples"
        has = "has" if self.num_low == 1 else "have"
        low = f"{self.num_low} of these {n} answers {has} a low reward"
        return f"The trained model gives {every} the same answer, {answer}, and {low}. {REMEDY}"

    @property
    def _two_answers(self) -> str:
        assert self.pair is not None
        one, other = map(_quoted, self.pair)
        n = self.num_pair
        every = "every example" if n == self.examples else f"{n} of {self.examples} examples"
        return (
            f"The trained model gives {every} one of two answers, {one} or {other} "
            f"({self.before} different ones before), and {self.num_pair_low} of these have a low "
            "reward. If other answers are right there, it no longer gives them: check that the "
            "training examples have every answer, and about equally often."
        )

    def as_dict(self) -> dict[str, Any]:
        """`answers` of report.json."""
        return asdict(self) | {"warning": self.warning}


def _pair(
    first: Sequence[str],
    last: Sequence[str],
    after: Sequence[ReportedRollout],
    middle: float,
    inputs: int,
) -> dict[str, Any]:
    """The fields about two answers; empty if the model did not collapse to two.

    Two answers may be all that a task needs. So each must be right somewhere and, together, they must
    be wrong as often as a choice among three or more answers would make them; an output that says
    how a game ended always has the same reward.
    """
    counts = Counter(last).most_common(2)
    if len(counts) < 2 or len(set(first)) < MANY_ANSWERS or inputs < MIN_INPUTS:
        return {}
    number = sum(n for _, n in counts)
    pair = [text for text, _ in counts]
    scored = [(t, r.reward) for t, r in zip(last, after, strict=True) if r.reward is not None]
    high = {text for text, reward in scored if reward > middle}
    low = sum(text in pair and reward <= middle for text, reward in scored)
    if number < ALIKE * len(last) or not high.issuperset(pair) or low < LOW * number:
        return {}
    shown = (
        next(" ".join(r.text.split()) for t, r in zip(last, after, strict=True) if t == text)
        for text in pair
    )
    return {"pair": tuple(shown), "num_pair": number, "num_pair_low": low}


def _quoted(answer: str) -> str:
    text = repr(answer)
    return f"{text[:LONGEST].rstrip()} ..." if len(text) > LONGEST else text


def _plain(text: str) -> str:
    """The text without what does not make it another answer: case, whitespace, a full stop.

    A JSON object counts as its value.
    """
    if text.lstrip()[:1] == "{":
        with suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
    return " ".join(text.casefold().split()).rstrip(".!")
