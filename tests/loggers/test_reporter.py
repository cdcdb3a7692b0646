"""What a program logs of a model goes to the loggers that `report_metrics` names."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.environments import ROOT
from tests.loggers.file_sink import FileConfig
from tests.patience import PATIENCE_S

from hone import Model, TrainableModel, Trajectory, TrajectoryGroup
from hone.backends.base import Backend, Named, Trainable, TrainResult
from hone.loggers import reporter
from hone.train_config import TrainSFTConfig
from hone.types import CheckpointInfo, ModelInfo, TrainConfig


class MemoryBackend(Backend):
    """Trains nothing; the step rises with every job."""

    def __init__(self) -> None:
        self.at = 0

    async def register(self, model: Trainable) -> ModelInfo:
        shared = model.spec().model_dump(
            include={"project", "name", "base_model", "rank", "alpha", "seed"}
        )
        where: dict[str, Any] = {
            "inference_base_url": "http://127.0.0.1:1/v1",
            "inference_name": model.name,
        }
        return ModelInfo(
            **shared, **where, step=0, best_step=None, not_applicable=[], created_at=0.0
        )

    async def prepare(self, model: Named) -> tuple[str, str]:
        return "http://127.0.0.1:1/v1", "k"

    async def step(self, model: Named) -> int:
        return self.at

    async def train(
        self,
        model: Named,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        self.at += 1
        return TrainResult(step=self.at, metrics={"learn/loss": 0.25})

    async def train_sft(
        self,
        model: Named,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        return await self.train(model, [])

    async def checkpoints(self, model: Named) -> list[CheckpointInfo]:
        return []

    async def delete_checkpoints(
        self, model: Named, best_checkpoint_metric: str = "val/reward"
    ) -> list[int]:
        return []

    async def log(
        self, model: Named, metrics: Mapping[str, float], *, split: str, step: int
    ) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    assert FileConfig.type_name == "file"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    monkeypatch.setenv("HONE_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield tmp_path
    reporter.close()


async def test_log_and_train_report_each_metric_once_over_two_programs(place: Path):
    for rewards in ((1.0, 0.0), (1.0, 1.0)):
        model = TrainableModel(name="agent", project="p", base_model="b", report_metrics=["file"])
        backend = MemoryBackend()
        backend.at = int(sum(rewards)) - 1  # where the program before stopped
        await model.register(backend)
        group = TrajectoryGroup([Trajectory(reward=reward) for reward in rewards])
        await model.log([group], split="train")
        await model.train([group])
        reporter.close()  # as at the end of a program
    sent = [json.loads(line) for line in (place / "log").read_text().splitlines()]
    ids = {line[1] for line in sent if line[0] == "opened"}
    assert len(ids) == 1 and ids.pop().startswith("agent-")
    assert [line for line in sent if line[0] == "finish"] == [["finish", "completed"]] * 2
    rewards = [line[2:] for line in sent if line[:2] == ["metric", "train/reward"]]
    assert rewards == [[0, 0.5], [1, 1.0]]
    losses = [line[2:] for line in sent if line[:2] == ["metric", "learn/loss"]]
    assert losses == [[1, 0.25], [2, 0.25]]
    held = place / ".hone" / "projects" / "p" / "models" / "agent" / "reports" / "events.jsonl"
    assert len(held.read_text().splitlines()) == 8


async def test_another_directory_is_another_run(place: Path):
    for directory in ("a", "b"):
        model = Model(name="agent", project="p", base_path=directory, report_metrics=["file"])
        await model.log(metrics={"reward": 1.0}, step=0)
    reporter.close()
    sent = [json.loads(line) for line in (place / "log").read_text().splitlines()]
    assert len({line[1] for line in sent if line[0] == "opened"}) == 2


SECOND = """
import asyncio
from hone import Model
from tests.loggers import file_sink

model = Model(name="agent", project="p", report_metrics=["file"])
asyncio.run(model.log(metrics={"reward": 2.0}, step=1))
"""


async def test_a_second_program_of_the_same_model_ends_when_the_first_has_sent_its_metrics(
    place: Path,
):
    model = Model(name="agent", project="p", report_metrics=["file"])
    await model.log(metrics={"reward": 1.0}, step=0)
    while not (place / "log").exists():  # the first program's logger holds the lock
        await asyncio.sleep(0.02)
    done = subprocess.run(
        [sys.executable, "-c", SECOND],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    sent = [json.loads(line) for line in (place / "log").read_text().splitlines()]
    assert [line for line in sent if line[0] == "metric"] == [
        ["metric", "val/reward", 0, 1.0],
        ["metric", "val/reward", 1, 2.0],
    ]
    assert len([line for line in sent if line[0] == "opened"]) == 1


async def test_a_report_that_fails_loses_no_training(place: Path, caplog: pytest.LogCaptureFixture):
    (place / "file").write_text("")
    fields = {"base_path": str(place / "file"), "report_metrics": ["file"]}
    model = TrainableModel(name="agent", base_model="b", **fields)
    await model.register(MemoryBackend())
    assert [(await model.train([])).step for _ in range(2)] == [1, 2]
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("model agent: its metrics are not reported:")


async def test_train_sft_reports_its_metrics(place: Path):
    model = TrainableModel(name="agent", project="p", base_model="b", report_metrics=["file"])
    await model.register(MemoryBackend())
    await model.train_sft([Trajectory(reward=0.0)])
    reporter.close()
    assert ["metric", "learn/loss", 1, 0.25] in [
        json.loads(line) for line in (place / "log").read_text().splitlines()
    ]


async def test_without_report_metrics_nothing_is_written(place: Path):
    model = TrainableModel(name="agent", project="p", base_model="b")
    await model.register(MemoryBackend())
    await model.log(metrics={"reward": 1.0})
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", r"report_metrics: wandb: wandb is not installed: pip install 'hone-rl\[wandb\]'"),
        ("wanb", "report_metrics: no logger is called 'wanb'. Did you mean 'wandb'"),
    ],
)
def test_a_logger_that_cannot_start_is_refused_with_the_model(name: str, message: str):
    with pytest.raises(ValidationError, match=message):
        TrainableModel(name="agent", base_model="b", report_metrics=[name])
