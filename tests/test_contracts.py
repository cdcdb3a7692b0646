"""The contracts of the source tree hold: imports, also by a string; names; where tests are.

Each import contract notices a breach of it. A word names one class.
"""

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
    "engine and learner know no messages": ("learner.process", "hone.chat.messages"),
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
    "only the composition root and the command line know the guests": (
        "loggers.process",
        "hone.integrations.loggers.otel",
    ),
    "nothing imports the composition root and the command line": (
        "finetune.run",
        "hone.composition",
    ),
    ACYCLIC: ("capture.base", "hone.capture.scope"),
}
"""By contract, a module and what it must not import."""

PROCESSES = {
    "hone.chat.jinja_child": "chat/jinja_process.py",
    "hone.inference.grammar_check": "inference/grammar.py",
    "hone.learner.child": "learner/process.py",
    "hone.loggers.child": "loggers/process.py",
}
"""By module that is run with `python -m`, the file that starts it."""

ROOMS = [
    path.name
    for path in sorted((ROOT / "src/hone").iterdir())
    if path.is_dir() and (ROOT / "tests" / path.name).is_dir() and path.name != "art"
]
"""Folders of modules and tests; tests/art has scripts for the environment of the art package."""
SUBJECTS = {
    "config": ["config/plugin_package"],
    "evaluation": ["evaluation/conformance"],
    "learner": ["learner/bf16", "learner/cuda", "learner/with_engine"],
    "server": [
        f"server/{subject}"
        for subject in (
            *("backup_live", "constrained", "deadlines", "delete", "families", "faults", "fuzz"),
            *("growth", "load", "locks", "malformed_models", "rename", "secrets", "templates"),
            *("threads", "versions"),
        )
    ],
    "workflow": ["workflow/frameworks"],
}
"""By folder, the tests whose subject is more than one module: what a whole server or a run does."""

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


def test_no_module_is_imported_by_a_string():
    """import-linter does not see `import_module("hone.x")`, so there is none."""
    modules = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "src/hone").rglob("*.py")
    }
    named = []
    for path in sorted((ROOT / "src/hone").rglob("*.py")):
        if path.name == "__init__.py":  # lazy names, below
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        loggers = {
            id(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and "getLogger" in ast.dump(node.func)
            for argument in node.args
        }
        named += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in loggers
            if node.value in modules - PROCESSES.keys() - {"hone"}
        ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("module", PROCESSES)
def test_a_module_that_is_a_process_is_named_in_its_own_folder(module: str):
    """`python -m MODULE` is a string, too: only the module that starts the process names it."""
    named = {
        str(path.relative_to(ROOT / "src/hone"))
        for path in (ROOT / "src/hone").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == module
    }
    assert named == {PROCESSES[module]}


def test_lazy_names_are_those_that_a_type_checker_sees():
    """`hone/__init__.py` names modules by strings; import-linter counts the imports beside them."""
    tree = ast.parse((ROOT / "src/hone/__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: node.module.removeprefix("hone.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hone.")
        for alias in node.names
    }
    [home] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME"
    ]
    assert home == imported


@pytest.mark.parametrize("room", ROOMS)
def test_tests_are_where_their_modules_are(room: str):
    """tests/ROOM/.../test_MODULE.py, test_MODULE_SUBJECT.py, or a subject of several modules."""
    modules = {
        path.relative_to(ROOT / "src/hone").with_suffix("").as_posix()
        for path in (ROOT / "src/hone" / room).rglob("*.py")
    }
    apart = []
    for path in sorted((ROOT / "tests" / room).rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix().replace("/test_", "/")
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            apart.append(name)
    assert apart == sorted(SUBJECTS.get(room, ()))


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
