"""The harness's trajectories -> the SDK's, which a job is made of.

In:   a TrajectoryCollection: episodes with rewards, and which recorded calls they are
Out:  TrajectoryGroups; what could not be converted, counted by reason

A trajectory whose calls a hone server recorded becomes a reference to them, and its text is left
at home. The text of any other is sent with its log-probabilities, to be rendered again; so its
order is checked here, where the message can still name the example.
"""

import logging
from collections import Counter
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from hone.errors import ConfigError, NotInThisVersion
from hone.finetune.base import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from hone.trajectory import History, TrajectoryGroup
from hone.trajectory import Trajectory as Sent

logger = logging.getLogger("hone")

_ROLES = {
    EpisodeItemRole.FUNCTION: "tool",
    EpisodeItemRole.ENVIRONMENT: "user",
    EpisodeItemRole.OTHER: "user",
}
"""Roles that chat templates do not know, in words that they do."""
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")


def sdk_groups(collection: TrajectoryCollection) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """The groups that can be sent, and what was left out, by reason."""
    groups, dropped = [], Counter[str]()
    for group in collection.trajectories:
        kept = []
        for trajectory in group:
            wrong = None if _recorded(trajectory) else _wrong_order(trajectory)
            if wrong is None:
                kept.append(_sent(trajectory))
            else:
                dropped["message_order"] += 1
                logger.warning("Dropped a trajectory: %s", wrong)
        if kept:
            example = str((group[0].metadata or {}).get("id", ""))
            groups.append(TrajectoryGroup(kept, example=example))
        elif group:
            dropped["empty_group"] += 1
    return groups, dropped


def validate_episode_order(trajectory: Trajectory) -> None:
    """Refuse a conversation that no chat template expresses."""
    wrong = _wrong_order(trajectory)
    if wrong is not None:
        raise ConfigError(wrong)


def _wrong_order(trajectory: Trajectory) -> str | None:
    example = (trajectory.metadata or {}).get("id")
    where = "" if example is None else f"example {example!r}: "
    for episode in conversations(trajectory):
        if not episode:
            return f"{where}Trajectory episode is empty."
        first = episode[0].role
        if first not in (EpisodeItemRole.USER, EpisodeItemRole.SYSTEM):
            return (
                f"{where}the first message is of role {first.value!r}; expected 'user' or 'system', "
                "since an episode begins with what the model was asked"
            )
        for i, (one, other) in enumerate(pairwise(episode)):
            if one.role is other.role is EpisodeItemRole.ASSISTANT:
                return (
                    f"{where}Consecutive assistant messages at positions {i} and {i + 1}; let the "
                    "agent send one message a turn, or use a hone server, which records what was "
                    "sampled"
                )
    return None


def _recorded(trajectory: Trajectory) -> bool:
    """Whether a hone server holds its tokens."""
    said = trajectory.metadata or {}
    return bool(said.get("rollout")) and said.get("calls") is not None


def conversations(trajectory: Trajectory) -> list[list[EpisodeItem]]:
    """The episode, cut where another conversation of the same rollout begins."""
    found: dict[Any, list[EpisodeItem]] = {}
    for item in trajectory.episode:
        if not isinstance(item, EpisodeItem):
            raise NotInThisVersion(
                "preference pairs (DPOItem) cannot be trained in this version of hone; the "
                "trajectory builder must give episodes of EpisodeItem"
            )
        found.setdefault((item.metadata or {}).get("conversation", 0), []).append(item)
    return list(found.values()) or [[]]


def _sent(trajectory: Trajectory) -> Sent:
    said = trajectory.metadata or {}
    fields: dict[str, Any] = {
        "reward": trajectory.reward,
        "shaped_rewards": trajectory.shaped_rewards,
        "metadata": {k: v for k, v in said.items() if isinstance(v, float | int | str | bool)},
    }
    if _recorded(trajectory):
        return Sent(rollout=said["rollout"], trained_calls=list(said["calls"]), **fields)
    first, *others = conversations(trajectory)
    tools = said.get("tools")
    return Sent(
        messages_and_choices=[_item(item) for item in first],
        tools=tools,
        additional_histories=[
            History(messages_and_choices=[_item(item) for item in other], tools=tools)
            for other in others
        ],
        **fields,
    )


def _item(item: EpisodeItem) -> dict[str, Any]:
    """A message, or a choice where it was sampled and is trained."""
    said = item.metadata or {}
    message = {
        "role": _ROLES.get(item.role, item.role.value),
        "content": item.content,
        **{key: said[key] for key in _KEPT if said.get(key)},
    }
    if item.role is not EpisodeItemRole.ASSISTANT or not item.logprobs:
        return message
    logprobs = item.logprobs
    if isinstance(logprobs, BaseModel):
        logprobs = logprobs.model_dump(mode="json", warnings=False)
    finish = said.get("finish_reason") or "stop"
    ids = {"token_ids": said["token_ids"]} if said.get("token_ids") else {}
    return {"index": 0, "finish_reason": finish, "logprobs": logprobs, "message": message, **ids}
