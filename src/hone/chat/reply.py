"""Parse sampled token ids into a message: text, reasoning and Hermes tool calls.

In:   ids as the engine samples them, in pieces of any size
Out:  deltas as soon as they are certain, and one Reply at the end

Whatever the pieces, the deltas add up to the same Reply: a whole answer is parsed by feeding it
once. No delta carries half a character, a part of a tag or a part of a stop string. A tool call that
does not parse stays in the text and is named in `malformed`; nothing here raises over what a model
wrote, because a bad answer is data.
"""

import codecs
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from hone.chat.messages import ToolCall
from hone.inference.base import FinishReason
from hone.wire.json import load_object

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"


Delta = dict[str, Any]
"""More of a message, as a chunk of the API has it: content, reasoning_content or whole tool_calls."""


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

    def deltas(self, before: "Reply") -> list[Delta]:
        """What this reply has more than the one before."""
        reasoning = (self.reasoning or "")[len(before.reasoning or "") :]
        content = self.content[len(before.content) :]
        deltas = [{"reasoning_content": reasoning}] if reasoning else []
        deltas += [{"content": content}] if content else []
        return deltas + [
            {"tool_calls": [{"index": i, **call.plain(call.arguments)}]}
            for i, call in enumerate(self.tool_calls)
            if i >= len(before.tool_calls)
        ]

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


class ByteDecoder:
    """Ids to text for byte-level vocabularies: exact, and whole characters only.

    `final` returns what was held back.
    """

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
    """Parses one completion. Feed it ids, then close it; `reply` is complete after that.

    Each time it reads all of the text that is certain and returns what is new in the result.
    """

    def __init__(
        self,
        decoder: ByteDecoder | WindowDecoder,
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
        self._thinks = thinks
        self._reasoning_open = reasoning_open
        self._seed = seed
        self._text = ""
        self._ended = False
        self._closed_calls: list[ToolCall | str] = []
        """Every `<tool_call>` that was closed: the call, or why it is none."""
        self._reply = Reply(content="")

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """The deltas that the new ids complete."""
        if self._ended:
            return []
        stops = [i for i, token in enumerate(ids) if token in self._stop_ids]
        if stops:
            self._ended = True
            ids = ids[: stops[0]]
        self._text += self._decoder.decode(ids)
        return self._update(final=False)

    def close(self) -> list[Delta]:
        """The deltas held back; the completion is over."""
        self._ended = True
        self._text += self._decoder.decode((), final=True)
        return self._update(final=True)

    def reply(self, finish: FinishReason = "stop") -> Reply:
        return self._reply.ended(finish)

    def _update(self, *, final: bool) -> list[Delta]:
        text = self._text
        cut = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if cut >= 0:
            text, self._ended, final = text[:cut], True, True
        before, reply = (
            self._reply,
            self._read(text if final else _certain(text, self._stop), final=final),
        )
        self._reply = reply
        return reply.deltas(before)

    def _read(self, text: str, *, final: bool) -> Reply:
        """What the text says. Unless it is final, nothing in it that more text could change."""
        reasoning = None
        if self._thinks:
            start = text if self._reasoning_open else text.lstrip()
            if self._reasoning_open or start.startswith(OPEN_THINK):
                thought, tag, text = _partition(start.removeprefix(OPEN_THINK), CLOSE_THINK)
                reasoning = (thought if tag or final else _certain(thought, (CLOSE_THINK,))).strip(
                    "\n"
                )
                if not tag:
                    unclosed = (f"the reasoning was never closed by {CLOSE_THINK}",)
                    return Reply(
                        content="", reasoning=reasoning, malformed=unclosed if final else ()
                    )
            elif not final and OPEN_THINK.startswith(start):
                return Reply(content="")
        content = _Content(trimmed=reasoning is not None)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        before, tag, rest = _partition(text, OPEN_CALL) if self._tools else (text, "", "")
        closed = 0
        while tag:
            content.add(before)
            body, tag, text = rest.partition(CLOSE_CALL)
            if not tag:
                before = ""
                if final:
                    malformed.append(f"{OPEN_CALL} was never closed by {CLOSE_CALL}")
                    before = OPEN_CALL + body
                break
            if closed == len(self._closed_calls):
                self._closed_calls.append(self._tool_call(body, len(calls)))
            call = self._closed_calls[closed]
            closed += 1
            if isinstance(call, ToolCall):
                calls.append(call)
                content.end()
            else:
                malformed.append(call)
                content.add(OPEN_CALL + body + CLOSE_CALL)
            before, tag, rest = _partition(text, OPEN_CALL)
        else:
            if self._tools and not final:
                before = _certain(before, (OPEN_CALL,))
        content.add(before)
        if calls or not final:
            content.text = content.text.rstrip()
        return Reply(
            content=content.text,
            reasoning=reasoning,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
        )

    def _tool_call(self, body: str, index: int) -> ToolCall | str:
        try:
            value = load_object(body)
            # Models that saw Llama's tool calls write `parameters`; neither is a call without any.
            key = (
                "parameters" if "parameters" in value and "arguments" not in value else "arguments"
            )
            name, arguments = value.get("name"), value.get(key, {})
            if not isinstance(name, str) or not name:
                raise ValueError(f"expected a name, got {name!r}")
            if not isinstance(arguments, dict):
                raise ValueError(f"expected {key} to be an object, got {arguments!r}")
        except ValueError as error:
            return f"tool call {body.strip()[:80]!r}: {error}"
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name, text, call_id(self._seed, index, name, text))


class _Content:
    """The answer's text around tool calls and after the reasoning."""

    def __init__(self, *, trimmed: bool) -> None:
        self.text = ""
        self._trimmed = trimmed

    def add(self, text: str) -> None:
        if self._trimmed:
            # Between calls the template has line breaks of its own; text there keeps one.
            text = text.lstrip()
            self._trimmed = not text
            text = "\n" + text if text and self.text else text
        self.text += text

    def end(self) -> None:
        """A tool call follows."""
        self.text, self._trimmed = self.text.rstrip(), True


def call_id(seed: str, index: int, name: str, arguments: str) -> str:
    """The id of a tool call: the same for the same answer, however it was streamed."""
    named = json.dumps([seed, index, name, arguments])
    return f"call_{hashlib.sha256(named.encode()).hexdigest()[:24]}"


def _certain(text: str, tags: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a tag."""
    start = max(0, len(text) - max(map(len, tags), default=1) + 1)
    for at in range(start, len(text)):
        if any(text[at] == tag[0] and tag.startswith(text[at:]) for tag in tags):
            return text[:at]
    return text


def _partition(text: str, tag: str) -> tuple[str, str, str]:
    """As str.partition, which takes long to find a tag in a text that has none."""
    return text.partition(tag) if "<" in text else (text, "", "")


@lru_cache(maxsize=64)  # a server keeps the tokenizer of every base model it has used
def byte_pieces(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token of a byte-level vocabulary; None for any other kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = {character: byte for byte, character in bytes_to_unicode().items()}
    pieces: list[bytes] = []
    for i in range(max(backend.get_vocab(with_added_tokens=True).values()) + 1):
        token = backend.id_to_token(i)
        try:
            pieces.append(bytes(table[character] for character in token or ""))
        except KeyError:
            pieces.append(token.encode())  # an added token may hold characters outside the table
    return pieces
