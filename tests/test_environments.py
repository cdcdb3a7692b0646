"""Scripts that run in another environment import nothing that only hone's environment has."""

import ast
from pathlib import Path

import pytest
from tests.environments import ROOT

PLACES = (
    "tests/art/client_*.py",
    "tests/art/scripts/*.py",
    "tests/frameworks/client_*.py",
    "tests/frameworks/talk.py",
    "tests/nat/edges.py",
    "tests/nat/project/src/*/*.py",
    "tests/plugin/src/*/*.py",
)
"""What is run with the packages of another environment; the folder that holds `tests` is not on its path."""
SCRIPTS = sorted(path for place in PLACES for path in ROOT.glob(place))


def imported(source: str) -> set[str]:
    """The first part of every name that the source imports, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_of_another_environment_imports_none_of_the_tests(path: Path) -> None:
    assert not imported(path.read_text(encoding="utf-8")) & {"tests", "bench", "docs", "conftest"}


def test_every_place_has_scripts() -> None:
    assert [place for place in PLACES if not list(ROOT.glob(place))] == []


def test_an_import_is_seen_wherever_it_stands() -> None:
    assert imported("def f():\n    from tests.patience import X\n") == {"tests"}
    assert imported("import json, tests.fakes as fakes\n") == {"json", "tests"}
    assert imported("from . import tests\nfrom .tests import x\n") == set()
