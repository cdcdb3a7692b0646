"""Which two validations a verdict compares.

In:   the History of a run
Out:  a Comparison: before, after, and the steps that `after` was chosen from

A step that was chosen as the best of many validations was also lucky in them: judged by the same
answers, it looks better than it is. So the first policy and the chosen one answer every example
again at the end of the run, and the verdict compares those answers. If that is impossible, or
pointless because the answers at temperature 0 would be the same, `tried` lists all steps that could
have been chosen, and the p value allows for the choice. With one trained step, or if none is better
than the first, nothing was chosen. docs/design/0002-verdicts.md gives the reasons.
"""

from dataclasses import dataclass

from hone.report.history import History, Validation


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two validations, and how the second was chosen."""

    before: Validation
    after: Validation
    tried: tuple[Validation, ...]
    """The trained steps that `after` was chosen from, by the answers that are compared."""
    chosen_of: int = 1
    """Number of trained steps that were validated; 1 if nothing was chosen."""
    fresh: bool = False
    """Whether both policies answered again after the choice."""


def comparison(history: History) -> Comparison | None:
    """The comparison; None without two validations that have a mean reward."""
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


def to_confirm(history: History) -> list[Validation]:
    """Validations whose policies must still answer again; none if no step was chosen."""
    compared = comparison(history)
    if compared is None or compared.chosen_of < 2 or compared.fresh:
        return []
    pair = (compared.before, compared.after)
    return [v for v in pair if (final := history.final(v)) is None or final.mean is None]


def _trained(scored: list[Validation]) -> list[Validation]:
    """The last validation of each step except the first."""
    by_step = {(v.epoch if v.step is None else v.step): v for v in scored[1:]}
    first = scored[0].step
    return [v for v in by_step.values() if v.step is None or v.step != first]
