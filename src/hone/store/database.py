"""The server's root directory, and the SQLite file in it.

In:   --root; SQL, from any thread
Out:  a directory that other users cannot read; rows; atomic transactions

One connection writes, under a lock, so that "database is locked" cannot happen; readers have their
own connections and see the last commit. A durable transaction is on the disk when it returns
(jobs); any other survives a `kill -9`, but not a loss of power (calls). A full disk raises DiskFull,
a failing disk StorageError; both leave the state as it was.

The root contains the server's key and every recorded conversation. The mode of a directory that
contains other files is never changed: with `--root /tmp`, that would lock out every other user.
"""

import errno
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hone.disk import storage
from hone.errors import ServerError, StateError
from hone.store.failpoints import failpoint

FAILPOINTS = ("store/before-commit", "store/after-commit")
"""Failpoints around every durable commit."""

VERSION = 1
"""Incremented with every change that `CREATE ... IF NOT EXISTS` in the schemas does not cover; such a
change also needs SQL that migrates older files."""


_OURS = ("state.sqlite", "server.lock", "logs", "api_key", "runs", "evals")
"""A directory with one of these names belongs to hone: a root, or the default directory of runs."""


def make_root(root: Path) -> None:
    """Create the root, or close it to other users. Raises ServerError if that is not possible."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ServerError(f"--root {root}: is a file; name a directory") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ServerError(
            f"--root {root}: cannot be created ({error.strerror}). Name another directory."
        ) from None
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


class Store:
    """Thread-safe and blocking: call it from `asyncio.to_thread`."""

    def __init__(self, path: Path, schemas: Sequence[str] | None = ()) -> None:
        """Open or create the file, and migrate it to this version.

        `schemas` None: for queries only; another process writes the file.
        """
        self.path = path
        self._writing = threading.RLock()  # so a nested transaction is an error, not a deadlock
        self._idle_readers: list[sqlite3.Connection] = []
        self._closed = False
        self._writes = schemas is not None
        if schemas is None:
            return
        try:
            # Raises its own errors for a full or failing disk: the file may be intact.
            with storage(path):
                self._writer = self._connect()
                self._migrate(schemas)
        except sqlite3.DatabaseError as error:
            raise StateError(
                f"{path}: not a state file of hone ({error}). Restore it from a backup, or move it "
                "away to start over; checkpoints are kept beside it and are not touched."
            ) from error

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit everything in the block at its end, or nothing if it raises."""
        with self._writing, storage(self.path):
            self._check_open()
            # Cannot be changed inside a transaction; FULL syncs the log at every commit.
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                if durable:
                    failpoint("store/before-commit")
                self._writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.OperationalError):  # SQLite may already have rolled back
                    self._writer.execute("ROLLBACK")
                raise
            if durable:
                failpoint("store/after-commit")

    def query(self, sql: str, args: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Rows of the last committed state."""
        self._check_open()
        with storage(self.path):
            try:
                reader = self._idle_readers.pop()
            except IndexError:
                reader = self._connect()
            try:
                return reader.execute(sql, args).fetchall()
            finally:
                self._idle_readers.append(reader)
                if self._closed:
                    self._close_readers()

    def close(self) -> None:
        with self._writing:
            if not self._closed:
                self._closed = True
                self._close_readers()
                if self._writes:
                    self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _close_readers(self) -> None:
        while self._idle_readers:
            self._idle_readers.pop().close()

    def _migrate(self, schemas: Sequence[str]) -> None:
        with closing(self._writer.execute("PRAGMA user_version")) as cursor:
            version = cursor.fetchone()[0]
        if version > VERSION:
            self._writer.close()
            raise StateError(
                f"{self.path}: written by a newer hone (schema {version}, this one knows {VERSION}). "
                "Upgrade hone, or start with another --root."
            )
        script = "\n".join(
            ("BEGIN IMMEDIATE;", *schemas, f"PRAGMA user_version = {VERSION};", "COMMIT;")
        )
        self._writer.executescript(script)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"{self.path}: the store is closed")
