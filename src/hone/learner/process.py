"""The learner's process, seen from the parent: start, train, save, load, cancel, close.

In:   a LearnerSpec; then jobs, one at a time
Out:  StepResults, JobProgress, checkpoints on disk; LearnerDied if the process ends under a job

A learner that runs out of memory ends its own process only. Both sides exchange JSON lines over the
child's stdin and a private copy of its stdout: no pickle, and no second import of the parent's main
module. A request may be followed by bytes, with their number in the request: the groups of a job are
passed on as stored, and only the child unpacks them. child.py is the other side.
"""

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
from typing import Any, Literal

from pydantic import Field

from hone import errors
from hone.errors import LearnerDied, TrainingError
from hone.files.logs import write_output
from hone.models.cache import cache_home
from hone.types import Strict, TrainConfig

STDERR_LINES = 40

MARK = "\x1e"
"""The first character of every message (ASCII's record separator). Other lines on the pipe were printed
by libraries before the child's own code ran."""


class LearnerSpec(Strict):
    """The model of a learner process, and the settings that determine exact results."""

    model_dir: Path
    base_model: str
    """Written into the adapter's configuration."""
    threads: int = Field(gt=0)
    device: str = "cpu"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    memory: int | None = Field(default=None, gt=0)
    """Maximum GPU memory that it may use, in bytes; None for half of the GPU."""


class WorkerInfo(Strict):
    """The settings that the child really uses, for the checkpoint's manifest."""

    pid: int
    torch: str
    threads: int
    device: str
    dtype: str
    deterministic: bool
    sha256: str
    notes: tuple[str, ...] = ()
    """What is unusual about training this model, for the log."""


def _environment() -> dict[str, str]:
    """Settings of the child, of the libraries that it uses, and of the processes that those start."""
    return {
        # Torch's compiler starts Python: that, too, must not import from the working directory.
        "PYTHONSAFEPATH": "1",
        # Without it cuBLAS refuses deterministic algorithms.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Compiled layers outlive the process: the first job of the next one does not wait for them.
        "TORCHINDUCTOR_CACHE_DIR": str(cache_home() / "inductor"),
    }


