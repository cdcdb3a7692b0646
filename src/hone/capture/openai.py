"""The bytes of one call to a model API, and the call that they describe.

In:   a request, and its response: whole, streamed, an error, or incomplete
Out:  a SeenCall

Bytes are stored as they pass and parsed only once, when the call is read. A stream is teed: the
client gets every byte as it arrives, and bytes that the client does not read are not read at all.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hone.capture.base import Recorder, SeenCall
from hone.capture.tee import decoder, loop_of, tee_like
from hone.wire.anthropic import messages as anthropic_messages
from hone.wire.anthropic.response import chat_completion
from hone.wire.errors import error_message
from hone.wire.json import object_or_empty
from hone.wire.openai.chat import usage
from hone.wire.openai.response_client import read_messages, read_response, read_tools
from hone.wire.openai.response_items import references
from hone.wire.rollout import HELD_HEADER
from hone.wire.stream import has_ended, join_events

UNANSWERED = "no answer yet"
LEFT = "the client left the stream before its end"
_CONVERSATION = (
    *("model", "messages", "system", "tools"),
    *("input", "instructions", "previous_response_id"),
)
"""Keys of a request that are not parameters."""
CLOSE_S = 5.0
"""Timeout for closing a stream that the agent left open."""


class Exchange:
    """One call, during the request and afterwards."""

    def __init__(
        self,
        index: int,
        function: str,
        host: str,
        sent: bytes,
        recorder: Recorder,
        *,
        is_message: bool,
    ) -> None:
        """`is_message`: the request is one of the Anthropic Messages API."""
        self.index, self.function, self.host, self.sent = index, function, host, sent
        self._recorder = recorder
        self._is_message = is_message
        self.started_at = time.time()
        self._began = time.perf_counter()
        self._held_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._seen: SeenCall | None = None
        self._turn: _Turn | None = None
        self._status: int | None = None
        self._error: str | None = None
        self._seconds: float | None = None
        self._pieces: list[bytes] = []
        self._decode: Callable[[bytes], bytes] | None = None
        self._is_stream = False
        self._open: tuple[Any, asyncio.AbstractEventLoop | None] | None = None
        """A streamed answer, and the event loop that reads it; None for a sync client."""

    # ---- events of the patched client -----------------------------------------------------

    def resume_if_retry(self, function: str, sent: bytes) -> bool:
        """Whether the request retries this failed call; if so, the call is in progress again."""
        failed = self._seconds is not None and (self._status is None or self._status >= 400)
        if not (failed and sent == self.sent and function == self.function):
            return False
        self._reset()
        return True

    def answered(self, response: Any, *, streamed: bool) -> None:
        """The response arrived: its headers if it is streamed, otherwise all of it."""
        self._status = response.status_code
        self._held_s += _seconds(response.headers.get(HELD_HEADER))  # retries are held too
        self._is_stream = "event-stream" in response.headers.get("content-type", "")
        if streamed and not response.is_closed:
            if "content-encoding" in response.headers:
                self._decode = decoder(response)
            response.stream = tee_like(type(response.stream))(response.stream, self)
            self._open = response, loop_of(response)
        else:
            self.piece(response.content)
            self.ended()

    def piece(self, body: bytes) -> None:
        self._pieces.append(body)

    def ended(self, error: BaseException | str | None = None) -> None:
        """The response ended, with this error if it is incomplete; only the first call counts."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._began
            if isinstance(error, BaseException):
                error = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._error = error
            self._open = None
            if self._recorder.on_end is not None:
                self._recorder.on_end(self)

    def left(self) -> None:
        """The client closed the stream; this is an error unless the stream had ended."""
        self.ended(None if has_ended(self._body()) else LEFT)

    def _body(self) -> bytes:
        body = b"".join(self._pieces)
        return body if self._decode is None else self._decode(body)

    async def close(self) -> None:
        """Close the stream if the agent left it open, so that its connection can be reused."""
        stream, self._open = self._open, None
        if stream is None or self._seconds is not None:
            return
        response, loop = stream
        # Any error of the library is ignored: the rollout is over, and nothing reads the answer.
        with suppress(Exception):
            if loop is None:
                response.close()
            elif loop is asyncio.get_running_loop():
                async with asyncio.timeout(CLOSE_S):
                    await response.aclose()

    # ---- the call as a SeenCall -----------------------------------------------------------

    def read(self) -> SeenCall:
        """The call as seen so far; when it has ended, it is parsed and its bytes are released."""
        if self._seen is not None:
            return self._seen
        seconds, status = self._seconds, self._status
        body = self._body()
        request = object_or_empty(self.sent)
        if self._is_message:
            messages, tools = anthropic_messages.read_request(request)
        else:
            messages, tools = self._messages(request), _tools(request)
        seen = SeenCall(
            index=self.index,
            function=self.function,
            model=str(request.get("model", "")),
            host=self.host,
            messages=messages,
            tools=tools,
            choices=[],
            usage=None,
            id=None,
            policy_step=None,
            started_at=self.started_at,
            seconds=time.perf_counter() - self._began if seconds is None else seconds,
            status=status,
            error=None,
            temperature=_number(request.get("temperature")),
            parameters={k: v for k, v in request.items() if k not in _CONVERSATION},
            is_chat=not self._is_message and "messages" in request,
            held_s=self._held_s,
        )
        if status is not None and status >= 400:
            text = error_message(object_or_empty(body)) or body[:500].decode(errors="replace")
            seen = replace(seen, error=f"HTTP {status}: {text or 'no reason given'}")
        elif status is not None and (seconds is not None or self._is_stream):
            answer = join_events(body) if self._is_stream else object_or_empty(body)
            seen = _answered(seen, answer)
            self._turn = _turn(request, answer, seen)
        if error := UNANSWERED if seconds is None else self._error:
            seen = replace(seen, error=error)
        if seconds is not None:
            self._seen = seen
            self._pieces.clear()
        return seen

    def _messages(self, request: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The whole prompt as chat messages; None if it is not known here."""
        messages, sent = request.get("messages"), request.get("input")
        if messages is not None or not isinstance(sent, str | list):
            return messages if isinstance(messages, list) else None
        instructions, previous = request.get("instructions"), request.get("previous_response_id")
        earlier = self._earlier() if previous is not None or references(sent) else {}
        if previous is not None and previous not in earlier:
            self._recorder.is_incomplete = True
            return None
        items = {id: item for turn in earlier.values() for id, item in turn.items.items()}
        system = [{"role": "system", "content": instructions}] if instructions else []
        before = [] if previous is None else earlier[previous].messages
        return [*system, *before, *read_messages(sent, items)]

    def _earlier(self) -> dict[str, "_Turn"]:
        """The rollout's earlier responses, by id."""
        turns: dict[str, _Turn] = {}
        for call in self._recorder.sent_before(self.index):
            call.read()
            if isinstance(call, Exchange) and call._turn is not None:
                turns[call._turn.id] = call._turn
        return turns


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _seconds(text: str | None) -> float:
    with suppress(ValueError):
        return float(text or 0.0)
    return 0.0  # of another server


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """A response of the Responses API that later requests can refer to."""

    id: str
    items: dict[str, dict[str, Any]]
    """The items of its output, by id."""
    messages: list[dict[str, Any]]
    """Its prompt and its answer, without instructions, which apply to one response only."""


def _turn(request: dict[str, Any], answer: dict[str, Any], seen: SeenCall) -> _Turn | None:
    """The response that a later request can continue; None for any other answer."""
    output = answer.get("output")
    if not isinstance(output, list) or seen.messages is None or not seen.choices:
        return None
    items = {str(item["id"]): item for item in output if isinstance(item, dict) and "id" in item}
    prompt = seen.messages[1:] if request.get("instructions") else seen.messages
    return _Turn(str(answer.get("id")), items, [*prompt, seen.choices[0]["message"]])


def _answered(seen: SeenCall, body: dict[str, Any]) -> SeenCall:
    """The call with its answer, in the form of a chat completion."""
    if body.get("error"):
        return replace(seen, error=error_message(body))
    if "output" in body and "choices" not in body:
        body = read_response(body)
    if body.get("type") == "message" and "choices" not in body:
        body = chat_completion(body)
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        return replace(seen, error="the answer has no choices")
    counts = {k: v for k, v in (body.get("usage") or {}).items() if isinstance(v, int)}
    counts = counts or _count_tokens(body, choices)
    for choice in choices:
        if choice.get("call_id"):
            choice.pop("logprobs", None)
    first = choices[0] if choices else {}
    return replace(
        seen,
        choices=choices,
        usage=counts,
        id=first.get("call_id") or body.get("id"),
        policy_step=body.get("policy_step", first.get("policy_step")),
    )


def _count_tokens(body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int] | None:
    """Token counts from a response's token ids, because streams have no `usage` by default."""
    prompt, counts = body.get("prompt_token_ids"), [_num_sampled(choice) for choice in choices]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    if isinstance(prompt, list):
        return usage(len(prompt), sum(known))
    return {"completion_tokens": sum(known)}


def _num_sampled(choice: dict[str, Any]) -> int | None:
    logprobs = choice.get("logprobs") or {}
    for tokens in (choice.get("token_ids"), logprobs.get("content"), logprobs.get("tokens")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def _tools(request: dict[str, Any]) -> list[dict[str, Any]] | None:
    return (read_tools(request) if "input" in request else request.get("tools")) or None
