"""Responses of the OpenAI Responses API: whole, or as typed events.

In:   a ResponsesRequest and its answer, as it grows and when it is finished
Out:  JSON objects

An item is complete before the next one begins. The final response has hone's additional fields:
`token_ids`, `prompt_token_ids`, `policy_step` and `call_id`, and with log-probabilities also
`token_logprobs`, one for each of `token_ids`. Those of `output_text` cover only its text.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hone.wire.errors import rename_key
from hone.wire.openai.dialect import Answer, AnswerHead, Dialect, Event, Logprobs
from hone.wire.openai.response_items import (
    ItemIds,
    encrypt,
    function_call_item,
    message_item,
    output_items,
    reasoning_item,
    text_part,
)
from hone.wire.openai.responses import CHAT_NAMES, ResponsesRequest


class ResponseWriter:
    """Writes one response."""

    def __init__(self, head: AnswerHead, fields: dict[str, Any], *, encrypted: bool) -> None:
        """`fields` is the request as the response repeats it."""
        self._head = head
        self._fields = fields
        self._encrypted = encrypted
        self._ids = ItemIds(head.call_id)
        self._tokens = _TextTokens()
        self._logprobs: Logprobs | None = None
        """Log-probabilities of every streamed token; None if the request does not want them."""
        self._sent = 0
        """Number of events."""
        self._output: list[dict[str, Any]] = []
        """The completed items."""
        self._open: _OpenItem | None = None

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        message = answer.message
        self._tokens.add(answer.logprobs or [])
        self._tokens.take(message.get("reasoning_content") or "")
        items = output_items(
            message,
            self._ids,
            status=_status(answer),
            encrypted=self._encrypted,
            logprobs=self._tokens.take(message.get("content") or ""),
        )
        return self._finished(answer, items, answer.logprobs)

    def delta(
        self, index: int, deltas: Sequence[dict[str, Any]], logprobs: Logprobs | None
    ) -> list[Event]:
        events = self._opening()
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += logprobs
            self._tokens.add(logprobs)
        for part in deltas:
            if part.get("reasoning_content"):
                self._tokens.take(part["reasoning_content"])
                events += self._grow("reasoning", 0, part["reasoning_content"], ())
            if part.get("content"):
                entries = self._tokens.take(part["content"])
                events += self._grow("message", 0, part["content"], entries)
            for call in part.get("tool_calls") or ():
                self._tokens.clear()
                function = call.get("function") or {}
                place = call.get("index", 0)
                names = {"call_id": call.get("id") or "", "name": function.get("name") or ""}
                events += self._grow(
                    "function_call", place, function.get("arguments") or "", (), **names
                )
        return events

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        (answer,) = answers
        events = self._opening()
        if self._open is None and not self._output:
            events += self._grow("message", 0, "", ())
        events += self._close(_status(answer))
        response = self._finished(answer, self._output, self._logprobs)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def error(self, status: int, body: dict[str, Any]) -> list[Event]:
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        error = {"code": code, "message": body["error"]["message"]}
        response = self._response("failed", self._output) | {"error": error}
        return [self._event("response.failed", response=response)]

    # ---- events -----------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _opening(self) -> list[Event]:
        if self._sent:
            return []
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress", [])) for kind in kinds]

    def _grow(
        self, kind: str, place: int, text: str, logprobs: Sequence[dict[str, Any]], **names: Any
    ) -> list[Event]:
        """Add text to an item; begins it if another one is open. `place` distinguishes calls."""
        events: list[Event] = []
        if self._open is None or (self._open.kind, self._open.place) != (kind, place):
            events += self._close("completed")
            begun = self._begin(kind, place, **names)
            self._open = _OpenItem(begun, place, encrypted=self._encrypted)
            events += self._item_events(self._open.added())
        item = self._open
        item.pieces.append(text)
        item.logprobs += logprobs
        if text:
            events += self._item_events([item.delta(text, logprobs)])
        return events

    def _begin(self, kind: str, place: int, **names: Any) -> dict[str, Any]:
        if kind == "reasoning":
            return reasoning_item(self._ids, None, status="in_progress")
        if kind == "function_call":
            item_id = self._ids.function_call(place)
            return function_call_item(item_id, **names, arguments="", status="in_progress")
        earlier = sum(item["type"] == "message" for item in self._output)
        return message_item(self._ids.message(earlier), [], "in_progress")

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        events = self._item_events(item.done(status))
        self._output.append(item.finished(status))
        return events

    def _item_events(self, written: list[dict[str, Any]]) -> list[Event]:
        index = len(self._output)
        return [
            self._event(f"response.{fields.pop('type')}", output_index=index, **fields)
            for fields in written
        ]

    # ---- responses --------------------------------------------------------------------------

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": self._ids.response,
            "object": "response",
            "created_at": int(head.created_at),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": output,
            "usage": None,
            **self._fields,
        }

    def _finished(
        self, answer: Answer, output: list[dict[str, Any]], logprobs: Logprobs | None
    ) -> dict[str, Any]:
        head, sampled = self._head, len(answer.token_ids)
        response = self._response(_status(answer), output)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": len(head.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": len(head.prompt_ids) + sampled,
        }
        response |= head.hone_fields | answer.hone_fields
        if logprobs is not None:
            response["token_logprobs"] = [entry["logprob"] for entry in logprobs]
        return response


def _writer(request: ResponsesRequest, head: AnswerHead) -> ResponseWriter:
    head = replace(head, not_applicable=request.not_applicable(head.not_applicable))
    return ResponseWriter(head, request.fields, encrypted=request.encrypted)


RESPONSES = Dialect(
    path="/v1/responses",
    prompt_key="input",
    schema=ResponsesRequest.schema,
    parse=ResponsesRequest.parse,
    writer=_writer,
    named_events=True,
    error_body=lambda status, body: rename_key(body, CHAT_NAMES),
)
INPUT_TOKENS = replace(RESPONSES, path="/v1/responses/input_tokens")
"""Requests for the length of the prompt of a response."""


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


_TEXT_EVENTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}
"""Prefix of the events that carry an item's text, by item type."""


