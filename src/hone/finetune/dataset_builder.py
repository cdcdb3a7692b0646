"""Turn the conversations of a dataset into trajectories, without running any rollout.

In:   rows with `messages`; with `prompt` and `completion`; or with `chosen` and `rejected`
Out:  a TrajectoryCollection: for SFT one conversation per group, for DPO a pair with rewards 1 and 0

The columns are those of TRL and of OpenAI's fine-tuning format. A plain text is one message: a
prompt is a user message, everything else an assistant message. Assistant messages of a prompt, and
those with which `chosen` and `rejected` both begin, are context. SFT never trains on `rejected`.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from hone.config.build import Builder
from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.config.schema import DEFAULT, RUNS, Document
from hone.errors import ConfigError
from hone.files.rollout_record import EpisodeItem
from hone.finetune.base import RoundRequest, TrajectoryBuilder, TrajectoryCollection
from hone.finetune.records import append_line
from hone.finetune.rerender import message_item
from hone.finetune.types import Trajectory
from hone.wire.conversation import common_prefix
from hone.wire.openai.chat import TOOLS

Message = dict[str, JsonValue]
Objective = Literal["sft", "dpo"]


_MESSAGES = TypeAdapter(list[Message])


class ConversationBuilderConfig(TrajectoryBuilderConfig, name="conversations"):
    """Reads conversations and preference pairs from the dataset's rows; runs no rollouts."""

    messages_key: str = Field(default="messages", min_length=1)
    """Column with a whole conversation."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Column with the beginning of a conversation: messages, or the text of a user message."""
    completion_key: str = Field(default="completion", min_length=1)
    """Column with the answer to the prompt: messages, or the text of an assistant message."""
    chosen_key: str = Field(default="chosen", min_length=1)
    """Column with the preferred answer, or the whole conversation if there is no prompt."""
    rejected_key: str = Field(default="rejected", min_length=1)
    """Column with the rejected answer, or the whole conversation if there is no prompt."""
    tools_key: str = Field(default="tools", min_length=1)
    """Column with the tools of the conversation, as in the OpenAI API."""

    def trajectories(
        self, example: str, row: object, objective: Objective | None = None
    ) -> list[Trajectory]:
        """The group of a row; raises ConfigError if it has nothing that the objective trains on.

        Without an objective, a row with a pair gives the pair.
        """
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {example!r}: expected an object with columns, got {row!r}")
        columns = {key: row[key] for key in row if row[key] is not None}
        tools = _tools(columns.get(self.tools_key), f"row {example!r}, column {self.tools_key!r}")
        has_pair = self.chosen_key in columns and self.rejected_key in columns
        if objective == "dpo" and not has_pair:
            raise ConfigError(
                f"row {example!r} has no pair of {self.chosen_key!r} and {self.rejected_key!r}, which "
                f"a trainer of type dpo needs. Its columns: {', '.join(map(repr, row))}. Name them in "
                "the keys of the trajectory builder, or set a trainer of type sft."
            )
        if has_pair and objective != "sft":
            return [
                _trajectory(*one, tools, example, reward)
                for one, reward in zip(self._pair(columns, example), (1.0, 0.0), strict=True)
            ]
        return [_trajectory(*self._conversation(columns, example), tools, example, 0.0)]

    def _pair(self, columns: Mapping[str, Any], example: str) -> list[tuple[list[Message], int]]:
        """Both conversations of a pair, and the number of messages that are context."""
        chosen, rejected = (
            self._answered(columns, key, example) for key in (self.chosen_key, self.rejected_key)
        )
        both = _common(chosen[0], rejected[0])
        return [(messages, max(context, both)) for messages, context in (chosen, rejected)]

    def _conversation(self, columns: Mapping[str, Any], example: str) -> tuple[list[Message], int]:
        """A conversation to imitate, and the number of messages that are context."""
        if messages := self._messages(columns, self.messages_key, "user", example):
            return messages, 0
        if self.completion_key in columns:
            return self._answered(columns, self.completion_key, example)
        if self.chosen_key in columns and self.rejected_key in columns:
            return self._pair(columns, example)[0]
        if self.chosen_key in columns:
            return self._answered(columns, self.chosen_key, example)
        raise ConfigError(
            f"row {example!r} has neither {self.messages_key!r}, nor {self.prompt_key!r} with "
            f"{self.completion_key!r}, nor {self.chosen_key!r} with {self.rejected_key!r}. Its "
            f"columns: {', '.join(map(repr, columns))}. Name them in the keys of the trajectory builder."
        )

    def _answered(
        self, columns: Mapping[str, Any], key: str, example: str
    ) -> tuple[list[Message], int]:
        """The prompt with the answer of a column, and the number of messages of the prompt."""
        prompt = self._messages(columns, self.prompt_key, "user", example)
        answer = self._messages(columns, key, "assistant", example)
        # Many datasets repeat the prompt in the answer, some after a system message.
        for start in range(len(answer)):
            end = start + len(prompt)
            if prompt and _common(answer[start:end], prompt) == len(prompt):
                return answer, end
            if answer[start]["role"] not in ("system", "developer"):
                break
        return prompt + answer, len(prompt)

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


