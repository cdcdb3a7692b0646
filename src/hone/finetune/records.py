"""One record per rollout, and the groups and numbers made of records.

In:   an ItemResult: what the workflow returned, the calls that were seen, the scores
Out:  a RolloutRecord; its event; groups by example; the numbers of a round; refusals where too
      many rollouts failed

A rollout that failed, or that its evaluator failed to score, has no reward: it has a failure, of
one of two kinds. A failure of the evaluator is never counted against the model. Groups are always
of one example: comparing answers to different questions would reward the easier question.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic_core import to_jsonable_python

from hone.errors import RolloutError
from hone.finetune.values import (
    EpisodeItem,
    EpisodeSource,
    Trajectory,
    TrajectoryCollection,
)
from hone.types import Strict

if TYPE_CHECKING:
    from hone.capture.base import SeenCall
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.run import ItemResult

Split = Literal["train", "val", "final"]
POLICY_FAILURES_WARNED = 0.05
"""Share of policy failures above which dropping them is worth a warning: it rewards them."""
MESSAGES_SHOWN = 3


class FailureRecord(Strict):
    """Why a rollout failed, or could not be scored."""

    kind: Literal["infrastructure", "policy"]
    """`policy` if the model caused the failure."""
    reason: str
    """Reason under which failures are counted, such as `timeout` or `token_limit`."""
    type: str = ""
    """Class of the exception."""
    message: str = ""
    """Text of the exception."""
    traceback: str = ""
    """Last part of the traceback."""


class StepRecord(Strict):
    """One call of `hone.step`."""

    name: str
    """Name of the step."""
    value: float | None = None
    """Value of the step, which becomes a shaped reward."""
    calls: int
    """Model calls that the rollout had sent before."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Other arguments of `hone.step`."""


class RolloutRecord(Strict):
    """One finished rollout; a resumed run does not repeat it."""

    epoch: int
    """Number of the epoch; in a validation, the epochs that the policy was trained for."""
    round: int = 0
    """Number of the round in the epoch."""
    split: Split
    """`train`, `val`, or `final` for the validation at the end of the run."""
    example: str
    """Id of the example."""
    generation: int
    """Number of the rollout among those of its example."""
    rollout: str
    """Id under which the server records the calls of the rollout."""
    reward: float | None
    """None if the rollout failed or could not be scored."""
    scores: dict[str, float | None] = Field(default_factory=dict)
    """Score of each evaluator."""
    failure: FailureRecord | None = None
    """Why the rollout failed; None on success."""
    output: JsonValue = None
    """What the workflow returned."""
    input: JsonValue = None
    """What the workflow was called with."""
    shaped: list[StepRecord] = Field(default_factory=list)
    """Calls of `hone.step`."""
    seconds: float = 0.0
    """Duration of the rollout."""
    calls: int = 0
    """Number of model calls."""
    tokens: int = 0
    """Number of sampled tokens."""
    policy_steps: list[int] = Field(default_factory=list)
    """Policy steps that answered the calls, each once."""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """The last conversation, for the report."""
    request: dict[str, Any] | None = None
    """Body of the first model call, without the model's name. Recorded for the first rollout of each
    example, so that a report can show what the agent sends."""
    trained_calls: list[str] | None = None
    """Ids of the recorded calls that are trained; None if none is, or if no server records calls."""
    episode: list[EpisodeItem] | None = None
    """The text that is trained, if no server recorded the calls."""
    shaped_rewards: list[float] | None = None
    """One value per trained call."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Other metadata of the trajectory, such as the evaluator's `reasoning`."""

    @model_validator(mode="before")
    @classmethod
    def _without_trajectory(cls, fields: Any) -> Any:
        """Read a record that embeds its whole trajectory, as hone wrote it before."""
        if not isinstance(fields, dict) or "trajectory" not in fields:
            return fields
        record = dict(fields)
        trajectory = record.pop("trajectory")
        if trajectory is None:
            return record
        metadata = dict(trajectory.get("metadata") or {})
        calls = metadata.pop("calls", None)
        record |= {"reward": trajectory["reward"], "trained_calls": calls}
        record |= {"episode": trajectory["episode"]} if calls is None else {}
        record |= {"shaped_rewards": trajectory.get("shaped_rewards")}
        return record | {"metadata": {k: v for k, v in metadata.items() if k not in _OF_RECORD}}

    @property
    def is_trained(self) -> bool:
        """Whether anything of it can be trained."""
        return self.trained_calls is not None or self.episode is not None

    @property
    def num_trained_calls(self) -> int:
        if self.trained_calls is not None:
            return len(self.trained_calls)
        return sum("call" in (item.metadata or {}) for item in self.episode or ())

    def trajectory(self, read_episode: EpisodeSource | None = None) -> Trajectory:
        """What is trained of it; `read_episode` makes its text from recorded calls, if asked."""
        return Trajectory.referring(
            read_episode if self.episode is None else lambda: self.episode or [],
            reward=self.reward,
            shaped_rewards=self.shaped_rewards,
            metadata={
                "id": self.example,
                "run_id": self.rollout.rpartition(":")[0],
                "epoch": self.epoch,
                "round": self.round,
                "generation": self.generation,
                "rollout": self.rollout,
                "calls": self.trained_calls,
                **self.metadata,
            },
        )


