"""A vLLM server as a process: started, shown, watched, ended. A small package stands in for vLLM."""

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.inference.conftest import write_vllm
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.errors import ConfigError, EngineError, EngineFailed
from hone.inference.vllm.client import VllmClient
from hone.inference.vllm.engine import VllmEngine
from hone.inference.vllm.process import VllmProcess, require_vllm
from hone.inference.vllm.server import VllmServer, start_server

pytestmark = pytest.mark.e2e

GLOO = "GLOO_SOCKET_IFNAME"
MAIN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer

TOP = {"token_id:7": 0.0, "token_id:8": -9999.0}
COMPLETION = {"choices": [{"logprobs": {"top_logprobs": [TOP]}}]}
ANSWERS = {"/v1/completions": COMPLETION, "/collective_rpc": {"results": [[4096, 4096]]}}
SAYS = os.environ["HONE_TEST_SAYS"].splitlines()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(503 if self.path == os.environ.get("HONE_TEST_REFUSES") else 200, {})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == os.environ.get("HONE_TEST_REFUSES"):
            print("ERROR 11-16 [serving.py:3] RuntimeError: unknown head size 8", flush=True)
            self.answer(500, {})
        else:
            self.answer(200, ANSWERS[self.path])

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

def main():
    worker = "import hone_vllm_worker, time; print('worker', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        path = sys.argv[sys.argv.index("--uds") + 1]
        with ThreadingUnixStreamServer(path, Handler) as server:
            for line in SAYS:
                print("INFO 11-16 [loader.py:7]", line, flush=True)
            server.serve_forever()
"""
"""The command line of a server with one worker, which says HONE_TEST_SAYS and answers on its socket."""
READY = "Application startup complete."


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that has this vLLM."""
    monkeypatch.setenv("PYTHONPATH", str(write_vllm(tmp_path, version="0.32.0", main=MAIN)))
    monkeypatch.setenv("HONE_TEST_SAYS", READY)
    link = tmp_path / "python"  # another path for every test: what an interpreter has is cached
    link.symlink_to(sys.executable)
    return str(link)


@contextmanager
def running(python: str, *, less_memory: str = "") -> Iterator[VllmProcess]:
    process = VllmProcess(less_memory=less_memory)
    try:
        process.start(require_vllm(python), ["model"])
        yield process
    finally:
        process.stop()


def members(pid: int) -> list[psutil.Process]:
    """The live processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def options(python: str, **args: Any) -> dict[str, Any]:
    sizes = {"max_length": 64, "max_adapters": 2, "rank": 4}
    environment = require_vllm(python)
    return {"environment": environment, "args": args, "dtype": "float32", "on_gpu": False, **sizes}


def server_of(model: Path, python: str, **args: Any) -> VllmServer:
    return start_server(str(model), **options(python, **args))


def test_files_of_others_in_the_temporary_directory_are_not_imported(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, ran = tmp_path / "shared", tmp_path / "ran"
    (shared / "vllm").mkdir(parents=True)
    (shared / "ast.py").write_text(f"open({str(ran)!r}, 'w').close()\nfrom _ast import *\n")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    assert require_vllm(python).version == "0.32.0"
    assert not ran.exists()


async def test_a_closed_engine_leaves_no_directory(
    prose: Prose, python: str, model: Path, tmp_path: Path
) -> None:
    processes: list[VllmProcess] = []

    @contextmanager
    def noted(process: VllmProcess) -> Iterator[None]:
        processes.append(process)
        if len(processes) == 2:
            raise EngineError("the server closes")
        yield

    directory = tmp_path / "engine"
    engine = VllmEngine.open(str(model), directory=directory, start=noted, **options(python))
    await engine.close()
    with pytest.raises(EngineError) as caught:
        VllmEngine.open(str(model), directory=directory, start=noted, **options(python))
    prose(caught)
    left = [path for path in (directory, *(p.socket.parent for p in processes)) if path.exists()]
    assert left == []


@pytest.mark.parametrize(
    "loads", ["Starting to load model /m...", "Loading model from scratch..."], ids=["v1", "v2"]
)
def test_the_log_shows_what_vllm_does_while_it_starts(
    python: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loads: str,
) -> None:
    """The lines are those of vLLM 0.20 and 0.32; either of its two model runners may load."""
    lines = [
        loads,
        loads,  # of another worker
        "Dynamo bytecode transform time: 3.12 s",
        "GPU KV cache size: 1,000 tokens, Maximum concurrency for 64 tokens per request: 15.62x",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/35",
        READY,
    ]
    monkeypatch.setenv("HONE_TEST_SAYS", "\n".join(lines))
    caplog.set_level(logging.INFO)
    server = server_of(model, python)
    assert server.process is not None
    try:
        shown = [record.getMessage() for record in caplog.records]
        assert [text for text in shown if text.startswith("vLLM ")] == [
            "vLLM starts",
            "vLLM loads the weights",
            "vLLM compiles the model",
            "vLLM has allocated its KV cache",
            "vLLM captures CUDA graphs",
        ]
        assert server.kv_bytes == 8192
    finally:
        server.process.stop()


def test_only_this_user_reaches_it(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routes load files and call methods of its workers, and ask for no key."""
    monkeypatch.setenv(GLOO, "eth0")  # as on a cluster, for other programs
    with running(python) as process:
        assert stat.S_ISSOCK(process.socket.stat().st_mode)
        directory = process.socket.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.stat().st_uid == os.getuid()
        assert process.pid is not None
        group = members(process.pid)
        assert len(group) == 2, "the server and its worker"
        listening = [one for process in group for one in process.net_connections("inet")]
        assert listening == []
        server = psutil.Process(process.pid)
        assert not {"--host", "--port"} & set(server.cmdline())
        loopback = [one.address for one in psutil.net_if_addrs()[server.environ()[GLOO]]]
        assert "127.0.0.1" in loopback, "where its workers listen for each other"
    assert not directory.exists() and all_end(group)