class LearnerProcess:
    """The parent's side. One request at a time, after `ready`; any thread may call `cancel`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.info: WorkerInfo | None = None
        """The child's settings, once it has loaded."""
        self._process = process
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._turn = threading.Lock()
        self._writing = threading.Lock()
        self._last_id = 0
        self._running: int | None = None
        self._ending = threading.Lock()
        self._when_ended: Callable[[], object] | None = None
        self._ended = False
        self._readers = [
            threading.Thread(target=self._read_messages, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @classmethod
    def launch(
        cls, spec: LearnerSpec, *, gives_way: bool = False, env: Mapping[str, str] | None = None
    ) -> "LearnerProcess":
        """Start the child, with `env` added to its environment; `ready` waits until it has loaded."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hone.learner.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**_environment(), **os.environ, **(env or {})},
        )
        worker = cls(process)
        body = {"spec": spec.model_dump(mode="json"), "gives_way": gives_way}
        worker._write({"do": "start", "id": worker._last_id, **body})
        return worker

    @classmethod
    def start(
        cls, spec: LearnerSpec, *, deadline_s: float = 300.0, env: Mapping[str, str] | None = None
    ) -> "LearnerProcess":
        """Launch the child and wait until the model is loaded."""
        worker = cls.launch(spec, env=env)
        worker.ready(deadline_s=deadline_s)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        # Its output ends before the process is reaped.
        return not self._ended and self._process.poll() is None

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call `call` on another thread once the child has ended; at once if it has ended already."""
        with self._ending:
            if not self._ended:
                self._when_ended = call
                return
        call()

    def ready(self, *, deadline_s: float = 300.0) -> WorkerInfo:
        """Wait until the model is loaded; a child that fails to load is closed, and its error raised."""
        with self._turn:
            if self.info is not None:
                return self.info
            try:
                self.info = WorkerInfo(**self._answer("start", deadline_s))
                return self.info
            finally:
                if self.info is None:
                    self.close()

    def train(
        self,
        groups: bytes,
        config: TrainConfig,
        *,
        job_id: str = "",
        base_step: int | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        silence_s: float = 600.0,
        label_logprobs: bool = False,
    ) -> dict[str, Any]:
        """Train on packed groups; returns a StepResult as a mapping.

        Groups with calls that are too stale for a job that starts from `base_step` are refused. A
        child that is silent for `silence_s` is killed.
        """
        body = {
            "config": config.model_dump(),
            "job_id": job_id,
            "base_step": base_step,
            "label_logprobs": label_logprobs,
        }
        return self._request("train", body, silence_s, on_progress, groups)

    def save(self, directory: Path, *, picture: bool = False, deadline_s: float = 120.0) -> str:
        """Write a checkpoint's files; returns the adapter's hash.

        `picture` adds a picture of the last job, which must have run with `label_logprobs`.
        """
        body = {"directory": str(directory), "picture": picture}
        return self._request("save", body, deadline_s)["sha256"]

    def load(self, directory: Path, *, optimizer: bool = True, deadline_s: float = 120.0) -> str:
        """Continue from a checkpoint; returns the adapter's hash."""
        body = {"directory": str(directory), "optimizer": optimizer}
        return self._request("load", body, deadline_s)["sha256"]

    def release(self, *, weights: bool, deadline_s: float = 120.0) -> None:
        """Free GPU memory between two jobs; with `weights` also that of the base model."""
        self._request("release", {"weights": weights}, deadline_s)

    def cancel(self) -> None:
        """Ask the running job to stop; `train` raises Cancelled within one micro-batch."""
        if (running := self._running) is not None:
            self._write({"do": "cancel", "id": running})

    def close(self, *, deadline_s: float = 10.0) -> None:
        """End the child by closing its stdin, and kill it after the deadline.

        A child that has not loaded yet is killed at once.
        """
        if self.info is None:
            deadline_s = 0
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def _request(
        self,
        what: str,
        body: dict[str, Any],
        silence_s: float,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        data: bytes = b"",
    ) -> dict[str, Any]:
        with self._turn:
            self._last_id += 1
            self._write({"do": what, "id": self._last_id, **body}, data)
            return self._answer(what, silence_s, on_progress)

    def _answer(
        self,
        what: str,
        silence_s: float,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait for the child's answer to the newest request."""
        self._running = self._last_id
        answered = False
        try:
            while True:
                message = self._next(what, silence_s)
                if message["id"] != self._last_id:
                    continue  # the answer to an abandoned request
                if message["event"] != "progress":
                    answered = True
                    break
                if on_progress is not None:
                    on_progress(message["progress"])
        finally:
            if not answered:
                self.cancel()
            self._running = None
        if message["event"] == "failed":
            raise getattr(errors, message["type"], TrainingError)(message["message"])
        return message["result"]

    def _next(self, what: str, silence_s: float) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=silence_s)
        except queue.Empty:
            self._process.kill()
            raise self._died(what, f"sent nothing for {silence_s:g} s and was killed") from None
        if message is None:
            self._messages.put(None)  # for the next request
            raise self._died(what, "ended")
        return message

    def _died(self, what: str, how: str) -> LearnerDied:
        code = self._process.wait(10)
        self._readers[1].join(10)
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = "; the system kills what exhausts memory: lower row_tokens" if code == -9 else ""
        tail = "\n".join(self._stderr) or "(it wrote nothing to stderr)"
        return LearnerDied(
            f"learner process {self._process.pid}, during {what!r}: it {how} ({ending}{hint}). "
            f"Start a new one from the last checkpoint. The end of its stderr:\n{tail}"
        )

    def _write(self, message: dict[str, Any], data: bytes = b"") -> None:
        assert self._process.stdin is not None, "started with pipes"
        # If the child is dead or closed, the reader reports it with the exit code.
        with self._writing, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n")
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None, "started with pipes"
        try:
            for raw in self._process.stdout:
                line = raw.decode(errors="replace")
                # A child that dies while it writes leaves an incomplete message.
                if line.startswith(MARK) and line.endswith("\n"):
                    self._messages.put(json.loads(line.removeprefix(MARK)))
                elif line.strip():
                    self._add_output(line)
        finally:
            self._messages.put(None)
            with self._ending:
                self._ended, call = True, self._when_ended
            if call is not None:
                call()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "started with pipes"
        for line in self._process.stderr:
            self._add_output(line.decode(errors="replace"))

    def _add_output(self, line: str) -> None:
        self._stderr.append(line.rstrip("\n"))
        write_output("learner", line.rstrip("\n"), pid=self._process.pid)
