"""Parse sampled token ids into a message: text, reasoning and Hermes tool calls.

In:   ids as the engine samples them, in pieces of any size
Out:  events as soon as they are certain, and one Reply at the end

Whatever the pieces, the events add up to the same Reply: a whole answer is parsed by feeding it
once. No event carries half a character, a part of a tag or a part of a stop string. A tool call that
does not parse stays in the text and is named in `malformed`; nothing here raises over what a model
wrote, because a bad answer is data.
"""

import codecs
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from hone.chat.messages import ToolCall
from hone.inference.base import FinishReason
from hone.wire.json import load_object

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A whole tool call, the `index`-th of the answer."""

    index: int
    call: ToolCall


Event = ContentDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The message of one completion."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """Tool calls and reasoning that do not parse, one sentence each; their text is in the content."""
    finish: Literal["stop", "length", "abort", "tool_calls"] = "stop"

    def ended(self, finish: FinishReason) -> "Reply":
        """With the finish reason of the API, where a stop after tool calls has its own."""
        called = finish == "stop" and bool(self.tool_calls)
        return replace(self, finish="tool_calls" if called else finish)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message as the API returns it, and as agents send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.plain(call.arguments) for call in self.tool_calls]
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


class TextDecoder(Protocol):
    """Ids to text, piece by piece; `final` returns what was held back."""

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str: ...


class ByteDecoder:
    """For byte-level vocabularies: exact, and whole characters only."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        # Embedding tables are padded beyond the vocabulary; such an id has no text.
        pieces = (self._pieces[i] for i in ids if 0 <= i < len(self._pieces))
        return self._utf8.decode(b"".join(pieces), final)


