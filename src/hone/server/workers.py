"""Worker processes for request bodies that are too large for the event loop.

In:   a function of serve/chat_tasks.py or train/tasks.py, and its arguments
Out:  its return value, or the HoneError it raises

Parsing JSON, validating it and tokenizing hold the GIL, so in a thread they would block the event
loop too. The processes start with the first large body, run tasks at a low priority, and end with
the server, even if it is killed. A process that dies is replaced; its request is answered with 503.
Bodies reach them as files; files that a killed server left behind are removed at the next start.

A `Worker` keeps state between two calls: a parsed body stays in its process, and only what the
server needs is returned.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hone.errors import HoneError, ServerError, Unavailable
from hone.files.disk import storage
from hone.files.logs import say
from hone.files.owned import make_owned
from hone.tasks.priority import lower_priority

P = ParamSpec("P")
T = TypeVar("T")

NICENESS = 10
DEADLINE_S = 300.0
"""Timeout of a task; its process is then killed."""


class WorkerPool:
    """At most `processes` workers, each started when it is first needed. For one event loop."""

    def __init__(
        self, processes: int, *, directory: Path | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        """`directory`: for bodies passed to workers; used by this pool only, and emptied now."""
        if directory is not None:
            make_owned(directory)
        self._directory = directory
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._deadline_s = deadline_s
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [pid for worker in self._all for pid in worker.processes]

    @property
    def busy(self) -> int:
        """How many workers run a task."""
        return sum(worker.busy for worker in self._all)

    async def run(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one function in a worker process."""
        async with self.worker() as worker:
            return await worker.run(task, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def worker(self) -> "AsyncIterator[Worker]":
        """One worker for several calls, reserved until the block ends."""
        async with self._free:
            if self._closed:
                raise Unavailable("the server is stopping; send the request again later")
            worker = self._idle.pop() if self._idle else Worker(self._directory, self._deadline_s)
            self._all.add(worker)
            try:
                yield worker
            finally:
                if worker.busy:
                    # The request was cancelled, or the process died: the next request gets a new
                    # process.
                    worker.kill()
                    self._all.discard(worker)
                else:
                    self._idle.append(worker)

    def close(self) -> None:
        """Kill every process; running tasks raise."""
        self._closed = True
        for worker in self._all:
            worker.kill()
        self._all.clear()
        self._idle.clear()


class Worker:
    """One process, started by its first call."""

    def __init__(self, directory: Path | None, deadline_s: float) -> None:
        self.busy = False
        """A task is running, or never returned because it was cancelled or the process died."""
        self._directory = directory
        self._deadline_s = deadline_s
        # Not forked: a fork of a process with threads and torch in it may deadlock.
        spawn = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start)

    @property
    def processes(self) -> dict[int, Any]:
        """Its process by its id, once it is started."""
        # TODO(python>=3.14): ProcessPoolExecutor.kill_workers() is public
        return dict(self._executor._processes or {})  # pyright: ignore[reportPrivateUsage]

    async def run(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.busy = True
        with tempfile.TemporaryDirectory(
            prefix="hone-body-", dir=self._directory, ignore_cleanup_errors=True
        ) as directory:
            try:
                async with asyncio.timeout(self._deadline_s):
                    submitted = asyncio.to_thread(self._submit, Path(directory), task, args, kwargs)
                    value = await asyncio.wrap_future(await submitted)
            except TimeoutError:
                raise Unavailable(
                    f"reading this request took more than {self._deadline_s:g} s and was stopped; "
                    "send less at once"
                ) from None
            except HoneError:  # raised by the task or by reading the file
                self.busy = False
                raise
            except (BrokenProcessPool, OSError) as error:
                say("a worker process died", level=logging.WARNING, error=str(error))
                raise Unavailable(
                    "the process that read this request died, perhaps for lack of memory; send it "
                    "again, or send less at once"
                ) from None
        self.busy = False
        return value

    def kill(self) -> None:
        processes = self.processes
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes.values():
            process.kill()

    def _submit(
        self, directory: Path, task: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Future[Any]:
        """Blocking.

        Bodies go through a file: pickling copies a body several times while it holds the GIL, and
        64 MB block the event loop for a tenth of a second.
        """
        bodies: list[pickle.PickleBuffer] = []
        wrapped = [pickle.PickleBuffer(arg) if isinstance(arg, bytes) else arg for arg in args]
        call = pickle.dumps((task, wrapped, kwargs), protocol=5, buffer_callback=bodies.append)
        files = [directory / str(i) for i in range(len(bodies))]
        for file, body in zip(files, bodies, strict=True):
            with storage(file):
                file.write_bytes(body)
        return self._executor.submit(_call, call, files)


# ---- the child ----------------------------------------------------------------------------------


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the server ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _call(call: bytes, bodies: list[Path]) -> Any:
    try:
        task, args, kwargs = pickle.loads(call, buffers=[body.read_bytes() for body in bodies])
        # Not before: unpickling the first call imports its module, which at a low priority and
        # beside a busy engine takes many seconds.
        lower_priority(NICENESS)
        return task(*args, **kwargs)
    except HoneError:
        raise
    except Exception:  # noqa: BLE001  # a defect: its trace belongs into the server's log
        raise RuntimeError(f"in a worker process:\n{traceback.format_exc()}") from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        raise ServerError("a worker runs only as the child of a server")
    parent.join()
    os._exit(1)
