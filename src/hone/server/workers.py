"""Worker processes for request bodies that are too large for the event loop.

In:   a function of chat_tasks.py or job_tasks.py, and its arguments
Out:  its return value, or the HoneError it raises

Parsing JSON, validating it and tokenizing hold the interpreter's lock, so in a thread they would
stop the event loop too. The processes start with the first large body, run at a low priority, and
end with the server, however that ends. One that dies is replaced; its request is answered with 503.

A `Worker` keeps state between two calls: a parsed body stays in its process, and only what the
event loop needs comes back.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar, cast

from hone.errors import HoneError, ServerError, Unavailable
from hone.logs import say
from hone.niceness import give_way

P = ParamSpec("P")
T = TypeVar("T")

NICENESS = 10
DEADLINE_S = 300.0
"""A task that takes longer is stopped, and its process with it."""
_FAILED, _RAISED, _RETURNED = range(3)


class WorkerPool:
    """At most `processes` workers, each started when it is first needed. For one event loop."""

    def __init__(self, processes: int, *, deadline_s: float = DEADLINE_S) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        # Threads of their own: tasks that wait must not take those of `asyncio.to_thread`.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="hone-worker")
        self._deadline_s = deadline_s
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._all if worker.pid is not None]

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
            worker = self._idle.pop() if self._idle else Worker(self._threads, self._deadline_s)
            self._all.add(worker)
            try:
                yield worker
            finally:
                if worker.busy or not worker.alive:
                    # Its request was given up, or it died: the next request gets a new process.
                    worker.kill()
                    self._all.discard(worker)
                else:
                    self._idle.append(worker)

    def close(self) -> None:
        """Kill every process; what still runs raises."""
        self._closed = True
        for worker in self._all:
            worker.kill()
        self._all.clear()
        self._idle.clear()
        self._threads.shutdown(wait=True)


class Worker:
    """One process, started by its first call."""

    def __init__(self, threads: ThreadPoolExecutor, deadline_s: float) -> None:
        self.busy = False
        self._threads = threads
        self._deadline_s = deadline_s
        self._starting = threading.Lock()
        self._killed = False
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive() and not self._killed

    async def run(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        self.busy = True
        kind, value = await loop.run_in_executor(self._threads, self._call, (task, args, kwargs))
        self.busy = False
        if kind == _RAISED:
            raise _rebuild(*value)
        if kind == _FAILED:
            raise RuntimeError(f"in a worker process:\n{value}")
        return value

    def kill(self) -> None:
        with self._starting:
            self._killed = True
            if self._process is not None and self._process.is_alive():
                self._process.kill()

    def _call(self, message: Any) -> tuple[int, Any]:
        """Blocking."""
        try:
            pipe = self._started()
            _send(pipe, message)
            if not pipe.poll(self._deadline_s):
                self.kill()
                raise Unavailable(
                    f"reading this request took more than {self._deadline_s:g} s and was stopped; "
                    "send less at once"
                )
            return pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None

    def _death(self) -> Unavailable:
        if self._killed:
            return Unavailable("reading this request was stopped; send it again")
        self.kill()
        process = self._process
        if process is not None and process.pid is not None:
            process.join()
        code = None if process is None else process.exitcode
        say("a worker process died", level=logging.WARNING, pid=self.pid, exit_code=code)
        return Unavailable(
            f"the process that read this request died (exit code {code}), perhaps for lack of "
            "memory; send it again, or send less at once"
        )

    def _started(self) -> Connection:
        with self._starting:
            if self._killed:
                raise EOFError
            if self._pipe is None:
                # Not forked: a fork of a process with threads and torch in it may deadlock.
                spawn = multiprocessing.get_context("spawn")
                ours, theirs = spawn.Pipe()
                self._pipe = cast("Connection", ours)
                self._process = spawn.Process(
                    target=_serve, args=(theirs,), daemon=True, name="hone-worker"
                )
                # On a thread that gives way: the child inherits the niceness, and its imports take
                # no time from the event loop either.
                starter = threading.Thread(target=_start, args=(self._process,))
                starter.start()
                starter.join()
                theirs.close()
                if self._process.pid is None:  # for lack of memory, say; the trace is on stderr
                    raise EOFError
            return self._pipe


def _send(pipe: Connection, message: tuple[Any, tuple[Any, ...], Any]) -> None:
    """Send a call; its bodies go as they are.

    To pickle a body copies it several times with the interpreter's lock held: 64 MB stop the event
    loop for a tenth of a second.
    """
    task, args, kwargs = message
    bodies: list[pickle.PickleBuffer] = []
    wrapped = tuple(pickle.PickleBuffer(arg) if type(arg) is bytes else arg for arg in args)
    pickled = pickle.dumps((task, wrapped, kwargs), protocol=5, buffer_callback=bodies.append)
    pipe.send((pickled, len(bodies)))
    for body in bodies:
        pipe.send_bytes(body.raw())


def _receive(pipe: Connection) -> tuple[Any, tuple[Any, ...], Any]:
    """The other side of `_send`."""
    pickled, count = pipe.recv()
    return pickle.loads(pickled, buffers=[pipe.recv_bytes() for _ in range(count)])


def _start(process: BaseProcess) -> None:
    give_way(NICENESS)
    process.start()


def _rebuild(kind: type[HoneError], message: str, fields: dict[str, Any]) -> HoneError:
    """An error as it was raised; its constructor wants other arguments than its message."""
    error = kind.__new__(kind, message)
    assert isinstance(error, HoneError), kind
    error.__dict__.update(fields)
    return error


# ---- the child ----------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """Answer calls until the server closes the pipe."""
    import signal

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the server ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task, args, kwargs = _receive(pipe)
        except EOFError:
            return
        pipe.send(_outcome(task, args, kwargs))
        del task, args, kwargs


def _outcome(task: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, Any]:
    try:
        return _RETURNED, task(*args, **kwargs)
    except HoneError as error:
        return _RAISED, (type(error), str(error), vars(error))
    except Exception:  # noqa: BLE001  # a defect: its trace belongs into the server's log
        return _FAILED, traceback.format_exc()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        raise ServerError("a worker runs only as the child of a server")
    parent.join()
    os._exit(1)
