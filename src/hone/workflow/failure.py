"""Why a rollout failed: because of policy or infrastructure, and a reason to count by.

In:   the exception that the agent raised, or its timeout; the calls it had made; whether the
      trained policy had answered one of them
Out:  RolloutFailure

Once the policy has answered, a failure is the policy's: an agent that raises KeyError on some
replies fails because of these replies, and without them the others would look better than the
policy is. There are two exceptions: a cause outside (workflow/outside.py), and a last call that got
no answer. Before any answer of the policy, every failure is infrastructure: it says nothing
about the policy, may be retried, and is never scored. An agent can decide this itself: it raises
PolicyFailure or AgentFailed.
"""

import asyncio
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from hone.capture.base import SeenCall
from hone.capture.openai import LEFT, UNANSWERED
from hone.config.policy import PolicyCalls
from hone.errors import AgentCrashed, AgentFailed, PolicyFailure
from hone.files.place import chain_of, place_in, place_waited_at
from hone.files.redact import redact
from hone.files.rollout_record import FailureKind
from hone.trajectory import failure_of
from hone.types import Failure
from hone.workflow.outside import api_code, is_outside_answer, reason_of

Cause = Literal["policy", "agent", "outside"]
"""`policy`: the policy's, as the agent says. `agent`: the policy's if it has answered. `outside`: not
the policy's."""

_ANSWERS = ("unparseable", "token_limit")
"""Reasons that require an answer of the policy."""


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """Why a rollout has no output."""

    kind: FailureKind
    reason: str
    """One word, to count by. Outside: connection, server_error, timeout, resources, killed,
    not_started, model_name, infrastructure_exceptions, or the `reason` of an AgentFailed. After an answer:
    agent_error, unparseable, token_limit, timeout, exit_status, no_output, output_too_large, or the
    `reason` of a PolicyFailure."""
    failure: Failure
    cause: Cause = "outside"

    @classmethod
    def of(
        cls,
        cause: Cause,
        reason: str,
        failure: Failure,
        calls: Sequence[SeenCall],
        answered: bool | None = None,
    ) -> "RolloutFailure":
        """The failure after these calls; `answered`: by the policy; None: by any model."""
        if cause == "agent" and (missing := _missing_answer(calls, reason)) is not None:
            cause, reason = "outside", missing
        if answered is None:
            answered = answered_by_policy(calls, None)
        is_policy = cause == "policy" or (cause == "agent" and answered)
        return cls("policy" if is_policy else "infrastructure", reason, failure, cause)

    def after_answer(self) -> "RolloutFailure":
        """The same failure, now that an answer of the policy is known."""
        return replace(self, kind="policy") if self.cause == "agent" else self


def answered_by_policy(calls: Iterable[SeenCall], policy: PolicyCalls | None) -> bool:
    """Whether the policy answered one of the calls; without a known policy, whether any model did."""
    return any(call.choices and (policy is None or policy.has(call)) for call in calls)


def raised(
    error: BaseException,
    calls: Sequence[SeenCall],
    *,
    answered: bool | None = None,
    listed: Collection[str] = (),
) -> RolloutFailure:
    """The failure of an agent that raised this error after these calls.

    `answered`: by the policy; None: any answer counts. `listed` are the class names of
    `finetuning.infrastructure_exceptions`.
    """
    causes = [_cause(leaf, calls, listed) for leaf in _leaves(error)]
    # In an exception group, the agent is the cause only if nothing lies outside.
    cause, reason = next((c for c in causes if c[0] == "outside"), causes[0])
    failure = failure_of(error)
    if isinstance(error, AgentFailed | PolicyFailure) and error.details:
        # The agent is a program or a service: its own output is more useful than our stack.
        details = redact(error.details)
        place = place_in(details)
        failure = failure.model_copy(update={"traceback": details, "place": place})
    more = ""
    if reason == "connection":
        more = _unreached(error)
    elif cause == "agent" and reason not in _ANSWERS:
        more = _truncated(calls)
    failure = failure.model_copy(update={"message": failure.message + redact(more)})
    result = RolloutFailure.of(cause, reason, failure, calls, answered)
    if result.kind == "infrastructure" and result.reason in _ANSWERS:
        return replace(result, reason="agent_error")
    return result


