"""docs/art.md: its program runs as it stands, on a real server with a model of a megabyte."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.sdk import art_table

from hone import art

PAGE = Path(__file__).parents[2] / "docs/art.md"


def program() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_the_loop_fits_on_a_postcard():
    written = [line for line in program().splitlines() if line.strip()]
    assert len(written) <= 30


def test_it_uses_public_names_only():
    tree = ast.parse(program())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "art"
    }
    assert used <= set(art.__all__)


def test_scripts_import_every_name_as_from_art():
    """In a process of its own: in this one, other tests have imported the modules."""
    lines = ["import hone.art as art"]
    for name in art_table.NAMES:
        home, _, last = name.rpartition(".")
        if not home[:1].isupper():  # not a method
            lines += [f"from hone.art{'.' * bool(home)}{home} import {last}"]
            first, below = name.split(".")[0], f"getattr(art, {name.split('.')[0]!r})"
            lines += [f"assert {below} is not None, {first!r}"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def test_the_page_shows_what_to_write_instead_and_all_of_it_works():
    """Each line of the migration table, after `import art` became `import hone.art as art`."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("## From ART to hone\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", section, re.MULTILINE)
    assert len(rows) >= 10
    scope: dict[str, object] = {}
    for before, after in rows:
        assert "art" in before and "hone" not in before
        exec(after, scope)


def test_the_table_says_what_happens_to_every_name_and_option():
    assert art_table.BEGIN + art_table.table() + art_table.END in PAGE.read_text(), (
        "run `python -m tests.sdk.art_table`"
    )


@pytest.mark.e2e
@pytest.mark.slow
def test_it_runs_and_the_step_rises(tmp_path: Path, tiny_model: Path):
    code = program().replace('"smollm2-135m-instruct"', repr(str(tiny_model)))
    code = code.replace(".get_step(), 10)", ".get_step(), 2)")
    # A random model says none of the three words; any reward that differs shows the loop turning.
    code = code.replace(
        'WORTH.get((choice.message.content or "").strip(" .").lower(), 0.0)',
        "len(choice.message.content or '') / 10",
    )
    assert code.count(str(tiny_model)) == 1 and "/ 10" in code and ", 2)" in code
    (tmp_path / "loop.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2"]
    assert done.stderr.count("gather: 32/32") == 2
    checkpoints = tmp_path / ".hone/projects/one-word/models/agent-001/checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["0000", "0001", "0002"]
    again = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (again.returncode, again.stdout) == (0, ""), "started again, it has nothing left to do"
