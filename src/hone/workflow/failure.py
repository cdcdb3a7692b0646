"""Why a rollout failed: whose doing it was, in one word.

In:   what the agent raised, or that its time ran out; the calls it had made
Out:  RolloutFailure

Failures of the policy are the model's own doing and may be given a reward; to drop them would be
to reward them. Everything else is infrastructure: it says nothing of the policy, may be tried
again, and is never scored. Where it cannot be told, it is infrastructure: a rollout too few costs
less than one that trains the model for a cable that was cut. So what an agent raises is its own
failure, unless it plainly could not read an answer; that answers were cut before is said beside it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from hone.capture.base import SeenCall
from hone.errors import PolicyFailure
from hone.trajectory import failure_of
from hone.types import Failure

Kind = Literal["infrastructure", "policy"]

_LATER = frozenset({408, 409, 429})
"""Statuses below 500 that are the server's state and not the request's fault."""


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """Why a rollout has no output."""

    kind: Kind
    reason: str
    """One word, to count by. Infrastructure: connection, server_error, timeout, agent_error.
    Policy: token_limit, unparseable, timeout, or what a PolicyFailure says."""
    failure: Failure


def raised(error: BaseException, calls: Sequence[SeenCall]) -> RolloutFailure:
    """What the agent raised, after these calls."""
    kinds = [_kind(leaf, calls) for leaf in _leaves(error)]
    # Of several at once the policy is blamed only if nothing else went wrong.
    kind, reason = next((k for k in kinds if k[0] == "infrastructure"), kinds[0])
    failure = failure_of(error)
    more = {"connection": _unreached(error), "agent_error": _cut(calls)}.get(reason, "")
    failure = failure.model_copy(update={"message": failure.message + more})
    return RolloutFailure(kind, reason, failure)


def _cut(calls: Sequence[SeenCall]) -> str:
    """How many answers ended at their token limit: what the agent made of them may be why."""
    answers = [call for call in calls if call.choices]
    cut = sum(call.finish == "length" for call in answers)
    if not cut:
        return ""
    return (
        f" (answers cut at the token limit before it: {cut} of {len(answers)}; an agent that cannot "
        "go on with such an answer raises hone.errors.PolicyFailure)"
    )


def _unreached(error: BaseException) -> str:
    """Where openai found nobody, and why: its own message is 'Connection error.'"""
    for cause in _causes(error):
        if _is(cause, "openai", "APIConnectionError"):
            request, why = getattr(cause, "request", None), cause.__cause__
            return (
                f" {getattr(request, 'url', 'the endpoint')} cannot be reached: {why or 'unknown'}"
            )
    return ""


def timed_out(after_s: float, place: str, calls: Sequence[SeenCall]) -> RolloutFailure:
    """Its time ran out while it was at `place`."""
    kind: Kind = "policy" if any(call.choices for call in calls) else "infrastructure"
    answered = sum(bool(call.choices) for call in calls)
    message = (
        f"the rollout did not end within {after_s:g} s; it had sent {len(calls)} calls, of which "
        f"{answered} were answered"
    )
    failure = Failure(type="TimeoutError", message=message, traceback=place)
    return RolloutFailure(kind, "timeout", failure)


def _kind(error: BaseException, calls: Sequence[SeenCall]) -> tuple[Kind, str]:
    if isinstance(error, PolicyFailure):
        return "policy", error.reason
    answers = [call for call in calls if call.choices]
    for cause in _causes(error):
        if _is(cause, "openai", "APIStatusError") and getattr(cause, "code", None) == (
            "context_length_exceeded"
        ):
            # With answers before it, the conversation grew too long; without, the input was.
            return ("policy", "token_limit") if answers else ("infrastructure", "agent_error")
        reason = _of_the_world(cause)
        if reason is not None:
            return "infrastructure", reason
    if answers and (_is_unread(error) or _is_unread(error.__cause__)):
        return "policy", "token_limit" if answers[-1].finish == "length" else "unparseable"
    return "infrastructure", "agent_error"


def _is_unread(error: BaseException | None) -> bool:
    """Whether it says that text could not be read."""
    if error is None:
        return False
    unparseable = isinstance(error, (json.JSONDecodeError, ValidationError))
    return unparseable or _is(error, "openai", "LengthFinishReasonError")


def _of_the_world(error: BaseException) -> str | None:
    """What went wrong outside the agent, in one word; None if nothing did."""
    status = None
    if _is(error, "openai", "APIStatusError"):
        status = getattr(error, "status_code", None)
    elif any(_is(error, library, "HTTPStatusError") for library in ("httpx", "httpx2")):
        status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return "server_error" if status >= 500 or status in _LATER else "agent_error"
    for library, late, lost in (
        ("openai", "APITimeoutError", "APIConnectionError"),
        ("httpx", "TimeoutException", "TransportError"),
        ("httpx2", "TimeoutException", "TransportError"),
        ("builtins", "TimeoutError", "ConnectionError"),
    ):
        if _is(error, library, late):
            return "timeout"
        if _is(error, library, lost):
            return "connection"
    return None


def _is(error: BaseException, library: str, name: str) -> bool:
    """Whether it is of that class; a library that is not loaded has raised nothing."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and isinstance(error, kind)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from or while handling, innermost last."""
    for _ in range(50):  # a chain may be a circle
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group, however deep; one that is no group is its own."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
