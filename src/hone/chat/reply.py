"""Parse sampled token ids into a message: text, reasoning and Hermes tool calls.

In:   ids as the engine samples them, in pieces of any size
Out:  deltas as soon as they are certain, and one Reply at the end

However the ids are split, the deltas add up to the same Reply; a whole answer is parsed by feeding
it at once. No delta contains part of a character, of a tag or of a stop string.

A tool call streams from the first character of its arguments on, in the model's own spelling. A
call that does not parse is listed in `malformed`. If its arguments had begun, it is a call with the
arguments as they were sampled, as with OpenAI and vLLM, and the agent's parser finds the error;
otherwise it stays in the text. Nothing here raises because of a model's output: a bad answer is
data.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from hone.chat.hermes import CLOSE_CALL, OPEN_CALL, HermesCall, parse_call, without_partial
from hone.chat.messages import ToolCall
from hone.inference.base import FinishReason

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"


Delta = dict[str, Any]
"""New parts of a message, as in a chunk of the API: content, reasoning_content or tool_calls.

A tool call begins with its index, id, type and name; each further delta has more of its arguments.
"""


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
        """The reply with the API's finish reason: a stop after tool calls is `tool_calls`."""
        called = finish == "stop" and bool(self.tool_calls)
        return replace(self, finish="tool_calls" if called else finish)

    def deltas(self) -> list[Delta]:
        """The whole reply as deltas, as if it had been streamed."""
        deltas: list[Delta] = [{"reasoning_content": self.reasoning}] if self.reasoning else []
        deltas += [{"content": self.content}] if self.content else []
        for i, call in enumerate(self.tool_calls):
            deltas += [_begin_call(i, call), _more_arguments(i, call.arguments)]
        return deltas

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
    """Decodes ids of byte-level vocabularies: exactly, and whole characters only.

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
    """Decodes ids of any other vocabulary, by comparing two decodings of the last tokens."""

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

    It reads every character once: the time per token does not depend on the length of the answer.
    """

    def __init__(
        self,
        decoder: ByteDecoder | WindowDecoder,
        *,
        stop_ids: Sequence[int],
        tools: bool = False,
        thinks: bool = False,
        reasoning_open: bool = False,
        stop: Sequence[str],
        seed: str,
    ) -> None:
        """`reasoning_open`: the prompt has already opened the reasoning. `seed` names the call."""
        self._decoder = decoder
        self._stop_ids = frozenset(stop_ids)
        self._stop = tuple(text for text in stop if text)
        self._tools = tools
        self._reasoning_open = reasoning_open
        self._seed = seed
        self._ended = False
        self._final = False
        self._unchecked = ""
        """The end of the text, which may be part of a stop string."""
        self._text = ""
        """What the current state has not read yet."""
        self._read: Callable[[bool], bool] = self._read_opening if thinks else self._read_content
        """Reads the text in the current state; returns whether another state continues."""
        self._reasoning: _Text | None = None
        self._content = _Text()
        self._calls: list[ToolCall] = []
        """The calls that have ended."""
        self._call = HermesCall()
        """The call that is being read."""
        self._malformed: list[str] = []
        self._deltas: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """The deltas that the new ids complete."""
        if self._ended:
            return []
        stops = [i for i, token in enumerate(ids) if token in self._stop_ids]
        if stops:
            self._ended = True
            ids = ids[: stops[0]]
        return self._add(self._decoder.decode(ids), final=False)

    def close(self) -> list[Delta]:
        """The deltas held back; the completion is over."""
        self._ended = True
        return [] if self._final else self._add(self._decoder.decode((), final=True), final=True)

    def reply(self, finish: FinishReason = "stop") -> Reply:
        return Reply(
            content=self._content.text,
            reasoning=None if self._reasoning is None else self._reasoning.text,
            tool_calls=tuple(self._calls),
            malformed=tuple(self._malformed),
        ).ended(finish)

    def _add(self, text: str, *, final: bool) -> list[Delta]:
        text = self._unchecked + text
        # Like the engine, use the stop string that is completed first, not the one that begins
        # first.
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            text, self._ended, final = text[: min(ends)[1]], True, True
        elif not final and self._stop:
            certain = without_partial(text, self._stop)
            self._unchecked, text = text[len(certain) :], certain
        self._final = final
        self._text += text
        while self._read(final):
            pass
        if final and not self._calls:
            self._emit("content", self._content.add_held())
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, key: str, text: str) -> None:
        if text and self._deltas and key in self._deltas[-1]:
            self._deltas[-1][key] += text
        elif text:
            self._deltas.append({key: text})

    # ---- states ----------------------------------------------------------------------------

    def _read_opening(self, final: bool) -> bool:
        """Whether the answer begins with reasoning."""
        start = self._text if self._reasoning_open else self._text.lstrip()
        tagged = start.startswith(OPEN_THINK)
        if not tagged and not final and OPEN_THINK.startswith(start):
            return False
        self._read = self._read_content
        if tagged or self._reasoning_open:
            self._text = start.removeprefix(OPEN_THINK)
            self._reasoning = _Text("\n", trimmed=True)
            self._content = _Text(trimmed=True)
            self._read = self._read_reasoning
        return True

    def _read_reasoning(self, final: bool) -> bool:
        assert self._reasoning is not None
        thought, tag = self._take_until(CLOSE_THINK, final)
        self._emit("reasoning_content", self._reasoning.add(thought))
        if tag:
            self._read = self._read_content
        elif final:
            self._malformed.append(f"the reasoning was never closed by {CLOSE_THINK}")
        return tag

    def _read_content(self, final: bool) -> bool:
        if self._tools:
            text, tag = self._take_until(OPEN_CALL, final)
        else:
            text, tag, self._text = self._text, False, ""
        self._emit("content", self._content.add(text))
        if tag:
            self._call, self._read = HermesCall(), self._read_call
        return tag

    def _read_call(self, final: bool) -> bool:
        call, text, self._text = self._call, self._text, ""
        begun = call.name is not None
        arguments = call.feed(text, final=final)
        if call.name is not None and not begun:
            self._begin_call(call.name)
        if arguments:
            self._deltas.append(_more_arguments(len(self._calls), arguments))
        if call.rest is None and not final:
            return False
        self._end_call(call)
        if call.rest is None:
            return False
        self._text, self._read = call.rest, self._read_content
        return True

    def _take_until(self, tag: str, final: bool) -> tuple[str, bool]:
        """The text before the tag, and whether the tag is there."""
        # str.partition is slow on a text without the tag.
        before, end, rest = self._text.partition(tag) if "<" in self._text else (self._text, "", "")
        if not end and not final:
            before = without_partial(before, (tag,))
            rest = self._text[len(before) :]
        self._text = rest
        return before, bool(end)

    # ---- tool calls ------------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self._content.end()
        index = len(self._calls)
        self._deltas.append(_begin_call(index, ToolCall(name, "", call_id(self._seed, index))))

    def _end_call(self, call: HermesCall) -> None:
        index, name, arguments = len(self._calls), call.name, call.arguments
        if call.rest is None:
            self._malformed.append(f"{OPEN_CALL} was never closed by {CLOSE_CALL}")
        else:
            try:
                parsed = parse_call(call.body)
                if name is None:
                    name, arguments = parsed
                    self._begin_call(name)
                    self._deltas.append(_more_arguments(index, arguments))
                elif parsed != (name, arguments):
                    raise ValueError("it has a key twice")
            except ValueError as error:
                self._malformed.append(f"tool call {call.body.strip()[:80]!r}: {error}")
        if name is None:
            text = OPEN_CALL + call.body + (CLOSE_CALL if call.rest is not None else "")
            self._emit("content", self._content.add(text))
        else:
            self._calls.append(ToolCall(name, arguments, call_id(self._seed, index)))


