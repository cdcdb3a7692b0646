"""Processes that render the chat templates of models, within limits of time, memory and length.

In:   the source of a template and the values that it sees
Out:  the text; TemplateError where the template refuses, TemplateLimit where it exceeds a limit

Every template is compiled and rendered in a process of jinja_child.py. A template that exceeds a
limit ends that process only, and the next rendering starts another one. A few processes stay for
later renderings, of any template, and end with this one: they read the end of their input, or, if
they are busy when this process is killed, are ended by their own timer.

One template has one process at a time, so a slow one leaves the cores to other models.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from hone.errors import TemplateError, TemplateLimit

TIME_S = 5.0
"""CPU time that one rendering may take. A template takes milliseconds, even for long prompts."""
MEMORY_BYTES = 1 << 30
"""Memory that one rendering may take."""
FREE_CHARACTERS, CHARACTERS_PER_CHARACTER = 1 << 20, 8
"""How long a text may be: so many characters, and so many for each character of the input."""
STALLED_S = 60.0
"""Timeout for a rendering, which on a busy machine may have to wait for CPU time."""
WATCH_S = 0.25
"""How often the memory of a process is measured where the system does not limit it."""
ENDING_S = 5.0
"""Timeout for a process to end after it has closed its output."""
MAX_IDLE = 4
"""Processes that wait for later renderings; each takes 20 MiB."""
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
"""Exit statuses of a process that got no memory inside the interpreter."""


class JinjaProcesses:
    """Processes of jinja_child.py. Thread-safe; rendering blocks."""

    def __init__(
        self,
        *,
        time_s: float = TIME_S,
        memory_bytes: int = MEMORY_BYTES,
        watch_memory: bool = sys.platform == "darwin",
    ) -> None:
        self._time_s = time_s
        self._memory_bytes = memory_bytes
        self._watch_memory = watch_memory
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._turn = _new_turns()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._all]

    def render(self, source: str, values: dict[str, Any]) -> str:
        """The text of a template. Raises TemplateError with what the template raised."""
        sent = json.dumps(values)
        max_characters = FREE_CHARACTERS + CHARACTERS_PER_CHARACTER * len(sent)
        request = '{"source": %s, "max_characters": %d, "values": %s}\n'
        line = (request % (json.dumps(source), max_characters, sent)).encode()
        turn = self._turn(source)
        if not turn.acquire(timeout=STALLED_S):
            raise TemplateLimit(
                f"the model's chat template still renders earlier requests after {STALLED_S:g} s; "
                "send the request again later"
            )
        try:
            answer = self._answer(line)
        finally:
            turn.release()
        if "limit" in answer:
            over_length = f"{max_characters} characters of text"
            limits = {"memory": self._memory_text, "length": over_length}
            raise self._exceeded(limits[answer["limit"]])
        if "refusal" in answer:
            raise TemplateError(answer["refusal"])
        return answer["text"]

    def close(self) -> None:
        """End all processes; a later rendering starts another."""
        with self._lock:
            processes, self._idle = list(self._all), []
            self._all.clear()
        for process in processes:
            _end(process)

    def forget(self) -> None:
        """Leave the processes to the parent, in a process that was forked from it."""
        self._lock = threading.Lock()
        self._idle, self._all = [], set()
        self._turn = _new_turns()

    def _answer(self, line: bytes) -> dict[str, str]:
        answer = self._exchange(process := self._take(), line)
        is_whole = answer.endswith(b"\n")
        with self._lock:
            stays = is_whole and process in self._all and len(self._idle) < MAX_IDLE
            if stays:
                self._idle.append(process)
            else:
                self._all.discard(process)
        if not is_whole:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
        if not stays:
            _end(process)
        if not is_whole:
            raise self._death(process.returncode)
        return json.loads(answer)

    def _take(self) -> "subprocess.Popen[bytes]":
        """A process that runs; one may have been killed since its last rendering."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                self._all.discard(process)
                _end(process)
            return self._start()

    def _death(self, status: int) -> TemplateLimit:
        if status == -signal.SIGPROF:
            return self._exceeded(f"{self._time_s:g} s of CPU time")
        if status in _CRASHES:
            return self._exceeded(self._memory_text)
        return TemplateLimit(
            f"the process that renders the chat template ended with status {status}, perhaps for "
            "lack of memory; send the request again"
        )

    def _exceeded(self, limit: str) -> TemplateLimit:
        return TemplateLimit(
            f"the model's chat template takes more than {limit} to render these messages; "
            "correct the template (chat_template.jinja, or tokenizer_config.json), or use another "
            "model"
        )

    @property
    def _memory_text(self) -> str:
        return f"{self._memory_bytes / 2**20:g} MiB of memory"

    def _exchange(self, process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
        """The answer, ended by a line break; less if the process ended first."""
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + STALLED_S
        received = bytearray()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            while not received.endswith(b"\n"):
                while not poll.poll(WATCH_S * 1000):
                    if time.monotonic() > deadline or self._is_too_large(process.pid):
                        # As its own timer does, or the interpreter without memory.
                        late = time.monotonic() > deadline
                        process.send_signal(signal.SIGPROF if late else signal.SIGABRT)
                        return b""
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                received += chunk
        except (OSError, ValueError):  # it ended, or was closed by another thread
            return b""
        return bytes(received)

    def _is_too_large(self, pid: int) -> bool:
        return self._watch_memory and resident_bytes(pid) > self._memory_bytes

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: nothing is imported from the working directory.
        command = [sys.executable, "-P", "-m", "hone.chat.jinja_child"]
        process = subprocess.Popen(
            [*command, str(self._time_s), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._all.add(process)
        return process


def _new_turns() -> Callable[[str], threading.Lock]:
    """A lock for each template."""
    return lru_cache(256)(lambda source: threading.Lock())


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # closing flushes what the process never read
            if pipe is not None:
                pipe.close()


def resident_bytes(pid: int) -> int:
    """Memory that a process uses; 0 if it has ended."""
    import psutil  # imported here: only macOS needs it

    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


PROCESSES = JinjaProcesses()
"""Of this process."""
atexit.register(PROCESSES.close)
os.register_at_fork(after_in_child=PROCESSES.forget)
