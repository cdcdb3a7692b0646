"""A vLLM server as a child process: found, started, watched, stopped.

In:   a Python interpreter with vLLM, the arguments of `vllm serve`
Out:  VllmEnvironment (version and known arguments); VllmProcess, which answers on a Unix socket

The server has its own process group and a pipe from this process: when this process ends, even by
SIGKILL, the group is killed (extension.py). Its output goes to a log file; the last lines are
part of every error. The socket is in a directory that only this user can enter, so vLLM's
development routes are not reachable by others.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from json import loads
from pathlib import Path

import httpx2

from hone.errors import EngineError, EngineFailed
from hone.files.logs import output_file, write_output
from hone.inference.vllm import extension

OLDEST, NEWEST = (0, 20), (0, 32)
"""Oldest and newest supported version of vLLM; others are refused."""
START_S = 900.0
"""Timeout for the start of vLLM: loading, compiling and graph capture can take many minutes."""
STOP_S = 10.0
"""Time that vLLM gets to end after SIGTERM."""
DESCRIBE_S = 60.0
LAST_LINES, MOST_CAUSES = 15, 5
"""Lines of vLLM's log in an error: the last ones, and the first different exceptions."""
CAUSE = re.compile(r"(?:^| ERROR .*\] )(\w+(?:\.\w+)*(?:Error|Exception): .+)")
NO_MEMORY = re.compile(
    r"out of memory|No available memory for the cache|less than desired GPU memory utilization"
    r"|KV cache is needed, which is larger",
    re.IGNORECASE,
)
"""Pattern of vLLM's exceptions if the GPU's memory, or its share of it, is too small."""
DISTURBED = "Error in memory profiling"
"""In vLLM's exception if another process returned memory of the GPU while vLLM measured its own."""
UNDISTURBED = (
    "Another process returned GPU memory while vLLM measured how much it needs. Start again while "
    "nothing else uses the GPU, or set engine_args.kv_cache_memory_bytes: vLLM does not measure then."
)
LOOK_S = 2.0
"""Maximum time between two checks of a server that is starting."""
READY = "Application startup complete"
STAGES = {
    "Starting to load model": "loads the weights",
    "Loading model from scratch": "loads the weights",  # vLLM's second model runner
    "Dynamo bytecode": "compiles the model",
    "Capturing CUDA graph": "captures CUDA graphs",
    "KV cache size": "has allocated its KV cache",
}
"""Parts of lines in vLLM's log, and the startup stage that each shows."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface."""
WORKER = "hone_vllm_worker"
"""Name of the copy of extension.py."""


@dataclass(frozen=True)
class VllmEnvironment:
    """A Python interpreter with vLLM."""

    python: str
    version: str
    keys: frozenset[str]
    """The arguments of its engine."""


