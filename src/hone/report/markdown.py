"""Text from models, datasets and errors in Markdown: it is shown as it is and is never markup.

In:   text
Out:  Markdown that a parser renders as that text

report.md is rendered by GitHub and by editors, and its text comes from anywhere: a `|` must not end
a table's cell, and a `<script>` of a model must not run.
"""

import re
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

_SPECIAL = re.compile(r"[\\`*\[\]<|~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""Markup anywhere in a line; an underscore inside a word is none."""
_FIRST = re.compile(r">|#{1,6}(\s|$)|[-+](\s|$)|[-=][-=\s]*$")
"""Markup at the start of a line: a quotation, a heading, a list, an underline."""
_NUMBERED = re.compile(r"(\d{1,9})(?=[.)](\s|$))")
"""An item of a numbered list."""


def escape(value: Any) -> Markup:
    """The text, with its markup escaped; what is Markdown already stays as it is."""
    text = str(value)  # raises for an undefined name of a template
    if isinstance(value, Markup):
        return value
    # Indented lines would be code, and blank ones would end the paragraph.
    lines = [line.strip() for line in text.splitlines()]
    # Parts of a sentence, such as ", ", keep the spaces around them.
    before, after = (" " if end == " " else "" for end in (text[:1], text[-1:]))
    return Markup(before + "\n".join(_line(line) for line in lines if line) + after)


def _line(line: str) -> str:
    text = _SPECIAL.sub(lambda match: f"\\{match[0]}", line)
    if item := _NUMBERED.match(text):
        return f"{item[1]}\\{text[item.end() :]}"
    return f"\\{text}" if _FIRST.match(text) else text


def one_line(text: str) -> str:
    """The text without line breaks, for headings and cells of tables."""
    return " ".join(text.split())


def fence(text: str) -> Markup:
    """A code fence longer than any in the text."""
    return Markup("`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))]))


def fenced(text: str, language: str = "") -> Markup:
    """The text as a block of code."""
    ticks = fence(text)
    return Markup("\n".join([f"{ticks}{language}", *text.splitlines(), ticks]))


def script(commands: Iterable[tuple[str, str]]) -> str:
    """Commands, each below a comment that says what it does."""
    return "\n".join(f"# {one_line(what)}\n{command}" for what, command in commands)
