"""Measurements turned into results: beside what, how many times better, and whether that is enough.

In:   values measured side by side, a goal or none
Out:  Result; results.json, a table for the terminal, a table for a README

results.json is the one record of everything too slow for `make test`: benchmarks, `make chaos`,
`make fuzz`, `make test-docs`, `make seeds`. Each result names the commit it was measured at, and
tests/test_readme.py fails when the README states a measurement that is not in it.

`ratio` always says how many times better hone is, so that above 1 is ahead whether the quantity
is a speed or a size. A peer that could not be measured has no value and no ratio, never a zero.
"""

import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.table import Table

RESULTS = Path(__file__).with_name("results.json")

Goal = tuple[Literal["ratio", "value"], Literal[">=", "<="], float]
"""What is compared, how, and with what: ("ratio", ">=", 3.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of results.json."""

    name: str
    """benchmark/quantity"""
    value: float
    unit: str
    peer: str | None
    """What it is compared with; None where nothing is."""
    peer_value: float | None
    """None also if the peer could not be measured."""
    ratio: float | None
    """How many times better than the peer."""
    goal: str | None
    met: bool | None
    """None where there is no goal, or where what it compares could not be measured."""
    machine: str
    commit: str = ""
    """Of the code that was measured; ends in '+' where files had changed since. Empty: not known."""


def result(
    name: str,
    runs: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    peer_runs: Sequence[float] | None = None,
    goal: Goal | None = None,
    smaller_is_better: bool = False,
    note: str = "",
) -> Result:
    """The medians of the runs of both sides, compared; `note` goes behind the machine's name."""
    value = median(runs)
    peer_value = median(peer_runs) if peer_runs else None
    ratio = None
    if peer_value is not None:
        ratio = peer_value / value if smaller_is_better else value / peer_value
    return Result(
        name=name,
        value=_rounded(value),
        unit=unit,
        peer=peer,
        peer_value=None if peer_value is None else _rounded(peer_value),
        ratio=None if ratio is None else _rounded(ratio),
        goal=None if goal is None else _goal_text(goal, unit),
        met=None if goal is None else _met(goal, value, ratio),
        machine=machine() + (f"; {note}" if note else ""),
        commit=commit(),
    )


@functools.cache
def commit() -> str:
    """The commit checked out, with a '+' behind it where the source differs from it; "" without git."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "bench", "tests", "examples")
    except (OSError, subprocess.CalledProcessError):
        return ""
    lines = [line for line in changed.splitlines() if not line.endswith(RESULTS.name)]
    return head + ("+" if lines else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()


def _met(goal: Goal, value: float, ratio: float | None) -> bool | None:
    what, how, bound = goal
    seen = ratio if what == "ratio" else value
    if seen is None:
        return None
    return seen >= bound if how == ">=" else seen <= bound


def _goal_text(goal: Goal, unit: str) -> str:
    what, how, bound = goal
    return f"{how} {bound:g}x" if what == "ratio" else f"{how} {bound:g} {unit}"


def _rounded(value: float) -> float:
    """Four digits: more would claim a precision that nobody measured."""
    return float(f"{value:.4g}")


def machine() -> str:
    """The machine in a few words, with the versions that decide its speed."""
    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cores} x {_processor()} ({platform.machine()}), {memory:.0f} GiB, {platform.system()}, "
        f"torch {version('torch')}, {cores} threads, fp32"
    )


def _processor() -> str:
    """What lscpu would call it: x86 kernels name it, those of ARM give only numbers."""
    known_arm = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd4f": "Neoverse-V2"}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    part = fields.get("CPU part")
    return fields.get("model name") or known_arm.get(part or "", part) or platform.processor()


def merged(old: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """The new results, and those old ones whose benchmark was not run again."""
    new = list(new)
    again = {_benchmark(r.name) for r in new}
    return [r for r in old if _benchmark(r.name) not in again] + new


def _benchmark(name: str) -> str:
    return name.split("/")[0]


def read(path: Path) -> list[Result]:
    if not path.is_file():
        return []
    return [Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def write(path: Path, results: Sequence[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    entries: list[dict[str, Any]] = [asdict(r) for r in results]
    partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def record(results: Sequence[Result], path: Path = RESULTS) -> None:
    """Put results into the file in place of those of the same benchmarks."""
    write(path, merged(read(path), results))


HEADINGS = ("what", "hone", "beside", "peer", "ratio", "goal", "met")


def cells(r: Result) -> tuple[str, ...]:
    """A result as one row of either table."""
    peer = "-" if r.peer is None else r.peer
    return (
        r.name,
        f"{r.value:g} {r.unit}",
        peer,
        "-" if r.peer_value is None else f"{r.peer_value:g} {r.unit}",
        "-" if r.ratio is None else f"{r.ratio:.2f}x",
        r.goal or "-",
        {True: "yes", False: "no", None: "-"}[r.met],
    )


def terminal_table(results: Sequence[Result], *, title: str) -> Table:
    table = Table(*HEADINGS, title=title)
    for r in results:
        style = {True: "green", False: "red", None: ""}[r.met]
        table.add_row(*cells(r), style=style)
    return table


def markdown_table(results: Sequence[Result]) -> str:
    """For a README; every machine that measured something stands below, once."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells(r)) + " |" for r in results]
    where = dict.fromkeys(
        f"{r.machine}, at commit {r.commit}" if r.commit else r.machine for r in results
    )
    return "\n".join([*lines, "", *(f"Measured on: {w}." for w in where)])
