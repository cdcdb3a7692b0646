"""What crosses the wire: a recorded Call, and how a job is to be trained.

In:   what the engine sampled; what the user asked for
Out:  checked, frozen values
Used: both halves of hone; with trajectory.py the only place where they meet

A Call carries the ids the engine was fed and returned. They are never encoded again from text:
15 of 64 completions of a small model come back as other ids, and their logprobs would then
describe tokens nobody sampled.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """A frozen value that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Call(Strict):
    """One request to a model and its answer, to the token."""

    prompt_ids: list[int] = Field(min_length=1)
    """What the engine was fed."""
    completion_ids: list[int]
    """What it sampled, the end token included."""
    logprobs: list[float] | None = None
    """Temperature-scaled, unmasked log-probability of each completion token; None if unknown."""
    exact: bool = True
    """False where only the log-probability after top-p, top-k, min-p or a grammar is known."""
    forced: list[int] = []
    """Places in the completion that were put there and not sampled; they get no label."""
    temperature: float = Field(default=1.0, ge=0)
    """0 means greedy: such a call is context, never labelled."""
    step: int = Field(default=0, ge=0)
    """The policy version that answered; 0 is the base model."""
    function: str = ""
    """Path of the function that made the call."""
    trained: bool = True
    """False: the call is context only (another model's, a function that is not a target)."""

    @model_validator(mode="after")
    def _logprobs_cover_the_completion(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"logprobs has {len(self.logprobs)} values for {len(self.completion_ids)} "
                "completion_ids; send one for each, or none at all"
            )
        outside = [i for i in self.forced if not 0 <= i < len(self.completion_ids)]
        if outside:
            raise ValueError(
                f"forced names places {outside} of a completion of {len(self.completion_ids)}"
            )
        return self


class TrainConfig(Strict):
    """How one job is trained. Every key is used; the step's metrics say what was used."""

    learning_rate: float = Field(default=5e-6, ge=0)
    """AdamW's step size (0 measures without moving the weights)."""
    loss: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    """How labels are weighted and clipped; see learner/loss.py."""
    epsilon: float = Field(default=0.2, gt=0)
    """The ratio is bounded below at 1 - epsilon (and above, unless epsilon_high is set)."""
    epsilon_high: float | None = None
    """The ratio's upper bound is 1 + epsilon_high; cispo caps the ratio itself there (default 5)."""
    unit: Literal["rollout", "call"] = "rollout"
    """What counts as one sequence where a loss averages per sequence."""
    dr_grpo_tokens: int = Field(default=1024, gt=0)
    """dr_grpo divides by sequences x this constant instead of by lengths."""
    scale_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    credit: Literal["outcome", "per_call", "return_to_go"] = "outcome"
    """Which reward a call is compared by: the trajectory's, its own, or the sum from it on."""
    baseline: Literal["group", "batch"] = "group"
    """What rewards are compared with: their group's mean, or the mean of the whole job."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the k3 divergence from the base model, in the loss."""
    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the base model, as a penalty in the advantage."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Upper bound of pi_old / pi_sampler; None switches the correction off."""
    groups_per_optimizer_step: int = Field(default=8, gt=0)
    """One optimizer step is taken per so many groups."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of the adapter's weights."""
    max_seq_length: int = Field(default=8192, gt=1)
    """Rollouts with a longer call are dropped whole and counted, never cut."""
    row_tokens: int = Field(default=1024, gt=0)
    """Tokens computed together; the longest path always fits."""

    @property
    def clip_high(self) -> float:
        """How far above 1 the ratio may count."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 4.0 if self.loss == "cispo" else self.epsilon
