"""A rollout as a trace of OpenTelemetry: a span for the rollout, and one for each model call.

In:   a LoggedRollout
Out:  spans with the gen_ai attributes of OpenTelemetry's semantic conventions (1.38: spans `chat`
      and `invoke_agent`, messages as JSON)

Trace and span ids are computed from the rollout's id, so a trace that is sent again replaces itself.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import hone
from hone.files.rollout_record import CallRecord
from hone.loggers.base import LoggedRollout, Message, Run

Attributes = Mapping[str, Any]
More = Callable[[LoggedRollout, CallRecord | None], Attributes]
"""Further attributes of the span of a rollout, or of one of its calls."""

PROVIDER = "hone"


def trace_id(rollout: str) -> int:
    return int.from_bytes(hashlib.sha256(rollout.encode()).digest()[:16])


def span_id(rollout: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{rollout} {name}".encode()).digest()[:8])


class Spans:
    """Makes the spans of rollouts."""

    def __init__(self, run: Run, *, service: str, content: bool, more: More) -> None:
        """`content`: whether spans hold the text of inputs, outputs and messages."""
        self._run, self._content, self._more = run, content, more
        self._resource = Resource.create(
            {"service.name": service, "hone.run": run.id, "hone.project": run.project}
        )
        self._scope = InstrumentationScope("hone", hone.__version__)

    def of(self, rollout: LoggedRollout) -> Iterator[ReadableSpan]:
        """The spans of a rollout; the rollout's own is the last."""
        root = self._context(rollout.rollout, "rollout")
        for index, (call, messages, reply) in enumerate(rollout.conversations()):
            yield ReadableSpan(
                name=f"chat {call.model}",
                context=self._context(rollout.rollout, f"call {index}"),
                parent=root,
                resource=self._resource,
                instrumentation_scope=self._scope,
                kind=SpanKind.CLIENT,
                attributes=_plain(
                    _of_call(call)
                    | (_messages(messages, reply) if self._content else {})
                    | dict(self._more(rollout, call))
                ),
                status=_status(call.error),
                start_time=_nanoseconds(call.at),
                end_time=_nanoseconds(call.at + call.seconds),
            )
        yield ReadableSpan(
            name=f"invoke_agent {self._run.name}".strip(),
            context=root,
            resource=self._resource,
            instrumentation_scope=self._scope,
            kind=SpanKind.INTERNAL,
            attributes=_plain(
                self._of_rollout(rollout)
                | (_texts(rollout) if self._content else {})
                | dict(self._more(rollout, None))
            ),
            status=_status(rollout.failure_text or None),
            start_time=_nanoseconds(rollout.ended_at - rollout.seconds),
            end_time=_nanoseconds(rollout.ended_at),
        )

    def _of_rollout(self, rollout: LoggedRollout) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": self._run.name or None,
            "gen_ai.conversation.id": rollout.rollout,
            "gen_ai.usage.output_tokens": rollout.tokens,
            "hone.split": rollout.split,
            "hone.epoch": rollout.epoch,
            "hone.round": rollout.round,
            "hone.example": rollout.example,
            "hone.generation": rollout.generation,
            "hone.step": rollout.step,
            "hone.reward": rollout.reward,
            "error.type": rollout.failure and rollout.failure.reason,
            **{f"hone.score.{name}": value for name, value in rollout.scores.items()},
        }

    @staticmethod
    def _context(rollout: str, name: str) -> SpanContext:
        return SpanContext(
            trace_id(rollout), span_id(rollout, name), is_remote=False, trace_flags=TraceFlags(1)
        )


def _of_call(call: CallRecord) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model,
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": call.model,
        "gen_ai.response.finish_reasons": [call.finish] if call.finish else None,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "hone.function": call.function,
        "hone.step": call.policy_step,
        "error.type": str(call.status or "error") if call.error else None,
    }


def _texts(rollout: LoggedRollout) -> dict[str, Any]:
    return {
        "gen_ai.input.messages": json.dumps([_parts("user", rollout.input)]),
        "gen_ai.output.messages": json.dumps([_parts("assistant", rollout.output)]),
    }


def _messages(messages: list[Message], reply: Message | None) -> dict[str, Any]:
    return {
        "gen_ai.input.messages": json.dumps([_message(one) for one in messages]),
        "gen_ai.output.messages": json.dumps([] if reply is None else [_message(reply)]),
    }


def _message(message: Message) -> dict[str, Any]:
    """A chat message in the form of the conventions: a role and typed parts."""
    role, content = message.get("role", "assistant"), message.get("content")
    if role == "tool":
        response = {"type": "tool_call_response", "id": message.get("tool_call_id")}
        return {"role": "tool", "parts": [response | {"response": content}]}
    parts = [] if content in (None, "", []) else _parts(role, content)["parts"]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        part = {"type": "tool_call", "id": call.get("id"), "name": function.get("name")}
        parts.append(part | {"arguments": function.get("arguments")})
    return {"role": role, "parts": parts}


def _parts(role: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _plain(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _status(error: str | None) -> Status:
    return Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error)


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
