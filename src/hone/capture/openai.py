"""What passed over the wire of one call to an OpenAI API, and what it says.

In:   a request, and its answer: whole, streamed, refused or broken off
Out:  a SeenCall

While the agent waits, bytes are kept and nothing is read: reading is done once, when somebody asks
for the call. A stream is teed: the client gets every byte as it arrives, and what it does not
fetch is not fetched for it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from hone.capture.base import SeenCall
from hone.capture.tee import decoder, loop_of, tee_like

UNANSWERED = "no answer yet"
LEFT = "the client left the stream before its end"
CLOSE_S = 5.0
"""How long closing a stream may take that an agent has left open."""


class Exchange:
    """One call, while it is under way and afterwards."""

    def __init__(self, index: int, function: str, host: str, sent: bytes) -> None:
        self.index, self.function, self.host, self.sent = index, function, host, sent
        self.started_at = time.time()
        self._began = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._seen: SeenCall | None = None
        self._status: int | None = None
        self._error: str | None = None
        self._seconds: float | None = None
        self._pieces: list[bytes] = []
        self._decode: Callable[[bytes], bytes] | None = None
        self._is_stream = False
        self._open: tuple[Any, asyncio.AbstractEventLoop | None] | None = None
        """A streamed answer, and the event loop it is read in; None for that of a sync client."""

    # ---- what the tap tells ---------------------------------------------------------------

    def takes_up(self, function: str, sent: bytes) -> bool:
        """Whether this is a failed call that is now sent once more; then it is under way again."""
        failed = self._seconds is not None and (self._status is None or self._status >= 400)
        if not (failed and sent == self.sent and function == self.function):
            return False
        self._reset()
        return True

    def answered(self, response: Any, *, streamed: bool) -> None:
        """The answer came: its head if it is streamed, the whole of it otherwise."""
        self._status = response.status_code
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
        """No more will come, for this reason if it is not the end; the first one told counts."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._began
            told = isinstance(error, BaseException)
            self._error = f"{type(error).__name__}: {error}".removesuffix(": ") if told else error
            self._open = None

    def left(self) -> None:
        """The client closed the stream: too early, unless it had seen the end."""
        whole = b"[DONE]" in b"".join(self._pieces[-2:])
        self.ended(None if whole else LEFT)

    async def close(self) -> None:
        """Close the stream if the agent has left it open, so that its connection is free again."""
        held, self._open = self._open, None
        if held is None or self._seconds is not None:
            return
        response, loop = held
        # Whatever the library makes of it: the rollout is over, and nobody waits for the answer.
        with suppress(Exception):
            if loop is None:
                response.close()
            elif loop is asyncio.get_running_loop():
                async with asyncio.timeout(CLOSE_S):
                    await response.aclose()

    # ---- what it says ---------------------------------------------------------------------

    def read(self) -> SeenCall:
        """What was seen so far; when it has ended it is read once and its bytes are let go."""
        if self._seen is not None:
            return self._seen
        seconds, status = self._seconds, self._status
        body = b"".join(self._pieces)
        body = body if self._decode is None else self._decode(body)
        asked = _object(self.sent)
        if status is not None and status >= 400:
            said = _Answer(error=f"HTTP {status}: {_refusal(body)}")
        elif status is None or (seconds is None and not self._is_stream):
            said = _Answer()
        else:
            said = _streamed(body) if self._is_stream else _whole(_object(body))
        under_way = UNANSWERED if seconds is None else None
        seen = SeenCall(
            index=self.index,
            function=self.function,
            model=str(asked.get("model", "")),
            host=self.host,
            messages=_messages(asked),
            tools=asked.get("tools") or None,
            choices=said.choices,
            usage=said.usage,
            id=said.id,
            policy_step=said.policy_step,
            started_at=self.started_at,
            seconds=time.perf_counter() - self._began if seconds is None else seconds,
            status=status,
            error=under_way or self._error or said.error,
            temperature=_number(asked.get("temperature")),
            parameters={k: v for k, v in asked.items() if k not in ("model", "messages", "tools")},
        )
        if seconds is not None:
            self._seen = seen
            self._pieces.clear()
        return seen


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# ---- reading ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Answer:
    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] | None = None
    id: str | None = None
    policy_step: int | None = None
    error: str | None = None


