"""A run in numbers: the metrics files, and why a reward stays flat.

In:   the History of a run (or its events)
Out:  training_metrics.jsonl, reward_history.json, validation_history.json, curriculum_state.json;
      a diagnosis in words

The files are written anew from the whole history, each in one move, so that a run that was killed
and went on has files without a gap and without a line twice.
"""

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hone.events import Event
from hone.report.estimate import by_example
from hone.report.history import History, Round

TRAINING, REWARDS = "training_metrics.jsonl", "reward_history.json"
VALIDATIONS, CURRICULUM = "validation_history.json", "curriculum_state.json"

# ---- files --------------------------------------------------------------------------------------


def write(output_dir: Path, events: Iterable[Event] | History) -> None:
    """The four files, as far as there is anything to write into them."""
    history = History.of(events)
    run_id = history.run.get("run_id")
    lines = [json.dumps(_line(r, run_id)) + "\n" for r in history.rounds]
    replace(output_dir / TRAINING, "".join(lines))
    replace(output_dir / REWARDS, _indented(reward_history(history)))
    if history.validations:
        replace(output_dir / VALIDATIONS, _indented(validation_history(history)))
    states = [state for r in history.rounds if (state := _curriculum(r))]
    if states:
        replace(output_dir / CURRICULUM, _indented(states[-1]))


