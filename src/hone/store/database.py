"""The server's root directory, and the SQLite file in it.

In:   --root; SQL, from any thread
Out:  a directory that other users cannot read; rows; atomic transactions

One connection writes, under a lock of this process; readers have their own connections and see the
last commit. A durable transaction is on the disk when it returns (jobs); any other survives a
`kill -9`, but not a loss of power (calls). A full disk raises DiskFull; a failing disk, and a lock
that another process holds for long, StorageError. All leave the state as it was. A store that is
opened for queries only changes no file.

The root contains the server's key and every recorded conversation. The mode of a directory that
contains other files is never changed: with `--root /tmp`, that would lock out every other user.
"""

import errno
import math
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hone.errors import Forbidden, NotFound, ServerError, StateError
from hone.files.disk import storage
from hone.store.failpoints import failpoint

FAILPOINTS = ("store/before-commit", "store/after-commit")
"""Failpoints around every durable commit."""

Migration = Callable[[sqlite3.Connection], None]
"""Changes the tables of a file from one version to the next, inside a transaction."""
MIGRATIONS: tuple[Migration, ...] = ()
"""Migrations in order; the first turns version 1 into version 2. Every change that `CREATE ... IF NOT
EXISTS` in the schemas does not cover is appended here, and none is ever changed or removed. A new file
gets the schemas and the newest version, and no migration."""

BUSY_S = 5.0
"""How long a transaction waits for a lock that another process holds, such as a sqlite3 shell."""

_SPARE_PAGES = 1024
"""Free pages that `shrink` leaves."""
_PAGES_AT_ONCE = 256
"""Pages that `shrink` moves in one transaction."""
_LOG_BYTES = 64 * 2**20
"""Size to which the write-ahead log is cut when it starts over; without a limit it stays as long as the
longest transaction made it."""

STATE = "state.sqlite"
"""Name of the state file in a root."""
_OURS = (STATE, "server.lock", "logs", "api_key", "runs", "evals")
"""A directory with one of these names belongs to hone: a root, or the default directory of runs."""
_OF_SDK = ["projects"]
"""All names in a directory that only the SDK has written to. Among others it is no sign of hone."""


