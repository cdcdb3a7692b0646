"""The pieces of a report, whatever it is written in.

In:   nothing; values only
Out:  a Document of Sections of Blocks
"""

from dataclasses import dataclass

from hone.report.examples import Example
from hone.report.headline import Tone


@dataclass(frozen=True, slots=True)
class Text:
    words: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers to be seen first: label, value, note."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns after the first are numbers, unless told otherwise."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    wide: bytes
    narrow: bytes | None
    """The same for a phone, if it was drawn."""
    alt: str
    file: str | None = None
    """Where it also lies beside the report."""
    instead: Table | None = None
    """What it shows, for a report without pictures."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole: label, share of it, what it comes to."""

    parts: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """What to type, each with what it does."""

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
    """What the run trained."""
    headline: str
    basis: str
    """What the headline rests on, in a sentence or two."""
    tone: Tone
    sections: tuple[Section, ...]
