"""Directories that hone clears: it marks them when it creates them, and removes no other.

In:   the path of a directory for temporary files
Out:  the directory, empty but for the mark; a StateError if it holds files and no mark

A directory may have the name that hone expects and belong to somebody else. The mark is written
before anything else, so a directory without it holds nothing of hone's.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from filelock import lock_descriptor

from hone.errors import Conflict, StateError
from hone.files.disk import storage

MARK = ".made-by-hone"


def is_owned(directory: Path) -> bool:
    """Whether hone created the directory. A link to one is not owned."""
    return not directory.is_symlink() and (directory / MARK).is_file()


def make_owned(directory: Path) -> None:
    """Create a directory with the mark, or remove everything else from one that has it.

    An empty directory gets the mark, too. Raises StateError for one that holds files and no mark.
    """
    with storage(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_owned(directory):
            for path in directory.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARK:
                    path.unlink()
        elif any(directory.iterdir()):
            raise StateError(
                f"{directory}: holds files that hone did not write, and hone would delete them. Move "
                "them elsewhere, or name another directory."
            )
        (directory / MARK).touch()


def remove_owned(directory: Path) -> bool:
    """Remove a directory with all that is in it, if it has the mark; returns whether it had."""
    if not is_owned(directory):
        return False
    shutil.rmtree(directory, ignore_errors=True)
    return True


def discard(directory: Path) -> None:
    """Remove a directory if it has the mark, or is empty."""
    if not remove_owned(directory):
        with suppress(OSError):  # it holds files that are not hone's
            directory.rmdir()


def lock_directory(directory: Path, held: str) -> int:
    """Create a directory if it is missing, and lock it until the descriptor is closed.

    The directory itself is locked: a lock file would stay in what is written there. Raises Conflict
    with the text `held` if another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # the other process has just ended
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if _took_lock(descriptor) and os.path.samestat(os.fstat(descriptor), directory.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise Conflict(held)


def _took_lock(descriptor: int) -> bool:
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:  # a file system without locks
        return True
