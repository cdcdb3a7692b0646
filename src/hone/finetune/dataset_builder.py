"""Conversations of a dataset as trajectories, without any rollout.

In:   rows with `messages`; with `prompt` and `completion`; or with `chosen` and `rejected`
Out:  a TrajectoryCollection: one conversation per group, or a pair with rewards 1 and 0

The columns are those of TRL and of OpenAI's fine-tuning format. Text stands for one message: a prompt
is the user's, everything else the assistant's. Assistant messages of a prompt, and those with which
`chosen` and `rejected` both begin, are context.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.errors import ConfigError
from hone.finetune.base import TrajectoryBuilder, TrajectoryCollection
from hone.finetune.records import EpisodeItem, Trajectory, append_line
from hone.finetune.rerender import message_item

if TYPE_CHECKING:
    from hone.config.build import Builder
    from hone.config.schema import Document
    from hone.evaluation.base import EvalInputItem

Message = dict[str, JsonValue]
_MESSAGES = TypeAdapter(list[Message])


class DatasetTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dataset_traj_builder"):
    """Takes conversations and preference pairs from the dataset's rows; runs no rollouts."""

    messages_key: str = Field(default="messages", min_length=1)
    """Column with a whole conversation."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Column with the beginning of a conversation: messages, or text of the user."""
    completion_key: str = Field(default="completion", min_length=1)
    """Column with the answer to the prompt: messages, or text of the assistant."""
    chosen_key: str = Field(default="chosen", min_length=1)
    """Column with the preferred answer, or the whole conversation if there is no prompt."""
    rejected_key: str = Field(default="rejected", min_length=1)
    """Column with the rejected answer, or the whole conversation if there is no prompt."""
    tools_key: str = Field(default="tools", min_length=1)
    """Column with the tools of the conversation, as in the OpenAI API."""

    def trajectories(self, example: str, row: object) -> list[Trajectory]:
        """The group of a row; raises ConfigError if it has no conversation."""
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {example!r}: expected an object with columns, got {row!r}")
        columns = {key: row[key] for key in row if row[key] is not None}
        tools = columns.get(self.tools_key)
        prompt = self._messages(columns, self.prompt_key, "user", example)
        if self.chosen_key in columns and self.rejected_key in columns:
            both = [
                prompt + self._messages(columns, key, "assistant", example)
                for key in (self.chosen_key, self.rejected_key)
            ]
            context = max(len(prompt), _common(*both))
            made = zip(both, (1.0, 0.0), strict=True)
            return [_trajectory(one, context, tools, example, reward) for one, reward in made]
        messages = self._messages(columns, self.messages_key, "user", example)
        if not messages and self.completion_key in columns:
            answer = self._messages(columns, self.completion_key, "assistant", example)
            return [_trajectory(prompt + answer, len(prompt), tools, example, 0.0)]
        if messages:
            return [_trajectory(messages, 0, tools, example, 0.0)]
        raise ConfigError(
            f"row {example!r} has neither {self.messages_key!r}, nor {self.prompt_key!r} with "
            f"{self.completion_key!r}, nor {self.chosen_key!r} with {self.rejected_key!r}. Its "
            f"columns: {', '.join(map(repr, row))}. Name them in the keys of dataset_traj_builder."
        )

    def _messages(
        self, row: Mapping[str, Any], key: str, author: str, example: str
    ) -> list[Message]:
        value = row.get(key, [])
        if isinstance(value, str):
            return [{"role": author, "content": value}]
        try:
            messages = _MESSAGES.validate_python(value)
        except ValidationError:
            messages = [{}]
        if any("role" not in message for message in messages):
            raise ConfigError(
                f"row {example!r}, column {key!r}: expected text, or a list of messages with `role` "
                f"and `content`, got {str(value)[:80]!r}"
            )
        return messages


def dataset_config_of(document: "Document") -> DatasetTrajectoryBuilderConfig | None:
    """The block of the run's trajectory builder; None if it runs rollouts."""
    config = document.trajectory_builders.get(document.finetuning.trajectory_builder or "")
    return config if isinstance(config, DatasetTrajectoryBuilderConfig) else None


class DatasetTrajectoryBuilder(TrajectoryBuilder):
    """Gives the conversations of the round's examples."""

    trajectory_builder_config: DatasetTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: DatasetTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.num_generations = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Nothing runs; `finalize` reads the rows."""

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        items: Sequence[EvalInputItem] = (meta or {}).get("items") or self.bound_evaluation.items
        config = self.trajectory_builder_config
        groups = [config.trajectories(item.id, item.full_dataset_entry) for item in items]
        return TrajectoryCollection(trajectories=groups, run_id=run_id)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append a line to trajectory_builder_RUN.jsonl."""
        file = f"trajectory_builder_{run_id}.jsonl"
        append_line(output_dir or ".", file, {"run_id": run_id, **metrics})


@register_trajectory_builder(config_type=DatasetTrajectoryBuilderConfig)
async def dataset_trajectory_builder(
    config: DatasetTrajectoryBuilderConfig, builder: "Builder"
) -> AsyncIterator[DatasetTrajectoryBuilder]:
    """Conversations and preference pairs of the dataset, for `sft_trainer` and `dpo_trainer`."""
    yield DatasetTrajectoryBuilder(config)


def _common(one: list[Message], other: list[Message]) -> int:
    """Number of messages with which both begin."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _trajectory(
    messages: list[Message], context: int, tools: Any, example: str, reward: float
) -> Trajectory:
    """A conversation of which the first `context` messages are not trained."""
    episode: list[EpisodeItem] = [
        message_item({**message, "weight": 0} if i < context else message)
        for i, message in enumerate(messages)
    ]
    metadata = {"id": example, "from_dataset": True, **({"tools": tools} if tools else {})}
    return Trajectory(episode=episode, reward=reward, metadata=metadata)
