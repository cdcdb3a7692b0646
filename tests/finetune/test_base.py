"""The values and the abstract classes of the harness."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.prose import Prose

from hone.config.registry import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from hone.config.schema import FinetuneConfig, RewardFunctionConfig
from hone.errors import ConfigError, NotInThisVersion
from hone.evaluation.base import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem
from hone.evaluation.run import EvaluationRunOutput
from hone.finetune.base import (
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    RoundRequest,
    Trainer,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryCollection,
)


class Builder(TrajectoryBuilder):
    """The seed's minimal one."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None: ...

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        return TrajectoryCollection(trajectories=[], run_id=run_id)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None: ...


class Adapter(TrainerAdapter):
    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        return TrainingJobRef(run_id=trajectories.run_id, backend="mine")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(
            run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.COMPLETED
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None: ...


class Loop(Trainer):
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        return None

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        return []

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {}

    async def cleanup(self) -> None: ...

    def log_progress(
        self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None: ...


def test_a_sampled_message_needs_logprobs():
    with pytest.raises(ValidationError, match=r"logprobs must be provided for assistant role\."):
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="hi")
    assert EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="hi", logprobs={}).logprobs == {}
    assert EpisodeItem(role=EpisodeItemRole("user"), content="hi").logprobs is None


def test_the_words_of_the_enums_are_those_of_the_seed():
    assert [status.value for status in TrainingStatusEnum] == [
        "pending",
        "running",
        "completed",
        "failed",
        "canceled",
    ]
    assert [role.value for role in EpisodeItemRole] == [
        "user",
        "assistant",
        "system",
        "function",
        "tool",
        "environment",
        "other",
    ]


def test_a_collection_is_the_same_after_a_file():
    item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs={"content": []})
    pair = DPOItem(prompt="p", chosen_response="a", rejected_response="b")
    collection = TrajectoryCollection(
        trajectories=[
            [Trajectory(episode=[item], reward=0.5)],
            [Trajectory(episode=[pair], reward=1)],
        ],
        run_id="r",
        metadata={"epoch": 0},
    )
    again = TrajectoryCollection.model_validate_json(collection.model_dump_json())
    assert again == collection
    assert again.count == 2


def test_a_reward_is_finite():
    with pytest.raises(ValidationError, match="finite"):
        Trajectory(episode=[], reward=float("nan"))


async def test_initialize_hands_the_configuration_to_all_three(prose: Prose):
    trainer = Loop(TrainerConfig())
    assert (trainer.run_config, trainer.trajectory_builder, trainer.trainer_adapter) == (None,) * 3
    assert (trainer.curriculum_config, trainer._curriculum_state) == (None, None)
    builder, adapter = Builder(TrajectoryBuilderConfig()), Adapter(TrainerAdapterConfig())
    config = FinetuneConfig(reward_function=RewardFunctionConfig(name="score"))
    with pytest.raises(ConfigError) as caught:
        await trainer.initialize(config)
    prose(caught)
    await trainer.bind_components(builder, adapter)
    await trainer.initialize(config)
    assert builder.run_config is adapter.run_config is trainer.run_config is config
    assert trainer.trainer_config.reward == builder.trajectory_builder_config.reward
    assert adapter.adapter_config.reward == RewardFunctionConfig(name="score")
    assert trainer._curriculum_state == {
        "current_percentile": 0.3,
        "last_expansion_epoch": -1,
        "total_groups": 0,
        "included_groups": set(),
    }
    state = trainer.get_curriculum_state()
    assert state["included_groups"] == []
    assert state["config"]["expansion_interval"] == 5


def test_a_curriculum_is_not_in_every_trainer(prose: Prose):
    nothing = TrajectoryCollection(trajectories=[], run_id="r")
    with pytest.raises(NotInThisVersion) as caught:
        Loop(TrainerConfig()).apply_curriculum_learning(nothing, 0)
    prose(caught)


async def test_unbound_components_are_reported(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        await Builder(TrajectoryBuilderConfig()).run_eval()
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        await Loop(TrainerConfig()).run_validation_evaluation(0, "r")
    prose(caught)


def test_validation_averages_what_was_scored_and_counts_the_rest():
    # (0.6 + 0.8) / 2 = 0.7; the item without a score is no 0.
    trainer = Loop(TrainerConfig(reward=RewardFunctionConfig(name="score")))
    items = [EvalOutputItem(id=str(i), score=score) for i, score in enumerate((0.6, 0.8, None))]
    others = EvalOutput(eval_output_items=[EvalOutputItem(id="0", score=9.0)])
    output = EvaluationRunOutput(
        results=[],
        eval_input=EvalInput(eval_input_items=[]),
        evaluation_results=[("score", EvalOutput(eval_output_items=items)), ("other", others)],
    )
    metrics = trainer._calculate_validation_metrics(output)
    assert metrics == {
        "avg_reward": pytest.approx(0.7),
        "min_reward": 0.6,
        "max_reward": 0.8,
        "num_examples": 2,
        "failures": 1,
    }


def test_a_builder_of_any_package_gets_the_round_as_a_dict():
    items = [EvalInputItem(id="a", input_obj="x")]
    request = RoundRequest("r", epoch=3, round=1, items=items, session=2, failure_reward=-1.0)
    assert request.meta["items"] is items and request.meta["failure_reward"] == -1.0
    assert RoundRequest.of("r", request.meta) == request
    # A trainer of another package names some of them, and may have keys of its own.
    assert RoundRequest.of("r", {"epoch": 3, "own": 1}) == RoundRequest("r", epoch=3)
    assert RoundRequest.of("r", None) == RoundRequest("r")


async def test_a_missing_score_is_not_a_reward():
    builder = Builder(TrajectoryBuilderConfig())
    assert await builder.compute_reward(EvalOutputItem(id="a", score=2)) == 2.0
    assert await builder.compute_reward(EvalOutputItem(id="a", score=None)) is None


async def test_optional_methods_do_nothing():
    adapter = Adapter(TrainerAdapterConfig())
    await adapter.open_run("r", 0)
    await adapter.log_metrics({"reward": 1.0}, split="val", step=None)
    await adapter.prune(1)
    await adapter.start_anew(None)
    await adapter.close_run("r")
    await adapter.close()
    assert await adapter.policy_step() is None
    assert adapter.served is None
