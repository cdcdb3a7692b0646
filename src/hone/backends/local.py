"""A hone server started by this process.

In:   a directory for the server's state
Out:  a RemoteBackend for a server that starts at first use and ends with this process; or for the
      one that another process runs there, if it may be shared

The server is a child process, so that the user's program need not load torch. It writes one line
into a pipe when it is ready, so nothing polls; it ends when its stdin closes, which also happens
when this process is killed. Its output goes to a file that every error names.
"""

import asyncio
import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from hone.backends.base import Named
from hone.backends.remote import RemoteBackend
from hone.errors import ConfigError, HoneError, ServerError
from hone.options import check_only
from hone.types import EMPTY_PATH, SERVER_ADDRESS, SERVER_OUTPUT, model_directory

START_S = 120.0
"""Timeout until the server is ready; it loads no model, but a cold disk can be slow."""
STOP_S = 30.0
"""Timeout until it has queued a running job again and ended."""
SHOWN_LINES = 15
SHOWN_BYTES = 65536
"""Maximum amount of the server's output that an error shows."""
CONNECT_S = 5.0


class LocalBackend(RemoteBackend):
    """A hone server started by this process, on free ports of this machine."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        in_process: bool = False,
        gpu_cost_per_hour_usd: None = None,
        api_key: str | None = None,
        log_level: str = "info",
        share: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Starts nothing yet; the first use does, or entering it as a context manager.

        Args:
            path: where the server keeps its state (`hone serve --root`), by default `.hone`; a
                server started there again continues its jobs.
            in_process: show the server's output in this program, for notebooks. ART runs its
            trainer inside the program; this server is still a separate process.
        gpu_cost_per_hour_usd: an option of ART; refused, because hone does not compute costs.
            api_key: key that clients must send; by default $HONE_API_KEY. Without one, the server
                accepts only processes of this user and of root.
            log_level: debug, info, warning or error.
            share: use the server that another process runs on this path, if there is one.
            settings: further options of `hone serve` by name, such as {"engine": "vllm"}.
        """
        if gpu_cost_per_hour_usd is not None:
            check_only("LocalBackend(gpu_cost_per_hour_usd)", gpu_cost_per_hour_usd, ())
        super().__init__("http://127.0.0.1:0", api_key)
        if path == "":
            raise ConfigError(f"LocalBackend(path) {EMPTY_PATH}")
        self.root = Path(".hone" if path is None else path).absolute()
        self.in_process = in_process
        self.log_level = log_level
        self.share = share
        self.settings = dict(settings or {})
        self._shared_pid: int | None = None
        """Process id of a shared server; None for a server that this process started."""
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._closed = False
        self._output_start = 0

    @property
    def log_place(self) -> str:
        return str(self.root / "logs" / "server.log")

    @property
    def output(self) -> Path:
        """File with the server's output, for a server that ended before it had a log."""
        return self.root / SERVER_OUTPUT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def connect(self) -> None:
        """Start the server unless it runs."""
        if self._shared_pid is not None:
            return
        if self._server is None or self._lock.locked():  # the lock is held until it is ready
            # In a thread, because it waits on a pipe; the lock lets only one caller start it.
            await asyncio.to_thread(self.start)

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def shared(self) -> bool:
        """Whether the server in use was started by another process."""
        return self._shared_pid is not None

    def lost(self) -> HoneError | None:
        if self._shared_pid is not None and not _is_alive(self._shared_pid):
            return ServerError(
                f"the server on {self.root} (process {self._shared_pid}), which another command had "
                f"started, has ended. Run the command again. Its log: {self.log_place}"
            )
        server = self._server
        if server is None or server.poll() is None:
            return None
        return ServerError(
            f"the server of LocalBackend({str(self.root)!r}) ended with exit status "
            f"{server.returncode}. Its log: {self.log_place}\n{self._last_output()}".rstrip()
        )

    async def ended(self) -> HoneError:
        server = self._server
        if server is None:
            return await super().ended()
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            server.wait()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=wait, daemon=True).start()
        await is_over.wait()
        return self.lost() or await super().ended()  # `stop` ended it

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        with self._lock:
            if self._server is not None or self._shared_pid is not None:
                return
            if self.share and self._use_running():
                return
            if self._closed:
                raise ServerError(f"LocalBackend({str(self.root)!r}) is closed; make another one")
            ready = self._launch()
            if self._closed:  # while it was launched
                self._give_up()
            line = _first_line(ready, START_S)
            if not line:
                raise self._failed_to_start(ended=line is not None)
            address: dict[str, Any] = json.loads(line)
            self._output_start = self.output.stat().st_size  # after the lines of a successful start
            self.base_url = f"http://127.0.0.1:{address['port']}"
            atexit.register(self.stop)

    def _use_running(self) -> bool:
        """Use the server that runs on the root; False if none answers."""
        try:
            address = json.loads((self.root / SERVER_ADDRESS).read_text(encoding="utf-8"))
            host, port, pid = str(address["host"]), int(address["port"]), int(address["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if host in ("0.0.0.0", "::"):  # clients cannot connect to a wildcard address
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            return False
        if not _is_alive(pid):
            return False
        self._shared_pid = pid
        self.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        key = self.root / "api_key"
        if self.api_key is None and key.is_file():
            self.api_key = key.read_text(encoding="utf-8").strip() or None
        return True

    def stop(self) -> None:
        """End the server and wait for it; a running job goes back to its queue on disk."""
        self._closed = True
        if self._lock.locked():
            self._give_up()  # the lock is held until the starting server has ended
        with self._lock:
            server, self._server = self._server, None
            if server is None:
                return
            atexit.unregister(self.stop)
            if os.getpid() == self._owner:  # not in a fork of it
                server.terminate()
                _end(server, STOP_S)

    def _give_up(self) -> None:
        """End a server that is not ready yet: it runs no job."""
        server = self._server
        if server is not None and os.getpid() == self._owner:
            server.terminate()

    def _launch(self) -> int:
        """Start the process; returns the pipe on which it reports that it is ready."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.output.parent.mkdir(exist_ok=True)
            out = self.output.open("ab")
        except OSError as error:
            raise ServerError(
                f"{self.root}: cannot be written to ({error.strerror}). Name another directory for "
                "the server's state: `root` under `backend` in a YAML, or LocalBackend(path)."
            ) from error
        ready, tell = os.pipe()
        command = [sys.executable, "-P", "-m", "hone", "serve", "--root", str(self.root)]
        command += ["--port", "0", "--inference-port", "-1", "--log-level", self.log_level]
        for name, value in self.settings.items():
            command += [f"--{name.replace('_', '-')}", value]
        owned = {"HONE_OWNED": "1", "HONE_READY_FD": str(tell)}
        key = {"HONE_API_KEY": self.api_key} if self.api_key else {}
        self._owner = os.getpid()
        try:
            with out:
                self._output_start = out.tell()
                self._server = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if self.in_process else out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(tell,),
                    env={**os.environ, **owned, **key},
                    # Ctrl-C goes to the program, which then closes the server; it must not be
                    # stopping already.
                    start_new_session=True,
                )
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(tell)
        if self._server.stdout is not None:
            copying = (self._server.stdout, self.output)
            threading.Thread(target=_show_output, args=copying, daemon=True).start()
        return ready

    def _checkpoint_path(self, model: Named, step: int) -> str | None:
        directory = model_directory(self.root, model.project, model.name)
        return str(directory / "checkpoints" / f"{step:04d}")

    def _failed_to_start(self, *, ended: bool) -> ServerError:
        server, self._server = self._server, None
        assert server is not None
        status = _end(server, 5.0 if ended else 0.0)
        what = f"ended ({status})" if ended else f"did not answer within {START_S:g} s"
        output = self._last_output()
        if not output:
            free = shutil.disk_usage(self.root).free / 2**20
            output = f"It printed nothing to {self.output}; {free:.1f} MiB are free there."
        else:
            output = f"Its output, in {self.output}:\n{output}"
        return ServerError(f"the server of LocalBackend({str(self.root)!r}) {what}. {output}")

    def _last_output(self) -> str:
        """The last lines that the server printed."""
        try:
            with self.output.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # The server truncates the file when it rotates it.
                start = self._output_start if size >= self._output_start else 0
                file.seek(max(start, size - SHOWN_BYTES))
                output = file.read()
        except OSError:
            return ""
        return "\n".join(output.decode(errors="replace").splitlines()[-SHOWN_LINES:])


def _show_output(lines: IO[bytes], path: Path) -> None:
    """Copy a server's output to its file and to this program's stderr."""
    with lines, path.open("ab", buffering=0) as file:
        for line in lines:
            file.write(line)
            sys.stderr.write(line.decode(errors="replace"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _end(server: subprocess.Popen[bytes], within_s: float) -> int:
    """Wait for its exit status; kill it if that takes longer."""
    assert server.stdin is not None
    server.stdin.close()  # closing stdin tells it to stop
    try:
        return server.wait(within_s)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _first_line(descriptor: int, within_s: float) -> str | None:
    """The line that a child writes into its pipe; empty if it ended first, None after `within_s`."""
    deadline, line = time.monotonic() + within_s, b""
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                return None
            more = pipe.read(4096)
            if not more:
                return ""
            line += more
    return line.decode()
