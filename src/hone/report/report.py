"""What a run came to: is the model better, by how much, how sure is that, and how to use it.

In:   a run's output_dir: events.jsonl, and trajectories/*.jsonl for examples
Out:  report.json for programs, report.md and report.html for people (sections.py and page.py say
      what stands in them), reward_plot.png

Before is the first validation that gave a number and after is the best step, or the last where no
step was chosen (comparison.py). The gain is paired by example and counts as certain when its p value
is at most 0.05 (estimate.py says which test).
Without two validations the training rewards of the first and the last epoch stand in, and the
report says so first, because a model may learn its training examples by heart.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hone.errors import ConfigError
from hone.events import FILE, read
from hone.report import metrics
from hone.report.comparison import Comparison, comparison
from hone.report.estimate import (
    Estimate,
    by_example,
    changes,
    estimate,
    gain,
    unpaired_gain,
)
from hone.report.examples import Example, pick, request
from hone.report.history import History
from hone.report.validations import Validation

Verdict = Literal["better", "worse", "unclear", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A mean reward, and of which policy."""

    value: Estimate
    epoch: int
    """Epochs of training behind it."""
    step: int | None
    failure_rate: float | None = None
    """Share of held-out rollouts that failed through the model's own doing."""

    def as_dict(self) -> dict[str, Any]:
        more = {"epoch": self.epoch, "step": self.step, "failure_rate": self.failure_rate}
        return self.value.as_dict() | more


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of a report; `gain` is None where there is nothing to compare."""

    history: History
    held_out: bool
    """False: measured on training examples, for want of two validations."""
    baseline: Measured | None
    tuned: Measured | None
    best: Measured | None
    """The best validation, where it is not the last one."""
    newest: Measured | None
    """The last validation, where it is not the one that is compared."""
    compared: Comparison | None
    """None for training rewards."""
    gain: Estimate | None
    deltas: dict[str, float]
    """What each example gained."""
    examples: list[Example] = field(default_factory=list)
    request: dict[str, Any] | None = None
    """What the agent sends to the model, without the model's name."""

    @property
    def verdict(self) -> Verdict:
        if self.gain is None:
            return "unknown"
        if not self.gain.certain or self.idle:
            return "unclear"
        return "better" if self.gain.mean > 0 else "worse"

    @property
    def idle(self) -> str | None:
        """Why nothing was learned, where no job moved the model; None where one did, or none ran."""
        reasons = [job.reason for job in self.history.jobs]
        return str(reasons[-1]) if reasons and all(reasons) else None

    @property
    def epoch_means(self) -> list[tuple[int, float | None]]:
        """Mean training reward of each epoch."""
        entries = metrics.reward_history(self.history)
        return [(entry["epoch"], entry["avg_reward"]) for entry in entries]

    @property
    def best_step(self) -> int | None:
        """What NAME@best means: what the trainer said, or the best step that was validated."""
        finished, best = self.history.finished, self.history.best
        if finished is not None and finished.best_step is not None:
            return finished.best_step
        return best.step if best is not None and self.held_out else None

    @property
    def step(self) -> int | None:
        """The newest one."""
        if self.history.finished is not None:
            return self.history.finished.step
        steps = [job.step for job in self.history.jobs if job.step]
        return steps[-1] if steps else self.history.run.step

    @property
    def model(self) -> str | None:
        """The name to ask for; step 0, the untrained model, is never the best of a training."""
        name = self.history.run.name
        return f"{name}@best" if name and self.best_step else name

    def as_dict(self) -> dict[str, Any]:
        """report.json."""
        history, run = self.history, self.history.run
        return {
            "baseline": self.baseline and self.baseline.as_dict(),
            "tuned": self.tuned and self.tuned.as_dict(),
            "gain": self.gain and self.gain.as_dict() | self._counts(),
            "verdict": self.verdict,
            "measured_on": "validation" if self.held_out else "training",
            "best": self.best and self.best.as_dict(),
            "newest": self.newest and self.newest.as_dict(),
            "selection": self._selection(),
            "failure_reward": self._failure_reward(),
            "evaluator": run.evaluators[0],
            "validation_evaluator": run.evaluators[1],
            "status": history.status,
            "message": history.finished and history.finished.message,
            "epochs": len(history.done),
            "epochs_planned": run.epochs,
            "seconds": history.seconds,
            "phases": history.phases,
            "checkpoint": {
                "project": run.project,
                "name": run.name,
                "step": self.step,
                "best_step": self.best_step,
                "model": self.model,
                "base_model": run.base_model,
            },
            "run_id": run.run_id,
            "sessions": history.sessions,
            "seed": run.seed,
            "rollouts": history.rollouts,
            "calls": history.calls,
            "tokens": history.tokens,
            "trained_tokens": self.trained_tokens(),
            "failures": dict(history.failures),
            "dropped": dict(history.dropped),
            "rewards": metrics.reward_history(history),
            "validations": metrics.validation_history(history),
            "examples": [example.as_dict() for example in self.examples],
            "warnings": history.warnings,
        }

    def _selection(self) -> dict[str, Any] | None:
        if self.compared is None:
            return None
        return {"chosen_of": self.compared.chosen_of, "fresh_answers": self.compared.fresh}

    def _failure_reward(self) -> float | None:
        found = [v.failure_reward for v in self.history.validations]
        return next((reward for reward in reversed(found) if reward is not None), None)

    def trained_tokens(self) -> dict[str, int]:
        """Tokens that the jobs learned from, those really computed, those shared; {} without a job."""
        jobs = [r.learned for r in self.history.rounds if "learn/computed_tokens" in r.learned]
        if not jobs:
            return {}
        logical, computed = (
            int(sum(job[f"learn/{kind}_tokens"] for job in jobs))
            for kind in ("logical", "computed")
        )
        return {"logical": logical, "computed": computed, "shared": logical - computed}

    def _counts(self) -> dict[str, Any]:
        assert self.gain is not None
        return {
            "certain": self.gain.certain,
            "better": sum(d > 0 for d in self.deltas.values()),
            "worse": sum(d < 0 for d in self.deltas.values()),
            "unchanged": sum(d == 0 for d in self.deltas.values()),
        }


