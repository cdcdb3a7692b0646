"""`hone finetune` in a directory of its own, over parts that need no server.

In:   overrides and options of the command
Out:  its exit status, its events, and the calls of its parts
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from tests.fakes import MemoryAdapter, ScriptedBuilder

from hone.config.registry import (
    TrainerAdapterConfig,
    TrajectoryBuilderConfig,
    register_trainer_adapter,
    register_trajectory_builder,
)
from hone.finetune.run import FinetuneOptions, finetune


class ScriptedBuilderConfig(TrajectoryBuilderConfig, name="scripted_builder"):
    """Of these tests."""


class MemoryAdapterConfig(TrainerAdapterConfig, name="memory_adapter"):
    """Of these tests."""

    api_key: str = ""


class Parts:
    """What the factories give; a test puts its own there."""

    builder: ScriptedBuilder
    adapter: MemoryAdapter
    closed: list[str]


@register_trajectory_builder(config_type=ScriptedBuilderConfig)
async def scripted_builder(config: Any, builder: Any) -> AsyncIterator[ScriptedBuilder]:
    yield Parts.builder
    Parts.closed.append("builder")


@register_trainer_adapter(config_type=MemoryAdapterConfig)
async def memory_adapter(config: Any, builder: Any) -> AsyncIterator[MemoryAdapter]:
    yield Parts.adapter
    Parts.closed.append("adapter")


AGENT = """
def run(input: str) -> str:
    if "broken" in input:
        raise ConnectionError("no tool")
    return "0.5"

def score(item):
    return float(item.output_obj)
"""

DOCUMENT: dict[str, Any] = {
    "workflow": {"_type": "python", "target": "agent.py:run"},
    "eval": {
        "general": {"dataset": {"_type": "json", "file_path": "train.json"}},
        "evaluators": {"score": {"_type": "python", "target": "agent.py:score"}},
    },
    "trajectory_builders": {"b": {"_type": "scripted_builder"}},
    "trainer_adapters": {"a": {"_type": "memory_adapter", "api_key": "sesame"}},
    "trainers": {"t": {"_type": "rl"}},
    "finetuning": {
        "enabled": True,
        "trainer": "t",
        "trajectory_builder": "b",
        "trainer_adapter": "a",
        "reward_function": {"name": "score"},
        "num_epochs": 2,
        "output_dir": "out",
    },
}


def rising(epoch: int, example: str, generation: int) -> float:
    return 0.1 + 0.2 * generation + 0.1 * epoch


class Command:
    """`hone finetune` in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "out"
        (directory / "agent.py").write_text(AGENT)
        for name, questions in {"train": "ab", "val": "xy", "empty": ""}.items():
            rows = [{"id": q, "question": q} for q in questions]
            (directory / f"{name}.json").write_text(json.dumps(rows))
        self.file = directory / "train.yml"
        self.file.write_text(yaml.safe_dump(DOCUMENT))

    def __call__(self, *override: tuple[str, str], **options: Any) -> int:
        return finetune(FinetuneOptions(config_file=self.file, override=override, **options))

    def events(self, type: str) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["type"] == type]

    @property
    def run_id(self) -> str:
        return json.loads((self.out / "run.json").read_text())["run_id"]
