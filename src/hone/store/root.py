"""The server's root: a directory for its state that other users cannot read.

In:   --root
Out:  a directory with mode 0700

It holds the server's key and every recorded conversation. The mode of a directory with files of
others is never changed: with `--root /tmp` that would lock out every other user.
"""

import os
import stat
from pathlib import Path

from hone.errors import ServerError

_OURS = ("state.sqlite", "server.lock", "logs", "api_key", "runs", "evals")
"""A directory with one of these belongs to hone: a root, or the default place of runs and evals."""


def make_root(root: Path) -> None:
    """Create the root, or close it to other users. Raises ServerError if that is not possible."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        if not root.is_dir():
            raise ServerError(f"--root {root}: is a file; name a directory") from None
    if not stat.S_IMODE(root.stat().st_mode) & 0o077:
        return
    entries = os.listdir(root)
    if entries and not any(name in entries for name in _OURS):
        raise ServerError(
            f"--root {root}: other users may read this directory, and it holds files that are not "
            "hone's. Name a new directory, or close it with chmod 700."
        )
    try:
        root.chmod(0o700)
    except PermissionError:
        raise ServerError(
            f"--root {root}: other users may read this directory, and it belongs to another user. "
            "Name a directory of your own."
        ) from None
