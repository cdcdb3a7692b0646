"""Connections and bodies are bounded in number, size and time, before anything is parsed."""

import json
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer, Server
from tests.server.test_run import serving

from hone.server.http.listen import max_connections

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
GET = HALF + b"\r\n"


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    at = urlsplit(server.control_url)
    with socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S) as connection:
        yield connection


def post(length: int, path: str = "/v1/chat/completions") -> bytes:
    """Headers of a request with a body of this length."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


def response(connection: socket.socket) -> tuple[HTTPResponse, bytes]:
    """The next response and its body; the connection may stay open."""
    received = HTTPResponse(connection)
    received.begin()
    return received, received.read()


@pytest.mark.parametrize("sent", [b"", HALF, GET + HALF], ids=["nothing", "half", "a second half"])
def test_a_connection_with_an_incomplete_request_is_closed(
    make_server: MakeServer, sent: bytes
) -> None:
    server = make_server(header_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(sent)
        received = answer(connection)
    assert received.count(b"HTTP/1.1 200 OK") == sent.count(GET)
    assert httpx.get(server.control_url + "/health", timeout=PATIENCE_S).status_code == 200


def test_an_incomplete_body_gets_408(make_server: MakeServer) -> None:
    server = make_server(body_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(post(1000) + b"{")
        received = answer(connection)
    assert received.startswith(b"HTTP/1.1 408 ") and b"body_timeout_s" in received
    assert b"1 bytes of the body" in received


def test_an_unread_body_does_not_keep_its_connection_open(make_server: MakeServer) -> None:
    """It is answered with 404 at once; then the client goes on as slowly as it likes."""
    server = make_server(header_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(post(1000, "/nowhere") + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b" ")
        answer(connection)


def test_connections_beyond_the_limit_are_refused_and_the_others_served(
    make_server: MakeServer,
) -> None:
    server = make_server(max_connections=3)
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(connected(server)) for _ in range(3)]
        with connected(server) as fourth:
            refused = answer(fourth)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in refused
        first.sendall(GET)
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
    # They are closed now, and counted no more.
    assert httpx.get(server.control_url + "/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.e2e
def test_large_bodies_beyond_the_budget_get_429_before_they_are_read(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(large_body_bytes=600, max_bodies_bytes=3000, body_processes=1)
    text = json.dumps({"model": str(tiny_model), "prompt": "the weather "}).encode()
    body = text + b" " * (2000 - len(text))
    with connected(server) as first, connected(server) as second, connected(server) as third:
        first.sendall(post(2000, "/v1/completions") + body[:-1])
        while not server.state.bodies.reserved:  # until the first is known to the server
            httpx.get(server.control_url + "/health", timeout=PATIENCE_S)
        second.sendall(post(2000, "/v1/completions"))
        refused, _ = response(second)
        assert (refused.status, refused.getheader("Retry-After")) == (429, "1")
        chunks = b"%x\r\n%s\r\n" % (1500, b" " * 1500)
        chunked = post(0, "/v1/completions").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        third.sendall(chunked + chunks)
        assert response(third)[0].status == 429
        first.sendall(body[-1:])
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
        while server.state.bodies.reserved:  # until the request is over for the server, too
            httpx.get(server.control_url + "/health", timeout=PATIENCE_S)


LARGE = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/training/jobs",
    "/_train_model",
    "/_log",
}
"""Routes that hand large bodies to another process."""


@pytest.mark.e2e
def test_only_routes_that_parse_elsewhere_accept_large_bodies(make_server: MakeServer) -> None:
    server = make_server(max_small_body_bytes=1000, large_body_bytes=1500)
    paths = httpx.get(server.control_url + "/openapi.json", timeout=PATIENCE_S).json()["paths"]
    posts = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert posts > LARGE and {"/register", "/v1/training/models", "/v1/runs"} < posts
    for path in sorted(posts - LARGE):
        with connected(server) as connection:
            connection.sendall(post(1001, path.replace("{", "").replace("}", "")))
            refused, why = response(connection)  # though none of the body was sent
        assert refused.status == 413, path
        assert b"larger than 1000 bytes (max_small_body_bytes)" in why, path
    chunked = post(0, "/v1/runs").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connected(server) as connection:
        connection.sendall(chunked + b"%x\r\n%s\r\n" % (1001, b" " * 1001))
        assert response(connection)[0].status == 413
    for path in sorted(LARGE):
        for size in (1001, 1501):
            body = b"{" + b" " * (size - 2) + b"}"
            headers = {"Content-Type": "application/json"}
            refused = httpx.post(
                server.control_url + path, content=body, headers=headers, timeout=PATIENCE_S
            )
            assert refused.status_code in (400, 422), (path, size)  # it was parsed


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_refused_body_reads_the_refusal(
    make_server: MakeServer, chunked: bool
) -> None:
    """As http.client and requests do; the body is more than the buffers of both sockets hold."""
    server = make_server(max_body_bytes=1000)
    at = urlsplit(server.control_url)
    piece = b" " * 2**20
    connection = HTTPConnection(str(at.hostname), at.port, timeout=PATIENCE_S)
    with closing(connection):
        size = {} if chunked else {"Content-Length": str(24 * len(piece))}
        body = (piece for _ in range(24))
        connection.request("POST", "/v1/completions", body, size, encode_chunked=chunked)
        refused = connection.getresponse()
        assert refused.status == 413 and b"1000 bytes" in refused.read()
        connection.request("GET", "/health")  # the same connection goes on
        assert connection.getresponse().status == 200


def test_the_log_says_why_a_request_was_refused(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    with caplog.at_level(logging.INFO, "hone.server"):
        url = server.control_url
        httpx.post(
            url + "/v1/chat/completions",
            json={"model": "x" * 5000, "messages": []},
            timeout=PATIENCE_S,
        )
        httpx.post(url + "/v1/training/jobs", json={"model": "agent"}, timeout=PATIENCE_S)
        httpx.post(
            url + "/v1/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user"}],
                "temperature": "sk-proj-0123456789abcdef",
            },
            timeout=PATIENCE_S,
        )
        server.stop()  # a request is logged after it is answered
    requests = [record.fields for record in caplog.records if record.message == "request"]  # pyright: ignore[reportAttributeAccessIssue] - see `say`
    assert [fields["status"] for fields in requests] == [400, 422, 400]
    assert "groups" in requests[1]["reason"] and "temperature" in requests[2]["reason"]
    assert all(len(fields["reason"]) <= 1010 for fields in requests)
    assert "0123456789" not in requests[2]["reason"]


def test_connections_leave_descriptors_for_files() -> None:
    # 256 are reserved, but never more than half: (1024 - 256) / 2 ports, (100 - 50) / 1 port.
    assert (max_connections(1024, 2), max_connections(100, 1)) == (384, 50)


@pytest.mark.e2e
def test_more_connections_than_the_soft_limit_of_descriptors(tmp_path: Path) -> None:
    """The limit is raised at the start; before, accept failed with a traceback once a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Fewer than the connections below, and more than this process may have open already.
    resource.setrlimit(resource.RLIMIT_NOFILE, (280, hard))
    try:
        context = serving("--root", str(tmp_path))
        _, output = context.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        at = ("127.0.0.1", output["port"])
        with ExitStack() as stack:
            crowd = [stack.enter_context(socket.create_connection(at, 30)) for _ in range(300)]
            for connection in crowd:
                connection.sendall(GET)
            assert {c.recv(15) for c in crowd} == {b"HTTP/1.1 200 OK"}
    finally:
        context.__exit__(None, None, None)
    assert "Traceback" not in (tmp_path / "logs" / "server.log").read_text()
