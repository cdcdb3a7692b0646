"""The messages that tests see, compared with one reviewed file per folder of tests.

In:   the error or the text that a test caught, and the values in it that differ between runs
Out:  a failure with the difference, if the text is not the test's entry in the folder's prose.md

A test asserts the class, the key and the place of an error. Its sentences are in prose.md, where they
are read and reviewed together; `make test ARGS=--update-prose` rewrites every file. An entry is the
same on every machine: paths, ports and ids are replaced by names such as <tmp_path> and <id>.
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

FILE = "prose.md"
UPDATE = "--update-prose"
COMMAND = f"make test ARGS={UPDATE}"
"""It runs the tests that are not e2e; `make test-e2e` takes the same argument for the others."""
INTRODUCTION = f"""# Messages that these tests see

One entry per message: the tests that see it, and the text. `{COMMAND}` rewrites this file
(`make test-e2e ARGS={UPDATE}` for the tests that are e2e); read the difference before you commit it.
"""
HEADING = "## "
REPOSITORY = Path(__file__).parents[1]
_UUID = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
VOLATILE = (
    (re.compile(r"(?<=Traceback \(most recent call last\):\n)(?:  .*\n)+"), "  <frames>\n"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
    (re.compile(rf"(?<!\w){_UUID}(?!\w)"), "<id>"),
    (re.compile(r"(?:(?<=[-_:])|(?<=[a-z]\.))(?!20\d{6}\b)[0-9a-f]{8,}(?![0-9A-Za-z])"), "<id>"),
    # A word of hexadecimal digits; the look-ahead leaves out numbers and words.
    (re.compile(r"(?<![\w.])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}(?!\w)"), "<id>"),
    # From 32768 on, a port is one that the system chose.
    (
        re.compile(
            r"((?:127\.0\.0\.1|localhost|\[::1\]):|\bport:? )(?:3[3-9]|[4-6]\d|32(?=[89]))\d{3}\b"
        ),
        r"\1<port>",
    ),
    # Lines of hone and of its tests move; those of a file that a test wrote stay.
    (re.compile(r"(<repository>/[^\s:]+\.py:)\d+\b"), r"\1<line>"),
    (re.compile(r"(?<=\bhub cache )\S+(?=:)"), "<directory>"),
    (re.compile(r"(/hone-[a-z]+-)[a-z0-9_]{8}(?=/)"), r"\1<id>"),
    (re.compile(r"errors\.pydantic\.dev/[\d.]+"), "errors.pydantic.dev"),
    # It holds the path of a model.
    (re.compile(r"(?<=the body has )\d+(?= bytes and about)"), "<size>"),
    # Words and numbers of the system, of SQLite, of Python and of libraries, which differ by version.
    (re.compile(r"\[Errno \d+\]"), "[Errno <n>]"),
    (re.compile(r"\*\*\* in database main \*\*\*[^)]*"), "<integrity check>"),
    (re.compile(r'(?<=no such column: )"(\w+)"'), r"\1"),
    (re.compile(r"(?<=maximum recursion depth exceeded)[\w ]+"), ""),
    (re.compile(r"(?<=Error while deserializing header: )[^)]+"), "<why>"),
    (re.compile(r"(?<=run with hone's attention \().*(?=\)\. )"), "<why>"),
    (re.compile(r"\b(process|pid) \d+\b"), r"\1 <pid>"),
    (re.compile(r"\bpython3\.\d+\b"), "python3"),
)

Caught = str | BaseException | pytest.ExceptionInfo[BaseException]


def text_of(caught: Caught) -> str:
    """The message with its notes."""
    error = caught.value if isinstance(caught, pytest.ExceptionInfo) else caught
    if isinstance(error, str):
        return error
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def place_of(caught: Caught) -> str:
    """Where an error is: the key, option or file:line before the first colon and space."""
    return text_of(caught).partition(": ")[0]


def without_paths(text: str, paths: Mapping[str, Path | str]) -> str:
    """The text with names for the paths, the longest first, also as symbolic links resolve them."""
    spelled = {
        each: f"<{name}>"
        for name, path in paths.items()
        for each in (str(Path(path).resolve()), str(path))
        if len(Path(each).parts) > 1  # a home that is `/` is in every path
    }
    for path in sorted(spelled, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.>-]){re.escape(path)}(?![\w-])", spelled[path], text)
    return text


def read(file: Path) -> dict[str, str]:
    """The entries of a file, by heading; headings one below the other share the text that follows."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else ():
        if line.startswith(HEADING):
            lines = [] if lines else lines  # of the heading above, if there is none between
            entries[line.removeprefix(HEADING)] = lines
        else:
            lines.append(line[4:])
    return {heading: "\n".join(lines).strip("\n") for heading, lines in entries.items()}


