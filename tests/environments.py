"""Virtual environments of other programs' clients, beside the one that hone runs in.

In:   a name, and requirements: a list of them, or a file of pinned versions
Out:  the interpreter of `.venv-NAME`, made once and kept until the requirements change

The clients' requirements contradict each other and hone's, so each set has an environment of its
own, without torch. A pinned file lists every package, so pip has nothing to resolve.
"""

import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
_FLAGS = ["--quiet", "--quiet", "--disable-pip-version-check", "--prefer-binary", "--no-compile"]


class NotInstalled(Exception):
    """pip could not install the requirements."""


def environment(
    name: str,
    requirements: Sequence[str] | Path,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> Path:
    """The interpreter of the environment; installs unless it has exactly these requirements."""
    place = ROOT / f".venv-{name}"
    python, stamp = place / "bin" / "python", place / ".installed"
    if isinstance(requirements, Path):
        wanted, arguments = requirements.read_text(), ["--no-deps", "--requirement", requirements]
    else:
        wanted, arguments = "\n".join(requirements), list(requirements)
    wanted = f"# Python {sys.version_info.major}.{sys.version_info.minor}\n{wanted}"
    with FileLock(f"{place}.lock"):  # two processes of pytest may want it
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        began = time.monotonic()
        say(f"installing {' '.join(map(str, arguments))} into {place.name}")
        shutil.rmtree(place, ignore_errors=True)
        # No pip inside: the one that runs this installs for the other interpreter.
        venv.create(place, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", *_FLAGS, *arguments]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotInstalled(f"pip ended with {done.returncode}: {done.stderr[-2000:]}")
        stamp.write_text(wanted)
        say(f"installed in {time.monotonic() - began:.0f} s")
    return python
