"""Check README.md and docs against the repository: trees, pictures, links, names, measurements."""

import json
import pkgutil
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
SOURCE = ROOT / "src" / "hone"
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"),
]
"""The pages that describe hone as it is; an entry of docs/log.md describes the day of its date."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    gone = [path for path in _module_paths(text) if not (SOURCE / path).is_file()]
    gone += [name for name in _dotted_names(text) if not _resolves(name)]
    assert not gone, f"{page.relative_to(ROOT)} names {gone}, which do not exist in src/hone"


def test_modules_are_told_from_other_files():
    text = (
        "`server/old.py` tests/server/test_run.py src/hone/gone.py my/server/a.py [x](../config/b.py) "
        "agent.py files/c.pyc"
    )
    assert _module_paths(text) == ["server/old.py", "gone.py"]
    assert _dotted_names("hone.server.old hone.rollout() myhone.config.x") == ["hone.server.old"]
    assert not _resolves("hone.server.old") and not _resolves("hone.files.lock.Gone")
    assert _resolves("hone.files.lock") and _resolves("hone.errors.PolicyFailure")


def test_the_pictures_name_files_of_their_folder():
    """Each picture of calls says in which folder its files are."""
    named = 0
    for folder in ("finetune", "server"):
        for part in ARCHITECTURE.split("\n## ")[1:]:
            if f"`src/hone/{folder}`" in part.split("```")[0]:
                files = re.findall(r"[\w/]+\.py\b", part.split("```")[1])
                homes = (SOURCE / folder, SOURCE)
                gone = [f for f in files if not any((home / f).is_file() for home in homes)]
                assert not gone, f"{part.splitlines()[0]}: {gone}"
                named += len(files)
    assert named > 10


def test_the_boxes_of_the_epoch_are_closed():
    picture = ARCHITECTURE.split("## The flow of one epoch")[1].split("```")[1].splitlines()
    top = next(line for line in picture if line.startswith("+"))
    edges = [at for at, character in enumerate(top) if character == "+"]
    assert len(edges) == 4  # the left and right edge of two boxes
    for left, right in (edges[:2], edges[2:]):
        rows = [at for at, line in enumerate(picture) if line[left : left + 1] == "+"]
        assert len(rows) == 2, picture
        for line in picture[rows[0] : rows[1] + 1]:
            assert line[left] in "+|" and line[right : right + 1] in ("+", "|"), line
    assert {len(line) for line in picture if line.startswith(("+", "|"))} <= {
        edges[1] + 1,
        edges[3] + 1,
    }


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


def _module_paths(text: str) -> list[str]:
    """Paths below src/hone: after src/hone/, or in one of its folders and not below another path."""
    folders = "|".join(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
    pattern = rf"(?<![\w/.-])(?:src/hone/([\w/]+\.py)|((?:{folders})/[\w/]+\.py))\b"
    return [match[1] or match[2] for match in re.finditer(pattern, text)]


def _dotted_names(text: str) -> list[str]:
    """Names in folders and modules of hone; `make test-docs` runs the blocks with the others."""
    modules = "|".join(module.name for module in pkgutil.iter_modules([str(SOURCE)]))
    return re.findall(rf"(?<![\w.])hone\.(?:{modules})(?:\.\w+)+", text)


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


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
