"""Check README.md and docs/architecture.md against the repository: trees, links, measurements."""

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from bench.report import RESULTS, read

ROOT = Path(__file__).parent.parent
READ_BY_BUILD = """
import contextlib, json, os, sys
root = sys.argv.pop() + os.sep
read = set()
sys.addaudithook(lambda event, args: read.add(str(args[0])) if event == "open" else None)
sys.path.insert(0, root + "docs")
import build
with contextlib.suppress(SystemExit):  # a stale page is another check's
    build.main(check=True)
read |= {str(module.__file__) for module in list(sys.modules.values()) if hasattr(module, "__file__")}
inside = (os.path.relpath(path, root) for path in read if path.startswith(root))
print(json.dumps([path for path in inside if os.path.isfile(root + path) and ".pyc" not in path]))
"""
"""Prints the files of the repository that docs/build.py opens or imports."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_is_in_a_tree():
    listed = _listed(ARCHITECTURE)
    parents = {str(parent) for path in listed for parent in Path(path).parents}
    closed = listed - parents  # a folder listed without its files stands for all of them
    missing = [
        path
        for path in _on_disk(ROOT)
        if path not in listed
        and not path.startswith("src/")  # docs/build.py generates that tree
        and not any(str(parent) in closed for parent in Path(path).parents)
    ]
    assert not missing, f"the tree of docs/architecture.md lacks {missing}; add one line for each"


def test_everything_in_the_tree_exists():
    gone = sorted(path for path in _listed(ARCHITECTURE) if not (ROOT / path).exists())
    assert not gone, f"the tree of docs/architecture.md names {gone}, which do not exist"


def test_the_descriptions_of_the_source_tree_begin_in_one_column():
    tree = ARCHITECTURE.split("<!-- source tree -->")[1].split("<!-- /source tree -->")[0]
    lines = [line for line in tree.splitlines() if line.strip(" `")]
    assert len(lines) > 100
    rows = [re.match(r" *[\w/]+(\.py|/)(?:( {2,})\S|$)", line) for line in lines]
    wrong = [line for line, row in zip(lines, rows, strict=True) if row is None]
    assert not wrong, "docs/build.py prints these without two spaces"
    columns = {row.end(2) for row in rows if row is not None and row[2]}
    assert len(columns) == 1, f"the descriptions begin in columns {sorted(columns)}"


@pytest.mark.e2e  # it builds the pages
def test_the_hook_watches_every_file_that_the_generated_docs_are_made_of():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (watched,) = (re.compile(hook["files"]) for hook in hooks if hook["id"] == "docs")
    read = subprocess.run(
        [sys.executable, "-c", READ_BY_BUILD, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    opened = json.loads(read.stdout.splitlines()[-1])
    files = {path for path in opened if path.split("/")[0] in ("src", "docs", "tests", "examples")}
    assert {"src/hone/train_config.py", "docs/yaml_reference.py"} <= files
    assert not sorted(path for path in files if not watched.search(path))


def test_links_and_named_files_exist():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_the_seven_files_to_read_first_are_there():
    part = ARCHITECTURE.split("## Read these seven files")[1].split("\n## ")[0]
    numbered = re.findall(r"^(\d)\. `([^`]+)`: \S", part, re.M)
    assert [int(number) for number, _ in numbered] == [1, 2, 3, 4, 5, 6, 7]
    assert [path for _, path in numbered if not (ROOT / "src/hone" / path).is_file()] == []


def test_every_measurement_in_it_was_recorded():
    recorded = [r for r in read(RESULTS) if r.commit]
    values = [v for r in recorded for v in (r.value, r.peer_value, r.ratio) if v is not None]
    values += _on_a_gpu()
    missing = [
        text
        for text, number in _measurements(README)
        if not any(_says(number, value) for value in values)
    ]
    assert not missing, f"README.md states {missing}, which bench/*.json does not have"


def _on_a_gpu() -> list[float]:
    """Rates and ratios of bench/gpu.json, and the ratio of each run's trie to every peer beside it."""
    values: list[float] = []
    for run in json.loads((ROOT / "bench" / "gpu.json").read_text(encoding="utf-8"))["runs"]:
        measured = run["measured"]
        rates = [m["logical_tokens_per_s"] for m in measured if "logical_tokens_per_s" in m]
        ratios = [m["ratio"] for m in measured if "ratio" in m]
        ends = ("hone_tokens_per_s", "vllm_tokens_per_s", "hone_s", "trl_s")
        served = [m[end] for m in measured for end in ends if end in m]
        in_turn = [rate for m in measured for rate in (*m.get("trie", ()), *m.get("peft", ()))]
        values += [*rates, *ratios, *served, *in_turn, *(rates[0] / rate for rate in rates[1:])]
    return values


