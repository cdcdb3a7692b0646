"""Why the reward does not rise, and what to change.

In:   the RunHistory of a run
Out:  a diagnosis as text; None while the reward rises
"""

import math
from collections.abc import Mapping
from statistics import fmean, stdev

from hone.files.events import JobDone
from hone.report.estimate import by_example
from hone.report.history import Round, RunHistory

FLAT_EPOCHS = 3
FLAT_SHARE = 0.5
"""Share of groups with equal rewards above which they are reported as the cause."""
CLIPPED = 0.2
SLOW = 1e-5
"""LoRA adapters are usually trained at 1e-5 to 2e-4; below, a run of normal length hardly moves
them."""
FEW_GENERATIONS = 4
_HOLD = "base with training.beta (0.01 to 0.1)"
_HOLD_DPO = "reference with a larger trainers.*.beta"
FLAT = "The reward did not rise by more than chance"
"""First words of a diagnosis."""


def diagnosis(history: RunHistory) -> str | None:
    """Why the reward does not rise, as measured, and what to change.

    None while it rises, and for rewards that compare rollouts of one policy. The reward is flat if none of at least `FLAT_EPOCHS` last epochs is better
    than the first of them by more than the standard error.
    """
    if history.run.relative:
        return None
    means = {epoch: by_example(history.rewards(epoch)) for epoch in history.epochs}
    epochs = _flat_stretch({epoch: known for epoch, known in means.items() if known})
    if len(epochs) < FLAT_EPOCHS:
        return None
    first, last = means[epochs[0]], means[epochs[-1]]
    rise, noise = _rise(first, last)
    rounds = [r for epoch in epochs for r in history.rounds_of(epoch)]
    flat = (
        f"{FLAT} in the last {len(epochs)} epochs: {fmean(first.values()):.3f} -> "
        f"{fmean(last.values()):.3f} ({rise:+.3f}, standard error {noise:.3f})."
    )
    return "\n".join([flat, *_explain(history, rounds, rise, noise)])