@pytest.mark.parametrize("longrope", [{"rope_type": "longrope"}, {"type": "su"}], ids=str)
def test_a_model_with_longrope_is_served_up_to_its_long_factors(
    prose: Prose, python: str, model: Path, caplog: pytest.LogCaptureFixture, longrope: Any
) -> None:
    """vLLM would use them for every sequence, transformers and the learner for longer ones only."""
    config = json.loads((model / "config.json").read_text())
    config |= {"rope_parameters": longrope, "original_max_position_embeddings": 32}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    caplog.set_level(logging.INFO)
    server = server_of(model, python)
    assert server.process is not None and server.process.pid is not None
    try:
        assert server.max_length == 32
        assert "--max-model-len=32" in psutil.Process(server.process.pid).cmdline()
        assert "sequences of up to 32 tokens" in caplog.text
    finally:
        server.process.stop()
    with pytest.raises(ConfigError) as caught:
        server_of(model, python, max_model_len=64)
    prose(caught)


def test_a_server_that_cannot_answer_says_why(
    prose: Prose, python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONE_TEST_REFUSES", "/v1/completions")
    with pytest.raises(EngineFailed) as caught:
        server_of(model, python)
    prose(caught)


def test_a_server_that_never_answers_is_stopped(
    prose: Prose, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONE_TEST_REFUSES", "/health")
    process = VllmProcess()
    with pytest.raises(EngineError) as caught:
        process.start(require_vllm(python), ["model"], start_s=0)
    prose(caught)
    assert process.pid is not None and all_end(members(process.pid))


def test_a_server_that_two_threads_stop_closes_its_pipe_once(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the pipe may belong to another file after the first close."""
    close, closed = os.close, []

    def close_during_another_stop(descriptor: int) -> None:
        monkeypatch.setattr("os.close", close)
        process.stop()
        closed.append(descriptor)
        close(descriptor)

    with running(python) as process:
        monkeypatch.setattr("os.close", close_during_another_stop)
        process.stop()
    assert len(closed) == 1


def test_a_server_that_failed_for_memory_says_what_to_do(
    prose: Prose, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers /wake_up with status 500 and no reason; the reason is in its log."""
    cause = "ERROR 11-16 [core.py:9] RuntimeError: CUDA Error: out of memory"
    monkeypatch.setenv("HONE_TEST_SAYS", f"{READY}\n{cause}")
    with running(python, less_memory="Reduce max_seq_length to 64.") as process:
        while cause not in process.log_end():
            time.sleep(0.01)
        client = VllmClient(process, None)
        client.fail("vLLM did not wake: Internal Server Error")
        prose(str(client.failure))


def test_workers_die_with_their_server(prose: Prose, python: str) -> None:
    with running(python) as process:
        assert process.pid is not None
        group = members(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S) and all_end(group) and len(group) == 2
        assert READY in str(process.failure)
        prose(str(process.failure))


OWNER = """
import sys, time
from hone.inference.vllm.client import VllmClient
from hone.inference.vllm.process import VllmProcess, require_vllm
process = VllmProcess()
process.start(require_vllm(sys.argv[1]), ["model"])
print(process.pid, process.socket.parent, flush=True)
time.sleep(600)
"""


def test_vllm_dies_with_hone_however_that_ends(python: str) -> None:
    command = [sys.executable, "-c", OWNER, python]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, private = owner.stdout.readline().split()
        group = members(int(pid))
        assert len(group) == 2 and Path(private).is_dir()
        owner.kill()
        assert all_end(group)
    assert not Path(private).exists()
