"""Messages of the Anthropic Messages API: whole, as the events of a stream, and read back.

In:   a MessagesRequest, and its answer; the body of any server's response
Out:  JSON objects; a response as a chat completion, for readers that know only those

`call_id`, `policy_step`, `prompt_token_ids` and `token_ids` are always present. In a stream, the
first three come with `message_start`, so that clients keep them in the final message, and
`token_ids` with `message_delta`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.wire.anthropic.blocks import BlockWriter, arguments_text, message_blocks
from hone.wire.anthropic.messages import (
    CHAT_NAMES,
    CountRequest,
    MessagesRequest,
    request_schema,
)
from hone.wire.errors import rename_key
from hone.wire.openai.chat import assistant_message, tool_call, usage
from hone.wire.openai.dialect import Answer, AnswerHead, Dialect, Event, Logprobs

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
_RECORDED = ("call_id", "policy_step", "token_ids", "malformed")
"""Fields of hone's responses that a choice of a chat completion has too."""


def error_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error of this API; `body` is the same in OpenAI's shape."""
    error = rename_key(body, CHAT_NAMES)["error"]
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    known = {key: error[key] for key in ("param", "code") if error.get(key)}
    wrong = {"type": kind, "message": error["message"], **known}
    return {"type": "error", "error": wrong, "request_id": body.get("request_id")}


class MessageWriter:
    """Writes one message."""

    def __init__(self, request: MessagesRequest, head: AnswerHead) -> None:
        self._request = request
        # This API's name for the template's argument.
        names = {"chat_template_kwargs.enable_thinking": "thinking"}
        ignored = [names.get(key, key) for key in head.not_applicable]
        self._head = replace(head, not_applicable=ignored)
        thinking = request.thinking
        self._hidden = thinking is not None and thinking.display == "omitted"
        self._blocks = BlockWriter(signature=head.call_id, hidden=self._hidden)
        self._started = False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        message = self._start(len(answer.token_ids))
        return message | {
            "content": message_blocks(
                answer.message, signature=answer.call_id, hidden=self._hidden
            ),
            **self._stop(answer),
            **answer.hone_fields,
        }

    def delta(
        self, index: int, deltas: Sequence[dict[str, Any]], logprobs: Logprobs | None
    ) -> list[Event]:
        events: list[Event] = []
        if not self._started:
            self._started = True
            events += [{"type": "message_start", "message": self._start(0)}, {"type": "ping"}]
        return events + [event for delta in deltas for event in self._blocks.add(delta)]

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        (answer,) = answers
        sampled = len(answer.token_ids)
        last = {
            "type": "message_delta",
            "delta": self._stop(answer),
            "usage": self._usage(sampled),
            "policy_step": self._head.policy_step,
            **answer.hone_fields,
        }
        opening = self.delta(0, (), None)
        return [*opening, *self._blocks.close(), last, {"type": "message_stop"}]

    def error(self, status: int, body: dict[str, Any]) -> list[Event]:
        return [error_body(status, body)]

    def _start(self, sampled: int) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"msg_{head.id}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(sampled),
            "call_id": head.call_id,
            **head.hone_fields,
        }

    def _stop(self, answer: Answer) -> dict[str, Any]:
        if answer.finish == "stop" and answer.stop in self._request.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        full = len(answer.token_ids) < (self._request.max_tokens or 0)
        cut = "model_context_window_exceeded" if full else "max_tokens"
        reasons = {"tool_calls": "tool_use", "length": cut}
        return {"stop_reason": reasons.get(answer.finish, "end_turn"), "stop_sequence": None}

    def _usage(self, sampled: int) -> dict[str, int]:
        return {
            "input_tokens": len(self._head.prompt_ids),
            "output_tokens": sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }


MESSAGES = Dialect(
    path="/v1/messages",
    prompt_key="messages",
    schema=request_schema(MessagesRequest),
    parse=MessagesRequest.parse,
    writer=MessageWriter,
    named_events=True,
    error_body=error_body,
)
COUNT = replace(
    MESSAGES,
    path="/v1/messages/count_tokens",
    schema=request_schema(CountRequest),
    parse=CountRequest.parse,
)
"""Requests for the number of tokens of a prompt."""


# ---- reading -----------------------------------------------------------------------------------


def chat_completion(message: dict[str, Any]) -> dict[str, Any]:
    """A message, of hone or of another server, in the shape of a chat completion."""
    blocks = [block for block in message.get("content") or () if isinstance(block, dict)]
    texts = [str(b.get("text") or "") for b in blocks if b.get("type") == "text"]
    thoughts = [str(b.get("thinking") or "") for b in blocks if b.get("type") == "thinking"]
    calls = [
        tool_call(b.get("id"), b.get("name"), arguments_text(b.get("input") or {}))
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    reason = message.get("stop_reason")
    choice = {
        "index": 0,
        "message": assistant_message("".join(texts), calls, thoughts),
        "finish_reason": _FINISH.get(str(reason), reason),
        **{key: message[key] for key in _RECORDED if key in message},
    }
    known = ("id", "model", "policy_step", "prompt_token_ids", "not_applicable")
    return {
        **{key: message[key] for key in known if key in message},
        "choices": [choice],
        "usage": _chat_usage(message.get("usage") or {}),
    }


def _chat_usage(used: Mapping[str, Any]) -> dict[str, int]:
    """Usage as in a chat completion; `input_tokens` does not include cached prompt tokens."""
    counts = {key: value for key, value in used.items() if isinstance(value, int)}
    inputs = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    prompt = sum(counts.get(key, 0) for key in inputs)
    return usage(prompt, counts.get("output_tokens", 0)) if counts else {}