def dataset_config_of(document: Document) -> ConversationBuilderConfig | None:
    """The block of the run's trajectory builder; None if it runs rollouts."""
    config = document.trajectory_builders.get(document.finetuning.trajectory_builder or "")
    return config if isinstance(config, ConversationBuilderConfig) else None


def objective_of(document: Document) -> Objective | None:
    """The objective of the run's trainer; None for a plugin's trainer."""
    trainer = document.trainers.get(document.finetuning.trainer or "")
    return None if trainer is None else trainer.job_keys().get("loss")


class ConversationBuilder(TrajectoryBuilder):
    """Returns the conversations of the round's examples as trajectories."""

    trajectory_builder_config: ConversationBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: ConversationBuilderConfig,
        objective: Objective | None = None,
    ) -> None:
        super().__init__(trajectory_builder_config)
        self.num_generations = 0
        self.objective: Objective | None = objective

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Does nothing; `finalize` reads the rows."""

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        items = RoundRequest.of(run_id, meta).items or self.bound_evaluation.items
        config, objective = self.trajectory_builder_config, self.objective
        groups = [
            config.trajectories(item.id, item.full_dataset_entry, objective) for item in items
        ]
        return TrajectoryCollection(trajectories=groups, run_id=run_id)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append a line to trajectory_builder_RUN.jsonl."""
        file = f"trajectory_builder_{run_id}.jsonl"
        append_line(output_dir or RUNS / DEFAULT, file, {"run_id": run_id, **metrics})


@register_trajectory_builder(config_type=ConversationBuilderConfig)
async def conversation_builder(
    config: ConversationBuilderConfig, builder: Builder
) -> AsyncIterator[ConversationBuilder]:
    """Conversations and preference pairs of the dataset, for the trainers `sft` and `dpo`."""
    yield ConversationBuilder(config, objective_of(builder.document))


def _common(one: list[Message], other: list[Message]) -> int:
    """How many messages two rows begin with in common. They are data, so every key counts."""
    return common_prefix([*map(_known, one)], [*map(_known, other)])


def _known(message: Message) -> Message:
    """The message without null keys: tables store every column for every message."""
    return {key: value for key, value in message.items() if value is not None}


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools in the OpenAI API's form, also parsed from JSON text; None if there are none."""
    try:
        tools = from_json(value) if isinstance(value, str) else value
        if tools:
            TOOLS.validate_python(tools)
    except ValueError:
        raise ConfigError(
            f"{where}: expected a list of tools as in the OpenAI API, each with `function` and its "
            f"`name`, got {str(value)[:80]!r}"
        ) from None
    return tools or None


def _trajectory(
    messages: list[Message], context: int, tools: Any, example: str, reward: float
) -> Trajectory:
    """A conversation whose first `context` messages are not trained."""
    trained = [
        i
        for i, message in enumerate(messages)
        if i >= context and message["role"] == "assistant" and message.get("weight") != 0
    ]
    if not trained:
        raise ConfigError(
            f"row {example!r}: there is no assistant message to train on: each is part of the prompt, "
            "has `weight: 0`, or is in both answers of the pair. Leave this row out."
        )
    if trained[0] == 0:
        raise ConfigError(
            f"row {example!r}: the first message is the assistant's, and it answers nothing; give it "
            "`weight: 0`, which makes it context, or a prompt"
        )
    episode: list[EpisodeItem] = [
        message_item({**message, "weight": 0} if i < context else message)
        for i, message in enumerate(messages)
    ]
    metadata = {"id": example, "from_dataset": True, **({"tools": tools} if tools else {})}
    return Trajectory(episode=episode, reward=reward, metadata=metadata)
