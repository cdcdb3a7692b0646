"""`_type: file_adapter`: hands groups to a backend that only writes them down."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hone.config.build import Builder
from hone.config.registry import TrainerAdapterConfig, register_trainer_adapter
from hone.config.schema import FinetuneConfig
from hone.finetune.base import (
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)


class FileAdapterConfig(TrainerAdapterConfig, name="file_adapter"):
    """A backend of one directory."""

    directory: Path
    """Each job becomes a file here, a group on each line."""


class FileAdapter(TrainerAdapter):
    """A job is done as soon as it is written."""

    adapter_config: FileAdapterConfig

    def __init__(self, config: FileAdapterConfig) -> None:
        super().__init__(config)
        self.training_jobs: dict[str, int] = {}
        """Jobs of each run."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self.adapter_config.directory.mkdir(parents=True, exist_ok=True)
        if not await self.is_healthy():
            raise ConnectionError(f"{self.adapter_config.directory} cannot be written to")

    async def is_healthy(self) -> bool:
        return self.adapter_config.directory.is_dir()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        if not trajectories.trajectories:
            raise ValueError("No valid trajectory groups to submit.")
        number = self.training_jobs.get(trajectories.run_id, 0)
        self.training_jobs[trajectories.run_id] = number + 1
        path = self.adapter_config.directory / f"{trajectories.run_id}_{number}.jsonl"
        groups = ([t.model_dump(mode="json") for t in group] for group in trajectories.trajectories)
        path.write_text("".join(json.dumps(group) + "\n" for group in groups), encoding="utf-8")
        return TrainingJobRef(
            run_id=trajectories.run_id, backend="file", metadata={"file": str(path)}
        )

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        if ref.run_id not in self.training_jobs:
            raise ValueError(f"No training job found with run_id {ref.run_id}")
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=TrainingStatusEnum.COMPLETED,
            progress=100,
            metadata=ref.metadata,
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        path = Path(output_dir or ".") / f"file_adapter_{ref.run_id}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run_id": ref.run_id, **metrics}) + "\n")


@register_trainer_adapter(config_type=FileAdapterConfig)
async def file_adapter(config: FileAdapterConfig, builder: Builder) -> AsyncIterator[FileAdapter]:
    """Hands groups to a backend that only writes them down."""
    made = FileAdapter(config)
    yield made
    await made.close()
