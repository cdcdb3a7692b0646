"""The child of worker.py: a learner that answers requests on stdin until it ends.

In:   JSON lines, each followed by as many bytes as it names; see LearnerProcess
Out:  JSON lines on what was its stdout: progress, results, and the errors of hone

It fixes what decides bits: thread count and deterministic algorithms. It ends when its stdin does,
so it cannot outlive the parent; an error hone does not know ends it too, and its last words reach
the parent on stderr.

A child launched ahead of its first job loads on a thread that gives way to who samples meanwhile.
That thread ends with it: only the superuser can take a niceness back, and jobs have the parent's.
"""

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from hone.disk import storage
from hone.errors import HoneError
from hone.learner.packed import unpack_groups
from hone.learner.staleness import check_fresh
from hone.learner.worker import MARK, LearnerSpec, WorkerInfo
from hone.niceness import give_way
from hone.types import TrainConfig

NICENESS = 10
"""Of a load that gives way: where no core is free it still gets a tenth of one, and comes to its
end before the job that waits for it gives it up."""


class _Inbox:
    """The child's stdin, read on a thread so that a cancellation is seen during a job."""

    def __init__(self, stream: IO[bytes]) -> None:
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
            request["data"] = self._stream.read(request["bytes"])
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
    # Not sys.stdin, which Python closes at the end and cannot while a thread reads from it: an error
    # would end the process with SIGABRT.
    inbox = _Inbox(open(0, "rb", closefd=False))  # noqa: SIM115  read until the process ends

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
                learner.save(directory, picture=request["picture"])
            else:
                learner.load(directory, optimizer=request["optimizer"])
        return {"sha256": learner.lora.sha256}
    assert request["do"] == "train", f"unknown request {request['do']!r}"
    groups, config = unpack_groups(request.pop("data")), TrainConfig(**request["config"])
    if request["base_step"] is not None:
        check_fresh(request["job_id"], groups, request["base_step"], config)
    result = learner.train(
        groups,
        config,
        on_progress=lambda progress: send("progress", job, progress=asdict(progress)),
        should_stop=lambda: inbox.should_stop(job),
        probe_tokens=request["probe_tokens"],
        label_logprobs=request["label_logprobs"],
    )
    # Of every label: for the picture, which is drawn here.
    return asdict(replace(result, logprobs=None))


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
