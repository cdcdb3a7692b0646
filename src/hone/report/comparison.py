"""Which two policies a verdict compares, and the answers of both that count.

In:   the RunHistory of a run
Out:  a Comparison: before, after, their rewards in pairs, and the worst case for what is missing

At the end of a run its first policy and the chosen one answer every held-out example side by side.
An outage then hits both, and a step is not judged by the answers that it was chosen for. Where that
is impossible, the answers of the run's own validations are compared; `others` then has the steps that
could have been chosen instead, and the p value allows for the choice. It also does at temperature 0,
where both steps repeat their answers. docs/design/0002-verdicts.md gives the reasons.

A rollout that failed before its policy answered is left out with its counterpart. One that the
environment failed after an answer is missing, perhaps because of the answer: it is left out of the
estimate, and the worst case fills it in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hone.report.estimate import Rewards, changes
from hone.report.history import RunHistory, Validation

Place = tuple[str, int]
"""Example and repetition."""


@dataclass(frozen=True)
class Comparison:
    """Two validations, and how the second was chosen."""

    before: Validation
    after: Validation
    others: tuple[dict[str, float], ...] = ()
    """Changes by example of the other steps that could have been chosen by the compared answers."""
    chosen_of: int = 1
    """Number of trained steps that were validated; 1 if nothing was chosen."""
    fresh: bool = False
    """Whether both policies answered side by side, after the choice."""
    lowest: float = 0.0
    """Lowest reward of the run by the evaluator of the validations; 0 if all are higher."""
    highest: float = 0.0
    """Highest reward of the run by that evaluator."""

    @cached_property
    def rewards(self) -> tuple[Rewards, Rewards]:
        """Rewards by example, before and after, of the rollouts that have one on both sides."""
        both = [place for place in self._answered if place not in self.lost]
        return self._by_example(both)

    def worst_case(self, *, rises: bool) -> tuple[Rewards, Rewards]:
        """`rewards`, with the reward that speaks most against a rise (or fall) for each lost one."""
        high, low = (self.highest, self.lowest) if rises else (self.lowest, self.highest)
        return self._by_example(self._answered, high, low)

    @cached_property
    def lost(self) -> set[Place]:
        """Pairs of which the environment failed at least one rollout after the policy had answered."""
        sides = self.before.attempts, self.after.attempts
        return {place for place in self._answered if any(side[place] is None for side in sides)}

    @cached_property
    def num_left_out(self) -> int:
        """Pairs that are left out because the policy did not answer one of them."""
        places = {p for v in (self.before, self.after) for p in (*v.attempts, *v.unanswered)}
        return len(places) - len(self._answered)

    @cached_property
    def _answered(self) -> list[Place]:
        """Places that both policies answered."""
        return [place for place in self.before.attempts if place in self.after.attempts]

    def _by_example(
        self, places: Sequence[Place], before: float = 0.0, after: float = 0.0
    ) -> tuple[Rewards, Rewards]:
        """Rewards of the places; `before` and `after` stand for those that are lost."""
        sides: list[Rewards] = []
        for validation, instead in ((self.before, before), (self.after, after)):
            rewards: dict[str, list[float]] = {}
            for example, repetition in places:
                reward = validation.attempts[example, repetition]
                rewards.setdefault(example, []).append(instead if reward is None else reward)
            sides.append(rewards)
        return sides[0], sides[1]


def comparison(history: RunHistory) -> Comparison | None:
    """The comparison; None without two validations that have a mean reward."""
    pair = _chosen(history)
    if pair is None:
        return None
    first, chosen = pair
    steps = _trained(history.scored)
    is_choice = len(steps) > 1 and (chosen.mean or 0.0) > (first.mean or 0.0)
    final = _answered_again(history, pair)
    before, after = final or pair
    others: tuple[dict[str, float], ...] = ()
    if is_choice and (final is None or history.run.validation_greedy):
        rivals = (v for v in steps if _policy(v) != _policy(chosen))
        others = tuple(changes(*Comparison(first, v).rewards) for v in rivals)
    seen = [
        r for v in (*history.scored, *(final or ())) for all_ in v.rewards.values() for r in all_
    ]
    return Comparison(
        before,
        after,
        others,
        len(steps) if is_choice else 1,
        fresh=final is not None,
        lowest=min([history.failure_reward, *seen]),
        highest=max([history.highest_reward, *seen]),
    )


def to_compare(history: RunHistory) -> tuple[Validation, Validation] | None:
    """The two validations whose policies must still answer side by side; None if they have.

    None, too, if both are the same step: nothing was trained.
    """
    pair = _chosen(history)
    if pair is None or _answered_again(history, pair) is not None:
        return None
    return None if _policy(pair[0]) == _policy(pair[1]) else pair


def _chosen(history: RunHistory) -> tuple[Validation, Validation] | None:
    """The first policy, and the best trained one, or the last if none is better than the first.

    A comparison at the end keeps its two policies, even if its answers lowered the reward of policy
    failures and thereby made another step the best.
    """
    scored, best = history.scored, history.best
    if len(scored) < 2 or best is None:
        return None
    first = scored[0]
    if history.finals and history.finals[-1][1].at > max(v.at for v in history.validations):
        compared = _policy(history.finals[-1][1])
        if again := [v for v in scored if _policy(v) == compared and v is not first]:
            return first, again[-1]
    return first, scored[-1] if _policy(best) == _policy(first) else best


def _answered_again(
    history: RunHistory, pair: tuple[Validation, Validation]
) -> tuple[Validation, Validation] | None:
    """What the two policies answered side by side; None if they did not."""
    wanted = [_policy(v) for v in pair]
    return next((f for f in reversed(history.finals) if [_policy(v) for v in f] == wanted), None)


def _trained(scored: list[Validation]) -> list[Validation]:
    """The last validation of each step except the first."""
    by_step = {_policy(v): v for v in scored[1:]}
    return [v for policy, v in by_step.items() if policy != _policy(scored[0])]


def _policy(validation: Validation) -> tuple[str, int]:
    """The step; the epoch, for a backend without steps."""
    if validation.step is None:
        return "epoch", validation.epoch
    return "step", validation.step
