"""Contenders in processes of their own, of which exactly one runs at a time.

In:   a module with a `main` that calls `serve`, and its settings
Out:  Contender, which asks it for one measurement after another, each with a deadline

Whoever is not being measured is stopped (SIGSTOP to its process group). Engines poll and thread
pools spin, and two contenders that share two cores would each be measured under the other's load.
"""

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parent.parent
THREADS = os.cpu_count() or 1
"""Every contender computes with so many."""
STDERR_LINES = 40

_MARK = "bench "
_PR_SET_PDEATHSIG = 1


class ContenderFailed(RuntimeError):
    """A contender ended, was silent past its deadline, or said that it could not."""


class Contender:
    """The parent's side of one contender; ready once constructed by `start`, and then stopped."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = name
        self._process = process
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._last_words: deque[str] = deque(maxlen=STDERR_LINES)
        self._readers = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_answers, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()

    @classmethod
    def start(
        cls,
        module: str,
        settings: Mapping[str, Any],
        *,
        name: str | None = None,
        python: Path | str = sys.executable,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 300.0,
    ) -> Self:
        """Run `python -m module` and wait until it has loaded and warmed up what it needs."""
        paths = [str(ROOT), str(ROOT / "src")] if str(python) == sys.executable else [str(ROOT)]
        process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=ROOT,
            start_new_session=True,  # a process group of its own, to be stopped and ended whole
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(THREADS)}
            | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            | dict(env or {}),
        )
        contender = cls(name or module, process)
        try:
            contender._ask({"do": "start", **settings}, deadline_s)
        except BaseException:
            contender.close()
            raise
        contender._signal(signal.SIGSTOP)
        return contender

    def measure(self, do: str, *, deadline_s: float = 600.0, **body: Any) -> dict[str, Any]:
        """One measurement: woken, asked, stopped again."""
        self._signal(signal.SIGCONT)
        try:
            return self._ask({"do": do, **body}, deadline_s)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the whole process group; there is nothing in it that must be saved."""
        self._signal(signal.SIGKILL)
        self._process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None, "started with pipes"
        with suppress(BrokenPipeError):  # it ended: the reader's end-of-file tells
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            raise self._failed(request["do"], f"gave no answer for {deadline_s:g} s") from None
        if answer is None:
            self._readers[1].join(10)  # its last words may still be in the pipe
            raise self._failed(request["do"], "ended")
        return answer

    def _failed(self, what: str, how: str) -> ContenderFailed:
        stderr = "\n".join(self._last_words) or "(it wrote nothing to stderr)"
        return ContenderFailed(f"{self.name}, during {what!r}: it {how}. Its last words:\n{stderr}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended; `_ask` says so with its last words
            os.killpg(self._process.pid, number)

    def _read_answers(self) -> None:
        assert self._process.stdout is not None, "started with pipes"
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self._answers.put(json.loads(line.removeprefix(_MARK)))
        self._answers.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "started with pipes"
        for line in self._process.stderr:
            self._last_words.append(line.rstrip("\n"))


def serve(start: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """The child's side: `start(settings)` gives the function that answers requests.

    An error ends the process with its traceback, which the parent shows.
    """
    _end_with_parent()
    # Libraries print to stdout; give them stderr, and keep the real one for answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if answer is None:
            answer = start(request)
            result: dict[str, Any] = {}
        else:
            result = answer(request)
        out.write("\n" + _MARK + json.dumps(result) + "\n")
        out.flush()


def _end_with_parent() -> None:
    """A stopped process does not see its stdin close: let the kernel end it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
