"""A directory that only one command at a time writes to.

In:   the directory; the command and the key of its name, for messages
Out:  a DirectoryLock, held until it is released or the process ends, however it ends

The operating system holds the lock, not the file: what a killed process leaves behind blocks
nobody. The file stays when the lock is released, because between its removal and the next lock two
processes could hold one each.
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import Self

from hone.errors import ConfigError, Conflict

log = logging.getLogger("hone")


class DirectoryLock:
    """Of one directory; a context manager that lets go at its end."""

    def __init__(self, directory: Path, file: str, *, command: str, key: str) -> None:
        """Takes it, or says who has it.

        Args:
            directory: must exist.
            file: the lock's name in it; whoever holds the lock writes his process id there.
            command: what holds it, for instance `hone eval`.
            key: of the configuration, under which another directory can be named.
        """
        try:
            self._held: int | None = os.open(directory / file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{key}: {directory} cannot be written to ({error.strerror}); name another "
                f"directory with -o {key} DIR"
            ) from None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(self._held, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            raise Conflict(
                f"{key}: {directory} is in use by another `{command}` (process {who}). Wait until "
                f"it has ended, or name another directory with -o {key} DIR."
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning(
                "%s: the file system gives no lock (%s); run only one `%s` in it at a time",
                *(directory, error.strerror, command),
            )
        os.ftruncate(self._held, 0)
        os.pwrite(self._held, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let go; a second time does nothing."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(directory: Path, file: str) -> bool:
    """Whether some process holds the lock of the directory."""
    try:
        found = os.open(directory / file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(found)
    return False
