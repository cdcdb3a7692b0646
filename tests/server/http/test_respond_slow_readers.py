"""A client that does not read its answer loses its connection and delays no other client."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from tests.fakes import ScriptedEngine
from tests.inference.vllm.test_client import Standin, served
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer, Server

from hone.inference.vllm.engine import VllmEngine
from hone.server.http import respond
from hone.server.settings import Settings
from hone.server.state import State
from hone.wire.limits import TimedProtocol

pytestmark = pytest.mark.e2e

LONG = ["the weather in the city " * 400]
BUFFER = 4096
"""Bytes of a socket's buffer, so that few are under way."""


@contextmanager
def asking(server: Server, **body: Any) -> Iterator[socket.socket]:
    """A client that has sent a request of the rollout `r` and has read nothing."""
    for app in server._servers:
        for listening in app.servers[0].sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    port = int(server.inference_url.rpartition(":")[2])
    content = json.dumps({"messages": [{"role": "user", "content": "Hello."}], **body}).encode()
    head = f"POST /rollout/r/v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", port))
        client.sendall(head.encode() + content)
        yield client


def wait_for(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return result


def connections(server: Server) -> int:
    return sum(len(app.server_state.connections) for app in server._servers)


def test_a_client_that_does_not_read_does_not_delay_the_sleep_of_an_engine(
    tiny_model: Path, tmp_path: Path
):
    standin = Standin()
    with served(standin) as url:
        made: list[VllmEngine] = []

        def open_engine(name: str) -> VllmEngine:
            made.append(
                VllmEngine.connect(name, url, directory=tmp_path / "adapters", max_length=300)
            )
            standin.pieces, standin.ids = 2000, [7] * 10
            return made[0]

        allowed = (str(tiny_model),)
        settings = Settings(root=tmp_path / "hone", device="cpu", allow_base_models=allowed)
        server = Server(State(settings, open_engine=open_engine), None).start()
        try:
            with asking(server, model=str(tiny_model), stream=True, logprobs=True) as client:
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                server.call(made[0].sleep())
                assert server.state.calls.rollout("r") == []  # it waits for its reader
                server.call(made[0].wake())
                text = b""
                while b"data: [DONE]" not in text[-100:]:
                    text += client.recv(2**20)
            (call,) = server.state.calls.rollout("r")
            assert len(call.call.completion_ids) == 20_000 and not call.abandoned
        finally:
            server.stop()


def test_a_client_that_reads_nothing_is_disconnected_and_its_call_abandoned(
    make_server: MakeServer, tiny_model: Path
):
    server = make_server(LONG, write_timeout_s=0.2)
    with asking(server, model=str(tiny_model), stream=True, logprobs=True, top_logprobs=5):
        wait_for(lambda: server.state.calls.has_rollout("r"))
        (call,) = server.state.calls.rollout("r")
        assert call.abandoned and call.finish == "length"  # the engine had finished
        wait_for(lambda: not connections(server))


def test_a_whole_answer_that_is_not_read_does_not_keep_its_connection(
    make_server: MakeServer, tiny_model: Path
):
    server = make_server(LONG, write_timeout_s=0.2)
    with asking(server, model=str(tiny_model), logprobs=True, top_logprobs=20, n=4):
        wait_for(lambda: server.state.calls.has_rollout("r"))
        wait_for(lambda: not connections(server))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what its buffer holds")
def test_a_client_that_reads_slowly_is_not_disconnected():
    stopped = threading.Event()

    class Protocol(TimedProtocol):
        header_timeout_s, write_timeout_s = PATIENCE_S, 1.0

        def stop_writing(self, unread: int) -> None:
            stopped.set()
            super().stop_writing(unread)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(b"x" * 2**25)(scope, receive, send)

    config = uvicorn.Config(app, http=Protocol, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for _ in range(25):  # less than a third of the kernel's buffer of 4 MiB in a second
                assert client.recv(2**16)
                assert not stopped.wait(0.1)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def test_the_buffer_for_a_slow_client_is_bounded(
    make_server: MakeServer,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
):
    monkeypatch.setattr(respond, "MAX_UNSENT_BYTES", 2**16)
    server = make_server(LONG)
    engine: ScriptedEngine = server.engine
    with asking(server, model=str(tiny_model), stream=True, logprobs=True) as client:
        wait_for(lambda: engine.aborted)
        text = b""
        while b"read faster" not in text:
            text += client.recv(2**16)
    (call,) = server.state.calls.rollout("r")
    assert call.abandoned


def test_a_client_that_reads_late_gets_everything(make_server: MakeServer, tiny_model: Path):
    server = make_server(LONG)
    engine: ScriptedEngine = server.engine
    with asking(server, model=str(tiny_model), stream=True, logprobs=True) as client:
        wait_for(lambda: engine.requests and not engine.running)
        text = b""
        while b"data: [DONE]" not in text[-100:]:
            text += client.recv(2**20)
    (call,) = server.state.calls.rollout("r")
    assert not call.abandoned
    events = [json.loads(line[6:]) for line in text.decode().splitlines() if "data: {" in line]
    said = "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    )
    assert said == LONG[0][: len(said)] and len(call.call.completion_ids) > 400
