"""`art.types` under hone's name: messages, tools, results, and TrainConfig with ART's default."""

from typing import Literal

from pydantic import Field

from hone import train_config
from hone.backends.base import TrainResult
from hone.train_config import ART_LEARNING_RATE, TrainSFTConfig
from hone.types import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools

__all__ = [
    "LocalTrainResult",
    "Message",
    "MessageOrChoice",
    "Messages",
    "MessagesAndChoices",
    "ServerlessTrainResult",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "Verbosity",
]

LocalTrainResult = TrainResult
ServerlessTrainResult = TrainResult

Verbosity = Literal[0, 1, 2]
"""ART's `verbose`."""


class TrainConfig(train_config.TrainConfig):
    """How one job is trained, with ART's default learning rate; other keys are those of hone.

    Only the keys that were set are sent. Without a learning rate, a job uses that of the model (its
    `defaults` or `trainer_args`), else the same default, which `hone.art.TrainableModel` registers.
    """

    learning_rate: float = Field(default=ART_LEARNING_RATE, ge=0)
    """AdamW's learning rate (0 measures without changing the weights)."""
