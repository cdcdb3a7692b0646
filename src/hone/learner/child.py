"""The learner's process itself: answers requests on stdin until stdin ends.

In:   JSON lines, each followed by as many bytes as it names; see LearnerProcess
Out:  JSON lines on its original stdout: progress, results, and hone's errors; on stderr everything
      it does, for ROOT/logs/learner.log

It sets everything that determines exact results: thread count and deterministic algorithms. It ends
when its stdin ends, so it cannot outlive the parent. An error that is not hone's ends it too, with
a traceback on stderr.

A child launched before its first job loads on a low-priority thread, so that samples are not slowed
down. That thread ends after loading: only the superuser can raise a priority again, and jobs need the
parent's.
"""

import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from hone.errors import HoneError
from hone.files.disk import storage
from hone.learner.packed import unpack_groups
from hone.learner.process import MARK, LearnerSpec, WorkerInfo
from hone.learner.staleness import check_fresh
from hone.tasks.priority import lower_priority
from hone.types import TrainConfig

log = logging.getLogger("hone.learner")

NICENESS = 10
"""Niceness while loading at low priority: without a free core it still gets a tenth of one, and
finishes before the job that waits for it times out."""


class _Inbox:
    """The child's stdin, read on a thread, so that a cancellation arrives during a job."""

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
        try:
            for line in self._stream:
                if not line.endswith(b"\n"):  # the parent died while it wrote
                    break
                request = json.loads(line)
                request["data"] = self._stream.read(request["bytes"])
                if request["do"] == "cancel":
                    self._cancelled.add(request["id"])
                else:
                    self._requests.put(request)
        finally:
            self._ended.set()
            self._requests.put(None)


def main() -> None:
    """Answer requests until stdin ends."""
    # Libraries print to stdout; give them stderr, and keep the real one for messages.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    # The parent handles Ctrl-C, and a stop that systemd sends to every process of a service: it
    # returns the running job and then closes stdin.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Not sys.stdin: Python closes it at exit, which fails with SIGABRT while a thread reads from it.
    inbox = _Inbox(open(0, "rb", closefd=False))  # noqa: SIM115  read until the process ends

    def send(event: str, job: int, **body: Any) -> None:
        # The leading newline ends an unfinished line that a library printed.
        out.write("\n" + MARK + json.dumps({"event": event, "id": job, **body}) + "\n")
        out.flush()

    learner: Any = None
    for request in inbox:
        job, began = request["id"], time.monotonic()
        try:
            if request["do"] == "start":
                with ThreadPoolExecutor(max_workers=1) as loading:
                    spec, gives_way = LearnerSpec(**request["spec"]), request["gives_way"]
                    log.info("loads %s", spec.model_dump_json(exclude_none=True))
                    learner, info = loading.submit(_load, spec, gives_way=gives_way).result()
                log.info("loaded in %.1f s: %s", time.monotonic() - began, info.model_dump_json())
                send("done", job, result=info.model_dump())
            else:
                assert learner is not None, "the parent starts before it asks"
                send("done", job, result=_answer(learner, request, inbox, send))
        except HoneError as error:
            log.error("%s failed: %s: %s", request["do"], type(error).__name__, error)
            send("failed", job, type=type(error).__name__, message=str(error))
        except RuntimeError as error:
            # By its name: torch is imported only when a model is loaded.
            if type(error).__name__ != "OutOfMemoryError":
                raise
            send("failed", job, type="OutOfMemory", message=str(error).splitlines()[0])


def _answer(
    learner: Any, request: dict[str, Any], inbox: _Inbox, send: Callable[..., None]
) -> dict[str, Any]:
    job = request["id"]
    if request["do"] in ("save", "load"):
        directory = Path(request["directory"])
        log.info("%ss %s", request["do"], directory)
        with storage(directory):
            if request["do"] == "save":
                learner.save(directory, picture=request["picture"])
            else:
                learner.load(directory, optimizer=request["optimizer"])
        return {"sha256": learner.lora.sha256}
    if request["do"] == "release":
        learner.release(weights=request["weights"])
        return {}
    assert request["do"] == "train", f"unknown request {request['do']!r}"
    groups, config = unpack_groups(request.pop("data")), TrainConfig(**request["config"])
    if request["base_step"] is not None:
        check_fresh(request["job_id"], groups, request["base_step"], config)
    began, name = time.monotonic(), request["job_id"]
    sizes = [len(group.trajectories) for group in groups]
    log.info("job %s: trajectories by group %s, %s", name, sizes, config.model_dump_json())

    def report(progress: Any) -> None:
        log.info("job %s: %s", name, json.dumps(asdict(progress)))
        send("progress", job, progress=asdict(progress))

    result = learner.train(
        groups,
        config,
        on_progress=report,
        should_stop=lambda: inbox.should_stop(job),
        label_logprobs=request["label_logprobs"],
    )
    log.info(
        "job %s: %d optimizer steps in %.1f s, adapter %s%s; metrics %s, tokens without a label %s",
        name,
        result.steps,
        time.monotonic() - began,
        result.sha256[:12],
        f" ({result.reason})" if result.reason else "",
        json.dumps(result.metrics),
        json.dumps(result.dropped),
    )
    # The log-probabilities are only for the picture, which this process draws.
    return asdict(replace(result, logprobs=None))


def _load(spec: LearnerSpec, *, gives_way: bool) -> tuple[Any, WorkerInfo]:
    if gives_way:
        lower_priority(NICENESS)
    import torch  # after stdout is safe, and no earlier than the niceness: it takes seconds

    from hone.learner.body import load_body
    from hone.learner.learner import Learner
    from hone.models.lora import Lora

    torch.set_num_threads(spec.threads)
    # torch.use_deterministic_algorithms does the same and imports torch's compiler, which never runs
    # here: five seconds of a learner's ten.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    # Otherwise every new tensor is filled with NaN, to make reads of unset memory repeatable; hone
    # has no such reads, and it costs a tenth of the step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if spec.memory is not None and spec.device.startswith("cuda"):
        # What exceeds it fails here, instead of taking the memory that vLLM needs.
        total = torch.cuda.get_device_properties(spec.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory / total))
    dtype = getattr(torch, spec.dtype)
    body = load_body(spec.model_dir, device=spec.device, dtype=dtype, memory=spec.memory)
    # A random adapter; every job loads that of the step it starts from.
    lora = Lora.init(body.layout, device=spec.device)
    learner = Learner(body, lora, base_model=spec.base_model)
    return learner, WorkerInfo(
        pid=os.getpid(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        device=spec.device,
        dtype=spec.dtype,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        sha256=learner.lora.sha256,
        notes=body.notes,
    )


if __name__ == "__main__":
    main()
