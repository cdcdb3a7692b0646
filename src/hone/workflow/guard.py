"""Kill the processes and remove the directories of rollouts, also when hone itself is killed.

In:   the token, the process group and the directory of each running program
Out:  none of them remain once the rollout has ended or this process has died

A program may start children, and some put them into other process groups (browsers do). So each
program has a token in its environment, which children inherit: on Linux every process with the
token is killed, elsewhere the program's process group. Code in this process cannot run after
SIGKILL, so a separate process (this file as a script, standard library only) reads from a pipe what
is running, and kills it when the pipe closes.
"""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

TOKEN = "HONE_PROGRAM"
"""The variable with the token."""
_ROUNDS = 20
"""Scans of the process table: a process may start another one during a scan."""


def kill_all(token: str, group: int | None) -> None:
    """SIGKILL the group and every process that has the token."""
    if group is not None:
        signal_group(group, signal.SIGKILL)
    for _ in range(_ROUNDS):
        pids = _with_token(token)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    # macOS raises PermissionError for a group that consists of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def remove_tree(directory: Path) -> None:
    """Remove a directory, even if parts of it are read-only or unreadable for their owner."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        _open(str(directory))
        for place, folders, _ in os.walk(directory):
            for folder in folders:
                _open(os.path.join(place, folder))  # os.walk lists it after this
        shutil.rmtree(directory, ignore_errors=True)


def _open(folder: str) -> None:
    """Let its owner read and change a folder, but not one that a link leads to."""
    if not os.path.islink(folder):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)


def _with_token(token: str) -> list[int]:
    """Processes with the token in their environment; none where the system does not show it."""
    wanted, pids = f"{TOKEN}={token}".encode(), []
    processes = Path("/proc")
    for name in os.listdir(processes) if processes.is_dir() else ():
        if name.isdigit() and int(name) != os.getpid():
            # An empty environment is a zombie's; other users' cannot be read.
            with contextlib.suppress(OSError):
                if wanted in (processes / name / "environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids


class Guard:
    """Tells the helper process what is running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._running: dict[str, tuple[int | None, str]] = {}

    @property
    def running(self) -> int:
        """Number of programs."""
        return len(self._running)

    def add(self, token: str, directory: str, group: int | None = None) -> None:
        """Report that a program will start in this directory, runs as this group, or has ended."""
        with self._lock:
            self._running[token] = (group, directory)
            if self._helper is None or self._helper.poll() is not None:
                self._start()
                for other, (other_group, place) in self._running.items():
                    self._tell(other, other_group, place)
            else:
                self._tell(token, group, directory)

    def remove(self, token: str) -> None:
        """Report that nothing of the program is left."""
        with self._lock:
            if self._running.pop(token, None) is not None:
                self._tell(token, None, None)

    def _start(self) -> None:
        self._helper = subprocess.Popen(
            # Isolated and without site-packages: it starts in some milliseconds.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it before this process
        )
        atexit.register(_end, self._helper)

    def _tell(self, token: str, group: int | None, directory: str | None) -> None:
        assert self._helper is not None and self._helper.stdin is not None, "it is started first"
        line = json.dumps([token, group, directory]).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it was killed; the next `add` starts another
            self._helper.stdin.write(line)
            self._helper.stdin.flush()


def _end(helper: subprocess.Popen[bytes]) -> None:
    assert helper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        helper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.wait(10)


guard = Guard()
"""The guard of this process."""


def _watch() -> None:
    """The separate process: track what is running until hone ends, then clean up."""
    running: dict[str, list[Any]] = {}
    for line in sys.stdin.buffer:
        with contextlib.suppress(ValueError):  # the last line may be cut
            token, group, directory = json.loads(line)
            if directory is None:
                running.pop(token, None)
            else:
                running[token] = [group, directory]
    for token, (group, directory) in running.items():
        kill_all(token, group)
        remove_tree(Path(directory))


if __name__ == "__main__":
    _watch()
