"""The store: whole transactions, readers that never wait, files it refuses."""

import os
import resource
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of

from hone.errors import DiskFull, StateError, StorageError
from hone.store import database
from hone.store.database import MIGRATIONS, Migration, Store

NEWER = len(MIGRATIONS) + 2
"""The version of a file that a newer hone wrote."""
SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY, size INTEGER NOT NULL);"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state.sqlite", (SCHEMA,))
    yield opened
    opened.close()


def names(store: Store) -> list[str]:
    return [row["name"] for row in store.query("SELECT name FROM things ORDER BY name")]


@pytest.mark.parametrize("durable", [True, False])
def test_a_transaction_happens_whole_or_not_at_all(store: Store, durable: bool):
    with store.transaction(durable=durable) as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
        assert names(store) == []  # not yet, for anybody else
    assert names(store) == ["a"]
    with pytest.raises(KeyError), store.transaction(durable=durable) as db:
        db.execute("INSERT INTO things VALUES ('b', 2)")
        raise KeyError
    assert names(store) == ["a"]
    with pytest.raises(sqlite3.IntegrityError), store.transaction(durable=durable) as db:
        db.execute("INSERT INTO things VALUES ('c', 3)")
        db.execute("INSERT INTO things VALUES ('a', 4)")
    assert names(store) == ["a"]


def test_only_a_durable_transaction_is_synced(store: Store):
    # 2 is FULL (the log is synced at every commit), 1 is NORMAL (at checkpoints of the log only).
    for durable, level in ((True, 2), (False, 1), (True, 2)):
        with store.transaction(durable=durable) as db:
            assert db.execute("PRAGMA synchronous").fetchone()[0] == level
    assert store.query("PRAGMA journal_mode")[0][0] == "wal"


def test_eight_threads_lose_no_write_and_get_no_lock_error(store: Store):
    def write(thread: int) -> None:
        for i in range(25):
            with store.transaction() as db:
                (before,) = db.execute("SELECT count(*) FROM things").fetchone()
                db.execute("INSERT INTO things VALUES (?, ?)", (f"{thread}-{i}", before))
            assert len(names(store)) > before

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [row["size"] for row in store.query("SELECT size FROM things ORDER BY size")]
    assert sizes == list(range(200))  # each saw all that were before it


def test_what_was_written_is_there_when_it_is_opened_again(prose: Prose, tmp_path: Path):
    path = tmp_path / "state.sqlite"
    first = Store(path, (SCHEMA,))
    with first.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    first.close()
    first.close()  # twice does no harm
    with pytest.raises(StateError) as caught:
        first.query("SELECT 1")
    prose(caught)
    with pytest.raises(StateError) as caught, first.transaction():
        pass
    prose(caught)
    more = "CREATE TABLE IF NOT EXISTS others (name TEXT);"
    second = Store(path, (SCHEMA, more))  # a schema that came later
    assert names(second) == ["a"]
    assert second.query("SELECT * FROM others") == []
    second.close()


def test_a_newer_file_is_refused_and_left_alone(prose: Prose, tmp_path: Path):
    path = tmp_path / "state.sqlite"
    Store(path, (SCHEMA,)).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {NEWER}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StateError) as caught:
        Store(path, (SCHEMA,))
    prose(caught)
    assert path.read_bytes() == before


def add_colour(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE things ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey'")


def paint_by_size(db: sqlite3.Connection) -> None:
    db.execute("UPDATE things SET colour = 'red' WHERE size > 1")


def break_half_way(db: sqlite3.Connection) -> None:
    db.execute("UPDATE things SET colour = 'blue'")
    db.execute("ALTER TABLE things DROP COLUMN no_such_column")


COLOURED = SCHEMA.replace("size INTEGER NOT NULL", "size INTEGER NOT NULL, colour TEXT NOT NULL")
BY_COLOUR = "CREATE INDEX IF NOT EXISTS by_colour ON things (colour);"


def rows_of(path: Path, *migrations: Migration) -> list[tuple[Any, ...]]:
    store = Store(path, (COLOURED, BY_COLOUR), migrations=migrations)
    rows = [tuple(row) for row in store.query("SELECT * FROM things ORDER BY name")]
    store.close()
    return rows


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


def test_an_older_file_gets_the_migrations_it_lacks_in_their_order(prose: Prose, tmp_path: Path):
    path = tmp_path / "state.sqlite"
    old = Store(path, (SCHEMA,), migrations=())
    with old.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1), ('b', 2)")
    old.close()
    assert version_of(path) == 1
    assert rows_of(path, add_colour) == [("a", 1, "grey"), ("b", 2, "grey")]
    assert version_of(path) == 2
    # The first would fail if it were applied again: the column exists.
    assert rows_of(path, add_colour, paint_by_size) == [("a", 1, "grey"), ("b", 2, "red")]
    assert version_of(path) == 3
    assert rows_of(path, add_colour, paint_by_size) == [("a", 1, "grey"), ("b", 2, "red")]
    with pytest.raises(StateError) as caught:
        rows_of(path, add_colour)
    prose(caught)


