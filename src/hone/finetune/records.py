"""Make the record of a rollout, and the event and the trajectory of a record.

In:   an ItemResult: what the workflow returned, the calls that were seen, the scores
Out:  a RolloutRecord, as the journal stores it, its event and its trajectory
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.capture.base import SeenCall
from hone.config.schema import FinetuneConfig
from hone.disk import append_lines
from hone.evaluation.base import Score
from hone.evaluation.results import ItemResult, score_failure_kind
from hone.event_log import IDS
from hone.finetune.types import Trajectory
from hone.redact import redact_json
from hone.rollout_record import (
    CallRecord,
    FailureRecord,
    RolloutRecord,
    Split,
    StepRecord,
)
from hone.types import Failure
from hone.workflow.jsonable import plain
from hone.workflow.run import RolloutResult


def record_of(
    result: ItemResult,
    *,
    split: Split,
    epoch: int,
    round: int = 0,
    generation: int = 0,
    reward_name: str | None,
    with_calls: bool = False,
) -> RolloutRecord:
    """The record of a finished rollout; a failed one has no reward."""
    item, ran = result.item, result.rollout
    assert ran is not None, "the workflow was run"
    conversation, failure = _last_conversation(ran.calls), _failure(result, ran, reward_name)
    score = result.scores.get(reward_name) if reward_name is not None else None
    return RolloutRecord(
        epoch=epoch,
        round=round,
        split=split,
        example=item.id,
        generation=generation,
        rollout=ran.id,
        reward=None if failure is not None or score is None else score.value,
        scores={name: one.value for name, one in result.scores.items()},
        failure=failure,
        answered=ran.answered,
        output=plain(item.output_obj),
        input=plain(item.input_obj),
        shaped=[
            StepRecord(
                name=step.name, value=step.value, calls=step.calls, metadata=plain(step.metadata)
            )
            for step in ran.steps
        ],
        seconds=ran.seconds,
        calls=len(ran.calls),
        tokens=sum((call.usage or {}).get("completion_tokens", 0) for call in ran.calls),
        policy_steps=sorted({c.policy_step for c in ran.calls if c.policy_step is not None}),
        messages=plain(conversation),
        model_calls=[_call_record(c, conversation) for c in ran.calls] if with_calls else [],
        request=_first_request(ran.calls) if generation == 0 else None,
    )


def without_secrets(record: RolloutRecord) -> RolloutRecord:
    """The record as it is written: without secrets in what an agent or an evaluator said.

    What is trained stays as it is, the episode and its tools: other text would have other tokens.
    """
    known = record.model_dump(exclude={"episode"})
    fields = redact_json(known, keep=(*IDS, "trained_calls", "scores"))
    if record.episode is not None and "tools" in record.metadata:
        fields["metadata"]["tools"] = record.metadata["tools"]
    return RolloutRecord.model_validate(fields).model_copy(update={"episode": record.episode})


def trajectory_of(record: RolloutRecord) -> Trajectory:
    """The trajectory; without its text if a server recorded the calls."""
    text: dict[str, Any] = {} if record.episode is None else {"episode": record.episode}
    return Trajectory.model_construct(
        **text,
        reward=record.reward,
        shaped_rewards=record.shaped_rewards,
        metadata={
            "id": record.example,
            "run_id": record.rollout.rpartition(":")[0],
            "epoch": record.epoch,
            "round": record.round,
            "generation": record.generation,
            "rollout": record.rollout,
            "calls": record.trained_calls,
            **record.metadata,
        },
    )


def event_fields(record: RolloutRecord) -> dict[str, Any]:
    """Fields of the event `rollout`."""
    return {
        **record.model_dump(
            include={"split", "epoch", "round", "example", "generation", "rollout", "reward"}
            | {"seconds", "calls", "tokens"}
        ),
        "failure_kind": record.failure_kind,
        "failure_reason": record.failure and record.failure.reason,
        "answered": record.answered,
        "retried": [f"{one.kind}: {one.reason}" for one in record.retries],
    }


def reward_or_substitute(record: RolloutRecord, config: FinetuneConfig) -> float | None:
    """The record's reward, or that of `on_policy_failure`; None if it has none, or none yet."""
    if record.failure_kind != "policy":
        return record.reward
    instead = config.on_policy_failure
    return None if isinstance(instead, str) else instead.reward


def append_line(directory: str | Path, name: str, fields: dict[str, Any]) -> None:
    """Append a line of JSON, with the time, to a component's own log."""
    line = {"timestamp": datetime.now(UTC).isoformat(), **plain(fields)}
    append_lines(Path(directory) / name, json.dumps(redact_json(line)).encode() + b"\n")


def failure_record(kind: str, reason: str, failure: Failure) -> FailureRecord:
    """Why a rollout failed, as the journal stores it."""
    fields = {"kind": kind, "reason": reason, **plain(failure.model_dump())}
    return FailureRecord.model_validate(fields)


def evaluator_failure(score: Score, *, answered: bool) -> FailureRecord:
    """Why a rollout could not be scored. `answered`: the policy answered a call of the rollout."""
    assert score.failure is not None, score
    kind = score_failure_kind(score, answered=answered)
    return failure_record(kind, score.reason, score.failure)


def _failure(
    result: ItemResult, ran: RolloutResult, reward_name: str | None
) -> FailureRecord | None:
    if ran.failure is not None:
        return failure_record(ran.failure.kind, ran.failure.reason, ran.failure.failure)
    if reward_name is None:
        return None
    none = Failure(type="NoScore", message=f"evaluator {reward_name!r} gave no score")
    score = result.scores.get(reward_name, Score(None, failure=none, is_outside=True))
    return None if score.value is not None else evaluator_failure(score, answered=ran.answered)


def _first_request(calls: tuple[SeenCall, ...]) -> dict[str, Any] | None:
    """The first request to the policy; calls that name a step are for a frozen model."""
    for call in calls:
        chat = call.is_chat and call.messages is not None
        if chat and call.reply is not None and "@" not in call.model:
            tools = {"tools": call.tools} if call.tools else {}
            return plain({"messages": call.messages, **tools, **call.parameters})
    return None


def _call_record(call: SeenCall, conversation: list[dict[str, Any]]) -> CallRecord:
    """The call; its text is included only if it is not part of the last conversation."""
    usage, messages, reply = call.usage or {}, call.messages or [], call.reply
    in_conversation = reply is not None and [*messages, reply] == conversation[: len(messages) + 1]
    return CallRecord(
        id=call.id,
        function=call.function,
        model=call.model,
        at=call.started_at,
        seconds=call.seconds,
        held_s=call.held_s,
        status=call.status,
        error=plain(call.error),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        finish=call.finish,
        policy_step=call.policy_step,
        temperature=call.temperature,
        num_messages=len(messages),
        messages=None if in_conversation else plain(messages),
        reply=None if in_conversation else plain(reply),
    )


def _last_conversation(calls: tuple[SeenCall, ...]) -> list[dict[str, Any]]:
    for call in reversed(calls):
        if call.messages is not None and call.reply is not None:
            return [*call.messages, call.reply]
    return []
