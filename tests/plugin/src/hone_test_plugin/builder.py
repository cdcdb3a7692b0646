"""`_type: plain_builder`: runs every example several times and groups what was said."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import Field

from hone.config.build import Builder
from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.evaluation.results import EvaluationRunOutput, ItemResult
from hone.finetune.base import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryCollection,
)


class PlainBuilderConfig(TrajectoryBuilderConfig, name="plain_builder"):
    """Groups of whole conversations."""

    num_generations: int = Field(default=2, ge=2)
    """Rollouts of each example."""


class PlainBuilder(TrajectoryBuilder):
    """One trajectory for each rollout that has a reward; one group for each example."""

    trajectory_builder_config: PlainBuilderConfig

    def __init__(self, config: PlainBuilderConfig) -> None:
        super().__init__(config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EvaluationRunOutput]]] = {}

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        if run_id in self.evaluation_runs:
            raise ValueError(f"Run {run_id} is already in progress.")
        count = self.trajectory_builder_config.num_generations
        tasks = [asyncio.create_task(self.run_eval()) for _ in range(count)]
        self.evaluation_runs[run_id] = tasks

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        outputs = await asyncio.gather(*self.evaluation_runs.pop(run_id))
        self.dropped.clear()
        groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for generation, output in enumerate(outputs):
            for result in output.results:
                trajectory = self._trajectory(result, generation)
                if trajectory is not None:
                    groups[result.item.id].append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def _trajectory(self, result: ItemResult, generation: int) -> Trajectory | None:
        reward = self.trajectory_builder_config.reward
        score = result.scores.get(reward.name) if reward else None
        if score is None or score.value is None:
            self.dropped["no reward"] += 1  # a failure is counted, never trained on as a zero
            return None
        episode = []
        for call in item_calls(result):
            episode = [_said(message) for message in call.messages or ()]
            episode.append(_said(call.reply or {}, call.choices[0].get("logprobs") or {}))
        if not episode:
            self.dropped["no model call"] += 1
            return None
        facts = {"id": result.item.id, "generation": generation}
        return Trajectory(episode=episode, reward=score.value, metadata=facts)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        path = Path(output_dir or ".") / f"plain_builder_{run_id}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run_id": run_id, **metrics}) + "\n")


def item_calls(result: ItemResult) -> list[Any]:
    """The model calls of a rollout that were answered."""
    calls = result.rollout.calls if result.rollout else ()
    return [call for call in calls if call.choices]


def _said(message: dict[str, Any], logprobs: dict[str, Any] | None = None) -> EpisodeItem:
    role = EpisodeItemRole(message.get("role", "assistant"))
    return EpisodeItem(role=role, content=message.get("content") or "", logprobs=logprobs or {})


@register_trajectory_builder(config_type=PlainBuilderConfig)
async def plain_builder(
    config: PlainBuilderConfig, builder: Builder
) -> AsyncIterator[PlainBuilder]:
    """Runs every example several times and groups what was said."""
    made = PlainBuilder(config)
    yield made
    # The code after the yield closes it, whatever happened before.
    for task in (task for tasks in made.evaluation_runs.values() for task in tasks):
        task.cancel()
