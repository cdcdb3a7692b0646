"""Users of one machine: what a server without a key answers to its own user, and to others.

Over real sockets. Who the other user is, a test decides in place of the kernel, so that it needs no
root; the tests marked `e2e` start clients of a really different user, and need root for that.
"""

import asyncio
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import CLIENTS, MakeServer, Server
from tests.wire.test_peers import OTHER, as_root

from hone.server.run import banner
from hone.wire import peers
from hone.wire.peers import Address, own_users

MESSAGE = {"role": "user", "content": "hi"}
KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer default"},
    {"x-api-key": "default"},
    {"Authorization": "Bearer hone-guess"},
]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The kernel's answers: `[user]` for every connection from now on; empty: the real ones."""
    users: list[int | None] = []
    real = peers.find_user

    async def find_user(client: Address, server: Address) -> int | None:
        return users[0] if users else await real(client, server)

    monkeypatch.setattr(peers, "find_user", find_user)
    return users


def requests(server: Server, model: str) -> list[tuple[str, str, Any]]:
    """One request of every kind."""
    chat = {"model": model, "messages": [MESSAGE]}
    streamed = chat | {"stream": True}
    inference = [
        ("/v1/models", None),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", streamed),
        ("/v1/responses", {"model": model, "input": "hi", "stream": True}),
        ("/v1/messages", chat | {"max_tokens": 4}),
        ("/rollout/r1/v1/chat/completions", chat),
        ("/project/p/v1/chat/completions", chat),
        ("/tokenize", {"model": model, "prompt": "hi"}),
    ]
    control = [
        ("/register", {"name": "agent", "project": "p", "base_model": model, "type": "trainable"}),
        ("/v1/training/models", {"name": "agent", "base_model": model}),
        ("/v1/training/models", None),
        ("/v1/training/jobs", None),
        ("/v1/training/jobs/j/events", None),
        ("/metrics", None),
        ("/openapi.json", None),
        ("/nowhere", None),
    ]
    return [
        *((server.inference_url, path, body) for path, body in inference),
        *((server.control_url, path, body) for path, body in (*inference, *control)),
    ]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A new connection for every request."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(timeout=PATIENCE_S, limits=limits) as client:
        yield client