def _flat_stretch(means: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The longest run of last epochs in which none is better than the first of them."""
    epochs = list(means)
    for start in reversed(range(len(epochs))):
        rises = (_rise(means[epochs[start]], means[later]) for later in epochs[start + 1 :])
        if any(rise > noise for rise, noise in rises):
            return epochs[start + 1 :]
    return epochs


def _rise(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    """Change between two epochs and its standard error, paired where the same examples ran."""
    paired = [after[e] - before[e] for e in before if e in after]
    if len(paired) >= 2:
        return fmean(paired), stdev(paired) / len(paired) ** 0.5
    squares = (stdev(x.values()) ** 2 / len(x) if len(x) > 1 else 0.0 for x in (before, after))
    return fmean(after.values()) - fmean(before.values()), sum(squares) ** 0.5


def _explain(history: RunHistory, rounds: list[Round], rise: float, noise: float) -> list[str]:
    """The measurements of these rounds, and the likely causes, each with what to change."""
    run = history.run
    groups = sum(r.metrics.get("num_groups") or 0 for r in rounds)
    flat = sum(r.num_flat for r in rounds)
    mostly_flat = flat >= FLAT_SHARE * max(groups, 1)
    clip, accuracy = (_mean(rounds, f"learn/{name}") for name in ("clip_frac", "reward_accuracy"))
    is_dpo = not math.isnan(accuracy)
    learned = f"reward_accuracy {accuracy:.3f}" if is_dpo else f"clip_frac {clip:.3f}"
    rate = rounds[-1].learned.get("learn/learning_rate") or run.learning_rate or math.nan
    steps = sum((job.metrics or {}).get("learn/optimizer_steps") or 0.0 for job in history.jobs)
    idle = [r.job.reason for r in rounds if isinstance(r.job, JobDone) and r.job.reason]
    failed = sum(len(r.failures) for r in rounds)
    rollouts = sum(len(r.failures.keys() | r.rewards.keys()) for r in rounds)
    # With `baseline: batch`, a rollout is compared with the whole batch.
    generations = math.nan if run.baseline == "batch" else run.generations or math.nan
    equal = "rewards" if run.credit == "outcome" else "values"
    measured = (
        f"Measured: {flat} of {groups} groups had equal {equal} ({flat / max(groups, 1):.0%}), which "
        f"teach nothing; {learned}; learning rate {rate:g}, {steps:.0f} optimizer steps so far; "
        f"{generations} generations per example."
    ).replace(" nan", " unknown")
    causes = (
        (
            rise < -2 * noise,
            "the reward falls: the updates do harm. Lower trainer_adapters.*.training.learning_rate, or "
            f"keep the model near its {_HOLD_DPO if is_dpo else _HOLD}. The best step so far is kept.",
        ),
        (mostly_flat, _why_flat(history, rounds, flat)),
        (
            generations < (8 if mostly_flat else FEW_GENERATIONS),
            f"num_generations is {generations}; set trajectory_builders.*.num_generations to 8 or more: "
            "a larger group more often has both a good and a bad answer.",
        ),
        (idle and not steps, f"no job has changed the model yet: {''.join(idle[-1:])}"),
        (
            clip > CLIPPED,
            f"clip_frac is {clip:.2f}: that share of tokens is clipped, so the updates are cut and "
            "noisy. Halve trainer_adapters.*.training.learning_rate, or raise "
            "training.groups_per_optimizer_step.",
        ),
        (
            rate < SLOW,
            f"the learning rate {rate:g} is small for a LoRA adapter: {steps:.0f} optimizer steps "
            f"change a weight by at most {rate * steps:.0e}. Set "
            "trainer_adapters.*.training.learning_rate between 2e-5 and 1e-4.",
        ),
        (
            failed > 0.05 * rollouts,
            f"{failed} of {rollouts} rollouts failed. Failures outside the model are not trained on; "
            "finetuning.on_policy_failure decides about those of the model. The report counts both, by "
            "reason.",
        ),
    )
    likely = [f"- {cause}" for applies, cause in causes if applies] or [
        f"- none of these explains it. A change smaller than {noise:.3f} cannot be seen with so few "
        "rollouts; more examples or generations would show smaller changes. Otherwise check that the "
        "reward measures what the agent can change (`hone eval` shows every score)."
    ]
    return [measured, *likely]


def _mean(rounds: list[Round], name: str) -> float:
    """Mean of a learner's metric; NaN if no round has it."""
    return fmean([r.learned[name] for r in rounds if name in r.learned] or [math.nan])


def _why_flat(history: RunHistory, rounds: list[Round], flat: int) -> str:
    """Why most groups have equal rewards."""
    run, rewards = history.run, [x for r in history.rounds for x in r.rewards.values()]
    lowest, highest = min(rewards), max(rewards)
    if lowest == highest:
        return (
            f"every rollout of the run has the reward {lowest:g}: the evaluator does not tell answers "
            "apart. Let it give partial credit, and look at its scores with `hone eval`."
        )
    equal = [g[0] for r in rounds for g in r.by_example.values() if len(g) > 1 and len({*g}) == 1]
    if run.credit != "outcome" or run.baseline == "batch":
        equal = []  # with per-call credit, equal outcomes do not make a group flat
    if equal.count(highest) * 2 > flat:
        return (
            "most of them have the highest reward of the run: these examples are solved. Stop here, or "
            "train on harder ones (finetuning.curriculum_learning.sort_ascending: true takes the "
            "hardest first)."
        )
    if equal.count(lowest) * 2 > flat:
        return (
            "most of them have the lowest reward of the run: no attempt succeeded, so there is nothing "
            "to compare. Give partial credit in the evaluator, start with the easier examples "
            "(finetuning.curriculum_learning.enabled: true), or raise the temperature in "
            "llms.*.temperature."
        )
    return (
        "attempts at one example get the same reward: raise the temperature in llms.*.temperature, or let the "
        "evaluator score finer differences."
    )
