"""`_type: plain_trainer`: the shortest loop that is one: collect, submit, wait, again."""

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Any

from hone.config.build import Builder
from hone.config.registry import TrainerConfig, register_trainer
from hone.config.schema import FinetuneConfig
from hone.finetune.base import (
    Trainer,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
)


class PlainTrainerConfig(TrainerConfig, name="plain_trainer"):
    """No curriculum, no validation, no resuming."""

    stop_at: float | None = None
    """End early once the mean reward of an epoch reaches this."""


class PlainTrainer(Trainer):
    """One job an epoch."""

    trainer_config: PlainTrainerConfig

    def __init__(self, config: PlainTrainerConfig) -> None:
        super().__init__(config)
        self._run_id: str | None = None
        self._job_refs: list[TrainingJobRef] = []
        self._reward_history: list[float] = []

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self._run_id = f"plain_run_{uuid.uuid4().hex[:8]}"

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        assert self.trajectory_builder is not None and self.trainer_adapter is not None
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch})
        collected = await self.trajectory_builder.finalize(run_id)
        rewards = [t.reward for group in collected.trajectories for t in group]
        if not rewards:
            return None
        self._reward_history.append(fmean(rewards))
        self.log_progress(epoch, {"avg_reward": fmean(rewards), "num_trajectories": len(rewards)})
        ref = await self.trainer_adapter.submit(collected)
        self._job_refs.append(ref)
        return ref

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        assert self._run_id is not None and self.trainer_adapter is not None, "not initialized"
        statuses: list[TrainingJobStatus] = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, self._run_id)
            if ref is None:
                break
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            if statuses[-1].status is TrainingStatusEnum.FAILED:
                break
            stop_at = self.trainer_config.stop_at
            if stop_at is not None and self._reward_history[-1] >= stop_at:
                break
        return statuses

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "total_epochs": len(self._job_refs)}

    async def cleanup(self) -> None:
        """Nothing of its own to let go."""

    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        assert self.run_config is not None
        directory = Path(output_dir or self.run_config.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "training_metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"epoch": epoch, **metrics}) + "\n")


@register_trainer(config_type=PlainTrainerConfig)
async def plain_trainer(
    config: PlainTrainerConfig, builder: Builder
) -> AsyncIterator[PlainTrainer]:
    """The shortest loop that is one."""
    yield PlainTrainer(config)
