"""Parse one Hermes tool call, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as it grows.

In:   the text after `<tool_call>`, in pieces of any size
Out:  the name and the arguments as soon as they are certain, and the text after the call

The call ends at the first `</tool_call>` at which its body is a JSON object, and if there is none, at
the first `</tool_call>`: a tag inside a JSON string does not end it. The call is begun once its body
reads `{"name": "NAME", "arguments": {`. A call that has begun has been streamed and remains a call,
even if it turns out to be malformed. In any other form, only a complete call is one.
"""

import json
import re
from collections.abc import Iterator, Sequence

from hone.wire.json import load_object, object_or_none

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"

_SPACE = " \t\n\r"
_HEAD = re.compile(
    r' \{ "name" : ("(?:[^"\\\x00-\x1f]|\\.)*") , "arguments" : '.replace(" ", f"[{_SPACE}]*")
)
_MARK = re.compile(rf'\\["\\]|["{{}}\[\]\x00-\x1f]|{CLOSE_CALL}')


class HermesCall:
    """One call. Feed it text until `rest` is not None, or until the text is final."""

    def __init__(self) -> None:
        self.name: str | None = None
        """Known once the call is begun."""
        self.body = ""
        """The whole body, known once the call has ended or the text is final."""
        self.rest: str | None = None
        """The text after the call, once it has ended."""
        self._text = ""
        self._read = 0
        """Number of characters read; the rest may be part of a tag or of an escape sequence."""
        self._end: int | None = None
        self._depth = 0
        self._opened = 0
        """Number of objects and lists seen so far."""
        self._in_string = False
        self._line_break = False
        """The string contains a line break or another control character, which JSON does not
        allow."""
        self._quoted_tag: int | None = None
        """The first `</tool_call>`, if it is inside a string."""
        self._string_ended = False
        """A string has ended since the quoted tag, and what follows it is unread."""
        self._arguments_start = 0
        self._arguments_end: int | None = None
        self._sent = 0

    @property
    def arguments(self) -> str:
        """The arguments returned so far."""
        return self._text[self._arguments_start : self._sent]

    def feed(self, text: str, *, final: bool) -> str:
        """More of the arguments. `final`: no more text will come."""
        # CPython appends in place to a string that nothing else refers to.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        while self._end is None:
            if self._string_ended and not self._continues():
                break
            mark = _MARK.search(self._text, self._read)
            if mark is None:
                break
            self._read = mark.end()
            self._lex(mark[0], mark.start())
        if final and self._end is None:
            self._end = self._quoted_tag
        unread = self._text[self._read :]
        if self._end is None and not final:
            unread = without_partial(unread, (CLOSE_CALL, '\\"'))
        self._read += len(unread)
        if self._end is not None or final:
            self.body = self._text[: self._end]
            self.rest = None if self._end is None else self._text[self._end + len(CLOSE_CALL) :]
        return self._new_arguments()

    def _new_arguments(self) -> str:
        """The part of the arguments that was not returned yet."""
        if self.name is None:
            return ""
        bounds = (self._read, self._end, self._quoted_tag, self._arguments_end)
        if self._end is not None:
            bounds = (self._end, self._arguments_end)
        start, self._sent = self._sent, min(bound for bound in bounds if bound is not None)
        return self._text[start : self._sent]

    def _lex(self, token: str, at: int) -> None:
        if self._in_string:
            self._lex_string(token, at)
        elif token == CLOSE_CALL:
            quoted = self._quoted_tag
            whole = quoted is None or object_or_none(self._text[:at]) is not None
            self._end = at if whole else quoted
        elif self._opened and not self._depth:
            pass  # after the object
        elif token == '"':
            self._in_string, self._line_break = self._depth > 0, False
        elif token in "{[":
            self._depth += 1
            self._opened += 1
            if self._opened == 2 and token == "{" and self._quoted_tag is None:
                self._begin(self._text[:at])
        elif token in "}]":
            self._depth = max(0, self._depth - 1)
            if self._depth == 1 and self._arguments_end is None:
                self._arguments_end = at + 1

    def _lex_string(self, token: str, at: int) -> None:
        if token == '"':
            self._in_string = False
            self._string_ended = self._quoted_tag is not None
        elif token == CLOSE_CALL:
            if self._line_break:
                self._end = at
            elif self._quoted_tag is None:
                self._quoted_tag = at
        elif token < " ":
            self._line_break = True
            self._end = self._quoted_tag

    def _continues(self) -> bool:
        """Whether to read on after the string; ends the call where the JSON is broken."""
        following = self._text[self._read :].lstrip(_SPACE)
        if not following:
            return False
        self._string_ended = False
        if following[0] not in ",:}]":
            self._end = self._quoted_tag
        return self._end is None

    def _begin(self, head: str) -> None:
        """Begin the call if the text before its first inner object has the expected form."""
        match = _HEAD.fullmatch(head)
        parsed = object_or_none(f'{{"name": {match[1]}}}') if match else None
        if parsed and (name := parsed["name"]):
            self.name, self._arguments_start, self._sent = name, len(head), len(head)


def parse_call(body: str) -> tuple[str, str]:
    """The name of a whole call and its arguments as written; raises ValueError."""
    value = load_object(body)
    # Models trained on Llama's tool calls write `parameters`; with neither key, there are no
    # arguments.
    key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
    name, arguments = value.get("name"), value.get(key, {})
    if not isinstance(name, str) or not name:
        raise ValueError(f"expected a name, got {name!r}")
    if not isinstance(arguments, dict):
        raise ValueError(f"expected {key} to be an object, got {arguments!r}")
    return name, dict(_members(body)).get(key, "{}")


def _members(body: str) -> Iterator[tuple[str, str]]:
    """The keys of a JSON object, each with the text of its value."""
    decoder = json.JSONDecoder()
    rest = body.lstrip(_SPACE + "{")
    while not rest.startswith("}"):
        key, end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip(_SPACE + ":")
        _, end = decoder.raw_decode(rest)
        yield key, rest[:end]
        rest = rest[end:].lstrip(_SPACE + ",")


def without_partial(text: str, tags: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a tag."""
    start = max(0, len(text) - max(map(len, tags), default=1) + 1)
    for at in range(start, len(text)):
        if any(text[at] == tag[0] and tag.startswith(text[at:]) for tag in tags):
            return text[:at]
    return text
