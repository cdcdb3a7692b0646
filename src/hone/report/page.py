"""A report as one HTML file, and as Markdown.

In:   a Document of sections; page.html.j2 and page.md.j2
Out:  text; the HTML embeds its pictures and loads nothing from the network

Pictures come in two widths, and the browser takes the one that fits: on a phone the letters have
the same size as on a desktop. Text from a model or a dataset is escaped in the HTML.
"""

from base64 import b64encode
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hone.report.blocks import Block, Document
from hone.report.text import number


def html(document: Document) -> str:
    return _environment("html").get_template("page.html.j2").render(document=document)


def markdown(document: Document) -> str:
    """The same report for a terminal or a repository; some pictures are tables here."""
    text = _environment("md").get_template("page.md.j2").render(document=document)
    return text.rstrip() + "\n"


def _environment(kind: str) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": _kind,
        "embedded": _embedded,
        "reward": _reward,
        "cell": _cell,
        "fence": _fence,
    }
    return environment


def _kind(block: Block) -> str:
    return type(block).__name__


def _embedded(picture: bytes) -> str:
    return f"data:image/png;base64,{b64encode(picture).decode('ascii')}"


def _reward(reward: float | None) -> str:
    return "no reward" if reward is None else number(reward)


def _cell(text: str) -> str:
    """One cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _fence(text: str) -> str:
    """A code fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence
