"""The store: whole transactions, readers that never wait, files it refuses."""

import os
import resource
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.errors import DiskFull, StateError, StorageError
from hone.store.database import VERSION, Store

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


def test_eight_threads_lose_no_write_and_meet_no_lock(store: Store):
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


def test_what_was_written_is_there_when_it_is_opened_again(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    first = Store(path, (SCHEMA,))
    with first.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    first.close()
    first.close()  # twice does no harm
    with pytest.raises(StateError, match="the store is closed"):
        first.query("SELECT 1")
    with pytest.raises(StateError, match="the store is closed"), first.transaction():
        pass
    more = "CREATE TABLE IF NOT EXISTS others (name TEXT);"
    second = Store(path, (SCHEMA, more))  # a schema that came later
    assert names(second) == ["a"]
    assert second.query("SELECT * FROM others") == []
    second.close()


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    Store(path, (SCHEMA,)).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StateError, match=rf"newer hone \(schema {VERSION + 1}, .*Upgrade hone"):
        Store(path, (SCHEMA,))
    assert path.read_bytes() == before


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)
    with pytest.raises(StateError, match=r"state\.sqlite: not a state file of hone"):
        Store(path, (SCHEMA,))


def test_a_transaction_inside_another_is_an_error_and_no_deadlock(store: Store):
    with pytest.raises(sqlite3.OperationalError), store.transaction(), store.transaction():
        pass
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    assert names(store) == ["a"]


def fill_up(store: Store) -> None:
    """From now on SQLite finds no room for another page: the same SQLITE_FULL as on a full disk."""
    writer = store._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_named_and_loses_nothing(store: Store):
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('a', 1)")
    fill_up(store)
    for durable in (True, False):
        with (
            pytest.raises(DiskFull, match=r"state\.sqlite: the disk is full"),
            store.transaction(durable=durable) as db,
        ):
            db.executemany(
                "INSERT INTO things VALUES (?, 2)", [(f"b{i:0400d}",) for i in range(200)]
            )
        assert names(store) == ["a"]
    store._writer.execute("PRAGMA max_page_count = 1000000")  # there is room again
    with store.transaction() as db:
        db.execute("INSERT INTO things VALUES ('b', 2)")
    assert names(store) == ["a", "b"]


def test_without_a_free_descriptor_a_read_is_no_defect(tmp_path: Path):
    store = Store(tmp_path / "state.sqlite", (SCHEMA,))  # no reader is open yet
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(StorageError, match="cannot be read or written at the moment"):
            names(store)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert names(store) == []
    store.close()


def test_starting_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(DiskFull, match=r"the disk is full .*Free some space") as raised:
        Store(path, (SCHEMA, "CREATE TABLE IF NOT EXISTS others (name TEXT);"))
    assert "move" not in str(raised.value)