_OF_RECORD = ("id", "run_id", "epoch", "round", "generation", "rollout")
"""What a trajectory's metadata takes from the fields of its record."""


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
    """The record of a rollout that ended; a failed one has no reward."""
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


def event_fields(record: RolloutRecord) -> dict[str, Any]:
    """The fields of the rollout's event."""
    failure = record.failure
    return {
        **record.model_dump(
            include={"split", "epoch", "round", "example", "generation", "rollout", "reward"}
            | {"seconds", "calls", "tokens"}
        ),
        "failure_kind": failure and failure.kind,
        "failure_reason": failure and failure.reason,
    }


async def run_recorded(
    run: Callable[[str], Awaitable[RolloutRecord]], run_id: str, *, retries: int, **place: Any
) -> RolloutRecord:
    """Run a rollout, again where its environment failed it; each try has an id of its own.

    `place`: what `rollout_id` needs besides the run and the retry.
    """
    record = await run(rollout_id(run_id, **place))
    for retry in range(1, retries + 1):
        if not _is_retried(record):
            break
        record = await run(rollout_id(run_id, **place, retry=retry))
    return record


def _is_retried(record: RolloutRecord) -> bool:
    """Whether its environment failed it; running the agent again does not fix an evaluator."""
    failure = record.failure
    return (
        failure is not None and failure.kind == "infrastructure" and failure.reason != "evaluator"
    )


def reward_or_substitute(record: RolloutRecord, config: "FinetuneConfig") -> float | None:
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
        named = {"kind": failed.kind, "reason": failed.reason}
        return FailureRecord.model_validate(named | plain(failed.failure.model_dump()))
    if reward_name is None:
        return None
    score = result.scores.get(reward_name)
    if score is not None and score.value is not None:
        return None
    fields: dict[str, JsonValue] = (
        plain(score.failure.model_dump())
        if score is not None and score.failure is not None
        else {"type": "NoScore", "message": f"evaluator {reward_name!r} gave no score"}
    )
    return FailureRecord.model_validate({"kind": "infrastructure", "reason": "evaluator", **fields})


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


# ---- groups of records ---------------------------------------------------------------------------