def write(file: Path, entries: Mapping[str, str]) -> None:
    """Entries in the order of their headings; no file if there are none."""
    if not entries:
        file.unlink(missing_ok=True)
        return
    parts = [INTRODUCTION]
    for text, headings in groupby(sorted(entries, key=_in_order), key=entries.__getitem__):
        lines = (f"    {line}" if line else "" for line in text.split("\n"))
        parts.append("\n".join([*(HEADING + heading for heading in headings), "", *lines, ""]))
    file.write_text("\n".join(parts), encoding="utf-8", newline="\n")


def _in_order(heading: str) -> list[tuple[int, str]]:
    """`test_a #10` after `test_a #9`."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", heading)
    ]


def test_of(heading: str, tests: Iterable[str]) -> str | None:
    """Which of the tests an entry belongs to; only its first entry has no number or name."""
    first = heading.rpartition(" #")[0]
    return heading if heading in tests else first if first in tests else None


@dataclass
class Snapshots:
    """What this process saw, by folder."""

    update: bool
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    """Entries of no test; an update removes them."""
    _read: dict[str, dict[str, str]] = field(default_factory=dict)

    def entries(self, folder: str) -> dict[str, str]:
        """What the folder's file had when the run began."""
        if folder not in self._read:
            self._read[folder] = read(Path(folder, FILE))
        return self._read[folder]

    def forget(self, folder: str, headings: Iterable[str]) -> None:
        """Remember entries that no test uses."""
        known = self.unused.setdefault(folder, [])
        known += [heading for heading in headings if heading not in known]

    def find_unused(self, folder: str, tests: Mapping[str, bool]) -> None:
        """Entries of tests that do not exist, or that take no `prose`.

        `tests` are those of the files that were collected whole, and whether each takes it.
        """
        files = {test.partition("::")[0] for test in tests}
        taking = {test for test, takes in tests.items() if takes}
        gone = [
            heading
            for heading in self.entries(folder)
            if ((file := heading.partition("::")[0]) in files and test_of(heading, taking) is None)
            or not Path(folder, file).exists()
        ]
        self.forget(folder, gone)

    def merge(self, report: Mapping[str, Any]) -> None:
        """Add what another process saw."""
        for folder, texts in report["used"].items():
            self.used.setdefault(folder, {}).update(texts)
        for folder, headings in report["unused"].items():
            self.forget(folder, headings)

    def write(self) -> None:
        """Rewrite the files of all folders that changed."""
        for folder in sorted({*self.used, *self.unused}):
            file = Path(folder, FILE)
            entries = before = read(file)
            entries = {k: v for k, v in before.items() if k not in self.unused.get(folder, ())}
            entries |= self.used.get(folder, {})
            if entries != before:
                write(file, entries)


@dataclass
class Prose:
    """Compares texts with the entries of one test."""

    snapshots: Snapshots
    folder: str
    test: str
    paths: Mapping[str, Path | str]
    _used: list[str] = field(default_factory=list)

    def __call__(self, caught: Caught, /, *, name: str | None = None, **values: object) -> None:
        """Compare a whole text with the next entry, or with the one of that name.

        Each of the values must be in the text, and stands there under its keyword; a pattern stands
        for what it matches.
        """
        heading = self.test
        if name is not None or self.test in self._used:
            heading = f"{self.test} #{name or len(self._used) + 1}"
        assert heading not in self._used, f"{name!r} was compared already"
        self._used.append(heading)
        text = self._normalized(text_of(caught), values)
        assert text, "there is no text"
        self.snapshots.used.setdefault(self.folder, {})[heading] = text
        known = self.snapshots.entries(self.folder).get(heading)
        if text == known or self.snapshots.update:
            return
        file = Path(self.folder, FILE)
        lines = unified_diff(
            (known or "").split("\n"), text.split("\n"), str(file), "this run", lineterm="", n=10
        )
        what = "has no entry" if known is None else "has another text"
        pytest.fail(
            "\n".join([f"{file} {what} for {heading}", *lines, f"If it is right: {COMMAND}"]),
            pytrace=False,
        )

    def end(self) -> None:
        """Fail if the test passed without some of its entries."""
        entries = self.snapshots.entries(self.folder)
        unused = [
            heading
            for heading in entries
            if test_of(heading, (self.test,)) and heading not in self._used
        ]
        self.snapshots.forget(self.folder, unused)
        if unused and not self.snapshots.update:
            what = "\n".join(
                [f"{Path(self.folder, FILE)} has entries that this test does not use:"]
            )
            pytest.fail("\n".join([what, *unused, f"Remove them: {COMMAND}"]), pytrace=False)

    def _normalized(self, text: str, values: Mapping[str, object]) -> str:
        for name in sorted(values, key=lambda name: len(str(values[name])), reverse=True):
            value = values[name]
            pattern = value if isinstance(value, re.Pattern) else re.compile(re.escape(str(value)))
            assert str(value) and pattern.search(text), f"{name}={value!r} is not in {text!r}"
            text = pattern.sub(f"<{name}>", text)
        text = without_paths(text, self.paths)
        # Others that the session made are numbered in the order of the tests.
        text = re.sub(r"<tmp>(/[\w.-]*?)\d+(?=\W|$)", r"<tmp>\1", text)
        for pattern, name in VOLATILE:
            text = pattern.sub(name, text)
        lines = (line.rstrip() for line in text.strip("\n").split("\n"))
        return "\n".join(lines).encode("ascii", "backslashreplace").decode()


