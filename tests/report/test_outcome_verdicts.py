"""report/outcome.py: how often a verdict is wrong, and how often a true gain is found.

Simulated runs, through the events, the comparison and the test that a report uses. Equal policies
may be called "better" in 2.5% of runs: the test is two-sided at 5%.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from hone.files.events import FinalValidationDone, RunStarted, ValidationDone, ValidationResult
from hone.report.history import RunHistory
from hone.report.outcome import Outcome

RUNS = 150
EXAMPLES = 40
Answers = list[float | None]
"""Reward of each example; None if the environment failed the rollout."""


def event(kind: type[ValidationResult], step: int, answers: Answers, **more: object):
    known = [reward for reward in answers if reward is not None]
    fields = {"at": step + (10.0 if kind is FinalValidationDone else 0.0), "epoch": step}
    fields |= {"step": step, "avg_reward": float(np.mean(known)), "failures": 0}
    rewards = {str(i): [reward] for i, reward in enumerate(answers)}
    return kind.model_validate(fields | {"rewards": rewards} | more)


def verdict(
    validated: list[Answers], final: tuple[Answers, Answers] | None = None, **missing: object
) -> str:
    """The verdict of a run with these validations, and with this comparison at its end.

    Missing answers were never given, unless `lost` says so.
    """
    run = RunStarted(at=0.0, run_id="r", session=1, epochs=len(validated) - 1, step=0)
    events = [event(ValidationDone, step, answers) for step, answers in enumerate(validated)]
    history = RunHistory.of([run, *events])
    if final is not None:
        best = history.best
        assert best is not None
        chosen = best.step or len(validated) - 1
        for step, answers in zip((0, chosen), final, strict=True):
            history.add(event(FinalValidationDone, step, answers, round=chosen, **missing))
    return Outcome.of(history).verdict


def shares(simulate: Callable[[Generator], str], runs: int = RUNS) -> dict[str, float]:
    """How often each verdict is given."""
    rng = np.random.default_rng(0)
    counts = Counter(simulate(rng) for _ in range(runs))
    return {name: counts[name] / runs for name in ("better", "worse", "unclear")}


def answers(rng: Generator, mean: float, n: int = EXAMPLES) -> Answers:
    """Right or wrong, as often right as `mean` says: many examples do not change at all."""
    return [float(right) for right in rng.random(n) < mean]


def spoiled(rewards: Answers, out: list[bool]) -> Answers:
    """Where a tool was out of order the agent's answer is wrong."""
    return [0.0 if broken else reward for reward, broken in zip(rewards, out, strict=True)]


# ---- an outage --------------------------------------------------------------------------------


def with_outage(rng: Generator, before: float, after: float) -> tuple[list[Answers], list[bool]]:
    """Two validations, the first with a tool that fails 30% of the time, and the next outage."""
    first = spoiled(answers(rng, before), list(rng.random(EXAMPLES) < 0.3))
    return [first, answers(rng, after)], list(rng.random(EXAMPLES) < 0.3)


def test_answers_from_different_times_turn_an_outage_into_a_gain():
    """Why the two policies answer side by side: equal ones are called better in 43% of the runs."""
    assert shares(lambda rng: verdict(with_outage(rng, 0.75, 0.75)[0]))["better"] > 0.3


def test_side_by_side_an_outage_is_no_gain():
    """Neither one in the first validation nor one in the comparison, where it hits both."""

    def simulate(rng: Generator) -> str:
        validated, out = with_outage(rng, 0.75, 0.75)
        both = answers(rng, 0.75), answers(rng, 0.75)
        return verdict(validated, (spoiled(both[0], out), spoiled(both[1], out)))

    given = shares(simulate)
    assert given["better"] <= 0.05 and given["unclear"] >= 0.9


def test_a_true_gain_is_found_in_spite_of_an_outage():
    def simulate(rng: Generator) -> str:
        validated, out = with_outage(rng, 0.4, 0.8)
        both = answers(rng, 0.4), answers(rng, 0.8)
        return verdict(validated, (spoiled(both[0], out), spoiled(both[1], out)))

    # 0.28 to 0.56 with the outage, over 40 examples: 2.9 standard errors of the paired change.
    assert shares(simulate)["better"] >= 0.75


# ---- what is missing --------------------------------------------------------------------------


def without(rewards: Answers, missing: list[bool]) -> Answers:
    return [None if gone else reward for reward, gone in zip(rewards, missing, strict=True)]


def test_pairs_that_are_left_out_at_random_change_nothing():
    """A third of the answers of one policy failed before they were given."""

    def simulate(rng: Generator, before: float, after: float) -> str:
        gone = list(rng.random(EXAMPLES) < 0.3)
        validated = [answers(rng, before), answers(rng, after)]
        return verdict(validated, (without(validated[0], gone), validated[1]))

    assert shares(lambda rng: simulate(rng, 0.6, 0.6))["better"] <= 0.05
    assert shares(lambda rng: simulate(rng, 0.4, 0.8))["better"] >= 0.75


@pytest.mark.parametrize("lost", [True, False])
def test_a_policy_that_breaks_its_environment_where_it_is_wrong_is_not_better(lost: bool):
    """The mean falls from 0.75 to 0.6, but the environment fails on 40%, all of them wrong."""

    def simulate(rng: Generator) -> str:
        before, after = answers(rng, 0.75), answers(rng, 0.6)
        broken = [reward == 0.0 for reward in after]
        known = without(after, broken)
        places = {str(i): [0] for i, gone in enumerate(broken) if gone}
        return verdict([before, known], (before, known), **{"lost": places} if lost else {})

    wrong = shares(simulate, runs=50)["better"]
    # Left out as if they had never been answered, they make a gain of 0.25 in most runs.
    assert wrong == 0 if lost else wrong > 0.5


# ---- small sets, ties and a choice ------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 8, 12])
def test_small_sets_with_ties_hold_the_level(n: int):
    def simulate(rng: Generator) -> str:
        grades = [list(rng.choice([0.0, 0.5, 1.0], n, p=[0.5, 0.2, 0.3])) for _ in range(4)]
        return verdict(grades[:2], (grades[2], grades[3]))

    given = shares(simulate)
    assert given["better"] <= 0.05 and given["worse"] <= 0.05


def test_the_best_of_five_equal_steps_is_not_better_side_by_side():
    def simulate(rng: Generator) -> str:
        validated = [answers(rng, 0.5, 16) for _ in range(6)]
        return verdict(validated, (answers(rng, 0.5, 16), answers(rng, 0.5, 16)))

    assert shares(simulate)["better"] <= 0.05


def test_a_true_gain_is_found_on_a_small_set():
    def simulate(rng: Generator) -> str:
        both = [answers(rng, mean, 12) for mean in (0.1, 0.8)]
        return verdict([answers(rng, 0.1, 12), answers(rng, 0.8, 12)], (both[0], both[1]))

    assert shares(simulate)["better"] >= 0.8