def _whole(said: dict[str, Any]) -> _Answer:
    """An answer in one piece."""
    if said.get("error"):
        return _Answer(error=_told(said["error"]))
    if "output" in said and "choices" not in said:
        said = _as_chat(said)
    choices = said.get("choices")
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        return _Answer(error="the answer has no choices")
    used = said.get("usage") or {}
    usage = {k: v for k, v in used.items() if isinstance(v, int)} or _counted(said, choices)
    for choice in choices:
        if choice.get("call_id"):
            choice.pop("logprobs", None)
    first = choices[0] if choices else {}
    return _Answer(
        choices=choices,
        usage=usage,
        id=first.get("call_id") or said.get("id"),
        policy_step=said.get("policy_step", first.get("policy_step")),
    )


def _counted(said: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int] | None:
    """What the answer used, where only its tokens tell: a stream has no `usage` unless asked."""
    prompt, sampled = said.get("prompt_token_ids"), [_num_sampled(choice) for choice in choices]
    known = [count for count in sampled if count is not None]
    if not known or len(known) < len(sampled):
        return None
    usage = {"completion_tokens": sum(known)}
    if isinstance(prompt, list):
        usage |= {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + sum(known)}
    return usage


def _num_sampled(choice: dict[str, Any]) -> int | None:
    logprobs = choice.get("logprobs") or {}
    for tokens in (choice.get("token_ids"), logprobs.get("content"), logprobs.get("tokens")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def _streamed(body: bytes) -> _Answer:
    """A stream of events put together to the answer it would have been in one piece."""
    said: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in _events(body):
        if event.get("error"):
            return _Answer(error=_told(event["error"]))
        if isinstance(event.get("response"), dict):  # of /responses: the last has everything
            said = event["response"]
            continue
        said |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        for part in event.get("choices") or ():
            _add_choice(choices.setdefault(part.get("index", 0), {}), part)
    if "output" in said:
        return _whole(said)
    for choice in choices.values():
        calls = choice.get("message", {}).get("tool_calls")
        if calls:
            choice["message"]["tool_calls"] = [calls[place] for place in sorted(calls)]
    return _whole(said | {"choices": [choices[index] for index in sorted(choices)]})


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    data: list[bytes] = []
    for line in (*body.replace(b"\r\n", b"\n").split(b"\n"), b""):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            event = _object(b"\n".join(data))
            data.clear()
            if event:
                yield event


def _add_choice(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if key == "delta":
            message = choice.setdefault("message", {"role": "assistant", "content": None})
            _add(message, value or {})
        elif key == "text":
            choice["text"] = choice.get("text", "") + (value or "")
        elif key == "logprobs":
            _add(choice.setdefault("logprobs", {}), value or {})
        elif key == "token_ids":  # vLLM sends those of each chunk, a hone server all in the last
            choice[key] = [*choice.get(key, ()), *(value or ())]
        elif value is not None or key not in choice:
            choice[key] = value


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a piece: text and lists grow, tool calls by their index, the rest is replaced."""
    for key, value in part.items():
        held = whole.get(key)
        if value is None:
            whole.setdefault(key, None)
        elif key == "tool_calls":
            calls = whole.setdefault(key, {})
            for place, call in enumerate(value):
                known = calls.setdefault(call.get("index", place), {})
                _add(known, {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, dict):
            _add(whole.setdefault(key, {}), value)
        elif isinstance(value, list):
            whole[key] = [*(held or ()), *value]
        elif isinstance(value, str) and held and key not in ("role", "type", "id"):
            whole[key] = held + value
        else:
            whole[key] = value


def _as_chat(said: dict[str, Any]) -> dict[str, Any]:
    """An answer of /responses in the shape of a chat completion."""
    items = [item for item in said["output"] or () if isinstance(item, dict)]
    parts = [p for item in items if item.get("type") == "message" for p in item.get("content", ())]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(p.get("text", "") for p in parts) if parts else None,
    }
    calls = [
        {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for item in items
        if item.get("type") == "function_call"
    ]
    if calls:
        message["tool_calls"] = calls
    cut = (said.get("incomplete_details") or {}).get("reason") == "max_output_tokens"
    finish = "length" if cut else "tool_calls" if calls else "stop"
    used = said.get("usage") or {}
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    return {
        "id": said.get("id"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {names.get(key, key): value for key, value in used.items()},
    }


def _messages(asked: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What was asked, as chat messages."""
    messages = asked.get("messages")
    if messages is None and "input" in asked:  # /responses
        said = asked["input"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if asked.get("instructions") and isinstance(messages, list):
            messages = [{"role": "system", "content": asked["instructions"]}, *messages]
    return messages if isinstance(messages, list) else None


def _refusal(body: bytes) -> str:
    said = _object(body)
    told = said.get("error") or said.get("detail") or said.get("message")
    return _told(told) if told else body[:500].decode(errors="replace") or "no reason given"


def _told(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object the bytes say; empty if they say none."""
    try:
        read = from_json(body)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
