"""The same example before and after: input, answers, rewards.

In:   two files of rollouts (trajectories/*.jsonl), of the first and the last policy
Out:  a few Examples: the most improved, and what got worse, still fails or could not be scored

Showing only successes would be misleading, so examples that got worse are always included. A line
that cannot be read is skipped: examples only illustrate; the numbers come from the events.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = {"improved": 3, "got worse": 2, "still failing": 1, "could not be scored": 1}
"""Number of examples shown of each kind."""
LONGEST = 700
"""Number of characters of a text that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """What the agent answered, or why the rollout failed."""
    reward: float | None
    """None if it could not be scored."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example under two policies."""

    id: str
    kind: str
    input: str
    before: Answer
    after: Answer


def pick(before: Path, after: Path, *, failure_reward: float | None = None) -> list[Example]:
    """Up to seven examples; none if the files do not exist.

    `failure_reward`: reward of a policy failure without a configured reward.
    """
    first, last = _records(before), _records(after)
    both = [_example(first[id], last[id], failure_reward) for id in first if id in last]
    both.sort(key=lambda e: abs((e.after.reward or 0) - (e.before.reward or 0)), reverse=True)
    chosen = [e for kind, n in MOST.items() for e in [e for e in both if e.kind == kind][:n]]
    return chosen or both[:1]


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


def _example(first: dict[str, Any], last: dict[str, Any], failure_reward: float | None) -> Example:
    before, after = _answer(first, failure_reward), _answer(last, failure_reward)
    if before.reward is None or after.reward is None:
        kind = "could not be scored"
    elif before.reward != after.reward:
        kind = "improved" if after.reward > before.reward else "got worse"
    else:  # whether an unchanged reward is bad is known only for rewards between 0 and 1
        kind = "still failing" if after.reward <= 0 else "unchanged"
    return Example(str(first["example"]), kind, shown(first.get("input")), before, after)


def _answer(record: dict[str, Any], failure_reward: float | None) -> Answer:
    reward, failure, output = record.get("reward"), record.get("failure"), record.get("output")
    if failure:
        if reward is None and failure.get("kind") == "policy":
            reward = failure_reward
        why = ": ".join(str(failure[k]) for k in ("kind", "reason", "message") if failure.get(k))
        return Answer(f"failed ({why})", reward)
    if output in (None, ""):  # a workflow that returns nothing: the model's last message
        replies = [m for m in record.get("messages") or [] if m.get("role") == "assistant"]
        output = (replies[-1].get("content") or replies[-1].get("tool_calls")) if replies else None
    return Answer(shown(output), reward)


def shown(value: Any) -> str:
    """A value as text, cut to a readable length."""
    if value is None:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.strip() or "(empty)"
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST].rstrip()} ... ({len(text) - LONGEST:,} characters more)"
