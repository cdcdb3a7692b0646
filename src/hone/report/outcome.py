"""The outcome of a run: reward before and after, the gain, and whether it is significant.

In:   a run's output_dir: events.jsonl, and trajectories/*.jsonl for examples
Out:  an Outcome, which is report.json

Before is the first validation with a reward, after is the best step, or the last step where none was
chosen (comparison.py). The gain is paired by example and significant when its p value is at most
0.05 (estimate.py says which test). Without two validations the training rewards of the first and
the last epoch are compared, and the report says so first, because a model can memorize its training
examples.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hone.errors import ConfigError
from hone.event_log import FILE, read
from hone.report import metrics
from hone.report.comparison import Comparison, comparison
from hone.report.estimate import (
    Estimate,
    Rewards,
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
class PolicyReward:
    """Mean reward of one policy."""

    value: Estimate
    epoch: int
    """Epochs that the policy was trained for."""
    step: int | None = None
    failure_rate: float | None = None
    """Share of held-out rollouts that failed because of the model."""

    @classmethod
    def of(cls, rewards: Rewards, **policy: Any) -> "PolicyReward":
        value = estimate(list(by_example(rewards).values()))
        assert value is not None, policy
        return cls(value=value, **policy)

    @classmethod
    def validated(cls, v: Validation) -> "PolicyReward":
        return cls.of(v.rewards, epoch=v.epoch, step=v.step, failure_rate=v.failure_rate)

    def as_dict(self) -> dict[str, Any]:
        policy = {"epoch": self.epoch, "step": self.step, "failure_rate": self.failure_rate}
        return asdict(self.value) | policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The numbers of a report; `gain` is None if there is nothing to compare."""

    history: History
    compared: Comparison | None
    """None for training rewards."""
    baseline: PolicyReward | None
    tuned: PolicyReward | None
    gain: Estimate | None
    deltas: dict[str, float]
    """Change of each example."""
    examples: list[Example]
    request: dict[str, Any] | None
    """What the agent sends to the model, without the model's name."""

    @property
    def held_out(self) -> bool:
        """Measured on held-out examples; else on training examples, for lack of two validations."""
        return self.compared is not None

    @property
    def verdict(self) -> Verdict:
        if self.gain is None:
            return "unknown"
        if not self.gain.certain or self.idle:
            return "unclear"
        return "better" if self.gain.mean > 0 else "worse"

    @property
    def best(self) -> PolicyReward | None:
        """The best validation, if it is not the last one."""
        best = self.history.best
        if self.compared is None or best is None or best is self.history.scored[-1]:
            return None
        return PolicyReward.validated(best)

    @property
    def newest(self) -> PolicyReward | None:
        """The last validation, if it is not the one that is compared."""
        if self.compared is None or self.compared.after.epoch == self.history.scored[-1].epoch:
            return None
        return PolicyReward.validated(self.history.scored[-1])

    @property
    def idle(self) -> str | None:
        """Why nothing was learned, if no job changed the model; None if one did, or none ran."""
        reasons = [job.reason for job in self.history.jobs]
        return reasons[-1] if reasons and all(reasons) else None

    @property
    def best_step(self) -> int | None:
        """What NAME@best means: what the trainer logged, or the best step that was validated."""
        finished, best = self.history.finished, self.history.best
        if finished is not None and finished.best_step is not None:
            return finished.best_step
        return best.step if best is not None and self.held_out else None

    @property
    def step(self) -> int | None:
        """The newest policy step."""
        if self.history.finished is not None:
            return self.history.finished.step
        steps = [job.step for job in self.history.jobs if job.step]
        return steps[-1] if steps else self.history.run.step

    @property
    def model(self) -> str | None:
        """The name to request; step 0, the untrained model, is never the best of a training."""
        name = self.history.run.name
        return f"{name}@best" if name and self.best_step else name

    @property
    def trained_tokens(self) -> dict[str, int]:
        """Tokens of the training jobs: all, computed, shared; empty without a job."""
        jobs = [r.learned for r in self.history.rounds if "learn/computed_tokens" in r.learned]
        if not jobs:
            return {}
        logical = int(sum(job["learn/logical_tokens"] for job in jobs))
        computed = int(sum(job["learn/computed_tokens"] for job in jobs))
        return {"logical": logical, "computed": computed, "shared": logical - computed}

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples by what became of them."""
        deltas = self.deltas.values()
        return {
            "better": sum(d > 0 for d in deltas),
            "worse": sum(d < 0 for d in deltas),
            "unchanged": sum(d == 0 for d in deltas),
        }

    def as_dict(self) -> dict[str, Any]:
        """report.json."""
        history, run, gain, compared = self.history, self.history.run, self.gain, self.compared
        worth = [v.failure_reward for v in history.validations if v.failure_reward is not None]
        return {
            "baseline": self.baseline and self.baseline.as_dict(),
            "tuned": self.tuned and self.tuned.as_dict(),
            "gain": gain and {**asdict(gain), "certain": gain.certain, **self.counts},
            "verdict": self.verdict,
            "measured_on": "validation" if self.held_out else "training",
            "best": self.best and self.best.as_dict(),
            "newest": self.newest and self.newest.as_dict(),
            "selection": compared
            and {"chosen_of": compared.chosen_of, "fresh_answers": compared.fresh},
            "failure_reward": worth[-1] if worth else None,
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
            "trained_tokens": self.trained_tokens,
            "failures": dict(history.failures),
            "dropped": dict(history.dropped),
            "rewards": metrics.reward_history(history),
            "validations": metrics.validation_history(history),
            "examples": [asdict(example) for example in self.examples],
            "warnings": history.warnings,
        }


def measure(output_dir: Path) -> Outcome:
    """Compute the outcome from the files of a run."""
    history = History.of(read(output_dir / FILE))
    if not history.sessions:
        raise ConfigError(
            f"{output_dir}: no run to report on ({FILE} is missing or empty). Name the "
            "finetuning.output_dir of a run that was started."
        )
    compared, first, last, change = comparison(history), None, None, None
    rewards: tuple[Rewards, Rewards] = {}, {}
    epochs = [epoch for epoch in history.epochs if history.rewards(epoch)]
    if compared is not None:
        first, last = map(PolicyReward.validated, (compared.before, compared.after))
        rewards = compared.before.rewards, compared.after.rewards
        change = gain(*rewards, tried=[v.rewards for v in compared.tried])
    elif len(epochs) > 1:
        rewards = history.rewards(epochs[0]), history.rewards(epochs[-1])
        first = PolicyReward.of(rewards[0], epoch=epochs[0])
        last = PolicyReward.of(rewards[1], epoch=epochs[-1])
        change = gain(*rewards) or unpaired_gain(*rewards)
    return Outcome(
        history=history,
        compared=compared,
        baseline=first,
        tuned=last,
        gain=change,
        deltas=changes(*rewards),
        examples=_examples(output_dir, history, compared, first, last),
        request=request(output_dir / "trajectories"),
    )


def _examples(
    output_dir: Path,
    history: History,
    compared: Comparison | None,
    first: PolicyReward | None,
    last: PolicyReward | None,
) -> list[Example]:
    if first is None or last is None:
        return []
    split = "epoch" if compared is None else "final" if compared.fresh else "validation"
    files = (output_dir / "trajectories" / f"{split}_{p.epoch:03d}.jsonl" for p in (first, last))
    return pick(*files, failure_reward=None if compared is None else history.failure_reward)