def test_a_new_file_has_the_newest_version_and_no_migration_runs(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    assert rows_of(path, add_colour, break_half_way) == []
    assert version_of(path) == 3


def test_a_migration_that_fails_changes_nothing_and_is_tried_again(prose: Prose, tmp_path: Path):
    path = tmp_path / "state.sqlite"
    old = Store(path, (SCHEMA,), migrations=())
    with old.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 2)")
    old.close()
    with pytest.raises(StateError) as caught:
        rows_of(path, add_colour, break_half_way)
    prose(caught)
    assert version_of(path) == 2, "the first one is kept"
    assert rows_of(path, add_colour, paint_by_size) == [("a", 2, "red")]  # not blue


def test_a_file_of_another_program_is_refused(prose: Prose, tmp_path: Path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)
    with pytest.raises(StateError) as caught:
        Store(path, (SCHEMA,))
    prose(caught)
    assert place_of(caught).endswith("state.sqlite")


def test_a_transaction_inside_another_is_an_error_and_no_deadlock(store: Store):
    with pytest.raises(sqlite3.OperationalError), store.transaction(), store.transaction():
        pass
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    assert names(store) == ["a"]


def test_the_file_shrinks_when_rows_are_gone(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "_SPARE_PAGES", 4)
    monkeypatch.setattr(database, "_PAGES_AT_ONCE", 16)
    with store.transaction() as db:
        db.executemany(
            "INSERT INTO things VALUES (?, 1)", [(f"{i:03d}" + "x" * 4000,) for i in range(200)]
        )
        db.execute("INSERT INTO things VALUES ('kept', 2)")
    store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    full = store.path.stat().st_size
    assert store.shrink() == 0, "nothing is free"
    with store.transaction() as db:
        db.execute("DELETE FROM things WHERE size = 1")
    freed = store.shrink()
    assert freed > 200 * 4000
    assert store.path.stat().st_size == full - freed
    assert names(store) == ["kept"]
    assert store.query("PRAGMA integrity_check")[0][0] == "ok"
    assert store.query("PRAGMA freelist_count")[0][0] == 4
    assert store._writer.execute("PRAGMA journal_size_limit").fetchone()[0] == 64 * 2**20


def fill_up(store: Store) -> None:
    """From now on SQLite finds no room for another page: the same SQLITE_FULL as on a full disk."""
    writer = store._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_named_and_loses_nothing(prose: Prose, store: Store):
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    fill_up(store)
    for durable in (True, False):
        with (
            pytest.raises(DiskFull) as caught,
            store.transaction(durable=durable) as db,
        ):
            db.executemany(
                "INSERT INTO things VALUES (?, 2)", [(f"b{i:0400d}",) for i in range(200)]
            )
        prose(caught)
        assert place_of(caught).endswith("state.sqlite")
        assert names(store) == ["a"]
    store._writer.execute("PRAGMA max_page_count = 1000000")  # there is room again
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('b', 2)")
    assert names(store) == ["a", "b"]