def replace(path: Path, held: str | bytes) -> None:
    """Write a file whole or not at all: somebody may be looking at it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    beside.write_bytes(held.encode() if isinstance(held, str) else held)
    beside.replace(path)


def reward_history(history: History) -> list[dict[str, Any]]:
    """One entry per epoch; several rounds are put together, each by the trajectories it had."""
    entries = []
    for epoch in history.epochs:
        rounds = [r for r in history.rounds if r.epoch == epoch]
        found = [r.metrics for r in rounds]
        entries.append(
            {
                "epoch": epoch,
                "timestamp": _time(rounds[-1].collected),
                "avg_reward": _weighted(found, "avg_reward", "num_trajectories"),
                "min_reward": _known(min, found, "min_reward"),
                "max_reward": _known(max, found, "max_reward"),
                "num_trajectories": sum(m.get("num_trajectories") or 0 for m in found),
                "filtered_avg_reward": _weighted(
                    found, "filtered_avg_reward", "filtered_trajectories"
                ),
                "curriculum_percentile": found[-1].get("curriculum_percentile", 1.0),
            }
        )
    return entries


def validation_history(history: History) -> list[dict[str, Any]]:
    """One entry per validation; one that failed has no reward, and says why."""
    return [
        {
            "epoch": v.epoch,
            "timestamp": _time({"at": v.at}),
            "avg_reward": v.mean,
            "min_reward": v.min,
            "max_reward": v.max,
            "num_examples": v.num_examples,
            "step": v.step,
            "failures": v.failures,
            "policy_failures": v.policy_failures,
            "failure_rate": v.failure_rate,
            "failure_reward": v.failure_reward,
            "error": v.error,
        }
        for v in history.validations
    ]


def _line(r: Round, run_id: str | None) -> dict[str, Any]:
    collected = r.collected
    assert collected is not None, r
    line = {"epoch": r.epoch, "timestamp": _time(collected), "run_id": run_id} | r.metrics
    if state := _curriculum(r):
        line["curriculum_state"] = state
    if r.of > 1:
        line["round"] = r.index
    line["zero_variance_groups"] = collected["zero_variance_groups"]
    line["dropped"] = collected["dropped"]
    if r.job is not None:
        told = {key: r.job.get(key) for key in ("job", "step", "reason", "message", "seconds")}
        line |= {key: value for key, value in told.items() if value is not None}
    return line | r.learned


def _curriculum(r: Round) -> dict[str, Any] | None:
    return None if r.collected is None else r.collected.get("curriculum_state")


def _time(event: Event | None) -> str | None:
    return None if event is None else datetime.fromtimestamp(event["at"], UTC).isoformat()


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _weighted(found: Sequence[Mapping[str, Any]], key: str, count: str) -> float | None:
    pairs = [(m[key], m.get(count) or 0) for m in found if m.get(key) is not None]
    total = sum(n for _, n in pairs)
    return sum(value * n for value, n in pairs) / total if total else None


def _known(pick: Any, found: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return pick((m[key] for m in found if m.get(key) is not None), default=None)


# ---- why a reward stays flat --------------------------------------------------------------------

FLAT_EPOCHS = 3
FLAT_SHARE = 0.5
"""From this share of zero-variance groups on, they are the cause."""
CLIPPED = 0.2
SLOW = 1e-5
"""LoRA adapters are trained at 1e-5 to 2e-4; below, a run of ordinary length hardly moves them."""
FEW_GENERATIONS = 4
FLAT = "The reward did not rise by more than chance"
"""How a diagnosis begins."""
_FALLING = (
    "the reward falls: the updates do harm. Lower trainer_adapters.*.training.learning_rate, or hold "
    "the model near its base with training.beta (0.01 to 0.1). The best step so far is kept."
)


def diagnosis(events: Iterable[Event] | History, *, epochs: int = FLAT_EPOCHS) -> str | None:
    """Why the reward does not rise, as measured, and what to change.

    None while it rises: flat is a stretch of `epochs` last epochs or more of which none is better
    than the first by more than the standard error.
    """
    history = History.of(events)
    known = [e for e in reward_history(history) if e["avg_reward"] is not None]
    stretch = _flat_stretch(history, known)
    if len(stretch) < epochs:
        return None
    first, last = stretch[0], stretch[-1]
    rise, noise = _rise(history, first, last)
    seen = _Seen.of(history, {e["epoch"] for e in stretch})
    causes = ([_FALLING] if rise < -2 * noise else []) + seen.causes() or [
        f"none of these explains it. A change smaller than {noise:.3f} cannot be seen with so few "
        "rollouts: more examples or generations narrow that. Otherwise see whether the reward "
        "measures what the agent can change (`hone eval` shows every score)."
    ]
    return "\n".join(
        [
            f"{FLAT} in the last {len(stretch)} epochs: "
            f"{first['avg_reward']:.3f} -> {last['avg_reward']:.3f} ({rise:+.3f}, standard error {noise:.3f}).",
            f"Measured: {seen}.",
            *(f"- {cause}" for cause in causes),
        ]
    )


def _flat_stretch(history: History, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest run of last epochs in which nothing rose above the first of them."""
    flat: list[dict[str, Any]] = []
    for start in reversed(range(len(entries))):
        rises = (_rise(history, entries[start], later) for later in entries[start + 1 :])
        if any(rise > noise for rise, noise in rises):
            break
        flat = entries[start:]
    return flat


