"""What strangers, proxies and peers get from a server: every request over a real socket."""

import socket
import stat
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import MakeServer

from hone.errors import ServerError
from hone.server.app import State
from hone.server.root import make_root
from hone.server.settings import Settings


def raw_status(url: str, headers: str, path: str = "/v1/models") -> int:
    """The status of a request with exactly these header lines."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def test_an_empty_bearer_token_opens_nothing(make_server: MakeServer):
    server = make_server(api_key="k")
    for url in (server.control_url, server.inference_url):
        for sent in ("", "Authorization: Bearer\r\n", "Authorization: Bearer \r\n"):
            assert raw_status(url, f"Host: 127.0.0.1\r\n{sent}") == 401
        assert raw_status(url, "Host: 127.0.0.1\r\nAuthorization: Bearer k\r\n") == 200


def test_a_proxys_word_for_its_client_is_not_taken(make_server: MakeServer):
    server = make_server(api_key="k", trust_network=(ip_network("10.0.0.0/8"),))
    asked = "Host: 127.0.0.1\r\nX-Forwarded-For: 10.0.0.9\r\n"
    assert raw_status(server.control_url, asked, "/v1/training/models") == 401


def test_a_proxy_that_the_operator_named_is_believed(make_server: MakeServer):
    here = (ip_network("127.0.0.0/8"),)
    trusted = (ip_network("10.0.0.0/8"),)
    server = make_server(api_key="k", trust_network=trusted, forwarded_allow_ips=here)
    asked = "Host: 127.0.0.1\r\nX-Forwarded-For: {}\r\n"
    path = "/v1/training/models"
    assert raw_status(server.control_url, asked.format("10.0.0.9"), path) == 200
    assert raw_status(server.control_url, asked.format("192.0.2.1"), path) == 401


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_without_a_key_a_reverse_proxy_gets_nothing(make_server: MakeServer, path: str):
    server = make_server()
    for url in (server.control_url, server.inference_url):
        assert raw_status(url, "Host: 127.0.0.1\r\n", path) == 200
        for header in ("X-Forwarded-For: 127.0.0.1", "Via: 1.1 proxy", "Forwarded: for=x"):
            assert raw_status(url, f"Host: 127.0.0.1\r\n{header}\r\n", path) == 401


@pytest.mark.parametrize("key", [None, "k"])
def test_host_and_origin_are_checked_with_and_without_a_key(
    make_server: MakeServer, key: str | None
):
    url = make_server(api_key=key).control_url
    sent = "Authorization: Bearer k\r\n"
    assert raw_status(url, f"Host: localhost\r\n{sent}") == 200
    for path in ("/v1/models", "/health"):
        assert raw_status(url, f"Host: rebound.example\r\n{sent}", path) == 401
        page = "Host: localhost\r\nOrigin: https://page.example\r\n"
        assert raw_status(url, page + sent, path) == 401


def test_a_page_the_operator_allowed_may_ask_and_read(make_server: MakeServer):
    origin = "https://chat.example"
    server = make_server(api_key="k", allowed_origins=(origin,))
    url = f"{server.inference_url}/v1/models"
    wants = {"Access-Control-Request-Method": "POST"}
    wants["Access-Control-Request-Headers"] = "authorization, content-type"
    before = httpx.options(url, headers={"Origin": origin, **wants})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == origin
    answer = httpx.get(url, headers={"Origin": origin, "Authorization": "Bearer k"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    other = httpx.options(url, headers={"Origin": "https://evil.example", **wants})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_a_trusted_peer_is_given_a_key_for_the_openai_api_alone(
    make_server: MakeServer, tiny_model: Path, tmp_path: Path
):
    server = make_server(api_key="k", trust_network=(ip_network("127.0.0.0/8"),))
    model = {"name": "agent", "project": "p", "base_model": str(tiny_model)}
    asked = httpx.post(
        f"{server.control_url}/_prepare_backend_for_training", json={"model": model}, timeout=60
    )
    assert asked.status_code == 200, asked.text
    key = {"Authorization": f"Bearer {asked.json()[1]}"}
    assert asked.json()[1] != "k"
    # Another server with the same key, which trusts no network.
    untrusted = make_server(api_key="k", root=tmp_path / "other")
    for url in (untrusted.control_url, untrusted.inference_url):
        assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200
    for path in ("/v1/training/models", "/metrics", "/v1/rollouts/r", "/openapi.json"):
        refused = httpx.get(untrusted.control_url + path, headers=key)
        assert refused.status_code == 401, path


# ---- the root -----------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_root_is_closed_to_others_new_or_old(tmp_path: Path, make_state: Any):
    state: State = make_state(root=tmp_path / "deep" / "root")
    root = state.settings.root
    assert mode(root) == 0o700
    state.store.close()
    root.chmod(0o755)
    State.open(Settings(root=root)).store.close()
    assert mode(root) == 0o700


def test_a_directory_of_other_things_is_left_as_it_is(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "thesis.txt").write_text("mine")
    shared.chmod(0o755)
    with pytest.raises(ServerError, match="chmod 700"):
        make_root(shared)
    assert mode(shared) == 0o755
    shared.chmod(0o700)
    make_root(shared)
    with pytest.raises(ServerError, match="is a file"):
        make_root(shared / "thesis.txt")


def test_a_directory_that_holds_only_runs_becomes_the_root(tmp_path: Path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    tmp_path.chmod(0o755)
    make_root(tmp_path)
    assert mode(tmp_path) == 0o700
