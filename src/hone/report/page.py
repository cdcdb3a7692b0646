"""A report as one HTML file, and as Markdown.

In:   a Document of sections
Out:  text; the HTML holds its pictures and needs nothing from any network

Pictures come in two widths, and the browser takes the one that fits: a phone shows letters of the
same size as a desk. Everything that came from a model or a dataset is escaped.
"""

from base64 import b64encode
from html import escape

from hone.report.blocks import (
    Bar,
    Block,
    Commands,
    Document,
    Pairs,
    Picture,
    Table,
    Text,
    Tiles,
)
from hone.report.examples import Answer, Example
from hone.report.text import number

STYLE = """
:root{--ink:#22303c;--soft:#5c6770;--line:#d5dce1;--paper:#f4f7f8;--cool:#1f7a8c;--warm:#c2551f;
--good:#1f7a8c;--bad:#a4262c;--unsure:#8a5a00}
*{box-sizing:border-box}
body{margin:0;color:var(--ink);background:#fff;font:16px/1.55 system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:54rem;margin:0 auto;padding:2.2rem 1.1rem 4rem}
header p.name{margin:0;color:var(--soft);font-size:.9rem}
h1{font-size:clamp(1.55rem,5vw,2.3rem);line-height:1.15;margin:.3rem 0 .7rem;letter-spacing:-.015em;
text-wrap:balance}
h1.good{color:var(--good)}h1.bad{color:var(--bad)}h1.unsure{color:var(--unsure)}
header p.basis{font-size:1.06rem;margin:0;max-width:44rem}
h2{font-size:1.18rem;margin:2.8rem 0 .7rem;padding-top:1rem;border-top:1px solid var(--line)}
p{margin:.6rem 0;overflow-wrap:anywhere;white-space:pre-line}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;
margin:1.5rem 0 .6rem}
.tile{background:var(--paper);border-radius:.6rem;padding:.75rem .95rem}
.tile b{display:block;font-size:1.75rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
img{display:block;width:100%;height:auto;margin:.4rem 0}
.note{color:var(--soft);font-size:.9rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.94rem}
th{font-weight:600;text-align:left;color:var(--soft);font-size:.85rem}
th,td{padding:.38rem .9rem .38rem 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
.num td+td,.num th+th{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.facts td:first-child{color:var(--soft);white-space:nowrap;width:1%;padding-right:1.6rem}
.bar{display:flex;height:1.5rem;border-radius:.4rem;overflow:hidden;margin:.9rem 0 .7rem}
.bar i{display:block;min-width:2px}
.key{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem 1rem;
font-size:.92rem;padding:0;margin:0;list-style:none}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;margin-right:.5rem}
.key span{display:block;color:var(--soft);padding-left:1.3rem}
.start{background:#7a6fb0}.rollouts{background:#1f7a8c}.learning{background:#e2703a}
.validation{background:#e9b949}.everything{background:#c3ccd2}
pre{background:var(--paper);border-radius:.5rem;padding:.75rem .9rem;margin:.25rem 0 1rem;
font:.86rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
.does{color:var(--soft);font-size:.9rem;margin:.9rem 0 0}
.pair{border:1px solid var(--line);border-radius:.6rem;padding:.9rem 1rem;margin:.8rem 0}
.pair .kind{color:var(--soft);font-size:.85rem}
.pair .ask{margin:.2rem 0 .8rem;font-weight:600;white-space:pre-wrap}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,17rem),1fr));gap:.8rem}
.two pre{margin:.2rem 0 0}
.two .label{font-size:.88rem;color:var(--soft)}.two .label b{color:var(--ink)}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem}
@media print{h2{break-after:avoid}.pair,img{break-inside:avoid}}
"""


# ---- HTML -----------------------------------------------------------------------------------------


