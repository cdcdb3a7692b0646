"""The same example before and after: input, answers, rewards.

In:   two files of rollouts (trajectories/*.jsonl), of the first and the last policy
Out:  a few Examples: the most improved, and what got worse, still fails or could not be scored

Successes alone would be an advertisement, so what got worse is always among them. A line that cannot
be read is skipped: examples illustrate, and the numbers do not come from here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPROVED, WORSE, FAILING, SAME = "improved", "got worse", "still failing", "unchanged"
UNSCORED = "could not be scored"
MOST = {IMPROVED: 3, WORSE: 2, FAILING: 1, UNSCORED: 1}
LONGEST = 700
"""Characters of a text that are shown."""


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

    `failure_reward`: reward of a policy failure that has none of its own.
    """
    first, last = _records(before), _records(after)
    both = [_example(first[id], last[id], failure_reward) for id in first if id in last]
    chosen: list[Example] = []
    for kind, most in MOST.items():
        of_kind = [example for example in both if example.kind == kind]
        chosen += sorted(of_kind, key=_change, reverse=True)[:most]
    return chosen or both[:1]


def request(folder: Path) -> dict[str, Any] | None:
    """The shortest first request of an agent; None if none was recorded."""
    for file in (*sorted(folder.glob("validation_*.jsonl")), *sorted(folder.glob("epoch_*.jsonl"))):
        bodies = [r["request"] for r in _records(file).values() if r.get("request")]
        if bodies:
            return min(bodies, key=lambda body: len(json.dumps(body)))
    return None


def _records(path: Path) -> dict[str, dict[str, Any]]:
    """The first generation of each example, in the order of the file; a later line counts."""
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("generation") == 0 and "example" in record:
            records[record["example"]] = record
    return records


def _example(first: dict[str, Any], last: dict[str, Any], failure_reward: float | None) -> Example:
    before, after = _answer(first, failure_reward), _answer(last, failure_reward)
    return Example(
        id=str(first["example"]),
        kind=_kind(before.reward, after.reward),
        input=shown(first.get("input")),
        before=before,
        after=after,
    )


def _kind(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return UNSCORED
    if after != before:
        return IMPROVED if after > before else WORSE
    # Whether an unchanged reward is a bad one is known only for the usual scale.
    return FAILING if after <= 0 else SAME


def _change(example: Example) -> float:
    before, after = example.before.reward, example.after.reward
    return 0.0 if before is None or after is None else abs(after - before)


def _answer(record: dict[str, Any], failure_reward: float | None) -> Answer:
    reward, failure, output = record.get("reward"), record.get("failure"), record.get("output")
    if failure:
        if reward is None and failure.get("kind") == "policy":
            reward = failure_reward
        why = ": ".join(str(failure[k]) for k in ("kind", "reason", "message") if failure.get(k))
        return Answer(f"failed ({why})", reward)
    return Answer(shown(_last_reply(record) if output in (None, "") else output), reward)


def _last_reply(record: dict[str, Any]) -> Any:
    """The model's last message, for a workflow that returns nothing."""
    messages = record.get("messages") or []
    last = next((m for m in reversed(messages) if m.get("role") == "assistant"), {})
    return last.get("content") or last.get("tool_calls")


def shown(value: Any) -> str:
    """A value as text, cut to a readable length."""
    if value is None:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.strip() or "(empty)"
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST].rstrip()} ... ({len(text) - LONGEST:,} characters more)"