class _Text:
    """Text without trailing white space and, once `trimmed`, without leading white space."""

    def __init__(self, strip: str | None = None, *, trimmed: bool = False) -> None:
        self._strip = strip
        self._trimmed = trimmed
        self._parts: list[str] = []
        self._held = ""
        """White space that is dropped if nothing follows."""

    def add(self, text: str) -> str:
        """The part of the text to emit now."""
        if self._trimmed:
            text = text.lstrip(self._strip)
            self._trimmed = not text
            # Between calls the template itself writes line breaks; text there keeps one.
            text = "\n" + text if text and self._parts else text
        text = self._held + text
        certain = text.rstrip(self._strip)
        self._held = text[len(certain) :]
        if certain:
            self._parts.append(certain)
        return certain

    def add_held(self) -> str:
        """Adds the white space at the end."""
        held, self._held = self._held, ""
        self._parts.append(held)
        return held

    def end(self) -> None:
        """A tool call follows."""
        self._held, self._trimmed = "", True

    @property
    def text(self) -> str:
        return "".join(self._parts)


def _begin_call(index: int, call: ToolCall) -> Delta:
    return {"tool_calls": [{"index": index, **call.plain("")}]}


def _more_arguments(index: int, text: str) -> Delta:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def call_id(seed: str, index: int) -> str:
    """The id of a tool call: the same for the same answer, however it was streamed."""
    return f"call_{hashlib.sha256(json.dumps([seed, index]).encode()).hexdigest()[:24]}"


@lru_cache(maxsize=64)  # a server keeps the tokenizer of every base model that it has used
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
            pieces.append(token.encode())  # an added token may contain characters outside the table
    return pieces