def html(document: Document) -> str:
    """The whole page."""
    sections = "\n".join(
        (f"<h2>{escape(s.title)}</h2>\n" if s.title else "")
        + "\n".join(_html(block) for block in s.blocks)
        for s in document.sections
    )
    title = escape(f"{document.name}: {document.headline}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="name">{escape(document.name)}</p>
<h1 class="{document.tone}">{escape(document.headline)}</h1>
<p class="basis">{escape(document.basis)}</p>
</header>
{sections}
<footer>Written by hone from events.jsonl; report.json holds the same numbers.</footer>
</main>
</body>
</html>
"""


def _html(block: Block) -> str:
    match block:
        case Text():
            return f'<p class="note">{escape(block.words)}</p>'
        case Tiles():
            tiles = (
                f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
                f"<span>{escape(note)}</span></div>"
                for label, value, note in block.tiles
            )
            return f'<div class="tiles">{"".join(tiles)}</div>'
        case Table():
            return _html_table(block)
        case Picture():
            image = f'<img src="{_embedded(block.wide)}" alt="{escape(block.alt)}">'
            if block.narrow is None:
                return image
            source = f'<source media="(max-width: 600px)" srcset="{_embedded(block.narrow)}">'
            return f"<picture>{source}{image}</picture>"
        case Bar():
            return _html_bar(block)
        case Commands():
            return "\n".join(
                f'<p class="does">{escape(what)}</p><pre>{escape(command)}</pre>'
                for what, command in block.commands
            )
        case Pairs():
            return "\n".join(_html_pair(example) for example in block.examples)


def _embedded(picture: bytes) -> str:
    return f"data:image/png;base64,{b64encode(picture).decode('ascii')}"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    shown = f"<thead><tr>{head}</tr></thead>" if any(table.head) else ""
    kind = "num" if table.numbers else "facts"
    return f'<div class="wide"><table class="{kind}">{shown}<tbody>{rows}</tbody></table></div>'


def _html_bar(bar: Bar) -> str:
    parts = "".join(
        f'<i class="{name.split()[0]}" style="width:{share:.2%}" title="{escape(name)}"></i>'
        for name, share, _ in bar.parts
    )
    key = "".join(
        f'<li><i class="{name.split()[0]}"></i>{escape(name)} '
        f"<span>{share:.0%}, {escape(amount)}</span></li>"
        for name, share, amount in bar.parts
    )
    return f'<div class="bar">{parts}</div><ul class="key">{key}</ul>'


def _html_pair(example: Example) -> str:
    return (
        f'<div class="pair"><div class="kind">{escape(example.id)}, {escape(example.kind)}</div>'
        f'<div class="ask">{escape(example.input)}</div><div class="two">'
        f"{_html_answer('before', example.before)}{_html_answer('after', example.after)}"
        "</div></div>"
    )


def _html_answer(label: str, answer: Answer) -> str:
    return (
        f'<div><div class="label">{label}: <b>{_reward(answer)}</b></div>'
        f"<pre>{escape(answer.text)}</pre></div>"
    )


def _reward(answer: Answer) -> str:
    return "no reward" if answer.reward is None else number(answer.reward)


# ---- Markdown -------------------------------------------------------------------------------------


def markdown(document: Document) -> str:
    """The same, for a terminal or a repository."""
    lines = [f"# {document.headline}", "", document.basis, ""]
    for section in document.sections:
        # Some pictures stand in the HTML alone; a section of nothing else is left out here.
        told = [block for block in map(_markdown, section.blocks) if block]
        lines += [f"## {section.title}", ""] if section.title and told else []
        for block in told:
            lines += [*block, ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(block: Block) -> list[str]:
    match block:
        case Text():
            return [block.words]
        case Tiles():
            return _md_table(("", "reward", "95% interval"), block.tiles)
        case Table():
            return _md_table(block.head, block.rows)
        case Picture():
            if block.file:
                return [f"![{block.alt}]({block.file})"]
            return [] if block.instead is None else _markdown(block.instead)
        case Bar():
            rows = tuple((name, f"{share:.0%}", amount) for name, share, amount in block.parts)
            return _md_table(("phase", "share", "time"), rows)
        case Commands():
            lines = []
            for what, command in block.commands:
                lines += [f"# {what}", command]
            return ["```bash", *lines, "```"]
        case Pairs():
            return [line for example in block.examples for line in _md_pair(example)]


def _md_table(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]


def _md_pair(example: Example) -> list[str]:
    return [
        f"**{example.id}** ({example.kind})",
        *_fenced(example.input),
        f"before: {_reward(example.before)}",
        *_fenced(example.before.text),
        f"after: {_reward(example.after)}",
        *_fenced(example.after.text),
        "",
    ]


def _fenced(text: str) -> list[str]:
    """In a fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return ["", fence, *text.splitlines(), fence, ""]