def group_by_example(
    records: Sequence[RolloutRecord],
    examples: Sequence[str],
    smallest: int,
    sources: Mapping[str, EpisodeSource],
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """One group per example, in their order; and what is left out, by reason.

    Args:
        records: the rollouts of a round.
        examples: ids of its examples.
        smallest: groups of fewer trajectories are left out.
        sources: by rollout id, what makes the text of its trajectory.
    """
    dropped = Counter[str]()
    by_example: dict[str, list[RolloutRecord]] = {example: [] for example in examples}
    for record in records:
        if record.is_trained:
            by_example[record.example].append(record)
        elif record.failure is not None:
            dropped[f"{record.failure.kind}/{record.failure.reason}"] += 1
        elif record.reward is None:
            dropped["no_reward"] += 1
    for group in by_example.values():
        if len(group) < smallest:
            dropped["small_group"] += len(group)
    large = [group for group in by_example.values() if len(group) >= max(smallest, 1)]
    shaped = any(record.shaped_rewards is not None for group in large for record in group)
    groups = [
        [_with_values(record, sources.get(record.rollout), shaped) for record in group]
        for group in large
    ]
    return groups, +dropped


def _with_values(
    record: RolloutRecord, read_episode: EpisodeSource | None, shaped: bool
) -> Trajectory:
    """Where other rollouts noted values, one that noted none earned 0 at each of its calls."""
    trajectory = record.trajectory(read_episode)
    if shaped and trajectory.shaped_rewards is None:
        trajectory.shaped_rewards = [0.0] * record.num_trained_calls
    return trajectory


# ---- numbers of a round -------------------------------------------------------------------------


def round_metrics(
    collected: TrajectoryCollection, chosen: TrajectoryCollection, percentile: float
) -> dict[str, Any]:
    """Means over trajectories; None where there is none."""
    return {
        **_rewards(collected, ""),
        "num_trajectories": collected.count,
        "num_groups": len(collected.trajectories),
        "filtered_trajectories": chosen.count,
        "filtered_groups": len(chosen.trajectories),
        **_rewards(chosen, "filtered_"),
        "curriculum_percentile": percentile,
    }


def _rewards(collection: TrajectoryCollection, prefix: str) -> dict[str, float | None]:
    rewards = [trajectory.reward for group in collection.trajectories for trajectory in group]
    return {
        f"{prefix}avg_reward": fmean(rewards) if rewards else None,
        f"{prefix}min_reward": min(rewards, default=None),
        f"{prefix}max_reward": max(rewards, default=None),
    }


def check_failures(records: Sequence[RolloutRecord], *, where: str, allowed: float) -> None:
    """Refuse to go on from rollouts of which too many failed by no fault of the model."""
    failed = [r for r in records if r.failure and r.failure.kind == "infrastructure"]
    if len(failed) <= allowed * len(records):
        return
    raise RolloutError(
        f"{where}: {len(failed)} of {len(records)} rollouts failed by no fault of the model "
        f"({reasons(failed)}), and finetuning.max_infrastructure_failures allows "
        f"{allowed:.0%}. Fix what failed and run the same command again: rollouts that ended well "
        f"are kept. Where the code had to change, add --fresh.\n{_last(failed)}"
    )


def policy_warning(records: Sequence[RolloutRecord], *, where: str) -> str | None:
    """What to say where many rollouts failed by the model's own doing and are dropped."""
    failed = [r for r in records if r.failure and r.failure.kind == "policy" and r.reward is None]
    if len(failed) <= POLICY_FAILURES_WARNED * len(records):
        return None
    return (
        f"{where}: {len(failed)} of {len(records)} rollouts failed by the model's own doing "
        f"({reasons(failed)}) and were dropped. Dropping them rewards them: set "
        "finetuning.on_policy_failure: {reward: 0.0}, or whatever such a failure is worth.\n"
        f"{_last(failed)}"
    )


def reasons(failed: Sequence[RolloutRecord]) -> str:
    """How often each, the commonest first."""
    counted = Counter(r.failure.reason for r in failed if r.failure)
    return ", ".join(f"{reason}: {n}" for reason, n in counted.most_common())


def _last(failed: Sequence[RolloutRecord]) -> str:
    """What the last few said, each once."""
    messages = dict.fromkeys(
        f"  {r.failure.type}: {r.failure.message}" for r in reversed(failed) if r.failure
    )
    return "\n".join(list(messages)[:MESSAGES_SHOWN])


def none_collected(epoch: int, dropped: Mapping[str, int], targets: Sequence[str]) -> str:
    """What to say of an epoch without a single trajectory."""
    why = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "no rollout was run"
    return (
        f"No trajectories collected for epoch {epoch + 1}. Left out: {why}. Check that "
        f"finetuning.target_functions {list(targets)!r} names functions that call the trained "
        "model, and that the reward's evaluator gives a score (`hone eval` shows every one). Fix "
        "what failed and run the same command again: rollouts that gave nothing to train on are run "
        "anew, the others are kept. Where the code had to change, add --fresh."
    )
