"""A learner in its own process, so that one that runs out of memory takes nothing else down.

In:   a LearnerSpec; then jobs, one at a time
Out:  StepResults, Progress, checkpoints on disk; LearnerDied if the process ends under a job
Used: server/service.py, through LearnerProcess; the child runs `python -m hone.learner.worker`

The two sides speak JSON lines over the child's stdin and a private copy of its stdout: no pickle,
and nothing of the parent's main module is imported again. The child fixes what decides bits:
thread count and deterministic algorithms. It ends when its stdin does, so it cannot outlive the
parent; an error hone does not know ends it too, and its last words come back as LearnerDied.

A child launched ahead of its first job loads on a thread that gives way to who samples meanwhile.
That thread ends with it: only the superuser can take a niceness back, and jobs have the parent's.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field

from hone import errors
from hone.disk import storage
from hone.errors import HoneError, LearnerDied, TrainingError
from hone.niceness import give_way
from hone.trajectory import TrajectoryGroup
from hone.types import Strict, TrainConfig

STDERR_LINES = 40

MARK = "\x1e"
"""Begins every message (ASCII's record separator). Anything else on the pipe was printed by a
library before the child's own first line ran."""

NICENESS = 10
"""Of a load that gives way: where no core is free it still gets a tenth of one, and comes to its
end before the job that waits for it gives it up."""


class LearnerSpec(Strict):
    """What a learner's process loads, and the settings that decide its bits."""

    model_dir: Path
    base_model: str
    """Written into the adapter's configuration."""
    adapter_dir: Path | None = None
    """Checkpoint to go on from; None draws a fresh adapter."""
    rank: int = Field(default=8, gt=0)
    alpha: float = Field(default=16.0, gt=0)
    seed: int = 0
    threads: int = Field(gt=0)
    device: str = "cpu"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"


class WorkerInfo(Strict):
    """What the child really runs with; goes into the checkpoint's manifest."""

    pid: int
    torch: str
    threads: int
    device: str
    dtype: str
    deterministic: bool
    sha256: str


class LearnerProcess:
    """The parent's side. One request at a time, after `ready`; `cancel` may come from any thread."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.info: WorkerInfo | None = None
        """What the child runs with; known once it has started."""
        self._process = process
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._turn = threading.Lock()
        self._writing = threading.Lock()
        self._asked = 0
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
        """Start the child, with `env` added to its environment, and let it load; see `ready`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hone.learner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Read by cuBLAS when it first runs; without it deterministic algorithms are refused.
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(env or {})},
        )
        worker = cls(process)
        body = {"spec": spec.model_dump(mode="json"), "gives_way": gives_way}
        worker._write({"do": "start", "id": worker._asked, **body})
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
        return self._process.poll() is None

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call this once the child has ended, on another thread; at once if it has ended already."""
        with self._ending:
            if not self._ended:
                self._when_ended = call
                return
        call()

    def ready(self, *, deadline_s: float = 300.0) -> WorkerInfo:
        """Wait until the model is loaded; a child that could not is closed, and says why here."""
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
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        silence_s: float = 600.0,
        probe_tokens: int = 32,
        label_logprobs: bool = False,
    ) -> dict[str, Any]:
        """A StepResult as a mapping. A child silent for `silence_s` is taken for dead and killed."""
        body = {
            "groups": [group.model_dump() for group in groups],
            "config": config.model_dump(),
            "probe_tokens": probe_tokens,
            "label_logprobs": label_logprobs,
        }
        return self._ask("train", body, silence_s, on_progress)

    def save(self, directory: Path, *, deadline_s: float = 120.0) -> str:
        """Write a checkpoint's files; the hash of the adapter they hold."""
        return self._ask("save", {"directory": str(directory)}, deadline_s)["sha256"]

    def load(self, directory: Path, *, optimizer: bool = True, deadline_s: float = 120.0) -> str:
        """Go on from a checkpoint; the hash of the adapter it held."""
        body = {"directory": str(directory), "optimizer": optimizer}
        return self._ask("load", body, deadline_s)["sha256"]

    def cancel(self) -> None:
        """Ask the running job to stop; it raises Cancelled within one micro-batch."""
        if (running := self._running) is not None:
            self._write({"do": "cancel", "id": running})

    def close(self, *, deadline_s: float = 10.0) -> None:
        """End the child: politely, then by force once the deadline has passed.

        One that has not loaded yet has nothing to end, and would do so only when it has.
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

    def _ask(
        self,
        what: str,
        body: dict[str, Any],
        silence_s: float,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        with self._turn:
            self._asked += 1
            self._write({"do": what, "id": self._asked, **body})
            return self._answer(what, silence_s, on_progress)

    def _answer(
        self,
        what: str,
        silence_s: float,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """What the child says to the newest request."""
        self._running = self._asked
        answered = False
        try:
            while True:
                message = self._next(what, silence_s)
                if message["id"] != self._asked:
                    continue  # of a request whose caller has left
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
            raise self._died(what, f"said nothing for {silence_s:g} s and was killed") from None
        if message is None:
            self._messages.put(None)  # for whoever asks next
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
            f"Start a new one from the last checkpoint. Its last words:\n{tail}"
        )

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "started with pipes"
        # Dead or closed: the reader's end-of-file tells, with the exit code.
        with self._writing, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None, "started with pipes"
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._messages.put(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                self._stderr.append(line.rstrip("\n"))
        self._messages.put(None)
        with self._ending:
            self._ended, call = True, self._when_ended
        if call is not None:
            call()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "started with pipes"
        for line in self._process.stderr:
            self._stderr.append(line.rstrip("\n"))


class _Inbox:
    """The child's stdin, read on a thread so that a cancellation is seen during a job."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (request := self._requests.get()) is not None:
            yield request

    def should_stop(self, job: int) -> bool:
        return self._ended.is_set() or job in self._cancelled

    def _read(self) -> None:
        for line in self._stream:
            request = json.loads(line)
            if request["do"] == "cancel":
                self._cancelled.add(request["id"])
            else:
                self._requests.put(request)
        self._ended.set()
        self._requests.put(None)


