"""Values of the interchange: a conversation, and a rollout with its conversations.

In:   nothing; dataclasses
Out:  the values that every format is written from, and that an import returns
"""

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.files.rollout_record import RolloutRecord
    from hone.types import RecordedCall

Message = dict[str, Any]


def number_or_none(value: Any) -> float | None:
    """A finite number, also from text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, with U+FFFD for lone surrogates, which cannot be written as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True)
class Conversation:
    """Messages of the OpenAI API, and the recorded calls of the sampled ones."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    sampled: "dict[int, RecordedCall]" = field(default_factory=dict)
    """The recorded call of a sampled message, by its index; empty if no server has the calls."""
    id: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class ExportedRollout:
    """One rollout of a run."""

    record: "RolloutRecord"
    conversations: list[Conversation]
    """At least one; the longest-running first, then those of sub-agents."""
    model: str
    """The trained model."""

    @property
    def reward(self) -> float | None:
        return self.record.reward

    def details(self) -> dict[str, Any]:
        """The rollout's data other than its conversations, as JSON values."""
        names = {"epoch", "round", "split", "example", "generation", "rollout", "reward", "scores"}
        names |= {"input", "output", "seconds", "policy_steps", "shaped_rewards"}
        known = self.record.model_dump(mode="json", include=names)
        failure = self.record.failure
        known["failure"] = failure and failure.model_dump(include={"kind", "reason", "message"})
        return known
