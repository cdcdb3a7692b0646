"""One command at a time in a directory; a killed one blocks nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.prose import Prose, place_of

from hone.errors import ConfigError, Conflict
from hone.files.lock import LockFile, holder, lock_directory

HOLD = (
    "import sys; from pathlib import Path; from hone.files.lock import lock_directory; "
    "held = lock_directory(Path(sys.argv[1]), 'l', command='hone eval', key='a.b'); "
    "print('held', flush=True); sys.stdin.read()"
)


def taken(directory: Path) -> LockFile:
    return lock_directory(directory, "l", command="hone eval", key="a.b")


def test_the_second_process_gets_the_id_of_the_holder(prose: Prose, tmp_path: Path):
    assert holder(tmp_path / "l") is None
    with taken(tmp_path):
        assert holder(tmp_path / "l") == str(os.getpid())
        with pytest.raises(Conflict) as caught:
            taken(tmp_path)
    prose(caught)
    assert place_of(caught) == "a.b"
    assert holder(tmp_path / "l") is None
    taken(tmp_path).release()


def test_a_killed_process_leaves_no_lock(prose: Prose, tmp_path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(Conflict) as caught:
            taken(tmp_path)
        prose(caught, pid=child.pid)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert (tmp_path / "l").read_text() == str(child.pid)
    with taken(tmp_path):
        assert (tmp_path / "l").read_text() == str(os.getpid())


def test_an_unwritable_directory_is_named(prose: Prose, tmp_path: Path):
    (tmp_path / "l").mkdir()
    with pytest.raises(ConfigError) as caught:
        taken(tmp_path)
    prose(caught)
    assert place_of(caught) == "a.b"
