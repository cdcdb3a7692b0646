"""The trainers `dpo` and `sft`, with objectives other than the reward.

In:   groups of rollouts, or conversations and pairs of a dataset (dataset_builder.py)
Out:  the same loop, files and events as the trainer `rl`; jobs with the loss dpo or sft

The loss is a key of the job, so that everything else is shared: the journal, idempotency keys,
resuming, validation and the report. The keys are in the journaled submission, and a job that is sent
again after a kill is the same job.
"""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field, ValidationError

from hone.config.build import Builder
from hone.config.problems import Mistakes
from hone.config.registry import TrainerConfig, register_trainer
from hone.config.schema import Document
from hone.finetune.adapter_config import adapter_config_of
from hone.finetune.builder import num_generations
from hone.finetune.dataset_builder import dataset_config_of
from hone.finetune.trainer import EpochTrainer, RLTrainerConfig
from hone.train_config import DpoPairs, DpoReference, TrainConfig

_DEFAULTS = TrainConfig()


class DPOTrainerConfig(TrainerConfig, name="dpo"):
    """Direct preference optimization: trains on pairs of a better and a worse trajectory.

    The pairs are those of a group of rollouts, by reward (builder `rollouts`), or of
    a dataset (builder `conversations`).
    """

    beta: float = Field(default=_DEFAULTS.dpo_beta, gt=0)
    """How strongly the policy is kept close to the reference; smaller values let it move
    further."""
    pairs: DpoPairs = _DEFAULTS.dpo_pairs
    """One pair per group, of the best and the worst trajectory by reward; or every pair with unequal
    rewards."""
    reference: DpoReference = _DEFAULTS.dpo_reference
    """The reference policy: the base model without adapter, or the policy at the start of each job."""

    def job_keys(self) -> dict[str, Any]:
        own = {"dpo_beta": self.beta, "dpo_pairs": self.pairs, "dpo_reference": self.reference}
        return {"loss": "dpo", **own}


class SFTTrainerConfig(TrainerConfig, name="sft"):
    """Supervised fine-tuning on the assistant messages of a dataset (builder `conversations`)."""

    def job_keys(self) -> dict[str, Any]:
        return {"loss": "sft"}


@register_trainer(config_type=DPOTrainerConfig)
async def dpo(config: DPOTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    """Runs the epochs with the loss `dpo`."""
    yield EpochTrainer(config)


@register_trainer(config_type=SFTTrainerConfig)
async def sft(config: SFTTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    """Runs the epochs with the loss `sft`."""
    yield EpochTrainer(config)


def objective_mistakes(document: Document) -> Mistakes:
    """Mistakes in how trainer, trajectory builder and adapter fit together."""
    config, adapter = document.finetuning, adapter_config_of(document)
    trainer = document.trainers.get(config.trainer or "")
    rows, place = dataset_config_of(document), ("finetuning", "trajectory_builder")
    if not isinstance(trainer, DPOTrainerConfig | SFTTrainerConfig):
        if rows is not None and isinstance(trainer, RLTrainerConfig):
            yield (
                place,
                f"{config.trajectory_builder!r} gives conversations of a dataset, which have no "
                "rewards to compare; set a trainer of type sft or dpo",
            )
        return
    if isinstance(trainer, SFTTrainerConfig) and num_generations(document) is not None:
        yield (
            place,
            f"{config.trajectory_builder!r} runs rollouts, and a trainer of type sft would train on "
            "all of them, good or bad; set a builder of type conversations",
        )
    if rows is not None and config.curriculum_learning.enabled:
        yield (
            ("finetuning", "curriculum_learning", "enabled"),
            "is true, but the conversations of a dataset have no rewards to rank; set it to false",
        )
    if adapter is None:
        return
    training = ("trainer_adapters", config.trainer_adapter or "", "training")
    keys, loss = trainer.job_keys(), adapter.training.loss
    if "loss" in adapter.training.model_fields_set and loss != keys["loss"]:
        yield (
            (*training, "loss"),
            f"is {loss!r}, but trainer {config.trainer!r} is of type {trainer.type_name}; remove "
            "this key",
        )
        return
    try:
        TrainConfig(**adapter.training.job_keys(0, 1) | keys)
    except ValidationError as error:
        yield training, error.errors()[0]["msg"].removeprefix("Value error, ")
