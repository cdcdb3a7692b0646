"""The outcome of a run: reward before and after, the gain, and whether it is significant.

In:   the RunHistory of a run
Out:  an Outcome, whose numbers are report.json

Before is the run's first step, after is the best one, or the last where none is better than the first
(comparison.py). The gain is paired by example and significant when its p value is at most 0.05
(estimate.py says which test). It is unclear if the rewards that are missing could have made it
insignificant. Without two validations the training rewards of the first and
the last epoch are compared, and the report says so first, because a model can memorize its training
examples. They are paired if at least `MIN_PAIRS` examples were in both epochs. Rewards that compare the
rollouts of one policy with each other (RULER) are compared with nothing.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hone.errors import ConfigError
from hone.files.event_log import FILE, read
from hone.report import metrics
from hone.report.comparison import Comparison, comparison
from hone.report.estimate import (
    MIN_PAIRS,
    Estimate,
    Rewards,
    by_example,
    changes,
    estimate,
    gain,
    unpaired_gain,
)
from hone.report.history import RunHistory, Validation

Verdict = Literal["better", "worse", "unclear", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReward(Estimate):
    """Mean reward of one policy."""

    epoch: int
    """Epochs that the policy was trained for."""
    step: int | None = None
    failure_rate: float | None = None
    """Share of held-out rollouts that failed because of the model."""

    @classmethod
    def of(cls, rewards: Rewards, **policy: Any) -> Self:
        value = estimate(list(by_example(rewards).values()))
        assert value is not None, policy
        return cls(**asdict(value), **policy)

    @classmethod
    def validated(cls, v: Validation, rewards: Rewards | None = None) -> Self:
        """`rewards`: those of its rewards that are compared; all by default."""
        counted = v.rewards if rewards is None else rewards
        return cls.of(counted, epoch=v.epoch, step=v.step, failure_rate=v.failure_rate)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a report; `baseline`, `tuned` and `gain` are None without two policies."""

    history: RunHistory
    compared: Comparison | None = None
    """None for training rewards."""
    baseline: PolicyReward | None = None
    tuned: PolicyReward | None = None
    gain: Estimate | None = None
    bound: Estimate | None = None
    """The change in the worst case for the rewards that the environment lost; None if it lost none."""
    deltas: tuple[float, ...] = ()
    """Change of each example; empty if the examples are not paired."""
    shared: int = 0
    """Number of examples that both policies have a reward for."""

    @classmethod
    def of(cls, history: RunHistory) -> Self:
        compared = comparison(history)
        if compared is not None:
            return cls._held_out(history, compared)
        epochs = [epoch for epoch in history.epochs if history.rewards(epoch)]
        if len(epochs) < 2 or history.run.relative:
            return cls(history)
        first, last = (history.rewards(epoch) for epoch in (epochs[0], epochs[-1]))
        policies = (
            PolicyReward.of(first, epoch=epochs[0]),
            PolicyReward.of(last, epoch=epochs[-1]),
        )
        deltas = tuple(changes(first, last).values())
        if (shared := len(deltas)) < MIN_PAIRS:
            return cls(history, None, *policies, unpaired_gain(first, last), shared=shared)
        return cls(history, None, *policies, gain(first, last), deltas=deltas, shared=shared)

    @classmethod
    def _held_out(cls, history: RunHistory, compared: Comparison) -> Self:
        before, after = compared.rewards
        if not before:
            first, last = map(PolicyReward.validated, (compared.before, compared.after))
            return cls(history, compared, first, last)
        change, bound = gain(before, after, others=compared.others), None
        if compared.lost and change is not None:
            worst = compared.worst_case(rises=change.mean >= 0)
            bound = gain(*worst, others=compared.others)
        deltas = tuple(changes(before, after).values())
        return cls(
            history,
            compared,
            PolicyReward.validated(compared.before, before),
            PolicyReward.validated(compared.after, after),
            change,
            bound,
            deltas,
            len(deltas),
        )

    @property
    def held_out(self) -> bool:
        """Whether held-out examples are compared; without two validations, training examples are."""
        return self.compared is not None

    @property
    def is_relative(self) -> bool:
        """Whether nothing is compared because all rewards compare rollouts of one policy."""
        return self.compared is None and self.history.run.relative

    @property
    def verdict(self) -> Verdict:
        if self.gain is None:
            return "unknown"
        if not self.gain.certain or self.idle or self.is_contradicted:
            return "unclear"
        return "better" if self.gain.mean > 0 else "worse"

    @property
    def is_contradicted(self) -> bool:
        """Whether the change is significant, but in the worst case it is not, or has another sign."""
        if self.gain is None or self.bound is None or not self.gain.certain:
            return False
        return not self.bound.certain or (self.bound.mean > 0) != (self.gain.mean > 0)

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
        """The step of NAME@best: the one that the trainer logged, or the best validated step."""
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
        """The model name to request; step 0, the untrained model, never counts as the best."""
        name = self.history.run.name
        return f"{name}@best" if name and self.best_step else name

    @property
    def trained_tokens(self) -> dict[str, int]:
        """Tokens of the training jobs: all, computed, shared; empty without a job."""
        jobs = [r.learned for r in self.history.rounds if "learn/computed_tokens" in r.learned]
        if not jobs:
            return {}
        kinds = ("logical", "computed", "shared")
        return {kind: int(sum(job[f"learn/{kind}_tokens"] for job in jobs)) for kind in kinds}

    @property
    def turns(self) -> dict[str, int]:
        """How the prompts of the training jobs were made (`turns/...`); empty without a job."""
        turns: Counter[str] = Counter()
        for r in self.history.rounds:
            names = [name for name in r.learned if name.startswith("turns/")]
            turns.update({name: int(r.learned[name]) for name in names})
        return dict(sorted(turns.items()))

    @property
    def num_turns(self) -> int:
        outcomes = ("first", "bridged", "re-rendered", "branched")
        return sum(self.turns.get(f"turns/{outcome}", 0) for outcome in outcomes)

    @property
    def branches(self) -> dict[str, int]:
        """Turns that started a branch, by reason, the most frequent first."""
        reasons: Counter[str] = Counter()
        for name, count in self.turns.items():
            _, outcome, *reason = name.split("/")
            if reason and (outcome in ("branched", "re-rendered") or reason == ["forked"]):
                reasons[reason[0].replace("_", " ")] += count
        return dict(reasons.most_common())

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples that got better, got worse, or are unchanged."""
        return {
            "better": sum(d > 0 for d in self.deltas),
            "worse": sum(d < 0 for d in self.deltas),
            "unchanged": sum(d == 0 for d in self.deltas),
        }

    def as_dict(self) -> dict[str, Any]:
        """report.json, without its examples."""
        history, run, gain, compared = self.history, self.history.run, self.gain, self.compared
        policies = {name: getattr(self, name) for name in ("baseline", "tuned", "best", "newest")}
        failure_rewards = [v.failure_reward for v in history.validations if v.policy_failures]
        return {
            **{name: policy and asdict(policy) for name, policy in policies.items()},
            "gain": gain and {**asdict(gain), "certain": gain.certain, **self.counts},
            "bound": self.bound and {**asdict(self.bound), "certain": self.bound.certain},
            "verdict": self.verdict,
            "relative": self.is_relative,
            "measured_on": "validation" if self.held_out else "training",
            "selection": compared
            and {"chosen_of": compared.chosen_of, "fresh_answers": compared.fresh},
            "missing": compared
            and {"left_out_pairs": compared.num_left_out, "lost_pairs": len(compared.lost)},
            "failure_reward": failure_rewards[-1] if failure_rewards else None,
            "evaluator": run.evaluators[0],
            "validation_evaluator": run.evaluators[1],
            "status": history.status,
            "message": history.finished and history.finished.message,
            "epochs": history.num_done,
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
            "turns": self.turns,
            "failures": dict(history.failures),
            "dropped": dict(history.dropped),
            "rewards": metrics.reward_history(history),
            "validations": metrics.validation_history(history),
            "warnings": history.warnings,
        }


def measure(output_dir: Path) -> Outcome:
    """The outcome of the run in this directory."""
    history = RunHistory.of(read(output_dir / FILE))
    if not history.sessions:
        raise ConfigError(
            f"{output_dir}: no run to report on ({FILE} is missing or empty). Name the "
            "finetuning.output_dir of a run that was started."
        )
    return Outcome.of(history)
