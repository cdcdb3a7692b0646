"""docs/promises.md against tests/: every test it names exists, and nothing stands there without one."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
REASON = re.compile(r"^Not (yet: |applicable here, because )\S", re.M)
NAMED = re.compile(r"`(tests/[^`]*)`")


def entries(page: str) -> dict[tuple[str, int], str]:
    """(part, number) -> what stands below that heading."""
    by_place: dict[tuple[str, int], str] = {}
    for part in page.split("\n## ")[1:]:
        title, *texts = re.split(r"^### ", part, flags=re.M)
        for text in texts:
            number, _, body = text.partition(". ")
            assert (title.strip(), int(number)) not in by_place, f"{title.strip()} {number} twice"
            by_place[title.strip(), int(number)] = body
    return by_place


@cache
def collected(path: Path) -> frozenset[str]:
    """`function` and `Class::method` for all that pytest would collect from the file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{n.name}" for n in node.body if _is_test(n)}
        elif _is_test(node):
            names.add(node.name)
    return frozenset(names)


@cache
def subclassed() -> frozenset[str]:
    """Classes that some test file derives a class of its own from."""
    return frozenset(
        ast.unparse(base)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for base in node.bases
    )


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and node.name.startswith("test_")


def missing(reference: str) -> str | None:
    """What is wrong with `path::name`, if anything is."""
    path, _, name = reference.partition("::")
    if not (ROOT / path).is_file():
        return "no such file"
    if name not in collected(ROOT / path):
        return "no such test in that file"
    suite = name.partition("::")[0]
    if not Path(path).name.startswith("test_") and suite not in subclassed():
        return f"pytest does not collect that file, and no test file derives from {suite!r}"
    return None


def test_there_are_eight_promises_and_twenty_pains():
    wanted = [("Eight promises", n) for n in range(1, 9)]
    wanted += [("Twenty pains", n) for n in range(1, 21)]
    assert list(entries(PAGE)) == wanted


@pytest.mark.parametrize("entry", entries(PAGE), ids=lambda entry: f"{entry[0]} {entry[1]}")
def test_it_is_held_by_tests_that_exist(entry: tuple[str, int]):
    body = entries(PAGE)[entry]
    named = NAMED.findall(body)
    assert len(named) == len(set(named)), "a test is named twice"
    wrong = {reference: why for reference in named if (why := missing(reference))}
    assert not wrong
    assert named or (entry[0] == "Twenty pains" and REASON.search(body)), "no test and no reason"


def test_what_is_wrong_with_a_name_is_found():
    here = "tests/test_promises.py"
    assert missing(f"{here}::test_what_is_wrong_with_a_name_is_found") is None
    assert missing(f"{here}::test_nothing") == missing(here) == "no such test in that file"
    assert missing(f"{here}::missing") == "no such test in that file"
    assert missing("tests/test_nowhere.py::test_x") == "no such file"
    suite = "tests/conformance/engine.py::EngineConformance"
    assert missing(f"{suite}::test_probe_reads_back_what_is_served") is None
    assert missing(f"{suite}::test_x") == "no such test in that file"
