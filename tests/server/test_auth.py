"""Who may call: keys, trusted networks, and what a web page on the same machine may not do."""

import re
import socket
import stat
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hone.errors import ConfigError, Forbidden, Unauthorized
from hone.server.auth import check, check_advertised, ensure_key, inference_key
from hone.server.settings import Settings

LOCAL = {"host": "127.0.0.1:7623"}


def passes(
    headers: dict[str, str], *, client: str = "127.0.0.1", control: bool = True, **settings: Any
) -> bool:
    try:
        check(Settings(**settings), "/v1/models", headers, client, control=control)
    except (Forbidden, Unauthorized):
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7623", "localhost", "LOCALHOST:1", "[::1]:7623", "0.0.0.0:7999"]
)
def test_without_a_key_this_machine_may_call_with_any_key(host: str):
    assert passes({"host": host})
    assert passes({"host": host, "authorization": "Bearer default"})


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7:7623", ""])
def test_without_a_key_a_name_made_to_point_here_is_refused(host: str):
    assert not passes({"host": host})


def test_without_a_key_a_page_from_elsewhere_is_refused():
    assert not passes({**LOCAL, "origin": "http://evil.example"})
    assert not passes({**LOCAL, "origin": "null"})
    assert passes({**LOCAL, "origin": "http://localhost:3000"})


def test_with_a_key_only_that_key_passes():
    assert passes({"host": "10.0.0.7", "authorization": "Bearer k"}, api_key="k")
    for wrong in ("Bearer K", "Bearer k ", "Basic k", "k", "Bearer ", ""):
        assert not passes({"host": "127.0.0.1", "authorization": wrong}, api_key="k"), wrong


def test_a_trusted_network_reaches_the_control_plane_only():
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.1.0.0/16"),)}
    assert passes({"host": "10.1.0.1"}, client="10.1.2.3", **trusted)
    assert not passes({"host": "10.1.0.1"}, client="10.2.2.3", **trusted)
    assert not passes({"host": "10.1.0.1"}, client="10.1.2.3", control=False, **trusted)
    assert not passes({"host": "10.1.0.1"}, client="not an address", **trusted)


def test_the_refusal_names_the_flag_and_the_tunnel():
    with pytest.raises(
        Unauthorized, match=r"HONE_API_KEY.*--trust-network CIDR.*ssh -L 7623:127.0.0.1:7623"
    ):
        check(Settings(api_key="k"), "/register", {"host": "10.0.0.7"}, "10.0.0.1", control=True)


KEY = {"authorization": "Bearer k"}


def test_with_a_key_names_that_are_not_ours_are_refused_too():
    ours = {"host": "hone.example:7623", **KEY}
    assert not passes(ours, api_key="k")
    for allowed in ("hone.example", "HONE.example", ".example", "*"):
        assert passes(ours, api_key="k", allowed_hosts=(allowed,)), allowed
    for other in ("example", ".hone.example", "one.example"):
        assert not passes(ours, api_key="k", allowed_hosts=(other,)), other
    for host in ("10.0.0.7:7623", "[fe80::1]:7623", "localhost", socket.gethostname()):
        assert passes({"host": host, **KEY}, api_key="k"), host
    assert passes({"host": "hone.example", **KEY}, api_key="k", host="hone.example")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "listens on 127.0.0.1 only, which agents elsewhere cannot reach. Add --host 0.0.0.0"),
        ({"api_key": "k"}, "behind a proxy or a tunnel, add --allowed-hosts gpu1"),
        ({"host": "0.0.0.0", "api_key": "k"}, "does not answer to the name 'gpu1'. Add --allowed-"),
        ({"host": "0.0.0.0", "api_key": "k", "allowed_hosts": ("gpu1",)}, None),
        ({"allowed_hosts": ("gpu1",)}, None),
        ({"host": "gpu1", "api_key": "k"}, None),
    ],
)
def test_an_advertised_address_that_cannot_work_is_refused(
    options: dict[str, Any], message: str | None
):
    settings = Settings(advertise_url="http://gpu1:8000/v1/", **options)
    assert settings.advertise_url == "http://gpu1:8000"
    if message is None:
        check_advertised(settings)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_advertised(settings)


def test_a_page_from_elsewhere_is_refused_with_a_key_too():
    page = {**LOCAL, **KEY, "origin": "https://chat.example"}
    assert not passes(page, api_key="k")
    assert not passes(page, api_key="k", allowed_origins=("http://chat.example",))
    assert passes(page, api_key="k", allowed_origins=("https://chat.example",))
    own = {**KEY, "host": "10.0.0.7:7623", "origin": "http://10.0.0.7:3000"}
    assert passes(own, api_key="k")
    assert not passes({**page, "origin": "null"}, api_key="k")


