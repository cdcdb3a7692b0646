"""Run every check and test of hone one after the other, and write down the commit where each passed.

In:   names of verbs (all if there are none); `--behind`
Out:  tests/verified.json: for each verb the commit, date, machine and seconds of its last pass

`make verify` runs it as `python -m tests.verify` from the root of the repository. A verb that fails
does not stop the others; its earlier pass stays in the file. With uncommitted changes the verbs run,
but nothing is written: a pass belongs to a commit. `--behind` runs nothing and lists the verbs
whose sources have changed since they passed; the exit status is 1 if there are any.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = "tests/verified.json"
WRITTEN = (RECORD, "bench/results.json")
"""Files that the verbs themselves write; they are no sources."""
SHOWN_FILES = 3


@dataclass(frozen=True)
class Verb:
    """A target of the Makefile, and the paths whose change can make it fail."""

    target: str
    sources: tuple[str, ...] = ()
    """Beside src/ and the pinned versions; all of the repository if there are none."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def paths(self) -> list[str]:
        """As git's pathspecs."""
        named = ["src", "constraints.txt", *self.sources] if self.sources else ["."]
        return [*named, *(f":(exclude){file}" for file in WRITTEN)]


_CLIENTS = ("tests/environments.py", "tests/server/conftest.py", "tests/chat/conftest.py")
VERBS: Mapping[str, Verb] = {
    "check": Verb("check"),
    "test": Verb("test"),
    # Where the frameworks cannot be installed, a pass would say nothing about them.
    "e2e": Verb("test-e2e", environment=(("HONE_REQUIRE_FRAMEWORKS", "1"),)),
    "art": Verb("test-art", ("tests/art", "tests/frameworks/constraints-a.txt", *_CLIENTS)),
    "nat": Verb("test-nat", ("tests/nat", "tests/art/run.py", "tests/plugin", *_CLIENTS)),
    "frameworks": Verb("test-frameworks", ("tests/frameworks", "tests/conformance", *_CLIENTS)),
    "sinks": Verb("test-sinks", ("tests/loggers", "tests/environments.py")),
    "vllm": Verb(
        "test-vllm",
        ("constraints-vllm.txt", "tests/inference", "tests/conformance", "tests/e2e"),
    ),
    "docs": Verb("test-docs", ("README.md", "docs", "examples", "tests/docs")),
    "chaos": Verb(
        "chaos",
        (
            *("tests/server/chaos.py", "tests/server/small_server.py"),
            *("tests/e2e/conftest.py", "tests/e2e/test_kill_objectives.py"),
            *("tests/e2e/test_kill.py", "tests/e2e/test_same_adapter.py"),
        ),
    ),
    "fuzz": Verb(
        "fuzz", ("tests/server/fuzz.py", "tests/server/target.py", "tests/server/test_fuzz.py")
    ),
}


def main(arguments: Sequence[str], *, root: Path = ROOT, verbs: Mapping[str, Verb] = VERBS) -> int:
    """Run the verbs, or list those that are behind; the exit status."""
    parser = argparse.ArgumentParser(prog="make verify", description="Run every check and test.")
    parser.add_argument("--behind", action="store_true", help="list what has to run again")
    parser.add_argument("verbs", nargs="*", metavar="VERB", help=f"of {', '.join(verbs)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.verbs if name not in verbs]
    if unknown:
        parser.error(f"no verb is called {unknown[0]!r}; there are {', '.join(verbs)}")
    chosen = {name: verbs[name] for name in options.verbs or verbs}
    return _list_behind(root, chosen) if options.behind else _run(root, chosen)


def _list_behind(root: Path, verbs: Mapping[str, Verb]) -> int:
    record = read(root)
    reasons = {name: behind(root, verb, record.get(name)) for name, verb in verbs.items()}
    for name, reason in reasons.items():
        if reason:
            _say(f"{name:<12}{reason}")
    if not any(reasons.values()):
        _say("none is behind")
    return 1 if any(reasons.values()) else 0


def _run(root: Path, verbs: Mapping[str, Verb]) -> int:
    results: dict[str, str] = {}
    failed = False
    for name, verb in verbs.items():
        commit, before = _head(root), changes(root)
        _say(f"--- make {verb.target}")
        began = time.monotonic()
        status = subprocess.run(
            # ARGS are this program's; the make that runs it would hand them down.
            ["make", verb.target, "ARGS="],
            cwd=root,
            env={**os.environ, **dict(verb.environment)},
            check=False,
        ).returncode
        seconds = round(time.monotonic() - began)
        # What was run is what the commit holds only if nothing changed meanwhile either.
        dirty = before or changes(root) or ([] if _head(root) == commit else ["another commit"])
        if status != 0:
            failed = True
            results[name] = f"FAILED with status {status} after {seconds} s"
        elif dirty:
            results[name] = f"passed in {seconds} s; not recorded: {_listed(dirty)} not committed"
        else:
            write(root, name, commit=commit, seconds=seconds)
            results[name] = f"passed in {seconds} s at {commit[:10]}"
    for name, result in results.items():
        _say(f"{name:<12}{result}")
    return 1 if failed else 0


# ---- the record -------------------------------------------------------------------------------


def read(root: Path) -> dict[str, dict[str, Any]]:
    """What each verb last passed at, by its name."""
    file = root / RECORD
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(root: Path, name: str, *, commit: str, seconds: int) -> None:
    """Replace one verb's entry: a line of its own, so that two branches seldom conflict."""
    date, machine = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"), platform.machine()
    entry = {"commit": commit, "date": date, "machine": machine, "seconds": seconds}
    entries = sorted({**read(root), name: entry}.items())
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries)
    (root / RECORD).parent.mkdir(exist_ok=True)
    (root / RECORD).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def behind(root: Path, verb: Verb, entry: Mapping[str, Any] | None) -> str | None:
    """Why the verb has to run again; None if nothing that it depends on has changed."""
    if entry is None:
        return "has not passed yet"
    commit = entry["commit"]
    passed = f"passed at {commit[:10]} ({entry['date'][:10]}, {entry['machine']})"
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    if known.returncode != 0:
        return f"{passed}, which is not a commit of this repository"
    changed = _git(root, "diff", "--name-only", commit, "--", *verb.paths).splitlines()
    changed += _untracked(root, verb.paths)
    return f"{passed}; changed since: {_listed(changed)}" if changed else None


def changes(root: Path) -> list[str]:
    """Files with changes that are not committed, but for those that the verbs write."""
    everything = Verb("").paths
    changed = _git(root, "diff", "--name-only", "HEAD", "--", *everything).splitlines()
    return changed + _untracked(root, everything)


def _untracked(root: Path, paths: Iterable[str]) -> list[str]:
    listing = ["ls-files", "--others", "--exclude-standard", "--", *paths]
    return _git(root, *listing).splitlines()


def _head(root: Path) -> str:
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def _listed(files: Sequence[str]) -> str:
    more = len(files) - SHOWN_FILES
    return ", ".join(files[:SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