def test_without_a_free_descriptor_a_read_is_no_defect(prose: Prose, tmp_path: Path):
    store = Store(tmp_path / "state.sqlite", (SCHEMA,))  # no reader is open yet
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            names(store)
        prose(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert names(store) == []
    store.close()


def test_starting_on_a_full_disk_says_so(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And does not advise to move the state file away: there is nothing wrong with it."""
    path = tmp_path / "state.sqlite"
    Store(path, (SCHEMA,)).close()
    connect = sqlite3.connect

    def on_a_full_disk(*args: Any, **more: Any) -> sqlite3.Connection:
        connection = connect(*args, **more)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", on_a_full_disk)
    with pytest.raises(DiskFull) as raised:
        Store(path, (SCHEMA, "CREATE TABLE IF NOT EXISTS others (name TEXT);"))
    prose(raised)
    assert "move" not in str(raised.value)


# ---- locks of other processes -------------------------------------------------------------------


@contextmanager
def locked(path: Path, *, readers: bool = False) -> Iterator[None]:
    """As a sqlite3 shell with an open transaction; with `readers`, nobody may read either."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        if readers:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
    finally:
        other.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_lock_of_another_process_is_a_storage_error_and_changes_nothing(
    prose: Prose, store: Store, monkeypatch: pytest.MonkeyPatch, durable: bool
):
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    with locked(store.path):
        for _ in range(2):
            with (
                pytest.raises(StorageError) as caught,
                store.transaction(durable=durable),
            ):
                pass
            prose(caught)
        assert names(store) == []  # and readers read
    with store.transaction(durable=durable) as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    assert names(store) == ["a"]


def test_a_transaction_waits_for_a_lock_that_ends_soon(store: Store):
    waits, done = threading.Event(), threading.Event()

    def write() -> None:
        waits.set()
        with store.transaction() as db:
            db.execute("INSERT INTO things VALUES ('a', 1)")
        done.set()

    thread = threading.Thread(target=write)
    with locked(store.path):
        thread.start()
        assert waits.wait(PATIENCE_S) and not done.wait(0.2)
    thread.join()
    assert names(store) == ["a"]


def test_only_the_first_transaction_waits_for_a_long_lock(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise a hundred requests would wait one after the other, for BUSY_S each."""
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    monkeypatch.setattr(database, "time", clock := Clock())
    patience = []
    with locked(store.path):
        for _ in range(3):
            with pytest.raises(StorageError), store.transaction():
                pass
            patience.append(store._writer.execute("PRAGMA busy_timeout").fetchone()[0])
        clock.now += 1.0  # and again after a while: it may be another lock
        with pytest.raises(StorageError), store.transaction():
            pass
        patience.append(store._writer.execute("PRAGMA busy_timeout").fetchone()[0])
    assert patience == [200, 0, 0, 200]


class Clock:
    """The time as the test says it is."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_locked_file_is_recognised_as_a_state_file(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = tmp_path / "state.sqlite"
    Store(path, (SCHEMA,)).close()
    for readers in (True, False):
        with locked(path, readers=readers):
            with pytest.raises(StorageError) as raised:
                Store(path, (SCHEMA,))
            prose(raised)
            assert "backup, or move" not in str(raised.value)
    Store(path, (SCHEMA,)).close()


# ---- for queries only ---------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_store_for_queries_leaves_a_closed_file_as_it_was(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    first = Store(path, (SCHEMA,))
    with first.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    first.close()
    before = contents(tmp_path)
    assert list(before) == ["state.sqlite"]
    reading = Store(path, None)
    assert names(reading) == ["a"]
    assert contents(tmp_path) == before
    # A server starts: the next query sees what it commits.
    server = Store(path, (SCHEMA,))
    with server.transaction() as db:
        db.execute("INSERT INTO things VALUES ('b', 2)")
    assert names(reading) == ["a", "b"]
    reading.close()
    server.close()


def test_a_store_for_queries_needs_no_write_lock(prose: Prose, store: Store):
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    with locked(store.path):
        reading = Store(store.path, None)
        assert names(reading) == ["a"]
        with pytest.raises(StorageError) as caught:
            reading.query("INSERT INTO things VALUES ('b', 2)")
        prose(caught)
        reading.close()


def test_a_store_for_queries_names_locked_newer_and_foreign_files(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = tmp_path / "state.sqlite"
    Store(path, (SCHEMA,)).close()
    with locked(path, readers=True), pytest.raises(StorageError) as caught:
        names(Store(path, None))
    prose(caught)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {NEWER}")
    with pytest.raises(StateError) as caught:
        names(Store(path, None))
    prose(caught)
    for content in (b"", b"no database at all, but long enough to be read as one" * 100):
        path.write_bytes(content)
        for log in tmp_path.glob("*-*"):
            log.unlink()
        with pytest.raises(StateError) as caught:
            names(Store(path, None))
        prose(caught)
        assert contents(tmp_path) == {"state.sqlite": content}
