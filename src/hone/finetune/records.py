"""Make the record of a rollout, and the event and the trajectory of a record.

In:   an ItemResult: what the workflow returned, the calls that were seen, the scores; its reward, and
      the calls that are trained
Out:  a RolloutRecord, as the journal stores it, its event and its trajectory

A record is made once, when all of it is known, and without secrets: what is trained and submitted
must equal what a resumed run reads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.capture.base import SeenCall
from hone.config.schema import FinetuneConfig
from hone.evaluation.base import Score
from hone.evaluation.results import ItemResult, score_failure_kind
from hone.files.disk import append_lines
from hone.files.event_log import IDS
from hone.files.redact import redact_json
from hone.files.rollout_record import (
    CallRecord,
    FailureRecord,
    RolloutRecord,
    Split,
    StepRecord,
)
from hone.finetune.calls import TrainedCalls, shaped_rewards
from hone.finetune.rerender import episode
from hone.finetune.types import Trajectory
from hone.types import Failure
from hone.workflow.jsonable import plain
from hone.workflow.run import RolloutResult


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout belongs in its run, besides its example."""

    split: Split
    epoch: int
    round: int = 0
    generation: int = 0


def record_of(
    result: ItemResult,
    place: Place,
    *,
    reward: float | None,
    failure: FailureRecord | None,
    trained: TrainedCalls | None = None,
    metadata: Mapping[str, Any] | None = None,
    with_calls: bool = False,
) -> RolloutRecord:
    """The record of a finished rollout.

    Args:
        result: the rollout and its scores.
        place: where it belongs in the run.
        reward: its reward; None if it has none, or none yet.
        failure: why it failed, or could not be scored.
        trained: its calls that are trained; None if they are not selected.
        metadata: other metadata of its trajectory.
        with_calls: include every model call, for loggers.
    """
    item, ran = result.item, ran_of(result)
    conversation = _last_conversation(ran.calls)
    record = RolloutRecord(
        epoch=place.epoch,
        round=place.round,
        split=place.split,
        example=item.id,
        generation=place.generation,
        rollout=ran.id,
        reward=reward,
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
        request=_first_request(ran.calls) if place.generation == 0 else None,
        **_training(trained, result, metadata or {}),
    )
    return without_secrets(record)


def _training(
    trained: TrainedCalls | None, result: ItemResult, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a record that say what is trained, or why nothing is."""
    if trained is None:
        return {"metadata": dict(metadata)}
    if trained.reason is not None:
        return {"metadata": dict(metadata), "not_trained": trained.reason}
    shaped = shaped_rewards(result.item.steps, trained.sampled)
    if not trained.foreign:
        calls = [one.id for one in trained.sampled]
        return {"metadata": dict(metadata), "shaped_rewards": shaped, "trained_calls": calls}
    tools = plain(result.item.trajectory[0].tools)
    text = episode(trained.sampled)
    return {"metadata": {**metadata, "tools": tools}, "shaped_rewards": shaped, "episode": text}


def without_secrets(record: RolloutRecord) -> RolloutRecord:
    """The record as it is written: without secrets in what an agent or an evaluator said.

    What is trained stays as it is, the episode and its tools: other text would have other tokens.
    """
    known = record.model_dump(exclude={"episode"})
    fields = redact_json(known, keep=(*IDS, "trained_calls", "scores"))
    if record.episode is not None and "tools" in record.metadata:
        fields["metadata"]["tools"] = record.metadata["tools"]
    return RolloutRecord.model_validate(fields).model_copy(update={"episode": record.episode})


def trajectory_of(
    record: RolloutRecord, reward: float | None = None, *, shaped: bool = False
) -> Trajectory:
    """The trajectory; without its text if a server recorded the calls.

    `reward`: replaces the record's. `shaped`: other rollouts have values of steps, so calls of a
    rollout without any have the value 0.
    """
    text: dict[str, Any] = {} if record.episode is None else {"episode": record.episode}
    values = record.shaped_rewards
    if shaped and values is None:
        values = [0.0] * record.num_trained_calls
    return Trajectory.model_construct(
        **text,
        reward=record.reward if reward is None else reward,
        shaped_rewards=values,
        rollout=record.rollout,
        trained_calls=record.trained_calls,
        metadata={
            "id": record.example,
            "run_id": record.rollout.rpartition(":")[0],
            "epoch": record.epoch,
            "round": record.round,
            "generation": record.generation,
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


def score_of_reward(
    result: ItemResult, reward_name: str | None
) -> tuple[Score | None, FailureRecord | None]:
    """The score of the evaluator that gives the reward, or why there is none."""
    ran = ran_of(result)
    if ran.failure is not None:
        return None, failure_record(ran.failure.kind, ran.failure.reason, ran.failure.failure)
    if reward_name is None:
        return None, None
    none = Failure(type="NoScore", message=f"evaluator {reward_name!r} gave no score")
    score = result.scores.get(reward_name, Score(None, failure=none, is_outside=True))
    if score.value is not None:
        return score, None
    return None, evaluator_failure(score, answered=ran.answered)


def reward_or_substitute(
    reward: float | None, failure: FailureRecord | None, config: FinetuneConfig
) -> float | None:
    """The reward, or that of `on_policy_failure`; None if there is none, or none yet."""
    if failure is None or failure.kind != "policy":
        return reward
    instead = config.on_policy_failure
    return None if isinstance(instead, str) else instead.reward


def ran_of(result: ItemResult) -> RolloutResult:
    """The rollout of a result; every result of a training run has one."""
    assert result.rollout is not None, "the workflow was run"
    return result.rollout


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