class WindowDecoder:
    """For every other vocabulary: the difference between two decodings of the last tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._anchor = 0
        self._read = 0

    def decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        self._ids.extend(ids)
        before = self._text(self._ids[self._anchor : self._read])
        now = self._text(self._ids[self._anchor :])
        if not final and now.endswith("\ufffd"):
            return ""
        self._anchor, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class StreamParser:
    """Parses one completion. Feed it ids, then close it; `reply` is complete after that."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop_ids: Sequence[int],
        tools: bool = False,
        thinks: bool = False,
        reasoning_open: bool = False,
        stop: Sequence[str] = (),
        seed: str = "",
    ) -> None:
        """`reasoning_open`: the prompt has already opened the reasoning. `seed` names the call."""
        self._decoder = decoder
        self._stop_ids = frozenset(stop_ids)
        self._stop = tuple(text for text in stop if text)
        self._tools = tools
        self._seed = seed
        self._state: Literal["start", "reasoning", "text", "call", "over"] = "text"
        if thinks:
            self._state = "reasoning" if reasoning_open else "start"
        self._unread = ""
        """Text that may yet turn out to be part of a tag or of a stop string."""
        self._space = ""
        """White space that is content only if text follows it."""
        self._after_call = False
        self._ended = False
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] | None = None
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """The events that the new ids complete."""
        if self._ended:
            return []
        stops = [i for i, token in enumerate(ids) if token in self._stop_ids]
        if stops:
            self._ended = True
            ids = ids[: stops[0]]
        self._unread += self._decoder.decode(ids)
        return self._advance(final=False)

    def close(self) -> list[Event]:
        """The events held back; the completion is over."""
        self._ended = True
        self._unread += self._decoder.decode((), final=True)
        events = self._advance(final=True)
        self._state = "over"
        return events

    def reply(self, finish: FinishReason = "stop") -> Reply:
        return Reply(
            content="".join(self._content),
            reasoning=None if self._reasoning is None else "".join(self._reasoning),
            tool_calls=tuple(self._calls),
            malformed=tuple(self._malformed),
        ).ended(finish)

    def _advance(self, *, final: bool) -> list[Event]:
        self._events = []
        cut = min((at for at in map(self._unread.find, self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self._unread, self._ended, final = self._unread[:cut], True, True
        held = 0 if final else _partial(self._unread, self._stop)
        tail = self._unread[len(self._unread) - held :]
        self._unread = self._unread[: len(self._unread) - held]
        while self._state != "over" and self._step(final=final):
            pass
        self._unread += tail
        if cut >= 0:
            self._state = "over"
        return self._events

    def _step(self, *, final: bool) -> bool:
        """One state transition; False when it needs more text."""
        if self._state == "start":
            return self._start(final=final)
        if self._state == "reasoning":
            return self._think(final=final)
        if self._state == "text":
            return self._text(final=final)
        return self._call(final=final)

    def _start(self, *, final: bool) -> bool:
        body = self._unread.lstrip()
        if body.startswith(OPEN_THINK):
            self._unread, self._state = body[len(OPEN_THINK) :], "reasoning"
            return True
        if final or not OPEN_THINK.startswith(body):
            self._state = "text"
            return True
        return False

    def _think(self, *, final: bool) -> bool:
        if self._reasoning is None:
            self._reasoning = []
        text, tag, rest = self._unread.partition(CLOSE_THINK)
        if tag:
            self._add_reasoning(text, last=True)
            self._unread, self._state = rest, "text"
            # The blank line after the reasoning is the template's, as that after a call is.
            self._after_call = True
            return True
        held = 0 if final else _partial(text, (CLOSE_THINK,))
        self._add_reasoning(text[: len(text) - held], last=final)
        self._unread = text[len(text) - held :]
        if final:
            self._malformed.append(f"the reasoning was never closed by {CLOSE_THINK}")
        return False

    def _add_reasoning(self, text: str, *, last: bool) -> None:
        """Add reasoning without the line breaks at its edges, which are the template's."""
        assert self._reasoning is not None
        text = self._space + text
        if not self._reasoning:
            text = text.lstrip("\n")
        trimmed = text.rstrip("\n")
        self._space = "" if last else text[len(trimmed) :]
        if trimmed:
            self._reasoning.append(trimmed)
            self._events.append(ReasoningDelta(trimmed))

    def _text(self, *, final: bool) -> bool:
        if self._tools:
            text, tag, rest = self._unread.partition(OPEN_CALL)
            if tag:
                self._add_text(text)
                self._unread, self._state = rest, "call"
                return True
        held = 0 if final or not self._tools else _partial(self._unread, (OPEN_CALL,))
        text = self._unread[: len(self._unread) - held]
        self._unread = self._unread[len(text) :]
        self._add_text(text)
        if final and not self._calls:
            self._flush()
        return False

    def _call(self, *, final: bool) -> bool:
        body, tag, rest = self._unread.partition(CLOSE_CALL)
        if not tag and not final:
            return False
        self._state, self._unread = "text", rest
        if not tag:
            self._malformed.append(f"{OPEN_CALL} was never closed by {CLOSE_CALL}")
            self._add_text(OPEN_CALL + body)
            return True
        try:
            call = self._tool_call(load_object(body))
        except ValueError as error:
            self._malformed.append(f"tool call {body.strip()[:80]!r}: {error}")
            self._add_text(OPEN_CALL + body + CLOSE_CALL)
            return True
        self._after_call = True
        self._calls.append(call)
        self._events.append(CallDelta(len(self._calls) - 1, call))
        return True

    def _tool_call(self, value: dict[str, Any]) -> ToolCall:
        # Models that saw Llama's tool calls write `parameters`; neither key is a call without any.
        key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
        name, arguments = value.get("name"), value.get(key, {})
        if not isinstance(name, str) or not name:
            raise ValueError(f"expected a name, got {name!r}")
        if not isinstance(arguments, dict):
            raise ValueError(f"expected {key} to be an object, got {arguments!r}")
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name, text, call_id(self._seed, len(self._calls), name, text))

    def _add_text(self, text: str) -> None:
        """Add content; hold back white space at its end until the next text decides."""
        text = self._space + text
        self._space = ""
        if self._after_call:
            # Between calls the template has line breaks of its own; text there keeps one.
            text = text.lstrip()
            if not text:
                return
            text = "\n" + text if self._content else text
            self._after_call = False
        trimmed = text.rstrip()
        self._space = text[len(trimmed) :]
        self._emit(trimmed)

    def _flush(self) -> None:
        space, self._space = self._space, ""
        self._emit(space)

    def _emit(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(ContentDelta(text))


def call_id(seed: str, index: int, name: str, arguments: str) -> str:
    """The id of a tool call: the same for the same answer, however it was streamed."""
    named = json.dumps([seed, index, name, arguments])
    return f"call_{hashlib.sha256(named.encode()).hexdigest()[:24]}"


def _partial(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a tag."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:size]):
                longest = size
                break
    return longest


def byte_pieces(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token of a byte-level vocabulary; None for any other kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    table = _byte_of_character()
    pieces: list[bytes] = []
    for i in range(max(backend.get_vocab(with_added_tokens=True).values()) + 1):
        token = backend.id_to_token(i)
        try:
            pieces.append(bytes(table[character] for character in token or ""))
        except KeyError:
            pieces.append(token.encode())  # an added token may hold characters outside the table
    return pieces


def _byte_of_character() -> dict[str, int]:
    """The characters of byte-level vocabularies: printable bytes as themselves, others from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table