def test_a_page_from_an_address_or_an_allowed_host_is_still_from_elsewhere():
    """The browser of a trusted peer would send what that page wants, and no key is asked of it."""
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.0.0.0/8"),)}
    for origin in ("http://192.0.2.1", "http://10.0.0.8:7623", "http://[2001:db8::1]"):
        page = {"host": "10.0.0.7:7623", "origin": origin}
        assert not passes(page, client="10.0.0.9", **trusted), origin
    names: dict[str, Any] = {**trusted, "allowed_hosts": ("*",)}
    page = {"host": "hone.example", "origin": "https://evil.example"}
    assert not passes(page, client="10.0.0.9", **names)
    assert passes({**page, "origin": "https://hone.example"}, client="10.0.0.9", **names)


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "x-forwarded-proto", "forwarded", "via", "x-real-ip"]
)
def test_a_forwarded_request_never_reaches_a_server_without_a_key(header: str):
    forwarded = {**LOCAL, header: "10.0.0.9"}
    assert not passes(forwarded)
    assert not passes(forwarded, forwarded_allow_ips=(ip_network("127.0.0.1"),))
    assert passes({**forwarded, **KEY}, api_key="k")
    with pytest.raises(Forbidden, match="--api-key"):
        check(Settings(), "/health", forwarded, "127.0.0.1", control=True)


def test_a_proxy_inside_a_trusted_network_does_not_lend_its_trust():
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.1.0.0/16"),)}
    forwarded = {**LOCAL, "x-forwarded-for": "10.1.2.3"}
    assert not passes(forwarded, client="10.1.0.5", **trusted)


def test_what_each_caller_may_do():
    settings = Settings(api_key="k", trust_network=(ip_network("10.1.0.0/16"),))
    sent = {**LOCAL, "authorization": f"Bearer {inference_key(settings)}"}
    chat = "/v1/chat/completions"
    assert check(settings, chat, {**LOCAL, **KEY}, "10.9.0.1", control=True) == "operator"
    assert check(settings, chat, {**LOCAL, **KEY}, "10.9.0.1", control=False) == "inference"
    assert check(settings, "/register", LOCAL, "10.1.0.1", control=True) == "peer"
    assert check(Settings(), "/register", LOCAL, "127.0.0.1", control=True) == "operator"
    assert check(Settings(), chat, LOCAL, "127.0.0.1", control=False) == "inference"
    for path in (chat, "/v1/models", "/rollout/r:1/v1/completions"):
        assert check(settings, path, sent, "10.9.0.1", control=True) == "inference"
    for path in ("/register", "/v1/training/models", "/metrics", "/v1/rollouts/r", "/v1/models2"):
        with pytest.raises(Unauthorized):
            check(settings, path, sent, "10.9.0.1", control=True)


def test_the_inference_key_is_not_the_key_and_stays_the_same():
    one, other = Settings(api_key="k"), Settings(api_key="l")
    assert inference_key(one) == inference_key(one) != inference_key(other)
    assert len(inference_key(one) or "") > 40 and inference_key(Settings()) is None


def test_health_is_answered_to_anyone():
    check(Settings(api_key="k"), "/health", {"host": "10.0.0.7"}, None, control=True)


def test_a_key_is_made_once_for_an_open_address_and_kept_from_others(tmp_path: Path):
    settings = Settings(root=tmp_path, host="0.0.0.0")
    settled, fresh = ensure_key(settings)
    assert fresh is not None and settled.api_key == fresh and len(fresh) > 30
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600
    again, shown = ensure_key(settings)
    assert shown is None and again.api_key == fresh


@pytest.mark.parametrize("text", ["", " \n", "two words\n", "sch\u00fcssel"])
def test_a_file_that_holds_no_key_is_replaced(tmp_path: Path, text: str):
    (tmp_path / "api_key").write_text(text, encoding="utf-8")
    settled, fresh = ensure_key(Settings(root=tmp_path, host="0.0.0.0"))
    assert fresh and settled.api_key == fresh
    assert (tmp_path / "api_key").read_text().strip() == fresh
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600


@pytest.mark.parametrize("key", ["", " ", "two words", "sch\u00fcssel", "k\n"])
def test_no_key_is_empty_or_one_that_nobody_can_send(key: str):
    with pytest.raises(ValidationError, match="at least one character"):
        Settings(api_key=key)


def test_loopback_and_a_given_key_need_none(tmp_path: Path):
    for settings in (Settings(root=tmp_path), Settings(root=tmp_path, host="0.0.0.0", api_key="k")):
        assert ensure_key(settings) == (settings, None)
    assert not (tmp_path / "api_key").exists()
