"""Why the reward does not rise, and what to change.

In:   the History of a run
Out:  a diagnosis in words; None while the reward rises
"""

from dataclasses import dataclass
from statistics import fmean, stdev

from hone.events import JobDone
from hone.report.estimate import by_example
from hone.report.history import History, Round
from hone.report.metrics import reward_history

FLAT_EPOCHS = 3
FLAT_SHARE = 0.5
"""From this share of groups with equal rewards on, they are the cause."""
CLIPPED = 0.2
SLOW = 1e-5
"""LoRA adapters are trained at 1e-5 to 2e-4; below, a run of ordinary length hardly moves them."""
FEW_GENERATIONS = 4
FLAT = "The reward did not rise by more than chance"
"""First words of a diagnosis."""
_FALLING = (
    "the reward falls: the updates do harm. Lower trainer_adapters.*.training.learning_rate, or keep "
    "the model near its base with training.beta (0.01 to 0.1). The best step so far is kept."
)


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    average: float
    means: dict[str, float]
    """Mean reward of each example."""


def diagnosis(history: History, *, epochs: int = FLAT_EPOCHS) -> str | None:
    """Why the reward does not rise, as measured, and what to change.

    None while it rises. The reward is flat if none of at least `epochs` last epochs is better than
    the first of them by more than the standard error.
    """
    known = [
        _Epoch(e["epoch"], e["avg_reward"], by_example(history.rewards(e["epoch"])))
        for e in reward_history(history)
        if e["avg_reward"] is not None
    ]
    flat = _flat_stretch(known)
    if len(flat) < epochs:
        return None
    first, last = flat[0], flat[-1]
    rise, noise = _rise(first, last)
    seen = _Measured.of(history, [r for e in flat for r in history.rounds_of(e.number)])
    causes = ([_FALLING] if rise < -2 * noise else []) + seen.causes() or [
        f"none of these explains it. A change smaller than {noise:.3f} cannot be seen with so few "
        "rollouts; more examples or generations would show smaller changes. Otherwise check that the "
        "reward measures what the agent can change (`hone eval` shows every score)."
    ]
    return "\n".join(
        [
            f"{FLAT} in the last {len(flat)} epochs: {first.average:.3f} -> {last.average:.3f} "
            f"({rise:+.3f}, standard error {noise:.3f}).",
            f"Measured: {seen}.",
            *(f"- {cause}" for cause in causes),
        ]
    )


def _flat_stretch(epochs: list[_Epoch]) -> list[_Epoch]:
    """The longest run of last epochs in which none is better than the first of them."""
    flat: list[_Epoch] = []
    for start in reversed(range(len(epochs))):
        rises = (_rise(epochs[start], later) for later in epochs[start + 1 :])
        if any(rise > noise for rise, noise in rises):
            break
        flat = epochs[start:]
    return flat