def _rise(
    history: History, first: Mapping[str, Any], last: Mapping[str, Any]
) -> tuple[float, float]:
    """Change between two epochs and its standard error, paired where the same examples ran."""
    before, after = (by_example(history.rewards(e["epoch"])) for e in (first, last))
    paired = [after[e] - before[e] for e in before if e in after]
    if len(paired) >= 2:
        return fmean(paired), stdev(paired) / len(paired) ** 0.5
    if len(before) < 2 or len(after) < 2:
        return last["avg_reward"] - first["avg_reward"], 0.0
    squares = (stdev(x.values()) ** 2 / len(x) for x in (before, after))
    return fmean(after.values()) - fmean(before.values()), sum(squares) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the last epochs measured."""

    groups: int
    flat: int
    at_top: int
    """Flat groups whose reward is the highest of the run."""
    at_bottom: int
    constant: float | None
    """The reward, where there was only one in the whole run."""
    clip_frac: float | None
    learning_rate: float | None
    optimizer_steps: int
    """Since the run began."""
    idle: list[str]
    """Why a job took no step, for each that took none."""
    compared: str
    """What a group has equal ones of if it is flat."""
    generations: int | None
    """Rollouts that are compared with each other; None where that is the whole batch."""
    failed: int
    rollouts: int

    @classmethod
    def of(cls, history: History, epochs: set[int]) -> "_Seen":
        rounds = [r for r in history.rounds if r.epoch in epochs]
        rewards = [reward for r in history.rounds for reward in r.rewards.values()]
        levels = [x for r in rounds for x in _flat_levels(r)]
        if history.run.get("credit", "outcome") != "outcome" or _with_batch(history):
            levels = []  # equal outcomes do not make a group flat there
        clips = [r.learned["learn/clip_frac"] for r in rounds if "learn/clip_frac" in r.learned]
        rates = [r.learned.get("learn/learning_rate") for r in rounds]
        return cls(
            groups=sum(r.metrics.get("num_groups") or 0 for r in rounds),
            flat=sum(r.collected["zero_variance_groups"] or 0 for r in rounds if r.collected),
            at_top=sum(x == max(rewards) for x in levels),
            at_bottom=sum(x == min(rewards) for x in levels),
            constant=rewards[0] if rewards and min(rewards) == max(rewards) else None,
            clip_frac=fmean(clips) if clips else None,
            learning_rate=rates[-1] or history.run.get("learning_rate"),
            optimizer_steps=int(
                sum(r.learned.get("learn/optimizer_steps") or 0 for r in history.rounds)
            ),
            compared="rewards" if history.run.get("credit", "outcome") == "outcome" else "values",
            idle=[r.job["reason"] for r in rounds if r.job and r.job.get("reason")],
            generations=None if _with_batch(history) else history.run.get("generations"),
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
        """The worst first; each with its remedy."""
        found = [*self._flat_groups(), *self._learning()]
        if self.rollouts and self.failed / self.rollouts > 0.05:
            found.append(
                f"{self.failed} of {self.rollouts} rollouts failed, and what fails is not learned "
                "from: the counts above say why; finetuning.on_policy_failure gives failures of the "
                "model a reward."
            )
        return found

    def _flat_groups(self) -> list[str]:
        more = (
            f"num_generations is {self.generations}; set trajectory_builders.*.num_generations to 8 "
            "or more: a larger group more often holds both a good and a bad answer."
        )
        few = self.generations is not None and self.generations < FEW_GENERATIONS
        if self.share < FLAT_SHARE:
            return [more] if few else []
        if self.constant is not None:
            return [
                f"every rollout of the run was given {self.constant:g}: the evaluator does not tell "
                "answers apart. Let it give partial credit, and look at its scores with `hone eval`."
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
                "let the evaluator tell finer differences."
            )
        return [why] if self.generations is None or self.generations >= 8 else [why, more]

    def _learning(self) -> list[str]:
        if self.idle and not self.optimizer_steps:
            return [f"no job has moved the model yet: {self.idle[-1]}"]
        found = []
        if self.clip_frac is not None and self.clip_frac > CLIPPED:
            found.append(
                f"clip_frac is {self.clip_frac:.2f}: that share of tokens ran into the bound, so "
                "the updates are cut and noisy. Halve trainer_adapters.*.training.learning_rate, "
                "or raise training.groups_per_optimizer_step."
            )
        elif self.learning_rate is not None and self.learning_rate < SLOW:
            moved = self.learning_rate * self.optimizer_steps
            found.append(
                f"the learning rate {self.learning_rate:g} is small for a LoRA adapter: "
                f"{self.optimizer_steps} optimizer steps can have moved a weight by {moved:.0e} at "
                "most. Set trainer_adapters.*.training.learning_rate between 2e-5 and 1e-4."
            )
        return found


def _with_batch(history: History) -> bool:
    """Whether rollouts are compared with the whole batch, not with their group."""
    return history.run.get("baseline") == "batch"


def _flat_levels(r: Round) -> list[float]:
    """The reward of each group whose rewards are all equal."""
    groups: dict[str, list[float]] = {}
    for (example, _), reward in r.rewards.items():
        groups.setdefault(example, []).append(reward)
    return [g[0] for g in groups.values() if len(g) > 1 and min(g) == max(g)]
