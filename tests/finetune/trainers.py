"""A trainer in a directory, over parts that need no server, as often as it is started.

In:   examples, rewards, keys of the `finetuning:` section
Out:  how its epochs ended, its events, the calls of its parts
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes import MemoryAdapter, ScriptedBuilder

from hone.config.schema import FinetuneConfig, FinetuneRunConfig, RewardFunctionConfig
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation
from hone.finetune.builder import RolloutBuilder
from hone.finetune.trainer import EpochTrainer, RLTrainerConfig
from hone.workflow.function import Function


class Told:
    """An evaluator: the output is the score; a workflow that says nothing cannot be scored."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(item.output_obj))


def evaluation(
    names: str = "abcd", workflow: Callable[[str], Any] = lambda input: "0.5"
) -> Evaluation:
    async def answer(input: str) -> str:
        return workflow(input)

    return Evaluation(
        workflow=Function.of("<workflow>", answer),
        items=[EvalInputItem(id=name, input_obj=name) for name in names],
        evaluators={"score": Told()},
        max_concurrency=4,
    )


def rising(epoch: int, example: str, generation: int) -> float:
    """0.1 and 0.3 in epoch 0, 0.1 more in each later one: means of 0.2, 0.3, ..."""
    return 0.1 + 0.2 * generation + 0.1 * epoch


class Bench:
    """A trainer in a directory, as often as it is started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trainer: type[EpochTrainer] = EpochTrainer
        self.builder = ScriptedBuilder(rising)
        self.real_builder: RolloutBuilder | None = None
        """Used instead of `builder` if there is one."""
        self.adapter = MemoryAdapter()
        self.training = evaluation()
        self.validation: Evaluation | None = None
        self.interval = 5
        self.keys: dict[str, Any] = {}

    async def start(self) -> EpochTrainer:
        config = FinetuneConfig(
            reward_function=RewardFunctionConfig(name="score"),
            output_dir=self.directory,
            run_configuration=FinetuneRunConfig(validation_interval=self.interval),
            **self.keys,
        )
        trainer = self.trainer(RLTrainerConfig())
        await trainer.bind_components(self.real_builder or self.builder, self.adapter)
        await trainer.initialize(config)
        trainer.bind_evaluations(self.training, self.validation)
        return trainer

    async def run(self, epochs: int) -> list[Any]:
        trainer = await self.start()
        try:
            return await trainer.run(epochs)
        finally:
            await trainer.cleanup()

    def events(self, type: str) -> list[dict[str, Any]]:
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == type]
