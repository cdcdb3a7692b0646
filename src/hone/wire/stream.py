"""Server-sent events of every dialect: written, read, and joined into one response.

In:   JSON objects to send; the bytes of a streamed response
Out:  the bytes of events; the response as it would have been without streaming

The `openai` package joins chunks too (ChatCompletionStreamState, 3.49), but drops the fields of a
choice that it does not know. hone's servers and vLLM send `token_ids` there.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hone.wire.json import object_or_empty, write_json
from hone.wire.openai.dialect import Event
from hone.wire.openai.response_client import text_of

_END = re.compile(
    rb"^(data: ?\[DONE\]|event: ?(response\.(completed|incomplete|failed)|message_stop)\r?$)", re.M
)
"""The last event of a stream: of chat completions and completions, of responses, of messages."""
_REPLACED = ("role", "type", "id", "signature")
"""Strings of a message that are sent whole and may be repeated."""


def write_event(value: Event, *, named: bool = False) -> bytes:
    """The bytes of an event; `named`: its `type` is also its name."""
    if isinstance(value, str):
        return b"data: " + value.encode() + b"\n\n"
    name = f"event: {value['type']}\n".encode() if named else b""
    return name + b"data: " + write_json(value) + b"\n\n"


def read_events(body: bytes) -> Iterator[dict[str, Any]]:
    data: list[bytes] = []
    for line in (*body.replace(b"\r\n", b"\n").split(b"\n"), b""):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            event = object_or_empty(b"\n".join(data))
            data.clear()
            if event:
                yield event


def has_ended(body: bytes) -> bool:
    """Whether the bytes read so far contain the end of the stream."""
    return _END.search(body) is not None


def join_events(body: bytes) -> dict[str, Any]:
    """A streamed response as one object; only the `error` if an event is an error."""
    events = list(read_events(body))
    for event in events:
        if event.get("error") or event.get("type") == "error":
            return {"error": event.get("error") or event}
    if events and str(events[0].get("type")).startswith("response."):
        return join_response(events)
    if events and events[0].get("type") in ("message_start", "ping"):
        return join_message(events)
    chunks = Chunks()
    for event in events:
        chunks.add(event)
    return chunks.join()


class Chunks:
    """The chunks of a chat completion, added one by one."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        self._response |= {k: v for k, v in chunk.items() if k != "choices" and v is not None}
        for part in chunk.get("choices") or ():
            choice = self._choices.setdefault(part.get("index", 0), {})
            for key, value in part.items():
                if key == "delta":
                    message = choice.setdefault("message", {"role": "assistant", "content": None})
                    _add(message, value or {})
                elif key in ("text", "logprobs", "token_ids"):
                    # vLLM sends the token ids of each chunk, a hone server all of them in the last.
                    _add(choice, {key: value})
                elif value is not None or key not in choice:
                    choice[key] = value

    def join(self) -> dict[str, Any]:
        """The response as it would have been without streaming, so far."""
        choices = [_whole_choice(self._choices[index]) for index in sorted(self._choices)]
        return self._response | {"choices": choices}


def _whole_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice with its tool calls as a list, in the order of their indices."""
    calls = choice.get("message", {}).get("tool_calls")
    if not calls:
        return choice
    listed = [calls[place] for place in sorted(calls)]
    return choice | {"message": choice["message"] | {"tool_calls": listed}}


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a delta: text and lists grow, tool calls by their index, the rest is replaced."""
    for key, value in part.items():
        before = whole.get(key)
        if value is None:
            whole.setdefault(key, None)
        elif key == "tool_calls":
            calls = whole[key] = before or {}
            for place, call in enumerate(value):
                known = calls.setdefault(call.get("index", place), {})
                _add(known, {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, dict):
            whole[key] = before or {}
            _add(whole[key], value)
        elif isinstance(value, list):
            whole[key] = before if isinstance(before, list) else []
            whole[key] += value
        elif isinstance(value, str) and isinstance(before, str) and key not in _REPLACED:
            whole[key] = before + value
        else:
            whole[key] = value


# ---- other dialects ----------------------------------------------------------------------------


def join_message(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The events of a stream as the message it would have been without streaming."""
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            message |= event.get("message") or {}
        elif kind == "content_block_start":
            blocks[index] = dict(event.get("content_block") or {})
        elif kind == "content_block_delta":
            delta = event.get("delta") or {}
            texts = {k: v for k, v in delta.items() if k != "type" and isinstance(v, str)}
            _add(blocks.setdefault(index, {}), texts)
        elif kind == "message_delta":
            known = {k: v for k, v in event.items() if k not in ("type", "delta", "usage")}
            used = {**(message.get("usage") or {}), **(event.get("usage") or {})}
            message |= {**(event.get("delta") or {}), **known, "usage": used}
    for block in blocks.values():
        if written := block.pop("partial_json", ""):
            block["input"] = object_or_empty(written.encode())
    return message | {"content": [blocks[index] for index in sorted(blocks)]}


def join_response(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The response of a stream; for an incomplete one, the items received so far."""
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event.get("response"), dict):
            response = event["response"]
        kind, place = str(event.get("type")), event.get("output_index")
        if not isinstance(place, int):
            continue
        if isinstance(event.get("item"), dict):
            items[place] = dict(event["item"])
        elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
            _grow(items.setdefault(place, {}), kind, event["delta"])
    if not response.get("output"):
        response = {**response, "output": [items[place] for place in sorted(items)]}
    return response


def _grow(item: dict[str, Any], kind: str, delta: str) -> None:
    if kind == "response.function_call_arguments.delta":
        item["arguments"] = str(item.get("arguments") or "") + delta
    elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
        before = text_of(item, "content")
        item["content"] = [{"text": before + delta}]
