"""The import contracts hold, each notices a breach of it, and a word names one class."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ACYCLIC = "no folder and no module imports itself by way of another"
BREACHES = {
    "the SDK and the harness run on a laptop": ("trajectory", "torch"),
    "the server half knows nothing of the harness": ("inference.base", "hone.workflow.run"),
    "finetune -> evaluation -> workflow -> capture, never back": (
        "capture.scope",
        "hone.finetune.trainer",
    ),
    "server -> store, chat -> inference, learner, never back": (
        "store.jobs",
        "hone.server.settings",
    ),
    "messages, engine and learner know no state of the server": (
        "chat.template",
        "hone.store.database",
    ),
    "engine and learner know no messages": ("learner.worker", "hone.chat.messages"),
    "the dialects know neither side of the wire": ("wire.stream", "hone.capture.base"),
    "a report reads the run directory and nothing else": (
        "report.history",
        "hone.finetune.records",
    ),
    "what is trained and how it is weighed are functions of their arguments": (
        "learner.loss",
        "hone.inference.base",
    ),
    "nothing outside hone.art imports ART's names": ("gather", "hone.art.batches"),
    ACYCLIC: ("capture.base", "hone.capture.scope"),
}
"""By contract, a module and what it must not import."""

WORDS = {
    **dict.fromkeys(
        ("Sample", "Rollout", "Step", "Comparison", "History", "Progress", "Exchange"), 1
    ),
    "Trajectory": 2,
}
"""Number of classes of each name; the two documented projects each have a Trajectory."""


def test_contracts_hold():
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert f"{len(BREACHES)} kept, 0 broken" in done.stdout


@pytest.mark.e2e
def test_each_contract_notices_a_breach_of_it(tmp_path: Path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, (module, imported) in BREACHES.items():
        path = tmp_path / "src/hone" / f"{module.replace('.', '/')}.py"
        line = f"import {imported}"
        if name == ACYCLIC:  # counted although it is for the type checker only: readers follow it
            line = f"if TYPE_CHECKING:\n    {line}"
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout
    for name, (module, imported) in BREACHES.items():
        _, header, rest = done.stdout.partition(f"{name}\n{'-' * len(name)}\n")
        section = rest.partition("\n---")[0]  # up to the next contract
        found = "- .base -> .scope" if name == ACYCLIC else f"- hone.{module} -> {imported} (l."
        assert header and found in " ".join(section.split()), section


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("word", sorted(WORDS))
def test_a_word_names_one_class(word: str):
    defined = [
        str(path.relative_to(ROOT / "src/hone"))
        for path in sorted((ROOT / "src/hone").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if word in _defines(node)
    ]
    assert len(defined) == WORDS[word], f"{word} is defined in {', '.join(defined)}"


def _defines(node: ast.AST) -> set[str]:
    """Names of classes and of other types (`Step = Annotated[...]`) that a statement defines."""
    match node:
        case ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()
