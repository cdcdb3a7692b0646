"""The seed's hooks are on the path of a run: overriding one changes what the run does."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes import MemoryAdapter, ScriptedBuilder
from tests.finetune.command import Command, Parts
from tests.finetune.trainers import Bench, evaluation, rising
from tests.finetune.worlds import finetuning

from hone.evaluation.base import EvalOutputItem
from hone.files.event_log import EventLog
from hone.finetune.base import TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from hone.finetune.builder import RolloutBuilder, RolloutBuilderConfig
from hone.finetune.trainer import EpochTrainer


class Easiest(EpochTrainer):
    """Trains on the best group only."""

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        assert (trajectory_collection.metadata or {})["round"] == 0
        best = max(trajectory_collection.trajectories, key=lambda group: group[0].reward)
        return trajectory_collection.model_copy(update={"trajectories": [best]})


async def test_an_own_curriculum_chooses_what_is_trained(bench: Bench):
    bench.trainer = Easiest
    bench.builder.reward = lambda epoch, example, g: "abcd".index(example) + 0.1 * g
    await bench.run(2)
    for job in bench.adapter.jobs.values():
        assert [[(t.metadata or {})["id"] for t in group] for group in job.trajectories] == [
            ["d"] * 2
        ]
    collected = bench.events("epoch_collected")
    assert [e["metrics"]["filtered_groups"] for e in collected] == [1, 1]


class Elsewhere(EpochTrainer):
    """Writes its metrics into a directory of its own."""

    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        assert output_dir is not None and output_dir == str(self._config.output_dir)
        super().log_progress(epoch, metrics, str(Path(output_dir) / "curves"))


async def test_the_trainer_s_progress_goes_where_it_is_sent(bench: Bench):
    bench.trainer = Elsewhere
    await bench.run(1)
    assert (bench.directory / "curves" / "training_metrics.jsonl").exists()
    assert not (bench.directory / "training_metrics.jsonl").exists()


class Measured(EpochTrainer):
    """Measures held-out reward itself, and returns what NeMo's trainer does."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        reward = {"avg_reward": 0.5 - epoch, "min_reward": 0.0, "max_reward": 1.0}
        return {**reward, "num_examples": 2, "epoch": epoch, "dataset_type": "validation"}


async def test_an_own_validation_is_the_one_that_counts(bench: Bench):
    bench.trainer, bench.validation = Measured, evaluation("xy")
    assert [status.status for status in await bench.run(1)] == ["completed"]
    result = [(e["epoch"], e["step"], e["avg_reward"]) for e in bench.events("validation")]
    assert result == [(0, 0, 0.5), (1, 1, -0.5)]
    rewards = [(step, m["reward"]) for split, step, m in bench.adapter.logged if split == "val"]
    assert rewards == [(0, 0.5), (1, -0.5)]
    assert not bench.events("rollout")[8:]  # the four examples twice, and no held-out ones


class LoggedBuilder(ScriptedBuilder):
    """Keeps what it is told to log."""

    def __init__(self) -> None:
        super().__init__(rising)
        self.lines: list[tuple[str, Mapping[str, Any], str | None]] = []

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        self.lines.append((run_id, metrics, output_dir))


class LoggedAdapter(MemoryAdapter):
    """Keeps what it is told to log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[TrainingJobRef, Mapping[str, Any], str | None]] = []

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        self.lines.append((ref, metrics, output_dir))


async def test_builder_and_adapter_log_each_round_into_the_output_directory(bench: Bench):
    builder, adapter = LoggedBuilder(), LoggedAdapter()
    bench.builder, bench.adapter = builder, adapter
    [first, _] = await bench.run(2)
    output_dir = str(bench.directory)
    assert [(run_id, place) for run_id, _, place in builder.lines] == [
        (first.run_id, output_dir)
    ] * 2
    # 0.1 and 0.3 in epoch 0; 0.1 more in epoch 1.
    assert [round(m["avg_reward"], 6) for _, m, _ in builder.lines] == [0.2, 0.3]
    assert [(m["epoch"], m["step"], m["learn/loss"]) for _, m, _ in adapter.lines] == [
        (0, 1, 0.5),
        (1, 2, 0.5),
    ]
    assert {place for _, _, place in adapter.lines} == {output_dir}


class Half(RolloutBuilder):
    """Gives half of the evaluator's score, none to example b, and no number to example d."""

    async def compute_reward(
        self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None
    ) -> float | None:
        assert meta is not None and meta["rollout"].startswith("r:")
        if output_item.id == "c":
            raise KeyError("no rule for c")
        if output_item.id == "d":
            return math.nan
        return None if output_item.id == "b" else float(output_item.score) / 2


async def test_an_own_reward_is_what_is_recorded(tmp_path: Path):
    builder = Half(RolloutBuilderConfig())
    await builder.initialize(finetuning(reward_function={"name": "score"}, rollout_retries=0))
    builder.bind_evaluation(evaluation("abcd", lambda input: "0.8"))
    with EventLog(tmp_path / "events.jsonl") as events:
        await builder.start_run("r", {"events": events})
        await builder.finalize("r")
    lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    rewards = {(line["example"], line["failure_reason"]): line["reward"] for line in lines}
    assert rewards == {
        ("a", None): 0.4,
        ("b", None): None,
        ("c", "evaluator"): None,
        ("d", "evaluator"): None,
    }
    # Example a has a reward and no call that could be trained.
    assert builder.dropped == {"no_reward": 2, "infrastructure/evaluator": 4, "no_calls": 2}


class TalkativeAdapter(MemoryAdapter):
    """Its statuses and its description hold more than hone knows of, under names that events use."""

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        status = await super().wait_until_complete(ref, poll_interval)
        more = {"type": "lora", "at": "noon", "seconds": None, "epoch": "first"}
        metrics = {"learn/clip_frac": None, "note": "fine", "learn/loss": float("nan")}
        metadata = {**(status.metadata or {}), **more, "metrics": metrics}
        return status.model_copy(update={"metadata": metadata})


async def test_what_an_adapter_adds_to_a_status_changes_no_event(bench: Bench):
    bench.adapter = TalkativeAdapter()
    bench.builder.reward = lambda epoch, example, generation: 0.5  # flat, so it is diagnosed
    statuses = await bench.run(3)
    assert [status.status for status in statuses] == ["completed"] * 3
    done = bench.events("job_done")
    assert [(e["epoch"], e["step"]) for e in done] == [(0, 1), (1, 2), (2, 3)]
    assert all(e["seconds"] >= 0 for e in done)
    (warning,) = (e["message"] for e in bench.events("warning"))
    assert "clip_frac unknown" in warning


def test_what_an_adapter_reports_of_its_model_changes_nothing_else(command: Command):
    class Described(MemoryAdapter):
        def describe(self) -> dict[str, Any]:
            return super().describe() | {"name": "mine", "step": 7, "type": "lora", "seed": "x"}

    Parts.adapter = Described()
    assert command() == 0
    (started,) = command.events("run_started")
    assert (started["name"], started["step"], started["seed"]) == ("mine", 0, 0)
