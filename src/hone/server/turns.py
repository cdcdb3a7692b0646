"""Count how the prompts of a job were made: which continue sampled ids, which branch off, and why.

In:   recorded calls, and which of them are trained
Out:  metrics of the job, `turns/...`

A turn is one request; its n choices share one prompt and count once. A turn that continues an answer
which an earlier turn has continued already is `forked`: both share the ids up to that answer.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from hone.types import RecordedCall


def count_turns(calls: Sequence[RecordedCall], trained: Collection[str]) -> Counter[str]:
    """Metrics of the calls whose ids are in `trained`, in the order of their requests."""
    by_id = {call.id: call for call in calls}
    continued: set[str] = set()
    requests: set[tuple[str, int]] = set()
    counts: Counter[str] = Counter()
    for call in calls:
        counts["turns/malformed"] += call.id in trained and bool(call.malformed)
        request = (call.rollout, call.index) if call.rollout else (call.id, 0)
        if call.id not in trained or request in requests:
            continue
        requests.add(request)
        outcome = f"turns/{call.outcome}"
        reasons = [reason.replace(" ", "_") for reason in call.reasons]
        if call.continues is not None:
            if call.continues in continued:
                reasons.append("forked")
            continued.add(call.continues)
            if (source := by_id.get(call.continues)) is not None:
                tokens = len(source.call.prompt_ids) + len(source.call.completion_ids)
                counts["turns/continued_tokens"] += tokens
        counts.update([outcome, *(f"{outcome}/{reason}" for reason in reasons)])
        counts["turns/prompt_tokens"] += len(call.call.prompt_ids)
        started = call.outcome in ("re-rendered", "branched") or "forked" in reasons
        counts["turns/branches"] += started
    return counts
