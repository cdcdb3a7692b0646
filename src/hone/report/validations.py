"""Validations as numbers: mean reward, rewards by example, failures.

In:   `validation` and `final_validation` events
Out:  Validations
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Self

from hone.events import ValidationResult


@dataclass(frozen=True, slots=True)
class Validation:
    """One pass over the held-out examples.

    A rollout that failed because of the model counts: with the reward that the configuration gives
    it, or under `drop` with the run's `failure_reward`. A rollout that failed because of its
    environment does not count.
    """

    epoch: int
    """Epochs that the policy was trained for."""
    step: int | None
    at: float
    mean: float | None
    """None if the validation failed."""
    min: float | None
    max: float | None
    num_examples: int
    failures: int
    """Rollouts without a reward of their own."""
    policy_failures: int
    """Rollouts that failed because of the model."""
    failure_reward: float | None
    """Reward of each of those; None if there are none."""
    dropped: bool
    """The configuration says `drop`, so that reward is the run's `failure_reward`."""
    rewards: dict[str, list[float]]
    """Rewards that count, by example."""
    error: str | None

    @classmethod
    def of(cls, result: ValidationResult, failure_reward: float) -> Self:
        """`failure_reward`: reward of a policy failure under `drop`."""
        failed, dropped = result.policy_failures or {}, result.on_policy_failure == "drop"
        reward = failure_reward if dropped else float(result.on_policy_failure)
        rewards = {e: [r for r in all_ if r is not None] for e, all_ in result.rewards.items()}
        if dropped:
            for example, n in failed.items():
                rewards.setdefault(example, []).extend([reward] * n)
        counted = [r for all_ in rewards.values() for r in all_]
        mean, low, high = result.avg_reward, result.min_reward, result.max_reward
        if failed and counted and not result.error:
            mean, low, high = fmean(counted), min(counted), max(counted)
        examples = result.num_examples
        return cls(
            epoch=result.epoch,
            step=result.step,
            at=result.at,
            mean=mean,
            min=low,
            max=high,
            num_examples=len(rewards) if examples is None else examples,
            failures=result.failures,
            policy_failures=sum(failed.values()),
            failure_reward=reward if failed else None,
            dropped=dropped,
            rewards={example: known for example, known in rewards.items() if known},
            error=result.error,
        )

    @property
    def unscored(self) -> int:
        """Examples without any reward: all of their rollouts failed because of the environment."""
        return max(self.num_examples - len(self.rewards), 0)

    @property
    def failure_rate(self) -> float | None:
        """Share of policy failures among the rollouts that count; None without any."""
        counted = sum(map(len, self.rewards.values()))
        return self.policy_failures / counted if counted else None