def state_file(root: Path) -> Path:
    """The state file of a root. Raises NotFound if there is none, Forbidden if it cannot be read."""
    path = root / STATE
    try:
        if path.is_file() and os.access(path, os.R_OK):
            return path
        denied = path.is_file()
    except PermissionError:
        denied = True
    if denied:
        raise Forbidden(
            f"--root {root}: it belongs to another user; run the command as the user that runs the "
            "server"
        )
    raise NotFound(f"--root {root}: there is no server state; name the root of a server")


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
    if entries and entries != _OF_SDK and not any(name in entries for name in _OURS):
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

    def __init__(
        self,
        path: Path,
        schemas: Sequence[str] | None = (),
        *,
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> None:
        """Open or create the file, and migrate it to this version.

        `schemas` None: for queries only; another process writes the file.
        """
        self.path = path
        self._newest = 1 + len(migrations)
        self.reported: set[str] = set()
        """Rows that cannot be read and were logged."""
        self._writing = threading.RLock()  # so a nested transaction is an error, not a deadlock
        self._idle_readers: list[sqlite3.Connection] = []
        self._closed = False
        self._refused_at = -math.inf
        """When a transaction last timed out because of another process's lock."""
        self._log = path.with_name(f"{path.name}-wal")
        """SQLite's write-ahead log: there while any process has the file open for writing."""
        self._writes = schemas is not None
        if schemas is None:
            return
        try:
            # Raises its own errors for a full, failing or locked disk: the file may be intact.
            with storage(path):
                self._writer = self._connect()
                try:
                    self._migrate(schemas, migrations)
                except BaseException:
                    self._writer.close()
                    raise
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
            self._begin()
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
            if not self._writes and not self._log.exists():
                rows = self._query_closed_file(sql, args)
                if not self._log.exists():
                    return rows
                # A server has opened the file meanwhile: read again, with its locks.
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

    def shrink(self) -> int:
        """Return the free pages at the end of the file to the disk; returns the bytes.

        In small transactions, so that requests do not wait. A few free pages stay for new rows.
        """
        before = size = self._pages("page_count")
        while (free := self._pages("freelist_count") - _SPARE_PAGES) > 0:
            with self.transaction() as db:
                bite = min(free, _PAGES_AT_ONCE)
                db.execute(f"PRAGMA incremental_vacuum({bite})").fetchall()
            if (now := self._pages("page_count")) >= size:
                break  # a file that was created without auto_vacuum
            size = now
        if size < before:
            with self._writing, storage(self.path):
                self._check_open()
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return (before - size) * self._pages("page_size")

    def _pages(self, pragma: str) -> int:
        return self.query(f"PRAGMA {pragma}")[0][0]

    def close(self) -> None:
        with self._writing:
            if not self._closed:
                self._closed = True
                self._close_readers()
                if self._writes:
                    self._writer.close()

    def _begin(self) -> None:
        """Begin a transaction, after a lock that another process holds.

        Only the first transaction that meets a lock waits for it. Otherwise every request would wait
        for BUSY_S, one after the other.
        """
        waits = time.monotonic() > self._refused_at + BUSY_S
        self._writer.execute(f"PRAGMA busy_timeout = {int(waits * BUSY_S * 1000)}")
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self._refused_at = time.monotonic()
            raise
        self._refused_at = -math.inf

    def _connect(self) -> sqlite3.Connection:
        if not self._writes:
            return self._connect_for_queries("mode=ro")
        is_new = not self.path.exists() or self.path.stat().st_size == 0
        connection = self._open(str(self.path))
        try:
            if is_new:  # later it would have no effect
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    def _query_closed_file(
        self, sql: str, args: Sequence[Any] | Mapping[str, Any]
    ) -> list[sqlite3.Row]:
        """Rows of a file that no process has open.

        `immutable`: otherwise SQLite creates a log to read the file, and leaves it behind.
        """
        with closing(self._connect_for_queries("mode=ro&immutable=1")) as reader:
            return reader.execute(sql, args).fetchall()

    def _connect_for_queries(self, options: str) -> sqlite3.Connection:
        """A connection that changes nothing. Raises StateError unless the file is a state file."""
        connection = self._open(f"{self.path.absolute().as_uri()}?{options}")
        with ExitStack() as unusable:
            unusable.callback(connection.close)
            try:
                with closing(connection.execute("PRAGMA user_version")) as cursor:
                    version = cursor.fetchone()[0]
            except sqlite3.OperationalError:
                raise  # locked, or the disk fails: the file may be intact
            except sqlite3.DatabaseError as error:
                raise self._not_ours(error) from error
            self._check_version(version)
            if version == 0:
                raise self._not_ours("it has no schema")
            unusable.pop_all()
        return connection

    def _open(self, database: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            database,
            uri=not self._writes,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.row_factory = sqlite3.Row
        return connection

    def _close_readers(self) -> None:
        while self._idle_readers:
            self._idle_readers.pop().close()

    def _migrate(self, schemas: Sequence[str], migrations: Sequence[Migration]) -> None:
        """Apply the migrations that the file lacks, each in one transaction; then the schemas."""
        while 0 < (version := self._version()) != self._newest:
            self._check_version(version)
            with self.transaction(durable=True) as db:
                # Again, now that no other process can migrate it.
                if self._version() == version:
                    migrations[version - 1](db)
                    db.execute(f"PRAGMA user_version = {version + 1}")
        script = "\n".join(
            ("BEGIN IMMEDIATE;", *schemas, f"PRAGMA user_version = {self._newest};", "COMMIT;")
        )
        self._writer.executescript(script)

    def _not_ours(self, why: object) -> StateError:
        return StateError(
            f"{self.path}: not a state file of hone ({why}). Name the root directory of a server."
        )

    def _check_version(self, version: int) -> None:
        if version > self._newest:
            raise StateError(
                f"{self.path}: written by a newer hone (schema {version}, this one knows "
                f"{self._newest}). Upgrade hone, or start with another --root."
            )

    def _version(self) -> int:
        """The version of the file; 0 if it is new."""
        with closing(self._writer.execute("PRAGMA user_version")) as cursor:
            return cursor.fetchone()[0]

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"{self.path}: the store is closed")