_SNAPSHOTS = pytest.StashKey[Snapshots]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(UPDATE, action="store_true", help=f"rewrite each folder's {FILE}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SNAPSHOTS] = Snapshots(update=bool(config.getoption(UPDATE)))


@pytest.fixture
def prose(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Prose:
    """Compares a message with this test's entry in the folder's prose.md."""
    folder, test = _place_of(request.node)
    paths = {
        "tmp_path": tmp_path,
        "tmp": tmp_path_factory.getbasetemp(),
        "python": sys.executable,
        "venv": sys.prefix,
        "python library": sys.base_prefix,
        "repository": REPOSITORY,
        "home": Path.home(),
    }
    if sys.base_prefix in ("/usr", "/usr/local"):  # in texts of every machine
        del paths["python library"]
    if tempfile.gettempdir() != "/tmp":
        paths["tempdir"] = tempfile.gettempdir()
    return Prose(request.config.stash[_SNAPSHOTS], folder, test, paths)


def _place_of(item: pytest.Item) -> tuple[str, str]:
    """The folder in tests/ that holds a test, and what its heading says."""
    tests = REPOSITORY / "tests"
    inside = item.path.relative_to(tests).parts if item.path.is_relative_to(tests) else ()
    folder = tests / inside[0] if len(inside) > 1 else item.path.parent
    file = item.path.relative_to(folder).as_posix()
    return str(folder), f"{file}::{item.nodeid.partition('::')[2]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # First: a test that `-m` or `-k` leaves out still has its entries.
    here = config.invocation_params.dir
    parts = {(here / arg.partition("::")[0]).resolve() for arg in config.args if "::" in arg}
    if config.getoption("lf", False):  # it collects parts of files
        return
    folders: dict[str, dict[str, bool]] = {}
    for item in items:
        if item.path.resolve() not in parts:
            folder, test = _place_of(item)
            takes = "prose" in getattr(item, "fixturenames", ())
            folders.setdefault(folder, {})[test] = takes
    for folder, tests in folders.items():
        config.stash[_SNAPSHOTS].find_unused(folder, tests)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield  # a test that failed or was skipped may not have come to all of its entries
    prose = getattr(item, "funcargs", {}).get("prose")
    if isinstance(prose, Prose):
        prose.end()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    report = getattr(node, "workeroutput", {}).get("prose")
    if report is not None:
        node.config.stash[_SNAPSHOTS].merge(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    snapshots = session.config.stash[_SNAPSHOTS]
    report = getattr(session.config, "workeroutput", None)
    if report is not None:
        report["prose"] = {"used": snapshots.used, "unused": snapshots.unused}
    elif snapshots.update:
        snapshots.write()
    elif any(snapshots.unused.values()) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    snapshots = config.stash[_SNAPSHOTS]
    if snapshots.update:
        return
    for folder, headings in snapshots.unused.items():
        for heading in headings:
            terminalreporter.write_line(f"{Path(folder, FILE)}: no test uses {heading}", red=True)
    if any(snapshots.unused.values()):
        terminalreporter.write_line(f"Remove what no test uses: {COMMAND}", red=True)
