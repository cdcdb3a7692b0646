"""docs/promises.md against tests/: every test it names exists, beside the command that runs it."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from tests.processes import FOLDERS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
REASON = re.compile(r"^Not (yet: |applicable here, because )\S", re.M)
NAMED = re.compile(r"`(tests/[^`]*)`")
LINE = re.compile(r"^- `(tests/[^`]*)`(?: \(`(make [\w-]+)`\))?$", re.M)
USUAL = "make test"
"""What runs a test that no command stands beside."""


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
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def collected(path: Path) -> frozenset[str]:
    """`function` and `Class::method` for all that pytest would collect from the file."""
    names: set[str] = set()
    for node in _tree(path).body:
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
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for base in node.bases
    )


def verb(reference: str) -> str:
    """The command that runs a test; for a suite of tests/conformance, any that runs a class of it."""
    path, name = ROOT / reference.partition("::")[0], reference.partition("::")[2]
    if path.name.startswith("test_"):
        return _verb(path, name)
    suite = name.partition("::")[0]
    verbs = {_verb(file, heir) for file, heir in heirs(suite)}
    return USUAL if USUAL in verbs else min(verbs)


@cache
def heirs(suite: str) -> tuple[tuple[Path, str], ...]:
    """Classes that pytest collects and that derive from the suite."""
    return tuple(
        (path, node.name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and suite in map(ast.unparse, node.bases)
    )


def _verb(path: Path, name: str) -> str:
    tree = _tree(path)
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    outer, _, inner = name.partition("::")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.name in (outer, inner)
        ):
            marks += map(ast.unparse, node.decorator_list)
    used = " ".join(marks)
    if "mark.vllm" in used:
        return "make test-vllm"
    if "HONE_CHAOS" in used:
        return "make chaos"
    is_e2e = "mark.e2e" in used or any(path.is_relative_to(folder) for folder in FOLDERS)
    return "make test-e2e" if is_e2e else USUAL


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


def test_there_are_eight_promises_and_twenty_problems():
    wanted = [("Eight promises", n) for n in range(1, 9)]
    wanted += [("Twenty problems", n) for n in range(1, 21)]
    assert list(entries(PAGE)) == wanted


@pytest.mark.parametrize("entry", entries(PAGE), ids=lambda entry: f"{entry[0]} {entry[1]}")
def test_it_is_held_by_tests_that_exist(entry: tuple[str, int]):
    body = entries(PAGE)[entry]
    named = NAMED.findall(body)
    assert len(named) == len(set(named)), "a test is named twice"
    wrong = {reference: why for reference in named if (why := missing(reference))}
    assert not wrong
    beside = {test: command or USUAL for test, command in LINE.findall(body)}
    assert beside == {test: verb(test) for test in named}, "name the command after the test"
    assert named or (entry[0] == "Twenty problems" and REASON.search(body)), "no test and no reason"


def test_what_is_wrong_with_a_name_is_found():
    here = "tests/test_promises.py"
    assert missing(f"{here}::test_what_is_wrong_with_a_name_is_found") is None
    assert missing(f"{here}::test_nothing") == missing(here) == "no such test in that file"
    assert missing(f"{here}::missing") == "no such test in that file"
    assert missing("tests/test_nowhere.py::test_x") == "no such file"
    suite = "tests/conformance/engine.py::EngineConformance"
    assert missing(f"{suite}::test_probe_reads_back_what_is_served") is None
    assert missing(f"{suite}::test_x") == "no such test in that file"


def test_the_command_follows_from_markers_and_folders():
    assert verb("tests/test_promises.py::test_what_is_wrong_with_a_name_is_found") == "make test"
    assert verb("tests/e2e/test_seed.py::test_the_seeds_configuration_trains_and_reports") == (
        "make test-e2e"
    )
    assert verb("tests/sdk/test_local.py::test_a_server_that_never_answers_is_given_up") == (
        "make test-e2e"
    )
    kill = "test_killed_while_a_job_trains_it_comes_to_the_same_end"
    assert verb(f"tests/e2e/test_kill_objectives.py::{kill}") == "make chaos"
    # Of its implementations one runs in `make test`; the frameworks all run in `make test-e2e`.
    engine, capture = "engine.py::EngineConformance", "capture.py::CaptureConformance"
    assert verb(f"tests/conformance/{engine}::test_adapters_of_one_batch_do_not_mix") == "make test"
    turns = f"tests/conformance/{capture}::test_turns_continue_the_sampled_ids"
    assert verb(turns) == "make test-e2e"
