"""`hone serve` as a process: what it prints, what it refuses, and how it stops."""

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.inference.conftest import write_vllm
from tests.inference.vllm.test_process import MAIN
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of
from tests.server.api import job
from typer.testing import CliRunner

from hone.backends.remote import RemoteBackend
from hone.cli.app import app
from hone.errors import ConfigError
from hone.model import TrainableModel
from hone.server import run
from hone.server.serve import gpus
from hone.server.settings import Settings
from hone.server.state import State

pytestmark = pytest.mark.e2e

SERVE = [sys.executable, "-m", "hone", "serve"]


@contextmanager
def serving(*options: str, owned: bool = False) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    """A server on free ports, and what it said when it was ready."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--inference-port", "0", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[writing],
        env=os.environ | {"HONE_READY_FD": str(writing)} | ({"HONE_OWNED": "1"} if owned else {}),
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = ready.readline()
        assert line, process.communicate(timeout=PATIENCE_S)
        yield process, json.loads(line)
    finally:
        with process:  # closes its pipes and waits
            if process.poll() is None:
                process.kill()


def test_it_says_where_it_listens_and_how_to_try_it(tmp_path: Path):
    advertised = "http://127.0.0.1:9999"
    options = ("--root", str(tmp_path), "--advertise-url", advertised)
    with serving(*options) as (process, output):
        control = f"http://127.0.0.1:{output['port']}"
        assert httpx.get(f"{control}/health", timeout=PATIENCE_S).json()["status"] == "ok"
        openai = f"http://127.0.0.1:{output['inference_port']}/v1"
        assert httpx.get(f"{openai}/models", timeout=PATIENCE_S).json()["data"] == []
        wrong_port = httpx.post(f"{openai}/training/models", json={}, timeout=PATIENCE_S).json()[
            "error"
        ]["message"]
        assert wrong_port.endswith(f"inference APIs; the training API is on port {output['port']}")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert control in out and f"curl {openai}/chat/completions" in out
    assert f"for agents    {advertised}/v1" in out
    assert str(tmp_path / "logs" / "server.log") in out
    log = (tmp_path / "logs" / "server.log").read_text()
    assert re.search(r"request method=GET path=/health status=200 ms=[0-9.]+", log)
    assert log.splitlines()[-1].endswith("server stopping")


def test_it_stops_at_once_while_a_client_follows_a_job(tmp_path: Path, tiny_model: Path):
    with serving("--root", str(tmp_path)) as (process, output):
        control = f"http://127.0.0.1:{output['port']}/v1/training"
        spec = {"name": "agent", "base_model": str(tiny_model)}
        assert httpx.post(f"{control}/models", json=spec, timeout=PATIENCE_S).status_code == 201
        answer = httpx.post(f"{control}/jobs", json=job(), timeout=PATIENCE_S)
        assert answer.status_code == 202
        with httpx.stream(
            "GET", f"{control}/jobs/{answer.json()['id']}/events", timeout=PATIENCE_S
        ) as events:
            lines = events.iter_lines()
            assert next(lines).startswith("id: ")  # its learner takes seconds to start
            process.send_signal(signal.SIGTERM)
            types = [line for line in lines if line.startswith("event: ")]
        _, err = process.communicate(timeout=PATIENCE_S)
    assert not {"event: done", "event: failed", "event: cancelled"} & set(types)
    # Who outlasts uvicorn's grace is cut off with an error in its log.
    assert (process.returncode, err) == (0, "")


async def test_the_log_shows_the_stages_of_vllms_start(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """On the server's console, and in the log of its client."""
    packages = str(write_vllm(tmp_path, version="0.32.0", main=MAIN))
    monkeypatch.setenv("PYTHONPATH", packages)
    monkeypatch.setenv("HONE_TEST_SAYS", "Starting to load model /m...")
    monkeypatch.setenv("HONE_TEST_REFUSES", "/health")  # it is never ready
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    caplog.set_level("INFO", "hone")
    options = ("--root", str(tmp_path / "hone"), "--engine", "vllm", "--engine-python", str(python))
    with serving(*options) as (process, output):
        backend = RemoteBackend(f"http://127.0.0.1:{output['port']}")
        model = TrainableModel[Any](name="agent", project="p", base_model=str(tiny_model))
        registering = asyncio.create_task(model.register(backend))
        async with asyncio.timeout(PATIENCE_S):
            while "vLLM loads the weights" not in caplog.text:
                assert not registering.done(), registering
                await asyncio.sleep(0.1)
        registering.cancel()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    log = tmp_path / "hone" / "logs" / "vllm.log"
    assert f"vLLM starts, which takes one to four minutes; its log: {log}" in caplog.messages
    assert caplog.messages.count("vLLM loads the weights") == 1
    assert re.search(r"info vLLM starts base_model=.*\n.* info vLLM loads the weights", err)


