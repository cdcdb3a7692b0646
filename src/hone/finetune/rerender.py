"""Convert calls to episodes, and trajectories to the SDK's groups.

In:   sampled calls; trajectories
Out:  episodes; the SDK's TrajectoryGroups; counts of what could not be converted, by reason

A trajectory whose calls a hone server recorded is sent as a reference to them, without text. Any
other is sent as text with log-probabilities, and the server renders it again; the order of its
messages is checked here, because the error can name the example. A call that continues a
conversation extends it; a call that does not continue one exactly starts another.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from hone.errors import ConfigError
from hone.files.rollout_record import EpisodeItem, EpisodeItemRole
from hone.finetune.calls import Message, SampledCall
from hone.finetune.types import DPOItem, Trajectory, TrajectoryCollection
from hone.trajectory import History, TrajectoryGroup
from hone.trajectory import Trajectory as SentTrajectory
from hone.wire.conversation import Continuations, text_of

logger = logging.getLogger("hone")

_EPISODE_ROLES = {
    "user": EpisodeItemRole.USER,
    "human": EpisodeItemRole.USER,
    "assistant": EpisodeItemRole.ASSISTANT,
    "ai": EpisodeItemRole.ASSISTANT,
    "system": EpisodeItemRole.SYSTEM,
    "developer": EpisodeItemRole.SYSTEM,
    "tool": EpisodeItemRole.TOOL,
    "function": EpisodeItemRole.FUNCTION,
}
_EPISODE_KEYS = ("tool_calls", "tool_call_id", "function_call", "name", "reasoning_content")
_CHAT_ROLES = {
    EpisodeItemRole.FUNCTION: "tool",
    EpisodeItemRole.ENVIRONMENT: "user",
    EpisodeItemRole.OTHER: "user",
}
"""Roles that chat templates do not know, and those to use instead."""
_CHAT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


# ---- calls -> an episode -------------------------------------------------------------------------


def episode(sampled: Sequence[SampledCall]) -> list[EpisodeItem]:
    """All conversations in order; `metadata["conversation"]` has their numbers."""
    conversations: list[list[tuple[Message, SampledCall | None]]] = []
    continuations = Continuations()
    for one in sampled:
        number, known = continuations.add(one.messages, one.reply)
        conversations += [[]] if number == len(conversations) else []
        conversations[number] += [(message, None) for message in one.messages[known:]]
        conversations[number].append((one.reply, one))
    return [
        _episode_item(message, call, k)
        for k, conversation in enumerate(conversations)
        for message, call in conversation
    ]


def _episode_item(message: Message, call: SampledCall | None, conversation: int) -> EpisodeItem:
    role = _EPISODE_ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    metadata: dict[str, Any] = {key: message[key] for key in _EPISODE_KEYS if message.get(key)}
    metadata["conversation"] = conversation
    if call is not None:
        metadata |= {"call": call.id, "finish_reason": call.finish}
        if call.token_ids is not None:
            metadata["token_ids"] = call.token_ids
    logprobs = None
    if role is EpisodeItemRole.ASSISTANT:
        logprobs = {} if call is None else call.logprobs
    text = text_of(message.get("content"))
    return EpisodeItem(role=role, content=text, logprobs=logprobs, metadata=metadata)


def message_item(message: Message) -> EpisodeItem:
    """A written message as part of an episode; `weight: 0` keeps it from being trained."""
    item = _episode_item(message, None, 0)
    if message.get("weight") == 0:
        item.metadata = {**(item.metadata or {}), "weight": 0}
    return item


# ---- trajectories -> a job -----------------------------------------------------------------------


def sdk_groups(collection: TrajectoryCollection) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """The groups that can be sent, and counts of what was dropped, by reason."""
    groups, dropped = [], Counter[str]()
    for group in collection.trajectories:
        pairs = [item for one in group for item in _pairs(one)]
        if pairs:
            groups += [_sent_pair(item, group) for item in pairs]
            continue
        wrong = [_wrong_order(trajectory) for trajectory in group]
        for why in filter(None, wrong):
            dropped["message_order"] += 1
            logger.warning("Dropped a trajectory: %s", why)
        sent = [_sent(one) for one, why in zip(group, wrong, strict=True) if why is None]
        if sent:
            groups.append(TrajectoryGroup(sent, example=_example(group)))
        elif group:
            dropped["empty_group"] += 1
    return groups, dropped


def _example(group: Sequence[Trajectory]) -> str:
    return str((group[0].metadata or {}).get("id", ""))


def _pairs(trajectory: Trajectory) -> list[DPOItem]:
    """Preference pairs, as NeMo Agent Toolkit's builders give them."""
    if trajectory.trained_calls is not None:
        return []
    return [item for item in trajectory.episode if isinstance(item, DPOItem)]


