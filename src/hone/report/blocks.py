"""The parts of a report, in any output format.

In:   nothing; values only
Out:  a Document of Sections of Blocks
"""

from dataclasses import dataclass
from typing import Literal

from hone.report.examples import Example

Tone = Literal["good", "bad", "unsure"]
"""Colour of the headline."""


@dataclass(frozen=True, slots=True)
class Text:
    words: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """The most important numbers: label, value, note."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = True
    """Columns after the first hold numbers."""


@dataclass(frozen=True, slots=True)
class Picture:
    wide: bytes
    narrow: bytes | None
    """The same picture for a phone, if it was drawn."""
    alt: str
    file: str | None = None
    """Name of the picture's own file beside the report."""
    instead: Table | None = None
    """The same content for a report without pictures."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole: label, share, amount."""

    parts: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """What a command does, and the command."""

    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    examples: tuple[Example, ...]


Block = Text | Tiles | Table | Picture | Bar | Commands | Pairs


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    """What was trained."""
    headline: str
    basis: str
    """What the headline rests on, in a sentence or two."""
    tone: Tone
    sections: tuple[Section, ...]
