"""Run one program with a limit on its output, and leave none of its processes behind.

In:   arguments, environment, working directory, the text for stdin, limits
Out:  Ended: exit status, stdout, the end of stderr

The program runs in its own process group. Whatever ends it (its own exit, the timeout, too much
output, cancellation, the death of this process) also ends its children: a child that kept running
could call the model under a rollout that is already scored.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.errors import AgentCrashed, AgentTimeout
from hone.workflow.deadline import Deadline
from hone.workflow.function import in_thread
from hone.workflow.guard import TOKEN, guard, kill_all, signal_group

TERM_S = 2.0
"""Time to end after SIGTERM, before SIGKILL."""
KILL_S = 2.0
"""Time to exit after SIGKILL, and for the last output to arrive."""
STDERR_BYTES = 16 * 1024
"""Number of bytes kept from the end of stderr."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended."""

    status: int
    """Exit status; -N if signal N killed it."""
    stdout: bytes
    stderr: bytes
    """Its last STDERR_BYTES."""


async def run_program(
    arguments: Sequence[str],
    *,
    token: str,
    env: Mapping[str, str],
    directory: Path,
    stdin: bytes | None,
    timeout_s: float | None,
    max_output_bytes: int,
) -> Ended:
    """Run the program to its end; raises AgentCrashed if it cannot start or prints too much.

    `token` marks its processes; the guard has it already. If `stdin` is None, it is empty. After
    `timeout_s`, plus the time that the server held its calls, the program is killed and
    AgentTimeout is raised.
    """
    popen = _start(arguments, {**env, TOKEN: token}, directory, pipe=stdin is not None)
    guard.add(token, str(directory), popen.pid)
    running, deadline = _Running(popen, max_output_bytes), Deadline(timeout_s)
    try:
        in_time = await running.wait(stdin, deadline)
    finally:
        try:
            await running.stop(token)
        except BaseException:  # cancelled again: kill without waiting
            kill_all(token, popen.pid)
            raise
        finally:
            running.close()
            guard.add(token, str(directory))  # from now on the id may belong to another process
    name, stderr = Path(arguments[0]).name, bytes(running.stderr.content)
    details = stderr.decode(errors="replace")
    if running.stdout.full.done():
        raise AgentCrashed(
            f"{name} printed more than max_output_bytes={max_output_bytes} and was killed",
            reason="output_too_large",
            details=details,
        )
    if not in_time:
        raise AgentTimeout(
            f"{name} did not end within timeout_s={timeout_s:g}{deadline.extension()} and was killed",
            details=details,
        )
    status = popen.poll()
    if status is None:
        message = f"{name} cannot be killed"
        raise AgentCrashed(message, reason="killed", details=details, is_outside=True)
    return Ended(status, bytes(running.stdout.content), stderr)


def _start(
    arguments: Sequence[str], env: Mapping[str, str], directory: Path, *, pipe: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            arguments,
            env=env,
            cwd=directory,
            stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        remedy = ""
        if isinstance(error, ValueError) or error.errno == errno.E2BIG:
            remedy = ". Leave {input} out of the command: the program then gets the input on stdin"
        raise AgentCrashed(
            f"{arguments[0]} cannot be started: {error}{remedy}",
            reason="not_started",
            is_outside=True,
        ) from error


class _Running:
    """A started program and its three pipes."""

    def __init__(self, popen: subprocess.Popen[bytes], max_output_bytes: int) -> None:
        self._popen = popen
        self.stdout = _Output(max_output_bytes)
        self.stderr = _Output(STDERR_BYTES, keep_end=True)
        self._transports: dict[Any, asyncio.BaseTransport] = {}
        # A thread: asyncio's own wait() also waits for the pipes, which children hold open.
        self._exited = asyncio.ensure_future(in_thread(_wait_for, popen))

    async def wait(self, stdin: bytes | None, deadline: Deadline) -> bool:
        """Until it exits or prints too much; False if the time is over before."""
        loop, popen = asyncio.get_running_loop(), self._popen
        for output, pipe in ((self.stdout, popen.stdout), (self.stderr, popen.stderr)):
            self._transports[pipe], _ = await loop.connect_read_pipe(lambda o=output: o, pipe)
        if popen.stdin is not None:
            writer, _ = await loop.connect_write_pipe(asyncio.Protocol, popen.stdin)
            self._transports[popen.stdin] = writer
            writer.write(stdin or b"")
            writer.write_eof()
        ends, passing = {self._exited, self.stdout.full}, asyncio.create_task(deadline.passed())
        try:
            await asyncio.wait({*ends, passing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            passing.cancel()
        return any(end.done() for end in ends)

    async def stop(self, token: str) -> None:
        """End all of its processes, and read what they had still printed."""
        if not self._exited.done():
            signal_group(self._popen.pid, signal.SIGTERM)
            await asyncio.wait({self._exited}, timeout=TERM_S)
        await in_thread(kill_all, token, self._popen.pid)
        await asyncio.wait({self._exited}, timeout=KILL_S)
        await asyncio.wait({self.stdout.ended, self.stderr.ended}, timeout=KILL_S)

    def close(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                self._transports.get(pipe, pipe).close()
        self._popen.poll()


class _Output(asyncio.Protocol):
    """Reads a pipe to its end and keeps the first bytes, or the last ones."""

    def __init__(self, limit: int, *, keep_end: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.content = bytearray()
        self.full: asyncio.Future[None] = loop.create_future()
        """More than the limit was printed."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self._limit, self._keep_end = limit, keep_end

    def data_received(self, data: bytes) -> None:
        self.content += data
        if len(self.content) <= self._limit:
            return
        if self._keep_end:
            del self.content[: -self._limit]
            return
        del self.content[self._limit :]
        if not self.full.done():
            self.full.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _wait_for(popen: subprocess.Popen[bytes]) -> None:
    """Wait for its exit; its id stays in use until `popen.poll()`, so its group can be killed."""
    if hasattr(os, "waitid"):  # macOS: from Python 3.13 on
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    else:
        popen.wait()