def _truncated(calls: Sequence[SeenCall]) -> str:
    """How many answers ended at their token limit, which may be why the agent failed."""
    answers = [call for call in calls if call.choices]
    truncated = sum(call.finish == "length" for call in answers)
    if not truncated:
        return ""
    return (
        f" (answers cut at the token limit before it: {truncated} of {len(answers)}; if the agent "
        "cannot use such an answer, raise max_tokens)"
    )


def _unreached(error: BaseException) -> str:
    """The address that a client could not reach, and why: its message is 'Connection error.'"""
    for cause in chain_of(error):
        if any(_is(cause, library, "APIConnectionError") for library in ("openai", "anthropic")):
            request, why = getattr(cause, "request", None), cause.__cause__
            return (
                f" {getattr(request, 'url', 'the endpoint')} cannot be reached: {why or 'unknown'}"
            )
    return ""


def timed_out(
    after_s: float,
    place: str,
    calls: Sequence[SeenCall],
    extension: str = "",
    *,
    answered: bool | None = None,
) -> RolloutFailure:
    """The failure of an agent that had not ended after `after_s`; `place` is where it waited.

    `extension` says how much longer its time was because the server held its calls.
    """
    num_answered = sum(bool(call.choices) for call in calls)
    message = (
        f"the rollout did not end within {after_s:g} s{extension}; it had sent {len(calls)} calls, "
        f"of which {num_answered} were answered"
    )
    failure = Failure(
        type="TimeoutError", message=message, traceback=redact(place), place=place_waited_at(place)
    )
    # A call in flight does not excuse the policy: an agent that never ends is nearly always in one.
    ended = [call for call in calls if not _is_interrupted(call)]
    return RolloutFailure.of("agent", "timeout", failure, ended, answered)


# ---- one exception ------------------------------------------------------------------------------


def _cause(
    error: BaseException, calls: Sequence[SeenCall], listed: Collection[str]
) -> tuple[Cause, str]:
    chain = list(chain_of(error))
    for one in chain:
        if isinstance(one, PolicyFailure):
            return "policy", one.reason
        if (reason := reason_of(one, listed)) is not None:
            return "outside", reason
    if any(_is_too_long(one) for one in chain):
        return "agent", "token_limit"
    if isinstance(error, AgentCrashed):
        return "agent", error.reason
    if any(map(_is_unparseable, _raised_from(error))):
        last = next((call for call in reversed(calls) if call.choices), None)
        is_cut = last is not None and last.finish == "length"
        return "agent", "token_limit" if is_cut else "unparseable"
    late = any(isinstance(one, TimeoutError) for one in chain)
    return "agent", "timeout" if late else "agent_error"


def _raised_from(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was raised from; not those that were only being handled."""
    one, known = error, set[int]()
    while one is not None and id(one) not in known:
        known.add(id(one))
        yield one
        one = one.__cause__


def _is_unparseable(error: BaseException) -> bool:
    """Whether the error says that text could not be parsed."""
    parsing = isinstance(error, (json.JSONDecodeError, ValidationError))
    return parsing or _is(error, "openai", "LengthFinishReasonError")


def _is_too_long(error: BaseException) -> bool:
    """Whether the conversation exceeds the model's context; LiteLLM has a class of its own."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "ContextWindowExceededError" in names or api_code(error) == "context_length_exceeded"


def _is(error: BaseException, library: str, name: str) -> bool:
    """Whether it is of that class; a library that is not loaded raised nothing."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and isinstance(error, kind)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors of an exception group, including nested groups, then what caused the group.

    Any other error by itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    leaves = [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return leaves if cause is None else [*leaves, cause]


# ---- the last call ------------------------------------------------------------------------------


def _missing_answer(calls: Sequence[SeenCall], reason: str) -> str | None:
    """The reason if the last call got no answer; None if it got one, or a refusal as sent.

    A call that was in flight when the agent failed counts only if the failure is a timeout:
    otherwise the agent failed on another answer, and so ended its other calls.
    """
    ended = [call for call in calls if reason == "timeout" or not _is_interrupted(call)]
    last = max(ended, key=lambda call: (call.started_at, call.index), default=None)
    if last is None or last.choices:
        return None
    if last.status is not None and last.status >= 400:
        return "server_error" if is_outside_answer(last.status) else None
    return "timeout" if reason == "timeout" else "connection"


def _is_interrupted(call: SeenCall) -> bool:
    """Whether the agent's side ended a call before its answer."""
    left = (UNANSWERED, LEFT, asyncio.CancelledError.__name__)
    return not call.choices and call.error is not None and call.error.startswith(left)