def write(output_dir: Path, *, brief: bool = False) -> Report:
    """All four files; what they say is what was known when this was called.

    `brief` draws nothing, for somebody who waits for the command to end: it shows the rewards if they
    were drawn after the last round or validation, and the rest can wait until the run is over.
    """
    # Both draw, and matplotlib takes a second to load, but only when something is drawn.
    from hone.report import page, plots
    from hone.report.sections import sections

    output_dir = Path(output_dir)
    report, place = measure(output_dir), output_dir / "reward_plot.png"
    picture = place.read_bytes() if place.exists() else None
    if picture is not None and not plots.shows_all(picture, report.history):
        picture = None
    if picture is None and not brief:
        picture = plots.rewards(report.history, plots.WIDE)
        metrics.replace(place, picture)
    told = sections(report, picture, brief=brief)
    metrics.replace(output_dir / "report.json", json.dumps(report.as_dict(), indent=2) + "\n")
    metrics.replace(output_dir / "report.md", page.markdown(told))
    metrics.replace(output_dir / "report.html", page.html(told))
    return report


def measure(output_dir: Path) -> Report:
    """The numbers, from the run's log."""
    history = History.of(read(output_dir / FILE))
    if not history.sessions:
        raise ConfigError(
            f"{output_dir}: no run to report on ({FILE} is missing or empty). Name the "
            "finetuning.output_dir of a run that was started."
        )
    compared, best, newest, found = comparison(history), None, None, None
    if compared is not None:
        first, last = _validated(compared.before), _validated(compared.after)
        rewards = compared.before.rewards, compared.after.rewards
        top, end = history.best, history.scored[-1]
        best = None if top is None or top is end else _validated(top)
        newest = None if compared.after.epoch == end.epoch else _validated(end)
        found = gain(*rewards, tried=[v.rewards for v in compared.tried])
    else:
        epochs = [e for e in history.epochs if history.rewards(e)]
        ends = (epochs[0], epochs[-1]) if len(epochs) > 1 else ()
        rewards = tuple(history.rewards(e) for e in ends)
        measured = [_trained(history, e) for e in ends]
        first, last = measured if measured else (None, None)
        found = (gain(*rewards) or unpaired_gain(*rewards)) if rewards else None
    deltas = changes(*rewards) if rewards else {}
    return Report(
        history=history,
        held_out=compared is not None,
        baseline=first,
        tuned=last,
        best=best,
        newest=newest,
        compared=compared,
        gain=found,
        deltas=deltas,
        examples=_examples(output_dir, history, compared, first, last),
        request=request(output_dir / "trajectories"),
    )


def _validated(v: Validation) -> Measured:
    value = estimate(list(by_example(v.rewards).values()))
    assert value is not None, v
    return Measured(value=value, epoch=v.epoch, step=v.step, failure_rate=v.failure_rate)


def _trained(history: History, epoch: int) -> Measured:
    value = estimate(list(by_example(history.rewards(epoch)).values()))
    assert value is not None, epoch
    return Measured(value=value, epoch=epoch, step=None)


def _examples(
    output_dir: Path,
    history: History,
    compared: Comparison | None,
    first: Measured | None,
    last: Measured | None,
) -> list[Example]:
    if first is None or last is None:
        return []
    name = "epoch" if compared is None else "final" if compared.fresh else "validation"
    before, after = (
        output_dir / "trajectories" / f"{name}_{m.epoch:03d}.jsonl" for m in (first, last)
    )
    failed = None if compared is None else history.failure_reward
    return pick(before, after, failure_reward=failed)