def _sent_pair(item: DPOItem, group: Sequence[Trajectory]) -> TrajectoryGroup:
    """The two answers as a separate group, with rewards 1 and 0."""
    prompt: list[dict[str, Any]] = [{"role": "user", "content": item.prompt}]
    if not isinstance(item.prompt, str):
        prompt = [{**message.model_dump(), "weight": 0} for message in item.prompt]
    return TrajectoryGroup(
        [
            SentTrajectory(
                messages_and_choices=[*prompt, {"role": "assistant", "content": text}],
                reward=reward,
            )
            for text, reward in ((item.chosen_response, 1.0), (item.rejected_response, 0.0))
        ],
        example=_example(group),
    )


def _wrong_order(trajectory: Trajectory) -> str | None:
    """What is wrong with the order of an agent's messages; a dataset's may be in any order."""
    metadata = trajectory.metadata or {}
    if metadata.get("from_dataset") or trajectory.trained_calls is not None:
        return None
    example = metadata.get("id")
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


def conversations(trajectory: Trajectory) -> list[list[EpisodeItem]]:
    """The conversations of an episode."""
    by_number: dict[Any, list[EpisodeItem]] = {}
    for item in trajectory.episode:
        if not isinstance(item, EpisodeItem):
            raise ConfigError(
                "a trajectory mixes preference pairs (DPOItem) with messages (EpisodeItem); give each "
                "its own trajectory"
            )
        by_number.setdefault((item.metadata or {}).get("conversation", 0), []).append(item)
    return list(by_number.values()) or [[]]


def _sent(trajectory: Trajectory) -> SentTrajectory:
    metadata = trajectory.metadata or {}
    fields: dict[str, Any] = {
        "reward": trajectory.reward,
        "shaped_rewards": trajectory.shaped_rewards,
        "metadata": {k: v for k, v in metadata.items() if isinstance(v, float | int | str | bool)},
    }
    if trajectory.trained_calls is not None:
        calls = trajectory.trained_calls
        return SentTrajectory(rollout=trajectory.rollout, trained_calls=calls, **fields)
    first, *others = conversations(trajectory)
    tools = metadata.get("tools")
    return SentTrajectory(
        messages_and_choices=[_message(item) for item in first],
        tools=tools,
        additional_histories=[
            History(messages_and_choices=[_message(item) for item in other], tools=tools)
            for other in others
        ],
        **fields,
    )


def _message(item: EpisodeItem) -> dict[str, Any]:
    """A message, or a choice if the message is trained."""
    metadata = item.metadata or {}
    message = {
        "role": _CHAT_ROLES.get(item.role, item.role.value),
        "content": item.content,
        **{key: metadata[key] for key in _CHAT_KEYS if metadata.get(key)},
        **({"weight": 0} if metadata.get("weight") == 0 else {}),
    }
    if item.role is not EpisodeItemRole.ASSISTANT or not item.logprobs:
        return message
    logprobs = item.logprobs
    if isinstance(logprobs, BaseModel):
        logprobs = logprobs.model_dump(mode="json", warnings=False)
    finish = metadata.get("finish_reason") or "stop"
    ids = {"token_ids": metadata["token_ids"]} if metadata.get("token_ids") else {}
    return {"index": 0, "finish_reason": finish, "logprobs": logprobs, "message": message, **ids}