class _OpenItem:
    """An item that grows. Its events have no output_index and no sequence number yet."""

    def __init__(self, item: dict[str, Any], place: int, *, encrypted: bool) -> None:
        """`item` as it begins, without text."""
        self.kind, self.place = item["type"], place
        self.pieces: list[str] = []
        """Its text so far. Joined only at the end: joining it at every delta takes quadratic time."""
        self.logprobs: Logprobs = []
        self._item = item
        self._encrypted = encrypted and self.kind == "reasoning"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def finished(self, status: str) -> dict[str, Any]:
        """The item with all of its text."""
        if self.kind == "function_call":
            return self._item | {"arguments": self.text, "status": status}
        secret = {"encrypted_content": encrypt(self.text)} if self._encrypted else {}
        return self._item | {"content": [self._part()], **secret, "status": status}

    def added(self) -> list[dict[str, Any]]:
        added = {"type": "output_item.added", "item": self._item}
        return [added, *self._part_events("content_part.added")]

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._text_event("delta", {"delta": text}, logprobs)

    def done(self, status: str) -> list[dict[str, Any]]:
        whole = {"text": self.text}
        if self.kind == "function_call":
            whole = {"name": self._item["name"], "arguments": self.text}
        return [
            self._text_event("done", whole, self.logprobs),
            *self._part_events("content_part.done"),
            {"type": "output_item.done", "item": self.finished(status)},
        ]

    def _text_event(
        self, kind: str, fields: dict[str, Any], logprobs: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        event = {"type": f"{_TEXT_EVENTS[self.kind]}.{kind}", "item_id": self._item["id"]}
        if self.kind != "function_call":
            event["content_index"] = 0
        return event | fields | ({"logprobs": list(logprobs)} if self.kind == "message" else {})

    def _part_events(self, kind: str) -> list[dict[str, Any]]:
        if self.kind == "function_call":
            return []
        event = {"type": kind, "item_id": self._item["id"], "content_index": 0}
        return [event | {"part": self._part()}]

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return text_part(self.text, self.logprobs)


class _TextTokens:
    """Finds the tokens of a text among all tokens that were sampled."""

    def __init__(self) -> None:
        self._entries: Logprobs = []
        self._rest: bytes = b""
        """The rest of a token whose beginning belongs to the previous text."""

    def add(self, entries: Logprobs) -> None:
        self._entries += entries

    def clear(self) -> None:
        self._entries, self._rest = [], b""

    def take(self, text: str) -> Logprobs:
        """The entries of this text; those before it are dropped, those after it are kept.

        All entries if the text differs from that of the tokens, as around tool calls.
        """
        pieces = [self._rest, *(bytes(entry["bytes"]) for entry in self._entries)]
        sampled, wanted = b"".join(pieces), text.encode()
        entries = self._entries
        if not wanted:
            return []
        if (start := sampled.find(wanted)) < 0:
            self.clear()
            return entries
        end = start + len(wanted)
        # Where each entry begins, and where the last one ends.
        bounds = list(accumulate(map(len, pieces)))
        first, last = bisect_right(bounds, start, lo=1) - 1, bisect_left(bounds, end)
        self._entries, self._rest = entries[last:], sampled[end : bounds[last]]
        return entries[first:last]