def _rise(first: _Epoch, last: _Epoch) -> tuple[float, float]:
    """Change between two epochs and its standard error, paired where the same examples ran."""
    before, after = first.means, last.means
    paired = [after[e] - before[e] for e in before if e in after]
    if len(paired) >= 2:
        return fmean(paired), stdev(paired) / len(paired) ** 0.5
    if len(before) < 2 or len(after) < 2:
        return last.average - first.average, 0.0
    squares = (stdev(x.values()) ** 2 / len(x) for x in (before, after))
    return fmean(after.values()) - fmean(before.values()), sum(squares) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What the last epochs measured."""

    groups: int
    flat: int
    at_top: int
    """Flat groups with the highest reward of the run."""
    at_bottom: int
    constant: float | None
    """The reward, if the whole run has only one."""
    clip_frac: float | None
    learning_rate: float | None
    optimizer_steps: int
    """Since the run began."""
    idle: list[str]
    """Why a job made no gradient step, for each that made none."""
    compared: str
    """What is equal in a flat group."""
    generations: int | None
    """Rollouts that are compared with each other; None if that is the whole batch."""
    failed: int
    rollouts: int

    @classmethod
    def of(cls, history: History, rounds: list[Round]) -> "_Measured":
        run, whole_batch = history.run, history.run.baseline == "batch"
        rewards = [reward for r in history.rounds for reward in r.rewards.values()]
        levels = [level for r in rounds for level in _flat_levels(r)]
        if run.credit != "outcome" or whole_batch:
            levels = []  # equal outcomes do not make a group flat there
        clips = [r.learned["learn/clip_frac"] for r in rounds if "learn/clip_frac" in r.learned]
        steps = [job.metrics.get("learn/optimizer_steps") for job in history.jobs if job.metrics]
        return cls(
            groups=sum(r.metrics.get("num_groups") or 0 for r in rounds),
            flat=sum(r.num_flat for r in rounds),
            at_top=sum(x == max(rewards) for x in levels),
            at_bottom=sum(x == min(rewards) for x in levels),
            constant=rewards[0] if rewards and min(rewards) == max(rewards) else None,
            clip_frac=fmean(clips) if clips else None,
            learning_rate=rounds[-1].learned.get("learn/learning_rate") or run.learning_rate,
            optimizer_steps=int(sum(n or 0 for n in steps)),
            compared="rewards" if run.credit == "outcome" else "values",
            idle=[r.job.reason for r in rounds if isinstance(r.job, JobDone) and r.job.reason],
            generations=None if whole_batch else run.generations,
            failed=sum(len(r.failures) for r in rounds),
            rollouts=sum(len(r.failures.keys() | r.rewards.keys()) for r in rounds),
        )

    def __str__(self) -> str:
        clip = "unknown" if self.clip_frac is None else f"{self.clip_frac:.3f}"
        rate = "unknown" if self.learning_rate is None else f"{self.learning_rate:g}"
        return (
            f"{self.flat} of {self.groups} groups had equal {self.compared} ({self.share:.0%}), which "
            f"teach nothing; clip_frac {clip}; learning rate {rate}, {self.optimizer_steps} optimizer "
            f"steps so far; {self.generations or 'unknown'} generations per example"
        )

    @property
    def share(self) -> float:
        return self.flat / self.groups if self.groups else 0.0

    def causes(self) -> list[str]:
        """The most likely first; each with what to change."""
        causes = [*self._flat_groups(), *self._learning()]
        if self.rollouts and self.failed / self.rollouts > 0.05:
            causes.append(
                f"{self.failed} of {self.rollouts} rollouts failed, and failed rollouts are not "
                "trained on: the counts above say why; finetuning.on_policy_failure gives failures of "
                "the model a reward."
            )
        return causes

    def _flat_groups(self) -> list[str]:
        more = (
            f"num_generations is {self.generations}; set trajectory_builders.*.num_generations to 8 "
            "or more: a larger group more often has both a good and a bad answer."
        )
        few = self.generations is not None and self.generations < FEW_GENERATIONS
        if self.share < FLAT_SHARE:
            return [more] if few else []
        if self.constant is not None:
            return [
                f"every rollout of the run has the reward {self.constant:g}: the evaluator does not "
                "tell answers apart. Let it give partial credit, and look at its scores with "
                "`hone eval`."
            ]
        if self.at_top * 2 > self.flat:
            why = (
                "most of them have the highest reward of the run: these examples are solved. Stop "
                "here, or train on harder ones (finetuning.curriculum_learning.sort_ascending: true "
                "takes the hardest first)."
            )
        elif self.at_bottom * 2 > self.flat:
            why = (
                "most of them have the lowest reward of the run: no attempt succeeded, so there is "
                "nothing to compare. Give partial credit in the evaluator, start with the easier "
                "examples (finetuning.curriculum_learning.enabled: true), or raise the temperature "
                "in llms.*.temperature."
            )
        else:
            why = (
                "attempts at one example end alike: raise the temperature in llms.*.temperature, or "
                "let the evaluator score finer differences."
            )
        return [why] if self.generations is None or self.generations >= 8 else [why, more]

    def _learning(self) -> list[str]:
        if self.idle and not self.optimizer_steps:
            return [f"no job has changed the model yet: {self.idle[-1]}"]
        if self.clip_frac is not None and self.clip_frac > CLIPPED:
            return [
                f"clip_frac is {self.clip_frac:.2f}: that share of tokens is clipped, so the updates "
                "are cut and noisy. Halve trainer_adapters.*.training.learning_rate, or raise "
                "training.groups_per_optimizer_step."
            ]
        if self.learning_rate is None or self.learning_rate >= SLOW:
            return []
        return [
            f"the learning rate {self.learning_rate:g} is small for a LoRA adapter: "
            f"{self.optimizer_steps} optimizer steps change a weight by at most "
            f"{self.learning_rate * self.optimizer_steps:.0e}. Set "
            "trainer_adapters.*.training.learning_rate between 2e-5 and 1e-4."
        ]


def _flat_levels(r: Round) -> list[float]:
    """The reward of each group whose rewards are all equal."""
    groups = r.by_example.values()
    return [g[0] for g in groups if len(g) > 1 and min(g) == max(g)]
