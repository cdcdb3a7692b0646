"""A run that is killed after any write resumes and ends with the same result."""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import MemoryAdapter, ScriptedBuilder

from hone.config.schema import (
    CurriculumLearningConfig,
    FinetuneConfig,
    FinetuneRunConfig,
    RewardFunctionConfig,
)
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation
from hone.files.event_log import FILE, EventLog, read
from hone.files.events import EpochCollected
from hone.finetune.base import Trainer, TrajectoryBuilder
from hone.finetune.dataset_builder import ConversationBuilder, ConversationBuilderConfig
from hone.finetune.journal import Journal
from hone.finetune.objectives import SFTTrainerConfig
from hone.finetune.resume import RunState
from hone.finetune.trainer import EpochTrainer, RLTrainerConfig
from hone.report.history import RunHistory
from hone.workflow.function import Function

EPOCHS = 2


class Killed(BaseException):
    """Nothing that runs may catch it."""


class Score:
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=1.0)


def conversation(name: str) -> dict[str, Any]:
    """A row of a dataset for SFT."""
    return {"prompt": name, "completion": f"It is {name}."}


class World:
    """What outlives the harness: the agent's host and the server. Everything else is on disk."""

    def __init__(self, directory: Path, keys: dict[str, Any]) -> None:
        self.directory, self.keys = directory, keys
        self.builder = ScriptedBuilder(self._reward, generations=2)
        self.adapter = MemoryAdapter()
        self.runs: Counter[str] = Counter()

    @staticmethod
    def _reward(epoch: int, example: str, generation: int) -> float | str:
        if (epoch, example) == (0, "c"):
            return "max_tokens"  # in rounds of two examples it is alone in the last one of epoch 0
        return 0.2 * generation + 0.3 * "abc".index(example)

    def _evaluation(self, names: str) -> Evaluation:
        async def answer(input: str) -> str:
            self.runs[input] += 1
            return input

        return Evaluation(
            workflow=Function.of("<workflow>", answer),
            items=[
                EvalInputItem(id=name, input_obj=name, full_dataset_entry=conversation(name))
                for name in names
            ],
            evaluators={"score": Score()},
            max_concurrency=2,
        )

    def _parts(self) -> tuple[Trainer, TrajectoryBuilder]:
        if "sft" in self.directory.parts:
            rows = ConversationBuilder(ConversationBuilderConfig())
            return EpochTrainer(SFTTrainerConfig()), rows
        # A part of the harness dies with it; what it knows of earlier rollouts is the journal's.
        builder = ScriptedBuilder(self._reward, generations=2)
        builder.ran = self.builder.ran
        return EpochTrainer(RLTrainerConfig()), builder

    async def run(self) -> list[Any]:
        """One start of the harness, which may be killed."""
        journal = Journal.open(self.directory, {})
        events = EventLog(self.directory / FILE)
        try:
            trainer, builder = self._parts()
            await trainer.bind_components(builder, self.adapter)
            config = FinetuneConfig(
                reward_function=RewardFunctionConfig(name="score"),
                output_dir=self.directory,
                num_epochs=EPOCHS,
                run_configuration=FinetuneRunConfig(validation_interval=1),
                **self.keys,
            )
            trainer.bind_run(journal, events, RunState.follow(config, events))
            await trainer.initialize(config)
            trainer.bind_evaluations(self._evaluation("abc"), self._evaluation("xy"))
            return await trainer.run(EPOCHS)
        finally:
            events.close()
            journal.close()

    def curve(self) -> list[Any]:
        """What the last word on each round was."""
        metrics: dict[tuple[int, int], Any] = {}
        for event in read(self.directory / FILE):
            if isinstance(event, EpochCollected):
                metrics[event.epoch, event.round] = event.metrics
        return sorted(metrics.items())

    def rewards(self) -> list[Any]:
        """Rewards by epoch and example, as a report shows them."""
        history = RunHistory.of(read(self.directory / FILE))
        return [
            {example: sorted(known) for example, known in history.rewards(epoch).items()}
            for epoch in history.epochs
        ]


SETTINGS: dict[str, dict[str, Any]] = {
    "one round": {},
    "rounds": {"groups_per_step": 2},
    "sft": {"groups_per_step": 2},
    "curriculum": {
        "curriculum_learning": CurriculumLearningConfig(
            enabled=True, initial_percentile=0.4, expansion_interval=1, skip_excluded=True
        )
    },
}


def counting(monkeypatch: pytest.MonkeyPatch, last: int | None) -> list[int]:
    """Every durable write is counted; after number `last` the process is gone."""
    writes, sync = [0], os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        writes[0] += 1
        if writes[0] == last:
            raise Killed

    monkeypatch.setattr(os, "fsync", fsync)
    return writes


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    _stub_pictures(monkeypatch)


def _stub_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, plot and report are written in a thread, where a kill would reach nobody."""
    monkeypatch.setattr("hone.report.writer.write", lambda events, output_dir, picture: None)
    monkeypatch.setattr("hone.report.writer.Files._report", lambda files: None)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_killed_after_any_write_has_the_same_result(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keys, tmp_path = SETTINGS[setting], tmp_path / setting
    whole = World(tmp_path / "whole", keys)
    writes = counting(monkeypatch, None)
    statuses = asyncio.run(whole.run())
    assert [status.status for status in statuses] == ["completed"] * EPOCHS
    assert writes[0] > (20 if setting == "sft" else 30)

    for last in range(1, writes[0] + 1):
        monkeypatch.undo()
        _stub_pictures(monkeypatch)
        world = World(tmp_path / f"killed-{last}", keys)
        counting(monkeypatch, last)
        with pytest.raises(Killed):
            asyncio.run(world.run())
        assert [s.status for s in asyncio.run(world.run())] == ["completed"] * EPOCHS, last
        assert sorted(world.builder.ran) == sorted(whole.builder.ran), f"killed after {last}"
        assert world.runs["x"] <= whole.runs["x"] + 1
        assert trained(world) == trained(whole)
        assert world.adapter.step == whole.adapter.step
        assert world.curve() == whole.curve()
        assert world.rewards() == whole.rewards(), f"killed after {last}"


def trained(world: World) -> list[Any]:
    """The jobs in order: their place in the run, and example and reward of each trajectory."""
    return [
        (
            {key: value for key, value in (job.metadata or {}).items() if key != "key"},
            [[((t.metadata or {})["id"], t.reward) for t in group] for group in job.trajectories],
        )
        for job in world.adapter.jobs.values()
    ]
