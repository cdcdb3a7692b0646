"""Durable files: written whole, appended line by line, and an error that says why it failed.

In:   paths and content
Out:  files and directories that survive a loss of power once a function returns; StorageError or
      DiskFull (ConfigError for what a user named) instead of the errors of the operating system, of
      SQLite and of Rust libraries

A rename is durable once the directory of the name is synced: syncing the file is not enough. A file
that cannot be read for now (EIO, EMFILE, EACCES) is not a damaged file. Callers must be able to
tell the two apart, so FileNotFoundError and errors about the content pass unchanged.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import lock_descriptor

from hone.errors import ConfigError, DiskFull, HoneError, StorageError

_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EMFILE,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_PROTOCOL: errno.EBUSY,  # it gave up: too many others took the lock first
}
"""SQLite's primary result codes for disk errors, and the errno of each."""
_RUST = re.compile(r"\(os error ([0-9]+)\)")
"""How safetensors spells an errno."""
_TAIL_BYTES = 2**20
"""Bytes read at a time when looking for the last line of a file."""


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory (not the files they stand for)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(path: Path, target: Path) -> None:
    """Rename, in the same directory, to a name that is free.

    If the directory cannot be synced, the rename is undone: the caller gets an error, and the file
    keeps its old name.
    """
    path.rename(target)
    try:
        sync(target.parent)
    except OSError:
        with suppress(OSError):  # then the new name stays, and the next `sync` makes it durable
            target.rename(path)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file: after a crash it has either the old content or the new, never a mixture.

    Creates the directory if it is missing. Raises StorageError.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_lines(path: Path) -> BinaryIO:
    """Open an append-only JSONL file; a last line that a crash cut short is removed."""
    file = path.open("ab+")
    _cut_torn_line(file)
    return file


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines; they are on the disk on return. Several processes may do so at once.

    Creates the directory if it is missing. Raises StorageError.
    """
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            with suppress(OSError):  # a file system without locks
                lock_descriptor(file.fileno())
            _cut_torn_line(file)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def _cut_torn_line(file: BinaryIO) -> None:
    """Remove a last line that lacks its newline, or is not a JSON object."""
    size = start = file.seek(0, os.SEEK_END)
    tail = b""
    while start > 0 and tail.count(b"\n") < 2:
        stop, start = start, max(0, start - _TAIL_BYTES)
        file.seek(start)
        tail = file.read(stop - start) + tail
    *lines, unfinished = tail.split(b"\n")
    end = size - len(unfinished)
    if lines and not _is_object(lines[-1]):
        end -= len(lines[-1]) + 1
    if end < size:
        file.truncate(end)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Raise StorageError or DiskFull where the disk fails inside the block.

    A missing file stays FileNotFoundError; errors of hone and of the content stay what they are.
    """

    def failure(error: Exception, number: int) -> HoneError:
        renamed_to = getattr(error, "filename2", None)
        where = renamed_to or getattr(error, "filename", None) or path
        if number in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(
                f"{where}: the disk is full ({error}). Free some space on the disk that holds it."
            )
        if isinstance(error, sqlite3.Error) and number == errno.EBUSY:
            return StorageError(
                f"{where}: another process holds a lock on this file ({error}). Nothing was changed; "
                "retry. If it keeps the lock, end it: a sqlite3 shell with an open transaction, or a "
                f"backup. `lsof {where}` lists the processes."
            )
        return StorageError(
            f"{where}: the file cannot be read or written at the moment ({error}). Nothing was changed; "
            "look at the disk, the permissions and the limit of open files (ulimit -n)."
        )

    with _disk_errors(failure):
        yield


@contextmanager
def output(where: str) -> Iterator[None]:
    """Raise ConfigError where the disk fails inside the block; `where` is what the user named.

    As in `storage`, FileNotFoundError stays what it is: a file that is read inside the block.
    """

    def failure(error: Exception, number: int) -> HoneError:
        return ConfigError(
            f"{where}: cannot be written to ({os.strerror(number)}). Name another place, or change "
            "what prevents it."
        )

    with _disk_errors(failure):
        yield


@contextmanager
def _disk_errors(failure: Callable[[Exception, int], HoneError]) -> Iterator[None]:
    """Raise `failure(error, errno)` for errors of the disk inside the block, and others unchanged."""
    try:
        yield
    except (HoneError, FileNotFoundError, BrokenPipeError):
        raise  # the reader of a pipe is gone, which is not an error of the disk
    except Exception as error:
        number = _errno(error)
        if number is None:
            raise
        raise failure(error, number) from error


def _errno(error: Exception) -> int | None:
    """The errno behind an error; None where the disk is not the cause."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
    match = _RUST.search(str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(match[1]) if match else None
