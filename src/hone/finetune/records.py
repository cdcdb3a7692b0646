"""A rollout that ended -> one line of the journal, and one event.

In:   an ItemResult: what the workflow returned, the calls that were seen, the scores
Out:  a RolloutRecord, what it is worth, whether to run it again; its id; the fields of its event

A rollout that failed, or that its evaluator failed to score, has no reward: it has a failure, of
one of two kinds. What the evaluator could not do is never blamed on the model.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from hone.finetune.base import FailureRecord, RolloutRecord, StepRecord

if TYPE_CHECKING:
    from hone.capture.base import SeenCall
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.run import ItemResult

Split = Literal["train", "val", "final"]


def rollout_id(
    run_id: str,
    *,
    epoch: int,
    round: int = 0,
    item: int,
    generation: int,
    session: int,
    retry: int = 0,
    split: Split = "train",
) -> str:
    """RUN:EPOCH.ROUND.ITEM.GENERATION.sSESSION[rRETRY].

    `v` stands before the epoch of a validation, `f` before that of a final one.
    """
    first = {"train": "", "val": "v", "final": "f"}[split]
    again = f"r{retry}" if retry else ""
    return f"{run_id}:{first}{epoch}.{round}.{item}.{generation}.s{session}{again}"


def record_of(
    result: "ItemResult",
    *,
    rollout: str,
    split: Split,
    epoch: int,
    round: int = 0,
    generation: int = 0,
    reward_name: str | None,
) -> RolloutRecord:
    """A rollout that ended, as the journal keeps it; a failed one has no reward."""
    item, ran = result.item, result.rollout
    calls: tuple[SeenCall, ...] = () if ran is None else ran.calls
    failure = _failure(result, reward_name)
    score = result.scores.get(reward_name) if reward_name is not None else None
    return RolloutRecord(
        epoch=epoch,
        round=round,
        split=split,
        example=item.id,
        generation=generation,
        rollout=rollout,
        reward=None if failure is not None or score is None else score.value,
        scores={name: one.value for name, one in result.scores.items()},
        failure=failure,
        output=plain(item.output_obj),
        input=plain(item.input_obj),
        shaped=[
            StepRecord(
                name=step.name, value=step.value, calls=step.calls, metadata=plain(step.metadata)
            )
            for step in (() if ran is None else ran.steps)
        ],
        seconds=0.0 if ran is None else ran.seconds,
        calls=len(calls),
        tokens=sum((call.usage or {}).get("completion_tokens", 0) for call in calls),
        policy_steps=sorted({c.policy_step for c in calls if c.policy_step is not None}),
        messages=_last_conversation(calls),
        request=_first_request(calls) if generation == 0 else None,
    )


def told(record: RolloutRecord) -> dict[str, Any]:
    """A rollout as the fields of its event."""
    failure = record.failure
    return {
        **record.model_dump(
            include={"split", "epoch", "round", "example", "generation", "rollout", "reward"}
            | {"seconds", "calls", "tokens"}
        ),
        "failure_kind": failure and failure.kind,
        "failure_reason": failure and failure.reason,
    }


def worth_another(record: RolloutRecord) -> bool:
    """Whether its world failed it; an evaluator is not asked again by running the agent again."""
    failure = record.failure
    return (
        failure is not None and failure.kind == "infrastructure" and failure.reason != "evaluator"
    )


def worth(record: RolloutRecord, config: "FinetuneConfig") -> float | None:
    """Its reward, or what `on_policy_failure` gives instead; None where it is left out."""
    failure, instead = record.failure, config.on_policy_failure
    if failure is None:
        return record.reward
    if failure.kind == "policy" and instead != "drop":
        return instead.reward
    return None


def append_line(directory: str | Path, name: str, **fields: Any) -> None:
    """One more line of JSON in a file of a component's own, with the time."""
    line = {"timestamp": datetime.now(UTC).isoformat(), **plain(fields)}
    Path(directory).mkdir(parents=True, exist_ok=True)
    with (Path(directory) / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def plain(value: Any) -> Any:
    """As JSON can hold it; what it cannot hold, as text. A number that is not finite becomes null."""
    how: Any = {"fallback": repr, "inf_nan_mode": "null", "serialize_unknown": True}
    try:
        return _encodable(to_jsonable_python(_encodable(value), **how))
    except UnicodeEncodeError:  # inside an object of the agent's own
        return _encodable(repr(value))


def _encodable(value: Any) -> Any:
    """The same in UTF-8: half a pair, as `json.loads` makes of a lone \\ud800, becomes that escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return value


def _failure(result: "ItemResult", reward_name: str | None) -> FailureRecord | None:
    failed = None if result.rollout is None else result.rollout.failure
    if failed is not None:
        said = plain(failed.failure.model_dump())
        return FailureRecord(kind=failed.kind, reason=failed.reason, **said)
    if reward_name is None:
        return None
    score = result.scores.get(reward_name)
    if score is not None and score.value is not None:
        return None
    found: dict[str, JsonValue] = (
        plain(score.failure.model_dump())
        if score is not None and score.failure is not None
        else {"type": "NoScore", "message": f"evaluator {reward_name!r} gave no score"}
    )
    return FailureRecord.model_validate({"kind": "infrastructure", "reason": "evaluator", **found})


def _first_request(calls: "tuple[SeenCall, ...]") -> dict[str, Any] | None:
    """What the agent sent first to the policy; calls that name a step are of a frozen model."""
    for call in calls:
        chat = call.messages is not None and "input" not in call.parameters  # of /v1/responses
        if chat and call.reply is not None and "@" not in call.model:
            tools = {"tools": call.tools} if call.tools else {}
            return plain({"messages": call.messages, **tools, **call.parameters})
    return None


def _last_conversation(calls: "tuple[SeenCall, ...]") -> list[dict[str, Any]]:
    for call in reversed(calls):
        if call.messages is not None and call.reply is not None:
            return plain([*call.messages, call.reply])
    return []
