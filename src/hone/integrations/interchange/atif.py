"""ATIF, Harbor's Agent Trajectory Interchange Format: written as version 1.7, read from any version.

In:   a rollout with its conversations; or a trajectory.json of any agent
Out:  a trajectory as a dict; or its conversations as messages of the OpenAI API

A tool message is an observation of the agent's step that called the tool. What ATIF has no field
for is kept under `extra`, so that reading back gives the same messages. Null content is written as
empty text, because ATIF requires a text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import hone
from hone.errors import ConfigError
from hone.integrations.interchange.base import (
    Conversation,
    ExportedRollout,
    Message,
    number_or_none,
)
from hone.wire.openai.chat import content_text

if TYPE_CHECKING:
    from hone.types import RecordedCall

VERSION = "ATIF-v1.7"
_SOURCE = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_OURS = "hone"
"""The key of `extra` for values that ATIF has no field for."""
_FIELDS = frozenset({"role", "content", "tool_calls", "reasoning_content"})
"""Keys of a message that have a field in a step."""


def to_atif(rollout: ExportedRollout) -> dict[str, Any]:
    """A rollout as one trajectory; further conversations are its sub-agents."""
    first, *others = rollout.conversations
    id = rollout.record.rollout
    root = _trajectory(first, id, rollout.model)
    root["session_id"] = id
    root["extra"] = {_OURS: rollout.details()}
    if rollout.reward is not None:
        root["final_metrics"]["extra"] = {"reward": rollout.reward}
    if others:
        root["subagent_trajectories"] = [
            _trajectory(one, f"{id}#{number}", rollout.model)
            for number, one in enumerate(others, start=1)
        ]
    return root


def _trajectory(conversation: Conversation, id: str, model: str) -> dict[str, Any]:
    agent: dict[str, Any] = {"name": "hone", "version": hone.__version__, "model_name": model}
    if conversation.tools:
        agent["tool_definitions"] = conversation.tools
    calls = conversation.sampled.values()
    steps = _steps(conversation)
    final: dict[str, Any] = {"total_steps": len(steps)}
    if calls:
        final["total_prompt_tokens"] = sum(len(call.call.prompt_ids) for call in calls)
        final["total_completion_tokens"] = sum(len(call.call.completion_ids) for call in calls)
    return {
        "schema_version": VERSION,
        "trajectory_id": id,
        "agent": agent,
        "steps": steps,
        "final_metrics": final,
    }


def _steps(conversation: Conversation) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for number, message in enumerate(conversation.messages):
        last = steps[-1] if steps else {}
        called = [call["tool_call_id"] for call in last.get("tool_calls", ())]
        if message["role"] == "tool" and message.get("tool_call_id") in called:
            results = last.setdefault("observation", {"results": []})["results"]
            results.append(_result(message))
            continue
        step = {"step_id": len(steps) + 1, **_step(message)}
        call = conversation.sampled.get(number)
        if call is not None and step["source"] == "agent":
            step["timestamp"] = datetime.fromtimestamp(call.created_at, UTC).isoformat()
            step["model_name"] = call.model
            step["metrics"] = _metrics(call)
        steps.append(step)
    return steps


def _step(message: Message) -> dict[str, Any]:
    source = _SOURCE.get(message["role"], "user")
    step: dict[str, Any] = {"source": source, "message": content_text(message.get("content"))}
    ours = {key: value for key, value in message.items() if key not in _FIELDS}
    if _SOURCE.get(message["role"]) is None or message["role"] == "developer":
        ours["role"] = message["role"]
    if isinstance(message.get("content"), list):
        ours["content"] = message["content"]
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    if source == "agent":
        step |= {"reasoning_content": reasoning} if reasoning else {}
        step |= {"tool_calls": [_tool_call(call) for call in calls]} if calls else {}
    if ours:
        step["extra"] = {_OURS: ours}
    return step


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    written = {"tool_call_id": str(call.get("id")), "function_name": str(function.get("name"))}
    if isinstance(arguments, dict) and json.dumps(arguments) == text:
        return {**written, "arguments": arguments}
    # A policy may write arguments that are not an object, or are formatted differently.
    parsed = arguments if isinstance(arguments, dict) else {}
    return {**written, "arguments": parsed, "extra": {_OURS: {"arguments": text}}}


def _result(message: Message) -> dict[str, Any]:
    result = {
        "source_call_id": message["tool_call_id"],
        "content": content_text(message.get("content")),
    }
    known = {"role", "content", "tool_call_id"}
    ours = {key: value for key, value in message.items() if key not in known}
    if isinstance(message.get("content"), list):
        ours["content"] = message["content"]
    return result | ({"extra": {_OURS: ours}} if ours else {})


def _metrics(call: "RecordedCall") -> dict[str, Any]:
    sampled = call.call
    metrics: dict[str, Any] = {
        "prompt_tokens": len(sampled.prompt_ids),
        "completion_tokens": len(sampled.completion_ids),
        "prompt_token_ids": sampled.prompt_ids,
        "completion_token_ids": sampled.completion_ids,
        "extra": {
            "call_id": call.id,
            "policy_step": sampled.step,
            "temperature": sampled.temperature,
            "finish_reason": call.finish,
        },
    }
    return metrics | ({"logprobs": sampled.logprobs} if sampled.logprobs is not None else {})


# ---- reading ------------------------------------------------------------------------------------


def is_atif(document: Any) -> bool:
    """Whether a JSON value is a trajectory of any version of ATIF."""
    return isinstance(document, Mapping) and "steps" in document and "agent" in document


def from_atif(document: Mapping[str, Any], where: str) -> list[Conversation]:
    """The conversations of a trajectory and of its embedded sub-agents; `where`, for the error.

    A trajectory without steps has none.
    """
    try:
        tools = document["agent"].get("tool_definitions")
        messages = [m for step in document["steps"] for m in _messages(step)]
        details = ((document.get("extra") or {}).get(_OURS)) or {}
        final = (document.get("final_metrics") or {}).get("extra") or {}
        id = document.get("trajectory_id") or document.get("session_id")
        reward = number_or_none(details.get("reward", final.get("reward")))
        own = Conversation(messages, tools or None, id=id, reward=reward)
        conversations = [own] if messages else []
        for embedded in document.get("subagent_trajectories") or ():
            for one in from_atif(embedded, where):
                one.reward = reward if one.reward is None else one.reward
                conversations.append(one)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: cannot be read as an ATIF trajectory ({type(error).__name__}: {error}); "
            "check it with Harbor's validator"
        ) from None
    return conversations


def _messages(step: Mapping[str, Any]) -> list[Message]:
    """The message of a step, and those of its observation."""
    ours = _ours(step)
    role = {"system": "system", "user": "user", "agent": "assistant"}[step["source"]]
    message: Message = {"role": role, "content": _content(step.get("message"))}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in step["tool_calls"]]
    if step.get("is_copied_context") and role == "assistant":
        message["weight"] = 0  # context of an earlier trajectory, which must not be trained again
    observed = (step.get("observation") or {}).get("results") or []
    is_empty = role == "system" and observed and not message["content"]
    messages = [] if is_empty else [message | ours]
    return messages + [_observed(result) for result in observed]


def _observed(result: Mapping[str, Any]) -> Message:
    id = result.get("source_call_id")
    # Without a call, it is a message of the environment.
    message: Message = {"role": "tool", "tool_call_id": id} if id else {"role": "user"}
    return message | {"content": _content(result.get("content"))} | _ours(result)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    text = _ours(call).get("arguments")
    arguments = json.dumps(call.get("arguments") or {}) if text is None else text
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _content(content: Any) -> Any:
    """Text; parts as the OpenAI API has them."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") == "image":
            parts.append({"type": "image_url", "image_url": {"url": part["source"]["path"]}})
        else:
            parts.append({"type": "text", "text": part.get("text") or f"[{part.get('type')}]"})
    return parts


def _ours(entry: Mapping[str, Any]) -> dict[str, Any]:
    extra = entry.get("extra")
    ours = extra.get(_OURS) if isinstance(extra, Mapping) else None
    return dict(ours) if isinstance(ours, Mapping) else {}
