"""Why a rollout failed: because of policy or infrastructure, and a reason to count by.

In:   the exception that the agent raised, or its timeout; the calls it had made
Out:  RolloutFailure

A failure of the policy is caused by the model and may be given a reward; dropping it would reward
it. Every other failure is infrastructure: it says nothing about the policy, may be retried, and is
never scored. A failure of unclear cause counts as infrastructure: a missing rollout costs less than
one that trains the model on a network fault. So an exception of the agent is its own failure,
unless it clearly could not read an answer; the message says how many answers had been truncated.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from hone.capture.base import SeenCall
from hone.config.policy import PolicyCalls
from hone.errors import AgentFailed, AgentTimeout, PolicyFailure
from hone.place import place_in, place_waited_at
from hone.trajectory import failure_of
from hone.types import Failure

Kind = Literal["infrastructure", "policy"]

_LATER = frozenset({408, 409, 429})
"""Statuses below 500 that are caused by the server's state, not by the request."""

_TRUNCATED = {
    "agent_error": "raises hone.errors.PolicyFailure",
    "exit_status": "exits with one of policy_failure_exit_codes",
}
"""How an agent can report that a truncated answer made it fail, by the reason of its failure."""


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """Why a rollout has no output."""

    kind: Kind
    reason: str
    """One word, to count by. Infrastructure: connection, server_error, timeout, agent_error, or the
    `reason` of an AgentFailed. Policy: token_limit, unparseable, timeout, or the `reason` of a
    PolicyFailure."""
    failure: Failure


def answered_by_policy(calls: Iterable[SeenCall], policy: PolicyCalls | None) -> bool:
    """Whether the policy answered one of the calls; without a known policy, whether any model did."""
    return any(call.choices and (policy is None or policy.has(call)) for call in calls)


def raised(error: BaseException, calls: Sequence[SeenCall]) -> RolloutFailure:
    """The failure of an agent that raised this error after these calls."""
    kinds = [_kind(leaf, calls) for leaf in _leaves(error)]
    # In an exception group, the policy is the cause only if there is no other cause.
    kind, reason = next((k for k in kinds if k[0] == "infrastructure"), kinds[0])
    failure = failure_of(error)
    if isinstance(error, AgentFailed | PolicyFailure) and error.details:
        # The agent is a program or a service: its own output is more useful than our stack.
        place = place_in(error.details)
        failure = failure.model_copy(update={"traceback": error.details, "place": place})
    more = ""
    if reason == "connection":
        more = _unreached(error)
    elif kind == "infrastructure" and reason in _TRUNCATED:
        more = _truncated(calls, _TRUNCATED[reason])
    failure = failure.model_copy(update={"message": failure.message + more})
    return RolloutFailure(kind, reason, failure)


def _truncated(calls: Sequence[SeenCall], remedy: str) -> str:
    """How many answers ended at their token limit, which may be why the agent failed."""
    answers = [call for call in calls if call.choices]
    truncated = sum(call.finish == "length" for call in answers)
    if not truncated:
        return ""
    return (
        f" (answers cut at the token limit before it: {truncated} of {len(answers)}; an agent that "
        f"cannot continue with such an answer {remedy})"
    )


def _unreached(error: BaseException) -> str:
    """The address that a client could not reach, and why: its message is 'Connection error.'"""
    for cause in _causes(error):
        if any(_is(cause, library, "APIConnectionError") for library in ("openai", "anthropic")):
            request, why = getattr(cause, "request", None), cause.__cause__
            return (
                f" {getattr(request, 'url', 'the endpoint')} cannot be reached: {why or 'unknown'}"
            )
    return ""


def timed_out(
    after_s: float, place: str, calls: Sequence[SeenCall], extension: str = ""
) -> RolloutFailure:
    """The failure of an agent that had not ended after `after_s`; `place` is where it waited.

    `extension` says how much longer its time was because the server held its calls.
    """
    kind: Kind = "policy" if any(call.choices for call in calls) else "infrastructure"
    answered = sum(bool(call.choices) for call in calls)
    message = (
        f"the rollout did not end within {after_s:g} s{extension}; it had sent {len(calls)} calls, "
        f"of which {answered} were answered"
    )
    failure = Failure(
        type="TimeoutError", message=message, traceback=place, place=place_waited_at(place)
    )
    return RolloutFailure(kind, "timeout", failure)


def _kind(error: BaseException, calls: Sequence[SeenCall]) -> tuple[Kind, str]:
    if isinstance(error, PolicyFailure):
        return "policy", error.reason
    answers = [call for call in calls if call.choices]
    if isinstance(error, AgentFailed):
        is_policy = isinstance(error, AgentTimeout) and answers
        return "policy" if is_policy else "infrastructure", error.reason
    reason: str | None = None
    for cause in _causes(error):
        # A wrapper may lack the code of the original refusal (LiteLLM's does); other failures come
        # first.
        if reason in (None, "agent_error") and _code(cause) == "context_length_exceeded":
            # After answers, the conversation grew too long; without any, the input was too long.
            return ("policy", "token_limit") if answers else ("infrastructure", "agent_error")
        reason = reason or _outside_reason(cause)
    if reason is not None:
        return "infrastructure", reason
    if answers and (_is_unparseable(error) or _is_unparseable(error.__cause__)):
        return "policy", "token_limit" if answers[-1].finish == "length" else "unparseable"
    return "infrastructure", "agent_error"


def _is_unparseable(error: BaseException | None) -> bool:
    """Whether the error says that text could not be parsed."""
    if error is None:
        return False
    parsing = isinstance(error, (json.JSONDecodeError, ValidationError))
    return parsing or _is(error, "openai", "LengthFinishReasonError")


def _code(error: BaseException) -> str | None:
    """The code of a refusal, if the server sent one; Anthropic's client has it only in the body."""
    if not any(_is(error, library, "APIStatusError") for library in ("openai", "anthropic")):
        return None
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, dict) else None
    return getattr(error, "code", None) or (inner.get("code") if isinstance(inner, dict) else None)


def _outside_reason(error: BaseException) -> str | None:
    """The reason, if the error came from outside the agent: a server or the network; else None."""
    status = None
    if any(_is(error, library, "APIStatusError") for library in ("openai", "anthropic")):
        status = getattr(error, "status_code", None)
    elif any(_is(error, library, "HTTPStatusError") for library in ("httpx", "httpx2")):
        status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return "server_error" if status >= 500 or status in _LATER else "agent_error"
    for library, late, lost in (
        ("openai", "APITimeoutError", "APIConnectionError"),
        ("anthropic", "APITimeoutError", "APIConnectionError"),
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
    """Whether it is of that class; a library that is not loaded raised nothing."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and isinstance(error, kind)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    for _ in range(50):  # a chain may be circular
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors of an exception group, including nested groups; any other error by itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
