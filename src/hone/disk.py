"""Durable file operations, and the error that says why one failed.

In:   paths
Out:  files and directories that survive a loss of power once a function returns; StorageError or
      DiskFull instead of the errors of the operating system, of SQLite and of Rust libraries

A rename is durable once the directory that holds the name is synced: syncing the file is not enough.
A file that cannot be read now (EIO, EMFILE, EACCES) is not a damaged file: callers must be able to
tell the two apart, so FileNotFoundError and everything about the content passes unchanged.
"""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.errors import DiskFull, HoneError, StorageError

_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EMFILE,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}
"""SQLite's primary result codes that are about the disk, and the errno each stands for."""
_RUST = re.compile(r"\(os error ([0-9]+)\)")
"""How safetensors spells an errno."""


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory (not the files they stand for)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(path: Path, target: Path) -> None:
    """Rename, in the same directory."""
    path.rename(target)
    sync(target.parent)


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Raise StorageError or DiskFull where the disk fails inside the block.

    A missing file stays FileNotFoundError; errors of hone and of the content stay what they are.
    """
    try:
        yield
    except (HoneError, FileNotFoundError):
        raise
    except Exception as error:
        number = _errno(error)
        if number is None:
            raise
        where = getattr(error, "filename", None) or path
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{where}: the disk is full ({error}). Free some space on the disk that holds it."
            ) from error
        raise StorageError(
            f"{where}: the file cannot be read or written just now ({error}). Nothing was changed; "
            "look at the disk, the permissions and the limit of open files (ulimit -n)."
        ) from error


def _errno(error: Exception) -> int | None:
    """The errno behind an error; None where the disk is not the cause."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
    found = _RUST.search(str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else None
