"""Trajectory and TrajectoryGroup: one conversation with a reward, and those compared with it.

In:   recorded calls and the reward the user's code gave
Out:  what a training job is made of
Used: by the SDK and the harness to build jobs, by learner/samples.py to read them

This module knows nothing of tensors, so that it loads on a laptop without torch.
"""

from typing import Self

from pydantic import Field, model_validator

from hone.types import Call, Strict


class Trajectory(Strict):
    """One rollout's calls, in order, and what it was worth."""

    calls: list[Call]
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    """One value per trained call, for `credit: per_call` or `return_to_go`."""
    rollout: str = ""
    """The rollout's id, as the server recorded it."""
    metrics: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_value_per_trained_call(self) -> Self:
        trained = sum(call.trained for call in self.calls)
        if self.shaped_rewards is not None and len(self.shaped_rewards) != trained:
            raise ValueError(
                f"shaped_rewards has {len(self.shaped_rewards)} values for {trained} trained calls"
            )
        return self


class TrajectoryGroup(Strict):
    """Trajectories of the same input, compared with each other."""

    trajectories: list[Trajectory] = Field(min_length=1)
    example: str = ""
    """Id of the input they share."""
