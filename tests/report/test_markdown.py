"""report/markdown.py: what a model says is shown, and is never markup."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tests.finetune.runs import Story, tell
from tests.report.test_metrics import started
from tests.report.test_report import finished, log, record

from hone.report import report
from hone.report.markdown import escape, fence, fenced

HOSTILE = [
    "<script>alert(1)</script>",
    "<!-- hidden -->",
    "&lt;b&gt; &#60; &copy;",
    "[click](http://evil)",
    "![x](http://evil/pixel.png)",
    "<http://evil>",
    "[a]: http://evil",
    "a | b | c",
    "# a heading",
    "#",
    "> said",
    "- item",
    "+ item",
    "* item",
    "1. item",
    "12) item",
    "---",
    "===",
    "***",
    "_ _ _",
    "```python",
    "~~~",
    "`code` and ``more``",
    "*bold* **bold** _it_ __it__ ~~gone~~",
    "\\ \\* \\",
    "    indented",
    "\tindented",
    "on_policy_failure is_a_key",
    "a -> b, 0.5 > 0.4",
]


def parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def inline(tokens: list[Token]) -> list[Token]:
    return [child for token in tokens for child in token.children or ()]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_paragraph_is_its_text(text: str):
    tokens = parsed(str(escape(text)))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert {token.type for token in inline(tokens)} <= {"text", "text_special"}
    assert "".join(token.content for token in inline(tokens)) == text.strip()


def test_parts_of_a_sentence_keep_their_spaces():
    # A list that a template joins with ", ".
    assert (
        "".join(map(escape, ("4 forked", ", ", "2 [rewritten]"))) == "4 forked, 2 \\[rewritten\\]"
    )
    assert escape(" (a table's share)") == " (a table's share)" and escape(" ").strip() == ""


def test_lines_stay_lines_of_one_paragraph():
    text = "\n\n".join(HOSTILE)
    tokens = parsed(str(escape(text)))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    kinds = Counter(token.type for token in inline(tokens))
    assert set(kinds) <= {"text", "text_special", "softbreak"}
    assert kinds["softbreak"] == len(HOSTILE) - 1


@pytest.mark.parametrize("text", [*HOSTILE, "```\n````\n", "a\u2028b", ""])
def test_code_is_its_text(text: str):
    (token,) = parsed(str(fenced(text, "bash")))
    assert (token.type, token.info) == ("fence", "bash")
    assert token.content == "".join(f"{line}\n" for line in text.splitlines())
    assert len(fence(text)) >= 3


ELEMENTS = frozenset(
    f"{name}_{end}"
    for name in ("heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td")
    for end in ("open", "close")
)


def test_a_report_of_hostile_text_has_the_elements_of_any_other(tmp_path: Path):
    """In inputs, answers, ids, failures, warnings, messages and settings."""
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    counts = []
    for place, evil in ((plain, "text"), (hostile, "\n".join(HOSTILE))):
        tell(Story(epochs=2, interval=2, examples=4, held_out=3), place)
        failure = {"kind": "policy", "reason": evil, "message": evil}
        told: dict[str, Any] = {
            "config_file": evil,
            "name": "agent",
            "evaluator": evil,
            "command": "hone",
        }
        events = (place / "events.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in events if '"run_started"' not in line]
        lines = [started(**told), *(e for e in lines if e["type"] != "run_finished")]
        lines.append({"at": 98.0, "type": "warning", "message": evil})
        log(place, *lines, finished("failed", message=evil))
        folder = place / "trajectories"
        (folder / "validation_000.jsonl").write_text(
            record(evil, None, None, failure=failure, input=evil)
        )
        (folder / "validation_002.jsonl").write_text(record(evil, 1.0, evil, input=evil))
        report.write(place, brief=True)
        tokens = parsed((place / "report.md").read_text())
        assert {t.type for t in tokens} <= ELEMENTS | {"inline", "fence"}
        assert {t.type for t in inline(tokens)} <= {
            *("text", "text_special", "softbreak", "strong_open", "strong_close")
        }
        counts.append(Counter(token.type for token in tokens))
    assert counts[0] == counts[1]
    assert "<script>" not in (hostile / "report.html").read_text()
    shutil.rmtree(hostile)
