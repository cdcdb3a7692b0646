"""Conversations as lines of JSON with OpenAI's messages: the format of fine-tuning datasets.

In:   conversations
Out:  {"messages": [...], "tools": [...], "id": ..., "reward": ...}, and back
"""

from collections.abc import Mapping
from typing import Any

from hone.errors import ConfigError
from hone.integrations.interchange.base import Conversation, number_or_none


def to_line(conversation: Conversation) -> dict[str, Any]:
    """The line of a conversation; keys without a value are left out."""
    line: dict[str, Any] = {"messages": conversation.messages}
    known = {"tools": conversation.tools, "id": conversation.id, "reward": conversation.reward}
    return line | {key: value for key, value in known.items() if value is not None}


def from_line(line: Any, where: str) -> Conversation:
    """The conversation of a line; `where`: its place, for the error."""
    messages = line.get("messages") if isinstance(line, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: has no list of `messages`, and is not an ATIF trajectory")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: messages[{number}] is {message!r}; it must have a role")
    id = line.get("id")
    return Conversation(
        [dict(message) for message in messages],
        line.get("tools") or None,
        id=None if id is None else str(id),
        reward=number_or_none(line.get("reward")),
    )
