"""The import contracts hold, and each notices a breach of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BREACHES = {
    "the SDK and the harness run on a laptop": {"trajectory.py": "import torch"},
    "the server half knows nothing of the harness": {
        "workflow/__init__.py": "",
        "workflow/run.py": "",
        "inference/base.py": "import hone.workflow.run",
    },
    "finetune -> evaluation -> workflow -> capture, never back": {
        "capture/__init__.py": "",
        "capture/scope.py": "import hone.finetune.trainer",
        "finetune/__init__.py": "",
        "finetune/trainer.py": "",
    },
    "server -> store, chat -> inference, learner, never back": {
        "store/jobs.py": "import hone.server.settings"
    },
    "messages, engine and learner know no state of the server": {
        "chat/template.py": "import hone.store.database"
    },
    "engine and learner know no messages": {"learner/worker.py": "import hone.chat.messages"},
    "the dialects know neither side of the wire": {"wire/stream.py": "import hone.capture.base"},
    "a report reads the run directory and nothing else": {
        "report/history.py": "import hone.finetune.records"
    },
    "what is trained and how it is weighed are functions of their arguments": {
        "learner/loss.py": "import hone.inference.base"
    },
    "no folder and no module imports itself by way of another": {
        # Counted although it is for the type checker only: readers follow it all the same.
        "capture/base.py": "if TYPE_CHECKING:\n    import hone.capture.scope",
    },
}


def test_contracts_hold():
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert f"{len(BREACHES)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_noticed(name: str, tmp_path: Path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in BREACHES[name].items():
        path = tmp_path / "src/hone" / file
        path.parent.mkdir(exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(f"{before}\n{line}\n", encoding="utf-8")
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"{name} BROKEN" in done.stdout


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
