"""prose.py: a changed, missing or unused entry fails, and an update rewrites the file."""

from pathlib import Path
from typing import Any

import pytest
from tests import prose
from tests.prose import Prose, Snapshots, place_of, read, write

TESTS = """
import pytest

@pytest.mark.parametrize("count", [1, 2])
def test_text(prose, tmp_path, count):
    prose(f"{tmp_path}/job-0123456789abcdef: {count} files")

def test_two(prose):
    prose("first")
    prose("second line\\n\\n## and third")

def test_last(prose):
    prose("second line\\n\\n## and third")
"""
ENTRIES = {
    "test_it.py::test_last": "second line\n\n## and third",
    "test_it.py::test_text[1]": "<tmp_path>/job-<id>: 1 files",
    "test_it.py::test_text[2]": "<tmp_path>/job-<id>: 2 files",
    "test_it.py::test_two": "first",
    "test_it.py::test_two #2": "second line\n\n## and third",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *options: str, test: str = "") -> pytest.ExitCode | int:
    """Run the folder's tests in this process."""
    plugins = ["-p", "tests.prose", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    where = ["--rootdir", str(folder), "-c", "/dev/null", "--import-mode=importlib"]
    return pytest.main([f"{folder}{test}", *where, *plugins, *options])


def test_an_update_writes_what_the_next_run_expects(folder: Path) -> None:
    assert run(folder) == 1, "no entry is there"
    assert run(folder, prose.UPDATE) == 0
    assert read(folder / prose.FILE) == ENTRIES
    before = (folder / prose.FILE).read_bytes()
    assert run(folder) == 0
    assert (folder / prose.FILE).read_bytes() == before


@pytest.mark.e2e
def test_processes_of_xdist_update_one_file(folder: Path) -> None:
    write(folder / prose.FILE, {"test_it.py::test_gone": "no such test"})
    assert run(folder, prose.UPDATE, "-n", "2") == 0
    assert read(folder / prose.FILE) == ENTRIES
    assert run(folder, "-n", "2") == 0
    write(folder / prose.FILE, ENTRIES | {"test_it.py::test_gone": "no such test"})
    assert run(folder, "-n", "2") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"test_it.py::test_two": "another"},
        {"test_it.py::test_two #3": "a third"},
        {"test_it.py::test_gone": "no such test"},
        {"test_gone.py::test_two": "no such file"},
        {"test_it.py::test_text[3]": "no such argument"},
    ],
)
def test_a_change_fails_and_an_update_takes_it_back(folder: Path, change: dict[str, str]) -> None:
    write(folder / prose.FILE, ENTRIES | change)
    assert run(folder) == 1
    assert run(folder, prose.UPDATE, "-k", "test_two") == 0
    assert read(folder / prose.FILE) == ENTRIES


def test_a_part_of_a_file_says_nothing_about_the_rest(folder: Path) -> None:
    write(folder / prose.FILE, ENTRIES | {"test_it.py::test_gone": "no such test"})
    assert run(folder, test="/test_it.py::test_last") == 0


def seen(text: str, **values: Any) -> str:
    """What an entry would hold."""
    snapshots = Snapshots(update=True)
    paths = {"tmp_path": "/t/it0", "tmp": "/t", "home": "/home/me", "repository": "/home/me/hone"}
    Prose(snapshots, "/nowhere", "test", paths)(text, **values)
    return snapshots.used["/nowhere"]["test"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/t/it0/state.sqlite: closed", "<tmp_path>/state.sqlite: closed"),
        ("'/t/models3/tiny'", "'<tmp>/models/tiny'"),
        ("/home/me/hone/src /home/me/x /home/mean", "<repository>/src <home>/x /home/mean"),
        ("http://127.0.0.1:43210/v1", "http://127.0.0.1:<port>/v1"),
        ("http://127.0.0.1:7623/v1 and port 80", "http://127.0.0.1:7623/v1 and port 80"),
        ("job-12345678 deadbeef01 added 150000000", "job-<id> <id> added 150000000"),
        ("web_search_20250305", "web_search_20250305"),
        ("<f at 0x7f3a12345678> (process 12)", "<f at <address>> (process <pid>)"),
        ("a \u2026  \n\n", "a \\u2026"),
    ],
)
def test_what_differs_between_machines_has_a_name(text: str, expected: str) -> None:
    assert seen(text) == expected


def test_a_value_must_be_in_the_text() -> None:
    assert seen("step 3 of 7", step=3) == "step <step> of 7"
    with pytest.raises(AssertionError, match="step=4 is not in"):
        seen("step 3 of 7", step=4)


def test_the_place_of_an_error_is_before_its_first_colon() -> None:
    assert place_of("config.yml:2: llms.m: wrong") == "config.yml:2"
    assert place_of(ValueError("eval.general: wrong")) == "eval.general"
