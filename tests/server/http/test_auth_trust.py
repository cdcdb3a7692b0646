"""Which clients, proxies and peers a server trusts: every request over a real socket."""

import socket
import stat
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server

from hone.errors import ServerError
from hone.inference.base import Engine
from hone.server.http.auth import inference_key
from hone.server.settings import Settings
from hone.server.state import State
from hone.store.database import make_root


def raw_status(url: str, headers: str, path: str = "/v1/models") -> int:
    """The status of a request with exactly these header lines."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def test_an_empty_bearer_token_opens_nothing(make_server: MakeServer):
    server = make_server(api_key="k")
    for url in (server.control_url, server.inference_url):
        for sent in ("", "Authorization: Bearer\r\n", "Authorization: Bearer \r\n"):
            assert raw_status(url, f"Host: 127.0.0.1\r\n{sent}") == 401
        assert raw_status(url, "Host: 127.0.0.1\r\nAuthorization: Bearer k\r\n") == 200


def test_a_401_says_whether_the_key_is_missing_or_wrong(prose: Prose, make_server: MakeServer):
    server = make_server(api_key="hone-right")
    inference = inference_key(server.state.settings)
    missing, wrong = "the request has no API key; ", "the request's API key is wrong; "
    other = (
        "the request's API key is the inference key, which is valid for the inference APIs only; "
    )
    cases: list[tuple[Any, str]] = [
        ({}, missing),
        ({"Authorization": "Bearer"}, missing),
        ({"Authorization": "Basic hone-right"}, missing),
        ({"Authorization": "Bearer default"}, missing),  # a client for which no key is set
        ({"Authorization": "Bearer hone-righ"}, wrong),
        ({"Authorization": "Bearer hone-right-2"}, wrong),
        ({"Authorization": "Bearer sch\u00fcssel".encode("latin-1")}, wrong),
        ({"x-api-key": "hone-left"}, wrong),
        ({"Authorization": f"Bearer {inference}"}, other),
    ]
    for headers, why in cases:
        for url in (server.control_url, server.inference_url):
            answer = httpx.get(f"{url}/v1/training/models", headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == 401 and error["message"].startswith(why), (headers, error)
            prose(error["message"])
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert "hone-" not in answer.text and "default" not in answer.text, answer.text


def test_the_client_address_of_an_unlisted_proxy_is_ignored(make_server: MakeServer):
    server = make_server(api_key="k", trust_network=(ip_network("10.0.0.0/8"),))
    headers = "Host: 127.0.0.1\r\nX-Forwarded-For: 10.0.0.9\r\n"
    assert raw_status(server.control_url, headers, "/v1/training/models") == 401


def test_the_client_address_of_a_listed_proxy_is_used(make_server: MakeServer):
    here = (ip_network("127.0.0.0/8"),)
    trusted = (ip_network("10.0.0.0/8"),)
    server = make_server(api_key="k", trust_network=trusted, forwarded_allow_ips=here)
    headers = "Host: 127.0.0.1\r\nX-Forwarded-For: {}\r\n"
    path = "/v1/training/models"
    assert raw_status(server.control_url, headers.format("10.0.0.9"), path) == 200
    assert raw_status(server.control_url, headers.format("192.0.2.1"), path) == 401


def test_a_proxy_that_names_its_client_in_another_header_is_refused(make_server: MakeServer):
    """Even if it is in a trusted network itself, and its client claims to be in one."""
    server = make_server(
        api_key="k",
        trust_network=(ip_network("127.0.0.0/8"), ip_network("10.0.0.0/8")),
        forwarded_allow_ips=(ip_network("127.0.0.1/32"),),
    )
    path, client = "/v1/training/models", "X-Forwarded-For: 10.0.0.9\r\n"
    table = {
        "": 401,
        "X-Real-IP: 192.0.2.1\r\n": 401,
        "X-Real-IP: 10.0.0.9\r\n": 401,
        "x-real-ip: 127.0.0.1\r\n": 401,
        "Forwarded: for=192.0.2.1\r\n": 401,
        "FORWARDED: for=10.0.0.9;proto=http\r\n": 401,
        "Via: 1.1 proxy\r\n": 401,
        "X-Forwarded-Proto: https\r\n": 401,
        "X-Forwarded-For: \r\n": 401,
        "X-Forwarded-For: 127.0.0.1\r\n": 401,
        client: 200,
        client + "Via: 1.1 proxy\r\n": 200,
        client + "X-Real-IP: 10.0.0.9\r\n": 200,
        client + "X-Real-IP: 192.0.2.1\r\n": 401,
        client + "X-Real-IP: 10.0.0.9\r\nX-Real-IP: 192.0.2.1\r\n": 401,
        client + "CF-Connecting-IP: 192.0.2.1\r\n": 401,
        client + "Forwarded: for=192.0.2.1\r\n": 401,
        client + "X-Forwarded-For: 192.0.2.1\r\n": 401,
    }
    statuses = {
        headers: raw_status(server.control_url, f"Host: 127.0.0.1\r\n{headers}", path)
        for headers in table
    }
    assert statuses == table


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_without_a_key_a_reverse_proxy_is_refused(make_server: MakeServer, path: str):
    server = make_server()
    for url in (server.control_url, server.inference_url):
        assert raw_status(url, "Host: 127.0.0.1\r\n", path) == 200
        for header in ("X-Forwarded-For: 127.0.0.1", "Via: 1.1 proxy", "Forwarded: for=x"):
            assert raw_status(url, f"Host: 127.0.0.1\r\n{header}\r\n", path) == 403


@pytest.mark.parametrize("key", [None, "k"])
def test_host_and_origin_are_checked_with_and_without_a_key(
    prose: Prose, make_server: MakeServer, key: str | None
):
    url = make_server(api_key=key).control_url
    sent = {"Authorization": "Bearer k"}
    assert httpx.get(f"{url}/v1/models", headers=sent | {"Host": "localhost"}).status_code == 200
    for path in ("/v1/models", "/health"):
        for header, value, code, option in (
            ("Host", "rebound.example", "host_not_allowed", "--allowed-hosts"),
            ("Origin", "https://page.example", "origin_not_allowed", "--allowed-origins"),
        ):
            answer = httpx.get(url + path, headers=sent | {header: value})
            error = answer.json()["error"]
            assert answer.status_code == 403, answer.text
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
            assert option in answer.text
            prose(error["message"])


def test_an_allowed_page_may_send_requests_and_read_responses(make_server: MakeServer):
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
    prepare = f"{server.control_url}/_prepare_backend_for_training"
    refused = httpx.post(prepare, json={"model": model})
    assert refused.status_code == 422 and "is a path" in refused.text
    # The operator registers it; peers then use it under any spelling of its base.
    spec = {**model, "token_ids_as_text": True}
    url, operator = f"{server.control_url}/v1/training/models", {"Authorization": "Bearer k"}
    assert httpx.post(url, json=spec, headers=operator).status_code == 201
    request = httpx.post(prepare, json={"model": model}, timeout=PATIENCE_S)
    assert request.status_code == 200, request.text
    key = {"Authorization": f"Bearer {request.json()[1]}"}
    assert request.json()[1] != "k"
    # Another server with the same key, which trusts no network.
    untrusted = make_server(api_key="k", root=tmp_path / "other")
    for url in (untrusted.control_url, untrusted.inference_url):
        assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200
    for path in ("/v1/training/models", "/metrics", "/v1/rollouts/r", "/openapi.json"):
        refused = httpx.get(untrusted.control_url + path, headers=key)
        assert refused.status_code == 401, path


# ---- base models --------------------------------------------------------------------------------


def chat_status(url: str, model: str, key: str | None = None) -> int:
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=sent, timeout=PATIENCE_S)
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == "model_not_found", answer.text
    return answer.status_code


@pytest.fixture
def loads() -> list[str]:
    return []


@pytest.fixture
def counted(
    tmp_path: Path, tokenizer: Any, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    """`counted(**settings)`: a server that notes in `loads` which base models it loads."""
    monkeypatch.chdir(tmp_path)
    started: list[Server] = []

    def open_engine(name: str) -> Engine:
        loads.append(name)
        return ScriptedEngine(("ok",), tokenizer=tokenizer)

    def start(**settings: Any) -> Server:
        root = tmp_path / f"hone{len(started)}"
        state = State(Settings(root=root, device="cpu", **settings), open_engine=open_engine)
        started.append(Server(state, None).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


def test_a_base_model_is_loaded_once_for_all_spellings_of_its_name(
    counted: Callable[..., Server], loads: list[str], tiny_model: Path, tmp_path: Path
):
    url = counted().control_url
    link = tmp_path / "link"
    link.symlink_to(tiny_model)
    place = str(tiny_model)
    spellings = [place, f"/.{place}", f"//{place}", f"{place}/", f"{place}/.", str(link), "./link"]
    spellings += ["link", f"{tmp_path}/../{tmp_path.name}/link", f"{place}@0", f"{place}@latest"]
    assert [chat_status(url, name) for name in spellings] == [200] * len(spellings)
    spec = {"name": "agent", "base_model": f"{place}/../{tiny_model.name}"}
    made = httpx.post(f"{url}/v1/training/models", json=spec)
    assert made.status_code == 201 and made.json()["base_model"] == place
    again = httpx.post(f"{url}/v1/training/models", json={**spec, "base_model": "./link"})
    assert again.status_code == 200
    assert chat_status(url, "agent") == 200
    assert loads == [place]


def test_an_inference_client_never_names_a_path(
    counted: Callable[..., Server], loads: list[str], tiny_model: Path, tmp_path: Path
):
    (tmp_path / "local").symlink_to(tiny_model)
    names = [str(tiny_model), f"/.{tiny_model}", "./local", "local", "~", "/etc", "no/such"]
    for server in (counted(), counted(allow_base_models=("*",))):
        assert [chat_status(server.inference_url, name) for name in names] == [404] * len(names)
    keyed = counted(api_key="k")
    inference = inference_key(keyed.state.settings)
    for url in (keyed.inference_url, keyed.control_url):
        assert [chat_status(url, name, inference) for name in names] == [404] * len(names)
    assert chat_status(keyed.inference_url, str(tiny_model), "k") == 404
    assert loads == []
    assert chat_status(keyed.control_url, str(tiny_model), "k") == 200
    # Loaded by the operator it is not theirs either, and they are not told that it is there.
    sent = {"Authorization": f"Bearer {inference}"}
    for url in (keyed.inference_url, keyed.control_url):
        assert chat_status(url, str(tiny_model), inference) == 404
        assert httpx.get(f"{url}/v1/models", headers=sent).json()["data"] == []
        assert str(tiny_model) not in httpx.get(f"{url}/v1/models/other", headers=sent).text
    own = httpx.get(f"{keyed.control_url}/v1/models", headers={"Authorization": "Bearer k"})
    assert [entry["id"] for entry in own.json()["data"]] == [str(tiny_model)]


def test_base_models_for_inference_clients_are_the_operators_choice(
    counted: Callable[..., Server],
    loads: list[str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--tiny" / "snapshots" / "0"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny_model)
    (hub / "models--org--tiny" / "refs").mkdir()
    (hub / "models--org--tiny" / "refs" / "main").write_text("0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    assert chat_status(counted().inference_url, "org/tiny") == 200
    keyed = counted(api_key="k")
    assert chat_status(keyed.inference_url, "org/tiny", "k") == 404
    assert chat_status(keyed.control_url, "org/tiny", "k") == 200
    spec = {"name": "agent", "base_model": str(tiny_model)}
    headers = {"Authorization": "Bearer k"}
    made = httpx.post(f"{keyed.control_url}/v1/training/models", json=spec, headers=headers)
    assert made.status_code == 201
    assert chat_status(keyed.inference_url, "agent", "k") == 200
    assert chat_status(keyed.inference_url, f"{tiny_model}/", "k") == 200
    some = counted(api_key="k", allow_base_models=("org/tiny", f"{tiny_model}/"))
    for name in ("org/tiny", str(tiny_model)):
        assert chat_status(some.inference_url, name, "k") == 200
    assert chat_status(some.inference_url, "org/other", "k") == 404
    listed = httpx.get(f"{some.inference_url}/v1/models", headers=headers).json()["data"]
    assert [entry["id"] for entry in listed] == ["org/tiny", str(tiny_model)]


# ---- the root -----------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_or_existing_root_is_private(tmp_path: Path, make_state: Any):
    state: State = make_state(root=tmp_path / "deep" / "root")
    root = state.settings.root
    assert mode(root) == 0o700
    state.store.close()
    root.chmod(0o755)
    State(Settings(root=root)).store.close()
    assert mode(root) == 0o700


def test_the_mode_of_a_directory_with_other_files_is_not_changed(prose: Prose, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "thesis.txt").write_text("mine")
    shared.chmod(0o755)
    with pytest.raises(ServerError) as caught:
        make_root(shared)
    prose(caught)
    assert mode(shared) == 0o755
    shared.chmod(0o700)
    make_root(shared)
    with pytest.raises(ServerError) as caught:
        make_root(shared / "thesis.txt")
    prose(caught)


@pytest.mark.parametrize("inside", ["runs/first", "projects/demo/models/agent"])
def test_a_directory_that_holds_only_what_hone_wrote_becomes_the_root(tmp_path: Path, inside: str):
    """Runs of `hone finetune`, or the state and trajectories of the SDK's models."""
    (tmp_path / inside).mkdir(parents=True)
    tmp_path.chmod(0o755)
    make_root(tmp_path)
    assert mode(tmp_path) == 0o700


def test_a_projects_directory_beside_other_files_is_no_root(prose: Prose, tmp_path: Path):
    for name in ("projects", "photos"):  # a home directory, for example
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(ServerError) as caught:
        make_root(tmp_path)
    prose(caught)
    assert mode(tmp_path) == 0o755


def test_a_project_may_have_the_name_of_a_file_of_the_root(server: Server, tiny_model: Path):
    """Projects have a directory of their own, so that no name is one of the server's files."""
    root = server.state.settings.root
    before = {path.name: path.is_dir() for path in root.iterdir()}
    for project in {"engines", "cache", "runs", "projects", *before} - {".bodies"}:
        model = {"name": "agent", "project": project, "base_model": str(tiny_model)}
        for path in ("/v1/training/models", "/register"):
            made = httpx.post(server.control_url + path, json=model)
            assert made.status_code in (200, 201), made.text
        assert (root / "projects" / project / "models" / "agent" / "model.json").is_file()
    after = {path.name: path.is_dir() for path in root.iterdir()}
    assert after == before | {"projects": True}
