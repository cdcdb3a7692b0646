"""inference/apart.py: work on a thread of its own, which may give way and never hangs whoever waits."""

import os
import sys
import threading

import pytest

from hone.inference.apart import LEAST, apart


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_what_gives_way_does_so_alone():
    ours = niceness()
    assert apart(niceness, gives_way=True).result() == LEAST
    assert apart(niceness).result() == ours
    assert niceness() == ours


def test_its_error_reaches_whoever_waits():
    with pytest.raises(KeyError, match="gone"):
        apart(lambda: {}["gone"]).result()


def test_where_niceness_is_forbidden_the_work_is_done(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert apart(lambda: 7, gives_way=True).result(5) == 7
