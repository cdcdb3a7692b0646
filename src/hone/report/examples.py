"""The same example before and after: what was asked, what was answered, what it was worth.

In:   two files of the journal (trajectories/*.jsonl), of the first and the last policy
Out:  a few Examples: the most improved, and what got worse, still fails or could not be scored

Successes alone would be an advertisement, so what got worse is always among them. A line that cannot
be read is passed over: examples illustrate, and the numbers do not come from here.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

IMPROVED, WORSE, FAILING, SAME = "improved", "got worse", "still failing", "unchanged"
UNSCORED = "could not be scored"
MOST = {IMPROVED: 3, WORSE: 2, FAILING: 1, UNSCORED: 1}
LONGEST = 700
"""Characters of a text that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One rollout's outcome."""

    text: str
    reward: float | None
    """None: it could not be scored, and the text says why."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example under two policies."""

    id: str
    kind: str
    input: str
    before: Answer
    after: Answer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pick(before: Path, after: Path, *, failure_reward: float | None = None) -> list[Example]:
    """Up to seven, the telling ones; none where the files are not there.

    `failure_reward`: what a failure of the model counts as that has no reward of its own.
    """
    first, last = _records(before), _records(after)
    for record in (*first.values(), *last.values()):
        failure = record.get("failure")
        if failure and failure.get("kind") == "policy" and record.get("reward") is None:
            record["reward"] = failure_reward
    both = [_example(first[id], last[id]) for id in first if id in last]
    chosen: list[Example] = []
    for kind, most in MOST.items():
        of_kind = [example for example in both if example.kind == kind]
        chosen += sorted(of_kind, key=_change, reverse=True)[:most]
    return chosen or both[:1]


def request(folder: Path) -> dict[str, Any] | None:
    """The shortest body that the agent sent first for an example; None where none was kept."""
    files = [*sorted(folder.glob("validation_*.jsonl")), *sorted(folder.glob("epoch_*.jsonl"))]
    for file in files:
        kept = [record["request"] for record in _records(file).values() if record.get("request")]
        if kept:
            return min(kept, key=lambda body: len(json.dumps(body)))
    return None


def _records(path: Path) -> dict[str, dict[str, Any]]:
    """The first generation of each example, in the order they were written; a later line counts."""
    found: dict[str, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("generation") == 0 and "example" in record:
            found[record["example"]] = record
    return found


def _example(first: dict[str, Any], last: dict[str, Any]) -> Example:
    before, after = _answer(first), _answer(last)
    return Example(
        id=str(first["example"]),
        kind=_kind(before.reward, after.reward),
        input=shown(first.get("input")),
        before=before,
        after=after,
    )


def _kind(before: float | None, after: float | None) -> str:
    if before is None or after is None:  # which says nothing about the model getting better
        return UNSCORED
    if after > before:
        return IMPROVED
    if after < before:
        return WORSE
    # Whether a reward that stayed is a bad one is known only for the usual scale.
    return FAILING if after <= 0 else SAME


def _change(example: Example) -> float:
    before, after = example.before.reward, example.after.reward
    if before is None or after is None:
        return 0.0
    return abs(after - before)


def _answer(record: dict[str, Any]) -> Answer:
    failure = record.get("failure")
    if failure:
        why = ": ".join(str(failure[k]) for k in ("kind", "reason", "message") if failure.get(k))
        return Answer(f"failed ({why})", record.get("reward"))
    output = record.get("output")
    return Answer(shown(_last_reply(record) if output in (None, "") else output), record["reward"])


def _last_reply(record: dict[str, Any]) -> Any:
    """What the model said last, for a workflow that returns nothing."""
    replies = [m for m in record.get("messages") or [] if m.get("role") == "assistant"]
    if not replies:
        return None
    return replies[-1].get("content") or replies[-1].get("tool_calls")


def shown(value: Any) -> str:
    """A value as text, cut to a length one can read."""
    if value is None:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.strip() or "(empty)"
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST].rstrip()} ... ({len(text) - LONGEST:,} characters more)"
