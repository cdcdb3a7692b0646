"""Background work: its priority, and its errors."""

import os
import sys
import threading

import pytest
from tests.patience import PATIENCE_S

from hone.inference.background import LOWEST_PRIORITY, run_in_background


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_only_low_priority_work_has_low_priority():
    ours = niceness()
    assert run_in_background(niceness, low_priority=True).result() == LOWEST_PRIORITY
    assert run_in_background(niceness).result() == ours
    assert niceness() == ours


def test_the_caller_gets_its_error():
    with pytest.raises(KeyError, match="gone"):
        run_in_background(lambda: {}["gone"]).result()


def test_work_runs_without_permission_to_change_its_niceness(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert run_in_background(lambda: 7, low_priority=True).result(PATIENCE_S) == 7
