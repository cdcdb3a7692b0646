"""Validations as numbers, and which two of them a verdict compares.

In:   `validation` events; the History of a run
Out:  Validations; a Comparison: before, after, all that were tried, whether both answered anew

A step that was chosen as the best of many validations was also lucky in them: judged by the same
answers it looks better than it is. So the first policy and the chosen one answer every example anew
at the end of the run (trainer.py), and the verdict compares those answers. Where that is not
possible or proves nothing (at temperature 0 the answers would be the same), `tried` names all steps
that could have been chosen, and the p value allows for the choice. With one trained step, or where
none is better than the first, nothing was chosen. docs/design/0002-verdicts.md has the reasons.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Self

from hone.events import Event

if TYPE_CHECKING:
    from hone.report.history import History


@dataclass(frozen=True, slots=True)
class Validation:
    """One pass over held-out examples.

    A rollout that failed through the model's own doing counts: at the reward that the
    configuration gives it, or where it says `drop`, at the run's `failure_reward`. One that failed
    through its environment does not.
    """

    epoch: int
    """Epochs of training behind it."""
    step: int | None
    at: float
    mean: float | None
    """None: it failed."""
    min: float | None
    max: float | None
    num_examples: int
    failures: int
    """Rollouts without a reward of their own."""
    policy_failures: int
    """Rollouts that failed through the model's own doing."""
    failure_reward: float | None
    """What each of those counts as; None where there was none."""
    dropped: bool
    """The configuration says `drop`, so that reward is the run's `failure_reward`."""
    rewards: dict[str, list[float]]
    """By example, what counts."""
    error: str | None
    seconds: float

    @classmethod
    def of(cls, event: Event, dropped_reward: float) -> Self:
        """`dropped_reward`: what a failure of the model counts as under `drop`."""
        failed: dict[str, int] = event.get("policy_failures") or {}
        instead = event.get("on_policy_failure", "drop")
        reward = dropped_reward if instead == "drop" else float(instead)
        rewards = {e: [r for r in all_ if r is not None] for e, all_ in event["rewards"].items()}
        if instead == "drop":
            for example, n in failed.items():
                rewards.setdefault(example, []).extend([reward] * n)
        counted = [r for all_ in rewards.values() for r in all_]
        recounted = bool(failed and counted and not event.get("error"))
        failures = event.get("failures") or 0
        return cls(
            epoch=event["epoch"],
            step=event.get("step"),
            at=event["at"],
            mean=fmean(counted) if recounted else event.get("avg_reward"),
            min=min(counted) if recounted else event.get("min_reward"),
            max=max(counted) if recounted else event.get("max_reward"),
            num_examples=event.get("num_examples", len(rewards)),
            failures=sum(failures.values()) if isinstance(failures, dict) else int(failures),
            policy_failures=sum(failed.values()),
            failure_reward=reward if failed else None,
            dropped=instead == "drop",
            rewards={example: known for example, known in rewards.items() if known},
            error=event.get("error"),
            seconds=event.get("seconds") or 0.0,
        )

    @property
    def unscored(self) -> int:
        """Examples without any reward: all of their rollouts failed through the environment."""
        return max(self.num_examples - len(self.rewards), 0)

    @property
    def failure_rate(self) -> float | None:
        """Share of the rollouts that count; None without any."""
        counted = sum(map(len, self.rewards.values()))
        return self.policy_failures / counted if counted else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two validations, and how the second was chosen."""

    before: Validation
    after: Validation
    tried: tuple[Validation, ...]
    """The trained steps among which `after` was chosen by the answers that are compared."""
    chosen_of: int = 1
    """How many trained steps were validated; 1 where nothing was chosen."""
    fresh: bool = False
    """Both answered anew after the choice."""


def comparison(history: "History") -> Comparison | None:
    """None without two validations that gave a number."""
    scored = history.scored
    if len(scored) < 2:
        return None
    first, best = scored[0], history.best
    steps = _trained(scored)
    if best is None or best is first or len(steps) < 2:
        return Comparison(first, scored[-1], (scored[-1],))
    before, after = history.final(first), history.final(best)
    if before and after and before.mean is not None and after.mean is not None:
        return Comparison(before, after, (after,), len(steps), fresh=True)
    return Comparison(first, best, tuple(steps), len(steps))


def to_confirm(history: "History") -> list[Validation]:
    """The validations whose policies must still answer anew; none where no step was chosen."""
    found = comparison(history)
    if found is None or found.chosen_of < 2 or found.fresh:
        return []
    pair = (found.before, found.after)
    return [v for v in pair if (final := history.final(v)) is None or final.mean is None]


def _trained(scored: list[Validation]) -> list[Validation]:
    """The last validation of each step but the first."""
    by_step = {(v.epoch if v.step is None else v.step): v for v in scored[1:]}
    first = scored[0].step
    return [v for v in by_step.values() if v.step is None or v.step != first]
