"""Run every code block of README.md, docs/ and the examples; slow ones only in `make test-docs`."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.docs.pages import ROOT, Block, Stage, blocks

# The reference is generated; `make check` keeps it up to date.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"]
PAGES += [ROOT / "README.md"]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
RUN = {"python", "bash", "yaml", "json", "jsonl", "toml"}
ALL = os.environ.get("HONE_DOCS") == "all"


@pytest.fixture
def stage(tmp_path: Path, tiny_model: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, tiny_model)
    # Commands on the pages name files of the repository.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for config in (tmp_path / "examples").rglob("*.yml"):
        config.write_text(stage.played(config.read_text(encoding="utf-8")), encoding="utf-8")
    yield stage
    stage.close()


def _runs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in RUN or "file" in block.marks]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_code_runs(page: Path, stage: Stage):
    for block in _runs(page):
        if ALL or not block.slow:
            stage.run(block)
    stage.check_configs()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_says_what_it_is(page: Path):
    """A block without a language is not run, so it must not look like code."""
    for block in blocks(page):
        assert block.language in RUN | {"", "text"}, f"{block}: {block.language!r} is not run"
        if block.language not in RUN:
            code = re.search(
                r"^(import |from \w+ import|hone |\.venv/bin/|curl |pip )", block.code, re.M
            )
            assert code is None, f"{block}: {code[0]!r} looks like code; name its language"


def test_blocks_are_read_with_their_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n\n<!-- slow -->\n<!-- file: a/b.py -->\n```python\nx = 1\n```\n\n"
        "- item\n\n  ```bash\n  hone serve &\n  ```\n\n```\npicture\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.language, first.code, first.line) == ("python", "x = 1\n", 5)
    assert first.marks == {"file": "a/b.py", "slow": ""}
    assert (second.language, second.code, second.marks) == ("bash", "hone serve &\n", {})
    assert (third.language, third.code) == ("", "picture\n")


@pytest.mark.parametrize(
    ("language", "code", "marks"),
    [
        ("bash", "true\nfalse\n", {}),
        ("python", "raise SystemExit(3)\n", {}),
        ("yaml", "a: [\n", {}),
        ("jsonl", '{"a": 1}\n{"a": \n', {}),
        ("python", "def f(:\n", {"file": "f.py"}),
        ("python", "import hone_is_not_quoted_here\n", {"from": "tests/docs/pages.py"}),
        ("bash", "true\n", {"elsewhere": "tests/docs/no_such_file.py"}),
    ],
)
def test_code_that_is_wrong_fails(stage: Stage, language: str, code: str, marks: dict[str, str]):
    with pytest.raises((AssertionError, ValueError, SyntaxError, yaml.YAMLError)):
        stage.run(Block(ROOT / "README.md", 1, language, code, marks))


def test_what_a_test_cannot_have_is_exchanged(stage: Stage, tiny_model: Path):
    text = "curl http://127.0.0.1:7623/health smollm2-135m-instruct x-smollm2-135m-instruct 17623"
    played = stage.played(text).split()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/health", played[1]) and ":7623/" not in played[1]
    assert played[2:] == [str(tiny_model), "x-smollm2-135m-instruct", "17623"]