def main() -> None:
    """The child: answer requests until stdin ends."""
    # Libraries print to stdout; give them stderr, and keep the real one for messages.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Ctrl-C, and a stop that systemd sends to every process of a service, are the parent's to act
    # on: it gives the running job back and then closes stdin.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    inbox = _Inbox(sys.stdin)

    def send(event: str, job: int, **body: Any) -> None:
        # The leading newline ends whatever was printed before without one.
        out.write("\n" + MARK + json.dumps({"event": event, "id": job, **body}) + "\n")
        out.flush()

    learner: Any = None
    for request in inbox:
        job = request["id"]
        try:
            if request["do"] == "start":
                with ThreadPoolExecutor(max_workers=1) as loading:
                    spec, gives_way = LearnerSpec(**request["spec"]), request["gives_way"]
                    learner, info = loading.submit(_load, spec, gives_way=gives_way).result()
                send("done", job, result=info.model_dump())
            else:
                assert learner is not None, "the parent starts before it asks"
                send("done", job, result=_answer(learner, request, inbox, send))
        except HoneError as error:
            send("failed", job, type=type(error).__name__, message=str(error))


def _answer(
    learner: Any, request: dict[str, Any], inbox: _Inbox, send: Callable[..., None]
) -> dict[str, Any]:
    job = request["id"]
    if request["do"] in ("save", "load"):
        directory = Path(request["directory"])
        with storage(directory):
            if request["do"] == "save":
                learner.save(directory)
            else:
                learner.load(directory, optimizer=request["optimizer"])
        return {"sha256": learner.lora.sha256}
    assert request["do"] == "train", f"unknown request {request['do']!r}"
    result = learner.train(
        [TrajectoryGroup(**group) for group in request["groups"]],
        TrainConfig(**request["config"]),
        on_progress=lambda progress: send("progress", job, progress=asdict(progress)),
        should_stop=lambda: inbox.should_stop(job),
        probe_tokens=request["probe_tokens"],
        label_logprobs=request["label_logprobs"],
    )
    return asdict(result)


def _load(spec: LearnerSpec, *, gives_way: bool) -> tuple[Any, WorkerInfo]:
    if gives_way:
        give_way(NICENESS)
    import torch  # after stdout is safe, and no earlier than the niceness: it takes seconds

    from hone.learner.learner import Learner
    from hone.models.decoder import Decoder
    from hone.models.lora import Lora

    torch.set_num_threads(spec.threads)
    # What torch.use_deterministic_algorithms does, less the compiler it imports to tell it too:
    # five seconds of a learner's ten, for something that never runs here.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    # Else every new tensor is first filled with NaN, to make reads of unset memory repeatable;
    # we make none, and it costs a tenth of the step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    decoder = Decoder.load(spec.model_dir, device=spec.device, dtype=getattr(torch, spec.dtype))
    lora = Lora.init(
        decoder.config, rank=spec.rank, alpha=spec.alpha, seed=spec.seed, device=spec.device
    )
    learner = Learner(decoder, lora, base_model=spec.base_model)
    if spec.adapter_dir is not None:
        learner.load(spec.adapter_dir)
    return learner, WorkerInfo(
        pid=os.getpid(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        device=spec.device,
        dtype=spec.dtype,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        sha256=learner.lora.sha256,
    )


if __name__ == "__main__":
    main()
