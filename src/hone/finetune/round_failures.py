"""Say what the failures of a round mean: errors that end the run, and warnings.

In:   the records of a round's rollouts, or of a validation's
Out:  the text of an error or a warning, with the last exceptions; None if there is nothing to say

Failures of the infrastructure end the run above a share. Failures of the model are trained on, so
they only warn. Only if one exception at one line ends most of a round is it a bug of the agent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from hone.files.place import is_line
from hone.files.rollout_record import EVALUATOR, RolloutRecord

POLICY_FAILURES_WARNED = 0.05
"""Share of policy failures above which there is a warning."""
FAILURES_AT_ONE_LINE = 4
"""Fewest rollouts that must fail at one line: two or three may be chance, since a policy that fails in
40% of its rollouts fails in both of two in one round of six. A round with fewer rollouts is judged
together with those of its epoch before it."""
CRASHES = frozenset({"agent_error", "exit_status", EVALUATOR})
"""Reasons of failures by any exception of the agent or of the evaluator. Other reasons say what was
wrong with an answer, such as that it could not be parsed or was too long."""
MENDED = frozenset(
    {"JSONDecodeError", "ValidationError", "LengthFinishReasonError", "PolicyFailure"}
)
"""Exceptions that say what was wrong with an answer, also if the evaluator raises them."""
MESSAGES_SHOWN = 3


def infrastructure_error(
    records: Sequence[RolloutRecord], *, where: str, allowed: float
) -> str | None:
    """The error for too many infrastructure failures; None if there are few."""
    failed = [r for r in records if r.failure_kind == "infrastructure"]
    if len(failed) <= allowed * len(records):
        return None
    broken = ""
    if any(r.failure.reason == EVALUATOR for r in failed if r.failure):
        broken = (
            " The evaluator counts as broken while it has scored no output, or if it is a service."
        )
    return (
        f"{where}: {len(failed)} of {len(records)} rollouts failed because of the infrastructure "
        f"({reasons(failed)}), and finetuning.max_infrastructure_failures allows "
        f"{allowed:.0%}.{broken} Fix what failed and run the same command again: rollouts that ended well "
        f"are kept. If the code had to change, add --fresh.\n{_last(failed)}"
    )


def failed_at_one_line(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Policy failures by one exception at one line, if more than half of the round is; else none."""
    places: dict[tuple[str, str], list[RolloutRecord]] = {}
    for record in records:
        failure = record.failure
        if failure and failure.kind == "policy" and is_line(failure.place):
            places.setdefault((failure.type, failure.place), []).append(record)
    most = max(places.values(), key=len, default=[])
    enough = len(most) >= FAILURES_AT_ONE_LINE and 2 * len(most) > len(records)
    return most if enough else []


def crashed_at_one_line(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """As `failed_at_one_line`, for exceptions that point to a bug; training can correct the others."""
    failed = failed_at_one_line(records)
    kinds = {(r.failure.reason, r.failure.type) for r in failed if r.failure}
    mended = any(reason not in CRASHES or type in MENDED for reason, type in kinds)
    return [] if mended else failed


def crash_error(records: Sequence[RolloutRecord], *, where: str) -> str | None:
    """The error for a round of which more than half crashed at one line; None for other rounds."""
    crash = _crash(records, where)
    return crash and (
        f"{crash}\n"
        "That is a bug there, not a mistake that training can correct. Fix it and run the same command "
        "again: those of this round are run again, the others are kept. If the code had to change, add "
        "--fresh. If the model's answers are the cause, raise hone.errors.PolicyFailure there: such "
        "rollouts are trained on."
    )


def crash_warning(records: Sequence[RolloutRecord], *, where: str) -> str | None:
    """The same for a validation, which counts them as failures of the model."""
    crash = _crash(records, where)
    return crash and (
        f"{crash}\n"
        "They count as failures of the model. If that line has a bug, fix it and start a new run with "
        "--fresh."
    )


def _crash(records: Sequence[RolloutRecord], where: str) -> str | None:
    failed = crashed_at_one_line(records)
    if not failed or failed[-1].failure is None:
        return None
    failure = failed[-1].failure
    return (
        f"{where}: {len(failed)} of {len(records)} rollouts failed with the same exception at the "
        f"same line, {failure.place}: {failure.type}: {failure.message}"
    )


def policy_warning(
    records: Sequence[RolloutRecord], *, where: str, dropped: bool = False
) -> str | None:
    """The warning about many policy failures; None if there are few, or if they have a reward.

    `dropped`: they are not trained on.
    """
    by_policy = [r for r in records if r.failure_kind == "policy"]
    failed = [r for r in by_policy if r.reward is None]
    at_one_line = failed_at_one_line(records)
    if len(failed) <= POLICY_FAILURES_WARNED * len(records) and not at_one_line:
        return None
    instead = ""
    if dropped:
        instead = (
            " They were dropped, and dropping them rewards failing: without "
            "finetuning.on_policy_failure: drop they are trained on with the lowest reward."
        )
    elif failed:
        instead = " They count with the run's lowest reward, which is 0 at most."
    place = ""
    if at_one_line and (failure := at_one_line[-1].failure):
        place = f" {len(at_one_line)} of them failed with {failure.type} at {failure.place}."
    return (
        f"{where}: {len(by_policy)} of {len(records)} rollouts failed because of the model "
        f"({reasons(by_policy)}).{instead}{place}\n{_last(by_policy)}"
    )


def reasons(failed: Sequence[RolloutRecord]) -> str:
    """Reasons with their counts, the most frequent first."""
    counted = Counter(r.failure.reason for r in failed if r.failure)
    return ", ".join(f"{reason}: {n}" for reason, n in counted.most_common())


def _last(failed: Sequence[RolloutRecord]) -> str:
    """The last few error messages with their lines, each once."""
    messages = dict.fromkeys(
        f"  {f.type}: {f.message}" + (f" ({f.place})" if is_line(f.place) else "")
        for r in reversed(failed)
        if (f := r.failure)
    )
    return "\n".join(list(messages)[:MESSAGES_SHOWN])


def none_collected(
    epoch: int,
    dropped: Mapping[str, int],
    targets: Sequence[str],
    records: Sequence[RolloutRecord] = (),
) -> str:
    """The error for an epoch without trajectories, with the first cause among its records."""
    why = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "no rollout was run"
    first = next((r.failure for r in records if r.failure and r.failure.type), None)
    if first is not None:
        at = f" ({first.place})" if first.place else ""
        message = first.message.strip().rstrip(".")
        cause = f"The first failure: {first.type}: {message}{at}."
    else:
        cause = (
            f"Check that finetuning.target_functions {list(targets)!r} names functions that call the "
            "trained model, and that the reward's evaluator gives a score (`hone eval` shows every "
            "one)."
        )
    return (
        f"No trajectories collected for epoch {epoch + 1}. Left out: {why}. {cause} Fix "
        "what failed and run the same command again: rollouts that gave nothing to train on are run "
        "again, the others are kept. If the code had to change, add --fresh."
    )
