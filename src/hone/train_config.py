"""TrainConfig and TrainSFTConfig: the settings of one training job.

In:   keys of a request, of a model's defaults, or of `training:` in a YAML file
Out:  validated settings; a key that its loss does not use is refused
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Credit = Literal["outcome", "per_call", "return_to_go"]
"""The reward of a call: the trajectory's, its own, or the sum of its own and all later ones."""
Baseline = Literal["group", "batch"]
"""What is subtracted from rewards: the mean of their group, or of the whole job."""


LossName = Literal["grpo", "dapo", "dr_grpo", "cispo", "dpo", "sft"]
DpoPairs = Literal["best_worst", "all"]
DpoReference = Literal["base", "job"]
ART_LEARNING_RATE = 5e-6
"""Learning rate of jobs of ART's clients, if neither the call nor the model sets one; ART's default."""

_ON_POLICY_KEYS = (
    "epsilon",
    "epsilon_high",
    "unit",
    "dr_grpo_tokens",
    "scale_rewards",
    "credit",
    "baseline",
    "beta",
    "kl_penalty_coef",
    "importance_cap",
)
"""Keys of TrainConfig without effect on the losses dpo and sft."""
_DPO_KEYS = ("dpo_beta", "dpo_pairs", "dpo_reference")
_UNUSED = {
    "grpo": ("dr_grpo_tokens", *_DPO_KEYS),
    "dapo": ("unit", "dr_grpo_tokens", *_DPO_KEYS),
    "dr_grpo": _DPO_KEYS,
    "cispo": ("unit", "dr_grpo_tokens", *_DPO_KEYS),
    "dpo": _ON_POLICY_KEYS,
    "sft": (*_ON_POLICY_KEYS, *_DPO_KEYS),
}


def unused_keys(loss: object) -> tuple[str, ...]:
    """Keys of TrainConfig that have no effect on this loss; of the default loss, if it is None."""
    return _UNUSED.get(TrainConfig().loss if loss is None else str(loss), ())


class TrainConfig(BaseModel):
    """How one job is trained. Every key is used; the step's metrics report the values used."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    learning_rate: float = Field(default=5e-5, ge=0)
    """AdamW's learning rate (0 measures without changing the weights)."""
    learning_rates: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    """Learning rate of each optimizer step, instead of `learning_rate`; later steps use the last
    value."""
    loss: LossName = "grpo"
    """How labels are weighted and clipped; see learner/loss.py. `dpo` compares trajectories of a group
    in pairs, `sft` trains on every trajectory whatever its reward."""
    epsilon: float | None = Field(default=None, gt=0)
    """The ratio is clipped below at 1 - epsilon (and above at 1 + epsilon without epsilon_high).
    Null: 0.2, and no lower bound for cispo."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """The ratio's upper bound is 1 + epsilon_high; cispo caps the ratio itself there (default 5)."""
    unit: Literal["rollout", "call"] = "rollout"
    """What is one sequence for grpo, which averages per sequence, and dr_grpo, which counts them."""
    dr_grpo_tokens: int = Field(default=1024, gt=0)
    """dr_grpo divides by sequences x this constant instead of by lengths."""
    scale_rewards: bool | None = None
    """Divide advantages by the group's standard deviation. Null: yes, except for dr_grpo, which
    does not by definition; true and false apply to every loss."""
    credit: Credit = "outcome"
    """The reward of a call: the trajectory's, its own, or the sum of its own and all later ones."""
    baseline: Baseline = "group"
    """What is subtracted from rewards: the mean of their group, or of the whole job."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the k3 divergence from the base model, in the loss."""
    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the base model, as a penalty in the advantage."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Upper bound of pi_old / pi_sampler; None disables the correction."""
    max_staleness: int | None = Field(default=0, ge=0)
    """How many steps older than the job's base step the sampled calls may be; None: any number. It
    does not apply to dpo and sft, which train on text of any origin."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """dpo: how strongly the policy is kept close to the reference; smaller values let it move
    further."""
    dpo_pairs: DpoPairs = "best_worst"
    """dpo: one pair per group, of the best and the worst trajectory by reward; or every pair with
    unequal rewards."""
    dpo_reference: DpoReference = "base"
    """dpo: the reference policy is the base model without adapter, or the policy at the start of the
    job."""
    groups_per_optimizer_step: int = Field(default=8, gt=0)
    """Maximum number of groups per optimizer step. Groups are split evenly: 17 into 6, 6 and 5."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_seq_length: int = Field(default=8192, gt=1)
    """Rollouts with a longer call are dropped and counted, never truncated."""
    row_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens per packed row; the longest path always fits. Null: as many as fit
    into the learner's share of the machine's total memory, recorded with the job when it starts."""

    @model_validator(mode="before")
    @classmethod
    def _without_accumulation(cls, values: Any) -> Any:
        """ART's TrainConfig has one more field, which its users leave at None."""
        if isinstance(values, dict) and "grad_accumulation_sequences" in values:
            values = dict(values)
            if values.pop("grad_accumulation_sequences") is not None:
                raise ValueError(
                    "grad_accumulation_sequences: Optimizer steps consist of whole groups; set "
                    "groups_per_optimizer_step"
                )
        return values

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of an optimizer step of the job, counted from 0."""
        rates = self.learning_rates
        return self.learning_rate if rates is None else rates[min(step, len(rates) - 1)]

    @property
    def is_on_policy(self) -> bool:
        """Whether the loss needs calls that the policy sampled, with their log-probabilities."""
        return self.loss not in ("dpo", "sft")

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        """Refuse keys that this loss does not use, if they are not at their default."""
        for key in unused_keys(self.loss):
            value, default = getattr(self, key), TrainConfig.model_fields[key].default
            if value != default:
                instead = " Set dpo_beta." if (key, self.loss) == ("beta", "dpo") else ""
                raise ValueError(
                    f"{key} is {value!r}, which has no effect on loss {self.loss!r}; remove it or "
                    f"set another loss.{instead}"
                )
        return self

    @property
    def divides_by_spread(self) -> bool:
        """Whether advantages are divided by the group's standard deviation."""
        return self.loss != "dr_grpo" if self.scale_rewards is None else self.scale_rewards

    @property
    def clip_low(self) -> float:
        """1 minus the lower bound of the ratio."""
        if self.epsilon is not None:
            return self.epsilon
        return 1.0 if self.loss == "cispo" else 0.2

    @property
    def clip_high(self) -> float:
        """The upper bound of the ratio, minus 1."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 4.0 if self.loss == "cispo" else self.clip_low


AUTO_BATCH = 2
"""Conversations per optimizer step of `batch_size: auto`; ART's value."""


class TrainSFTConfig(BaseModel):
    """How `train_sft` trains; ART's names and defaults."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    learning_rate: float | list[float] = 5e-5
    """AdamW's learning rate; a list has one value per batch."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Conversations per optimizer step; auto: 2."""

    def job_keys(self) -> dict[str, Any]:
        """The equivalent keys of TrainConfig."""
        size = AUTO_BATCH if self.batch_size == "auto" else self.batch_size
        rate = self.learning_rate
        rates = {"learning_rates": rate} if isinstance(rate, list) else {"learning_rate": rate}
        return {"loss": "sft", "groups_per_optimizer_step": size, **rates}