def send(
    http: httpx.Client, url: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    return http.request("GET" if body is None else "POST", url + path, json=body, headers=headers)


@pytest.mark.parametrize("user", [OTHER, None], ids=["another user", "unknown"])
def test_every_route_refuses_other_users(
    http: httpx.Client,
    make_server: MakeServer,
    lookups: list[int | None],
    tiny_model: Path,
    user: int | None,
):
    server = make_server()
    lookups.append(user)
    for number, (url, path, body) in enumerate(requests(server, str(tiny_model))):
        answer = send(http, url, path, body, KEYS[number % len(KEYS)])
        assert answer.status_code == 401, (path, answer.text)
        assert "has no key, so it accepts only processes of" in answer.text
        assert "--api-key KEY" in answer.text and "--trust-network 127.0.0.1/32" in answer.text
        if not path.endswith("messages"):  # Anthropic's errors have no code
            assert answer.json()["error"]["code"] == "invalid_api_key"
    for sent in KEYS:
        assert send(http, server.control_url, "/v1/models", headers=sent).status_code == 401
    assert server.state.models.list() == [] and server.engine.requests == []


def test_other_users_only_see_the_health_status(
    http: httpx.Client, make_server: MakeServer, lookups: list[int | None], tiny_model: Path
):
    server = make_server()
    own = http.get(f"{server.control_url}/health").json()
    assert own["root"] == str(server.state.settings.root)
    lookups.append(OTHER)
    for url in (server.control_url, server.inference_url):
        for path in ("/health", "/healthcheck"):
            health = http.get(url + path).json()
            assert health["status"] == "ok"
            assert not {"root", "port", "base_models", "jobs"} & health.keys()
            assert {frozenset(part) for part in health["parts"].values()} == {frozenset({"status"})}
            assert str(tiny_model) not in json.dumps(health)


def test_the_same_user_needs_no_key(http: httpx.Client, make_server: MakeServer, tiny_model: Path):
    server = make_server()
    model = str(tiny_model)
    for key in ("default", "anything"):
        with openai.OpenAI(base_url=server.openai_url, api_key=key) as client:
            answer = client.chat.completions.create(model=model, messages=[MESSAGE])  # pyright: ignore[reportArgumentType]
            assert answer.choices[0].message.content == "ok"
    for url, path, body in requests(server, model):
        assert send(http, url, path, body).status_code not in (401, 403), path


def test_the_openai_client_of_another_user_shows_the_reason(
    prose: Prose, make_server: MakeServer, lookups: list[int | None], tiny_model: Path
):
    server = make_server()
    lookups.append(OTHER)
    client = openai.OpenAI(base_url=server.openai_url, api_key="default")
    CLIENTS.append(client)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    prose(caught, user=re.compile(r"(?<=processes of )\S+(?=, and)"))


def test_a_key_lets_every_user_in_and_no_one_is_looked_up(
    http: httpx.Client, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
):
    async def find_user(client: Address, server: Address) -> int | None:
        raise AssertionError("looked up")

    monkeypatch.setattr(peers, "find_user", find_user)
    server = make_server(api_key="k")
    for url in (server.control_url, server.inference_url):
        right = {"Authorization": "Bearer k"}
        assert send(http, url, "/v1/models", headers=right).status_code == 200
        assert send(http, url, "/v1/models").status_code == 401


def test_a_trusted_loopback_makes_other_users_peers(
    http: httpx.Client, make_server: MakeServer, lookups: list[int | None], tiny_model: Path
):
    server = make_server(trust_network=(ip_network("127.0.0.1/32"),))
    lookups.append(OTHER)
    path = {"name": "agent", "base_model": str(tiny_model)}
    refused = send(http, server.control_url, "/v1/training/models", path)
    assert refused.status_code == 422 and "is a path" in refused.text
    for url in (server.control_url, server.inference_url):
        assert send(http, url, "/v1/models").status_code == 200
        assert "root" not in http.get(f"{url}/health").json()
    lookups.clear()
    assert send(http, server.control_url, "/v1/training/models", path).status_code == 201


def test_a_user_is_looked_up_once_for_each_connection(
    http: httpx.Client, make_server: MakeServer, lookups: list[int | None]
):
    server = make_server()
    url = f"{server.control_url}/v1/models"
    with httpx.Client() as own:
        assert own.get(url).status_code == 200
        lookups.append(OTHER)
        # This connection is known; a new one is another user's.
        assert [own.get(url).status_code for _ in range(3)] == [200] * 3
        assert http.get(url).status_code == 401
        with httpx.Client() as other:
            assert other.get(url).status_code == 401
            lookups.clear()
            assert other.get(url).status_code == 401
        assert http.get(url).status_code == 200


@pytest.mark.parametrize("ending", ["close", "half-close", "reset"])
def test_a_client_that_closes_after_sending_is_no_operator(
    http: httpx.Client, make_server: MakeServer, tiny_model: Path, ending: str
):
    """Its socket is nobody's, or its port may be another process's by now."""
    server = make_server()
    at = urlsplit(server.control_url)
    body = json.dumps({"name": "agent", "base_model": str(tiny_model)}).encode()
    request = (
        b"POST /v1/training/models HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    held, go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        """Keep the server's loop from reading before the client has closed."""
        held.set()
        assert go_on.wait(PATIENCE_S)

    with socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S) as client:
        blocked = asyncio.run_coroutine_threadsafe(hold(), server._loop)
        assert held.wait(PATIENCE_S)
        client.sendall(request)
        if ending == "half-close":
            client.shutdown(socket.SHUT_WR)
            go_on.set()
            while client.recv(65536):
                pass
        elif ending == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    go_on.set()
    blocked.result(PATIENCE_S)
    assert http.get(f"{server.control_url}/v1/training/models").json() == []


def test_the_start_says_who_is_accepted(make_state: Any):
    lines = banner(make_state(), None)
    assert f"accepts       {own_users()}, without a key" in lines
    trusting = make_state(trust_network=(ip_network("127.0.0.1/32"),))
    assert "trusts        127.0.0.1/32 without a key" in banner(trusting, None)
    assert not any(line.startswith("accepts") for line in banner(make_state(api_key="k"), None))


# ---- really different users ---------------------------------------------------------------------

CLIENT = """
import http.client, json, os, socket, sys
port, uid, requests = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
b"".decode("latin-1"), "".encode("idna")  # modules that only root may read here
socket.getaddrinfo("127.0.0.1", port)
os.setgroups([]), os.setgid(uid), os.setuid(uid)
answers = []
for path, headers, body in requests:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST" if body else "GET", path, body and json.dumps(body), headers)
    response = connection.getresponse()
    answers.append([response.status, response.read().decode()])
    connection.close()
print(json.dumps(answers))
"""


def ask_as(uid: int, url: str, *requests: tuple[str, dict[str, str], Any]) -> list[tuple[int, str]]:
    """The answers to requests from a process of that user."""
    command = [
        sys.executable,
        "-c",
        CLIENT,
        str(urlsplit(url).port),
        str(uid),
        json.dumps(requests),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [(status, text) for status, text in json.loads(done.stdout)]


@pytest.mark.e2e
@as_root
def test_a_process_of_another_user_is_refused_on_both_ports(
    make_server: MakeServer, tiny_model: Path
):
    server = make_server()
    typed = {"Content-Type": "application/json"}
    chat = {"model": str(tiny_model), "messages": [MESSAGE]}
    for url in (server.control_url, server.inference_url):
        answers = ask_as(
            OTHER,
            url,
            *(("/v1/models", sent, None) for sent in KEYS),
            ("/v1/chat/completions", {**typed, "Authorization": "Bearer default"}, chat),
            ("/rollout/r/v1/chat/completions", typed, chat),
            ("/health", {}, None),
        )
        assert [status for status, _ in answers] == [401] * 6 + [200]
        assert f"this request is from a process of uid {OTHER}" in answers[0][1]
        assert [status for status, _ in ask_as(0, url, ("/v1/models", {}, None))] == [200]
    registered = {"name": "agent", "base_model": str(tiny_model)}
    [(status, _)] = ask_as(OTHER, server.control_url, ("/v1/training/models", typed, registered))
    assert status == 401 and server.state.models.list() == []
    # How a user namespace shows users that it does not know.
    [(status, text)] = ask_as(65534, server.control_url, ("/v1/models", {}, None))
    assert status == 401 and "cannot tell whose process" in text


@pytest.mark.e2e
@as_root
def test_a_process_of_another_user_passes_with_the_key_or_a_trusted_loopback(
    make_server: MakeServer,
):
    keyed = make_server(api_key="k")
    right = ("/v1/models", {"Authorization": "Bearer k"}, None)
    wrong = ("/v1/models", {"Authorization": "Bearer default"}, None)
    for url in (keyed.control_url, keyed.inference_url):
        assert [status for status, _ in ask_as(OTHER, url, right, wrong)] == [200, 401]
    keyed.stop()
    trusting = make_server(trust_network=(ip_network("127.0.0.1/32"),))
    for url in (trusting.control_url, trusting.inference_url):
        assert [status for status, _ in ask_as(OTHER, url, right, wrong)] == [200, 200]


@pytest.mark.e2e
def test_a_thousand_connections_at_once_are_all_told_apart(make_server: MakeServer):
    server = make_server()
    at = urlsplit(server.control_url)
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    is_root = sys.platform == "linux" and os.geteuid() == 0

    def status(number: int) -> int:
        with socket.socket() as client:
            if is_root and number % 2:
                os.fchown(client.fileno(), OTHER, -1)
            client.settimeout(PATIENCE_S)
            client.connect((at.hostname, at.port))
            client.sendall(request)
            with client.makefile("rb") as answer:
                return int(answer.read().split()[1])

    with ThreadPoolExecutor(100) as pool:
        statuses = list(pool.map(status, range(1000)))
    assert statuses[::2] == [200] * 500
    assert statuses[1::2] == [401 if is_root else 200] * 500