@cache
def find_vllm(python: str) -> VllmEnvironment | None:
    """The vLLM of an interpreter; None if it has none. Takes a fraction of a second."""
    source = Path(extension.__file__).read_text(encoding="utf-8")
    try:
        # As text, not as a file: a script's directory comes first on sys.path, and it contains
        # engine.py.
        run = subprocess.run(
            [python, "-c", source, "describe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DESCRIBE_S,
            cwd="/",  # with -c it comes first on sys.path, so others must not be able to write to it
            check=True,
        )
        answer = loads(run.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise EngineError(
            f"--engine-python {python}: {output.strip()[-500:]}\nName a Python 3.10 or newer with "
            "vLLM, for example the `bin/python` of its virtual environment."
        ) from None
    if answer["version"] is None:
        return None
    return VllmEnvironment(python, answer["version"], frozenset(answer["keys"]))


def require_vllm(python: str) -> VllmEnvironment:
    """The vLLM of an interpreter, of a version that hone supports."""
    environment = find_vllm(python)
    if environment is None:
        raise EngineError(
            f"vLLM is not installed in {python}. Install it there, or name the Python of another "
            "environment with --engine-python."
        )
    check_version(environment.version, where=python)
    return environment


def check_version(version: str, *, where: str) -> None:
    """Refuse an unsupported version of vLLM."""
    parts = version.split("+")[0].split(".")
    try:
        release = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        release = (0, 0)
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise EngineError(
            f"{where} has vLLM {version}; hone supports {oldest} to {newest}. Install one of these."
        )


class VllmProcess:
    """A vLLM server started by this process."""

    def __init__(self, *, less_memory: str = "") -> None:
        """`less_memory` is added to the error of a server that ran out of memory."""
        self._less_memory = less_memory
        self.log = output_file("vllm")
        log = "" if self.log is None else f"; its log: {self.log}"
        self.stages = [f"vLLM starts, which takes one to four minutes{log}"]
        """What it has done to start, in order."""
        # Not under the server's root: the path of a socket may have at most about a hundred characters.
        self._private = Path(tempfile.mkdtemp(prefix=extension.PREFIX))
        self.socket = self._private / "socket"
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._causes: dict[str, None] = {}
        self._changed = threading.Condition()
        self._ready = False
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._status: int | None = None

    def start(
        self,
        environment: VllmEnvironment,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = lambda stage: None,
        start_s: float = START_S,
    ) -> None:
        """Start it and wait until it answers; `tell` is called with each startup stage."""
        script = self._private / f"{WORKER}.py"
        shutil.copyfile(extension.__file__, script)
        read, write = os.pipe()
        command = [environment.python, str(script), str(read), "serve", *arguments]
        command += ["--uds", str(self.socket)]
        command += ["--worker-extension-cls", f"{WORKER}.HoneWorker"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(env or {}),
                pass_fds=(read,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(write)
            self._clean()
            raise EngineError(f"vLLM cannot be started: {error}") from None
        finally:
            os.close(read)
        self._pipe = write
        reader = threading.Thread(target=self._read_log, args=(tell,), daemon=True)
        reader.start()
        threading.Thread(target=self._await_end, args=(reader,), daemon=True).start()
        self._wait_until_ready(start_s)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        path = [str(self._private), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            **env,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",  # for the workers, too
            "PYTHONUNBUFFERED": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            # Otherwise torch's gloo listens on the address of the host's name, for other machines too.
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._status is None

    @property
    def failure(self) -> EngineFailed | None:
        """Why it ended without being asked to; None while it runs."""
        with self._changed:
            if self._status is None or self._stopping:
                return None
            ending = self.with_advice(f"vLLM ended with exit status {self._status}.")
            return EngineFailed(f"{ending} {self.log_end()}")

    def with_advice(self, message: str) -> str:
        """Add what to do if the message, or an exception in the log, is about the GPU's memory."""
        if any(map(NO_MEMORY.search, (message, *self._causes))):
            return f"CUDA out of memory. {self._less_memory}\n{message}"
        if any(DISTURBED in cause for cause in self._causes):
            return f"{UNDISTURBED}\n{message}"
        return message

    def log_end(self) -> str:
        """The exceptions in its log, and the last lines."""
        causes = [f"It raised {cause}" for cause in self._causes]
        where = "" if self.log is None else f", {self.log}"
        return "\n".join([*causes, f"The last lines of its log{where}:", *self._last])

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._status is not None, timeout_s)

    def stop(self) -> None:
        """End it and its workers. Blocking; may be called from another thread while it starts."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._process is not None and self._status is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            self.wait(STOP_S)
            self._kill_group()
            self.wait(STOP_S)
        self._clean()

    def _kill_group(self) -> None:
        """Kill what is left of the process group, workers included."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _clean(self) -> None:
        with self._changed:  # two threads may stop it
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)
        shutil.rmtree(self._private, ignore_errors=True)

    # ---- its output ---------------------------------------------------------------------------

    def _read_log(self, tell: Callable[[str], None]) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        stages = dict(STAGES)
        with process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                write_output("vllm", text, pid=process.pid)
                self._last.append(text)
                if len(self._causes) < MOST_CAUSES and (cause := CAUSE.search(text)):
                    self._causes[cause[1][:500]] = None
                if READY in text:
                    with self._changed:
                        self._ready = True
                        self._changed.notify_all()
                if stage := next((stages[part] for part in stages if part in text), None):
                    stages = {part: other for part, other in stages.items() if other != stage}
                    self.stages.append(f"vLLM {stage}")
                    tell(self.stages[-1])

    def _await_end(self, reader: threading.Thread) -> None:
        assert self._process is not None
        status = self._process.wait()
        self._kill_group()  # a worker may have outlived the server
        reader.join(LOOK_S)  # so that the last lines of the log are known
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _wait_until_ready(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._over, LOOK_S)
            if self._over:
                failure = self.failure
                self.stop()
                raise failure or EngineError("vLLM was stopped while it was starting")
            if self._answers():
                return
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(f"vLLM did not answer within {start_s:g} s. {self.log_end()}")

    @property
    def _over(self) -> bool:
        return self._stopping or self._status is not None

    def _answers(self) -> bool:
        try:  # with a plain socket first: an HTTP client leaks its socket if nothing listens
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(str(self.socket))
        except OSError:
            return False
        transport = httpx2.HTTPTransport(uds=str(self.socket))
        try:
            with httpx2.Client(transport=transport, timeout=5.0) as client:
                return client.get("http://vllm/health").status_code == 200
        except httpx2.HTTPError:
            return False
