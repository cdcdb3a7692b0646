"""The same example before and after: input, answers, rewards.

In:   two files of rollouts (trajectories/*.jsonl), of the first and the last policy
Out:  a few Examples: the most improved, typical ones, and what got worse, still fails or could not be
      scored

Showing only successes would be misleading, so examples that got worse are always included, and
typical ones: those at a quarter, a half and three quarters of the examples, in the order of their
change. A line that cannot be read is skipped: examples only illustrate; the numbers come from the
events.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MOST = {"improved": 2, "got worse": 2, "still failing": 1, "could not be scored": 1}
"""Number of examples shown of each kind, besides the typical ones."""
QUARTILES = (0.25, 0.5, 0.75)
"""Places of the typical examples."""
LONGEST = 700
"""Number of characters of a text that are shown."""


@dataclass(frozen=True, slots=True)
class ReportedRollout:
    """What a report shows of a rollout."""

    input: str
    text: str
    """What the agent answered; the last message of the model if the agent returned nothing."""
    reward: float | None
    """None if it could not be scored."""
    failure: str | None = None
    """`kind: reason: message`; None on success."""
    kind: str | None = None
    """`policy` or `infrastructure`; None on success."""

    @property
    def answered(self) -> bool:
        """Whether it ended well; an empty answer is an answer."""
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """What the agent answered, or of a failed rollout the last message of the model."""
    reward: float | None
    """None if it could not be scored."""
    failure: str | None = None
    """Why the rollout failed."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example under two policies."""

    id: str
    kind: str
    input: str
    before: Answer
    after: Answer
    typical: bool = False
    """Whether it was chosen by its place in the order of the changes."""

    @property
    def change(self) -> float | None:
        before, after = self.before.reward, self.after.reward
        return None if before is None or after is None else after - before


def read_rollouts(path: Path) -> dict[str, ReportedRollout]:
    """The first rollout of each example; none if the file does not exist."""
    return {id: _rollout(record) for id, record in _records(path).items()}


def pick(
    before: Mapping[str, ReportedRollout],
    after: Mapping[str, ReportedRollout],
    *,
    failure_reward: float | None = None,
) -> list[Example]:
    """Up to nine examples.

    `failure_reward`: reward of a policy failure without a configured reward.
    """
    both = [_example(id, before[id], after[id], failure_reward) for id in before if id in after]
    both.sort(key=lambda e: abs(e.change or 0.0), reverse=True)
    # By change, the largest first; equal ones in the order of the file.
    ranked = sorted((e for e in both if e.change is not None), key=lambda e: -(e.change or 0.0))
    places = {int(place * len(ranked)) for place in QUARTILES if len(ranked) > len(QUARTILES)}
    typical = [ranked[place].id for place in sorted(places)]
    chosen = {kind: [e for e in both if e.kind == kind][:n] for kind, n in MOST.items()}
    best = [e.id for e in chosen.pop("improved")]
    others = [e.id for examples in chosen.values() for e in examples]
    shown_ids = dict.fromkeys([*best, *typical, *others])
    by_id = {e.id: replace(e, typical=e.id in typical) for e in both}
    return [by_id[id] for id in shown_ids] or both[:1]


def request(folder: Path) -> dict[str, Any] | None:
    """The shortest first request of an agent; None if none was recorded."""
    for file in (*sorted(folder.glob("validation_*.jsonl")), *sorted(folder.glob("epoch_*.jsonl"))):
        bodies = [r["request"] for r in _records(file).values() if r.get("request")]
        if bodies:
            return min(bodies, key=lambda body: len(json.dumps(body)))
    return None


def _records(path: Path) -> dict[str, dict[str, Any]]:
    """The first generation of each example, in file order; a later line replaces an earlier one."""
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with suppress(ValueError, AttributeError, KeyError):
            record = json.loads(line)
            if record.get("generation") == 0:
                records[record["example"]] = record
    return records


def _rollout(record: dict[str, Any]) -> ReportedRollout:
    failure = record.get("failure") or {}
    parts = (str(failure[key]) for key in ("kind", "reason", "message") if failure.get(key))
    return ReportedRollout(
        input=_text(record.get("input")),
        text=_text(record.get("output")) or _last_message(record.get("messages") or []),
        reward=record.get("reward"),
        failure=": ".join(parts) if failure else None,
        kind=failure.get("kind"),
    )


def _last_message(messages: list[dict[str, Any]]) -> str:
    """The last message of the model: its text, and its tool calls as JSON."""
    replies = [message for message in messages if message.get("role") == "assistant"]
    if not replies:
        return ""
    parts = (_text(replies[-1].get(key) or None) for key in ("content", "tool_calls"))
    return "\n".join(filter(None, parts))


def _example(
    id: str, first: ReportedRollout, last: ReportedRollout, failure_reward: float | None
) -> Example:
    before, after = _answer(first, failure_reward), _answer(last, failure_reward)
    if before.reward is None or after.reward is None:
        kind = "could not be scored"
    elif before.reward != after.reward:
        kind = "improved" if after.reward > before.reward else "got worse"
    else:  # whether an unchanged reward is bad is known only for rewards between 0 and 1
        kind = "still failing" if after.reward <= 0 else "unchanged"
    return Example(id, kind, shown(first.input), before, after)


def _answer(rollout: ReportedRollout, failure_reward: float | None) -> Answer:
    reward = rollout.reward
    if reward is None and rollout.kind == "policy":
        reward = failure_reward
    return Answer(shown(rollout.text), reward, rollout.failure)


def _text(value: Any) -> str:
    """A value as text: JSON unless it is text; empty for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def shown(text: str) -> str:
    """A text, cut to a readable length."""
    text = text.strip() or "(nothing)"
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST].rstrip()} ... ({len(text) - LONGEST:,} characters more)"