def test_an_owned_server_ends_with_its_owner(tmp_path: Path):
    with serving("--root", str(tmp_path), owned=True) as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_second_server_on_one_root_and_a_taken_port_are_refused(tmp_path: Path):
    with serving("--root", str(tmp_path)) as (_, output):
        for options, says in (
            (["--root", str(tmp_path), "--port", "0"], "another server uses it"),
            (["--root", str(tmp_path / "b"), "--port", str(output["port"])], "choose another port"),
        ):
            refused = subprocess.run(
                [*SERVE, *options], capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert refused.returncode == 1 and says in refused.stderr
            assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--engine", "abacus"], 2, "--engine 'abacus'"),
        (["--port", "70000"], 2, "--port 70000"),
        (["--trust-network", "10.0.0.0/99"], 2, "--trust-network"),
        (["--log-level", "loud"], 2, "--log-level 'loud'"),
        (["--device", "gpu"], 2, "--device 'gpu': expected cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], 1, "--device cuda:99: torch "),  # another machine may have it
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, options: list[str], status: int, says: str
):
    refused = CliRunner().invoke(app, ["serve", "--root", str(tmp_path), *options])
    assert refused.exit_code == status and says in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("device", ["cuda", None])
def test_a_torch_without_cuda_is_named_at_the_start(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None
):
    (tmp_path / "version.py").write_text("__version__, cuda, hip = '2.0+cpu', None, None\n")
    monkeypatch.setattr(torch, "__spec__", ModuleSpec("torch", None, origin=str(tmp_path / "_")))
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)  # the files of a GPU are there
    why = "torch 2.0+cpu is built without CUDA. Install a build with CUDA"
    if device is not None:
        with pytest.raises(ConfigError) as caught:
            gpus.check_device(device)
        prose(caught)
        assert place_of(caught) == "--device cuda"
        return
    state = State(Settings(root=tmp_path / "root"))
    (line,) = (line for line in run.banner(state, None) if line.startswith("device"))
    state.store.close()
    assert line.startswith(f"device        cpu: {why}") and "GPU" in line
    assert gpus.unused_gpu("cpu") is None
    (tmp_path / "version.py").write_text("__version__, cuda, hip = '2.0', '13.0', None\n")
    assert gpus.unused_gpu(None) is None


def test_an_engine_that_is_not_there_is_refused_at_the_start(tmp_path: Path):
    options = ["--root", str(tmp_path), "--engine", "vllm", "--engine-python", "/no/python"]
    options += ["--port", "0", "--inference-port", "0"]
    refused = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 1 and "--engine-python /no/python: " in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        # An address for documentation, which no machine has, and a name that never resolves.
        (["--host", "192.0.2.1"], "--host 192.0.2.1: this machine cannot listen there ("),
        (["--host", "no.invalid"], "--host no.invalid: this machine cannot listen there ("),
        (
            ["--root", f"{__file__}/x"],
            f"--root {__file__}/x: cannot be created (Not a directory). ",
        ),
    ],
)
def test_an_option_that_cannot_be_used_is_named(tmp_path: Path, options: list[str], says: str):
    command = [*SERVE, "--root", str(tmp_path), "--port", "0", "--api-key", "k", *options]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 1 and refused.stderr.startswith(f"hone: {says}")
    assert "Traceback" not in refused.stderr


def test_one_port_for_both_apis_is_refused(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*SERVE, "--root", str(tmp_path), "--port", port, "--inference-port", port]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 1
    assert f"--inference-port {port}: cannot listen on 127.0.0.1:{port} (" in refused.stderr


def test_an_open_address_needs_the_key_it_shows_once(tmp_path: Path):
    with serving("--root", str(tmp_path), "--host", "0.0.0.0") as (process, output):
        url = f"http://127.0.0.1:{output['inference_port']}/v1/models"
        key = (tmp_path / "api_key").read_text().strip()
        assert httpx.get(url, timeout=PATIENCE_S).status_code == 401
        assert (
            httpx.get(
                url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S
            ).status_code
            == 200
        )
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert key in out and process.returncode == 0  # docs/reference/cli.md says so
    with serving("--root", str(tmp_path), "--host", "0.0.0.0") as (process, _):
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert key not in out


def test_arts_command_starts_it_too(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for words in (["art", "run"], ["art"]):
            refused = subprocess.run(
                [*SERVE[:-1], *words, "--host", "127.0.0.1", "--port", port],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                cwd=tmp_path,
            )
            # Far enough to show that both forms reach the server: the port is in use.
            assert f"--port {port}: cannot listen" in refused.stderr, refused.stderr


def test_what_a_model_leaves_is_not_searched_for_garbage_again():
    class Held(list["Held"]):
        """Knows itself, so that only the collector frees it."""

    left: list[weakref.ref[Held]] = []
    objects = [Held() for _ in range(1000)]

    def load(base_model: str) -> Any:
        garbage = Held()
        garbage.append(garbage)
        left.append(weakref.ref(garbage))
        return base_model, objects

    before = gc.get_freeze_count()
    try:
        assert run.without_gc_pauses(load)("m") == ("m", objects)
        assert gc.get_freeze_count() >= before + 1000
        assert left[0]() is None
    finally:
        if not before:  # conftest.py freezes what is imported
            gc.unfreeze()
