"""Files and directories that are on the disk, and not only on their way to it.

In:   paths
Out:  nothing; when a function returns, a power cut changes none of it any more
Used: models/cache.py and server/checkpoints.py, whose directories are whole under their final name;
      finetune/journal.py

A rename is on the disk once the directory that holds the name is: the file's own sync is not enough.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Of a directory: the names in it; what they stand for is synced by itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(path: Path, target: Path) -> None:
    """Rename, in the same directory."""
    path.rename(target)
    sync(target.parent)