def test_measurements_are_told_from_other_numbers():
    text = (
        "Python 3.11, ART 0.5.4, port 8000, 14 evaluators, `0.7`, seeds 0 to 9, [5 s](x.md)\n"
        "```\n3.2 s\n```\n"
        "from 0.250 to 1.000 in 4.5 minutes, 3.8x as fast, 1,204 tokens/s, 12% more, 0.3 GB"
    )
    numbers = [number for _, number in _measurements(text)]
    assert numbers == ["5", "0.250", "1.000", "4.5", "3.8", "1,204", "12", "0.3"]
    assert _says("0.250", 0.2499) and not _says("0.250", 0.2494)
    assert _says("1,204", 1204.3) and _says("12", 0.12) and not _says("12", 13)


def test_the_tree_is_read_by_its_indentation():
    text = "<!-- tree -->\n```\nsrc/p/   why\n  a.py   first\n  b/\n    c.py\nX   last\n```\n<!-- /tree -->"
    assert _listed(text) == {"src/p", "src/p/a.py", "src/p/b", "src/p/b/c.py", "X"}


def _measurements(text: str) -> list[tuple[str, str]]:
    """Numbers in the prose with decimals or a unit, without versions: (text with unit, number)."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.S)
    prose = re.sub(r"Python \d+\.\d+|\d+\.\d+\.\d+", " ", prose)
    units = r"x|times|ms|s|seconds|minutes|hours|[MG]i?B|%|tokens/s"
    number = rf"(?<![\w.-])(\d+(?:,\d{{3}})*(?:\.\d+)?)(?:\s?({units})(?!\w))?(?![\w.]*\d)"
    return [
        (match[0], match[1])
        for match in re.finditer(number, prose)
        if "." in match[1] or match[2] is not None
    ]


def _says(number: str, value: float) -> bool:
    """Whether `number` is `value` rounded to its digits, as it is or as a percentage."""
    digits = len(number.partition(".")[2])
    stated = float(number.replace(",", ""))
    return any(round(v, digits) == stated for v in (value, 100 * value))


def _listed(text: str) -> set[str]:
    """Paths of a tree: two spaces of indentation per level, the name, then its description."""
    block = text.split("<!-- tree -->")[1].split("<!-- /tree -->")[0]
    paths: set[str] = set()
    above: list[str] = []
    for line in block.replace("```", "").splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0].rstrip("/")
        above = [*above[:depth], name]
        paths.add("/".join(above))
    return paths


def _on_disk(folder: Path) -> list[str]:
    """Every file that git does not ignore; also works without git, as in an unpacked archive."""
    if (folder / ".git").exists() and shutil.which("git"):
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(listing, cwd=folder, capture_output=True, text=True, check=True)
        return [name for name in done.stdout.splitlines() if (folder / name).exists()]
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    names: list[str] = []
    for path in sorted(folder.iterdir()):
        relative = path.relative_to(ROOT).as_posix()
        if path.name == ".git" or any(
            fnmatch(relative if "/" in pattern else path.name, pattern) for pattern in ignored
        ):
            continue
        names += _on_disk(path) if path.is_dir() else [relative]
    return names
