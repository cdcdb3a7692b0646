"""A virtual environment for NeMo Agent Toolkit alone, made once.

In:   nothing but a network and half a gigabyte of disk
Out:  the path of its Python
Used: bench/harness.py

It counts as made only when its evaluation was seen to import, so an interrupted installation is
repeated.
"""

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from bench.process import ROOT

DIRECTORY = ROOT / ".venv-bench-nat"
VERSION = "1.9.0"
REQUIREMENTS = (f"nvidia-nat-eval[full]=={VERSION}", "langchain-core>=1", "openai>=2")
"""langchain-core is imported by its evaluation and not declared."""
INSTALL_DEADLINE_S = 900.0

_MADE = ".made"


def nat_python(say: Callable[[str], None]) -> Path:
    """The environment's Python; makes the environment if there is none."""
    python = DIRECTORY / "bin" / "python"
    recipe = f"{' '.join(REQUIREMENTS)}, Python {sys.version_info[:2]}"
    made = DIRECTORY / _MADE
    if made.is_file() and made.read_text() == recipe:
        return python
    say(f"making {DIRECTORY.name} with {' '.join(REQUIREMENTS)}: some minutes, once")
    if not python.is_file():
        venv.create(DIRECTORY, with_pip=True, clear=True)
    _run(python, "-m", "pip", "install", "-q", "-q", *REQUIREMENTS)
    _run(python, "-c", "import nat.plugins.eval.runtime.evaluate, openai")
    made.write_text(recipe)
    return python


def _run(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_DEADLINE_S,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise OSError(
            f"{DIRECTORY.name}: `python {' '.join(arguments)}` failed with exit code "
            f"{done.returncode}. Remove {DIRECTORY} and try again, or leave the peer out with "
            f"--without nat. It said:\n{done.stderr[-3000:]}"
        )
