"""Lock files: one process at a time in a directory.

In:   the path of a lock file
Out:  a lock, held until it is released or the process ends, however it ends; who holds it, if not

The operating system holds the lock, not the file: a file left behind by a killed process blocks
nothing. The file is not removed when the lock is released; otherwise two processes could each lock
a different file of that name. It contains the id of the process that took the lock last.
"""

import errno
import logging
import os
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from hone.errors import ConfigError, Conflict

log = logging.getLogger("hone")

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error codes of file systems without locks, such as some network file systems."""


class LockHeld(Exception):
    """Another process holds the lock; its id is the message."""


class LockFile:
    """A lock that this process holds; a context manager that releases it."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        """Take the lock. Raises LockHeld, or OSError if the file cannot be written."""
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=wait_s)
        except Timeout:
            raise LockHeld(_process(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s: the file system has no locks (%s); run only one command in it at a time",
                *(path.parent, error.strerror),
            )
        path.write_text(str(os.getpid()), encoding="utf-8")

    def release(self) -> None:
        """Release the lock. Releasing twice does nothing."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_directory(directory: Path, file: str, *, command: str, key: str) -> LockFile:
    """Lock a directory for this process. Raises Conflict, or ConfigError if it cannot be written.

    Args:
        directory: must exist.
        file: name of the lock file in it.
        command: what runs in the directory, for instance `hone eval`.
        key: the configuration key that names the directory.
    """
    try:
        return LockFile(directory / file)
    except LockHeld as held:
        raise in_use(directory, str(held), command=command, key=key) from None
    except OSError as error:
        raise ConfigError(
            f"{key}: {directory} cannot be written to ({error.strerror}). Name another directory "
            f"with -o {key} DIR."
        ) from None


def in_use(directory: Path, process: str, *, command: str, key: str) -> Conflict:
    """The error for a directory that another process has locked."""
    return Conflict(
        f"{key}: {directory} is in use by another `{command}` (process {process}). Wait until it "
        f"has ended, or name another directory with -o {key} DIR."
    )


def holder(path: Path) -> str | None:
    """The process that holds the lock; None if it is free or that cannot be determined."""
    if not path.is_file():
        return None
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _process(path)
    except OSError:
        return None
    lock.release()
    return None


def _process(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
