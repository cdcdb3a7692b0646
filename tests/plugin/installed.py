"""The plugin of this folder, installed as a user would install it.

In:   a directory
Out:  the same directory with the package and its metadata, ready for sys.path or PYTHONPATH
"""

import os
import subprocess
import sys
import zipfile
from contextlib import chdir
from pathlib import Path

from hatchling.build import build_wheel
from tests.patience import PATIENCE_S

PACKAGE = Path(__file__).parent


def install(directory: Path, package: Path = PACKAGE) -> Path:
    """pip, into a directory of its own: this environment stays as it is."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(directory)]
    subprocess.run([*command, str(package)], check=True, timeout=PATIENCE_S, capture_output=True)
    return directory


def unpack(directory: Path, package: Path = PACKAGE) -> Path:
    """The files that pip would install, from the same build, without a process."""
    with chdir(package):
        wheel = build_wheel(os.fspath(directory))
    with zipfile.ZipFile(directory / wheel) as files:
        files.extractall(directory)
    return directory
