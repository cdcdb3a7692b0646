"""Who may call: keys, trusted networks, and what a web page on the same machine may not do."""

import os
import socket
import stat
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.prose import Prose

from hone.errors import ConfigError, Forbidden, Unauthorized
from hone.server.http.auth import (
    Caller,
    check,
    check_advertised,
    check_networks,
    ensure_key,
    inference_key,
)
from hone.server.settings import Settings

LOCAL = {"host": "127.0.0.1:7623"}


def caller(client: str | None, user: int | None = None) -> Caller:
    """A caller without a proxy; without `user`, one of whom only the address is known."""
    return Caller(client, client, user)


def passes(
    headers: dict[str, str],
    *,
    client: str = "127.0.0.1",
    user: int | None = os.geteuid(),
    control: bool = True,
    **settings: Any,
) -> bool:
    try:
        who = caller(client, user)
        check(Settings(**settings), "/v1/models", headers, who, control=control)
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
def test_without_a_key_a_rebound_host_name_is_refused(host: str):
    assert not passes({"host": host})


def test_without_a_key_a_page_of_another_site_is_refused():
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


def test_the_refusal_names_the_flag_and_the_tunnel(prose: Prose):
    with pytest.raises(Unauthorized) as caught:
        check(
            Settings(api_key="k"),
            "/register",
            {"host": "10.0.0.7"},
            caller("10.0.0.1"),
            control=True,
        )
    prose(caught)


OWN = caller("127.0.0.1", os.geteuid())
KEY = {"authorization": "Bearer k"}


def test_with_a_key_unknown_host_names_are_refused_too():
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
    prose: Prose, options: dict[str, Any], message: str | None
):
    settings = Settings(advertise_url="http://gpu1:8000/v1/", **options)
    assert settings.advertise_url == "http://gpu1:8000"
    if message is None:
        check_advertised(settings)
        return
    with pytest.raises(ConfigError) as caught:
        check_advertised(settings)
    prose(caught)


def test_with_a_key_a_page_of_another_site_is_refused_too():
    page = {**LOCAL, **KEY, "origin": "https://chat.example"}
    assert not passes(page, api_key="k")
    assert not passes(page, api_key="k", allowed_origins=("http://chat.example",))
    assert passes(page, api_key="k", allowed_origins=("https://chat.example",))
    own = {**KEY, "host": "10.0.0.7:7623", "origin": "http://10.0.0.7:3000"}
    assert passes(own, api_key="k")
    assert not passes({**page, "origin": "null"}, api_key="k")


def test_a_page_of_an_ip_address_or_an_allowed_host_is_another_site():
    """The browser of a trusted peer would send what that page wants, and no key is asked of it."""
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.0.0.0/8"),)}
    for origin in ("http://192.0.2.1", "http://10.0.0.8:7623", "http://[2001:db8::1]"):
        page = {"host": "10.0.0.7:7623", "origin": origin}
        assert not passes(page, client="10.0.0.9", **trusted), origin
    names: dict[str, Any] = {**trusted, "allowed_hosts": ("*",)}
    page = {"host": "hone.example", "origin": "https://evil.example"}
    assert not passes(page, client="10.0.0.9", **names)
    assert passes({**page, "origin": "https://hone.example"}, client="10.0.0.9", **names)


OTHER = os.geteuid() + 12345


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("user", [OTHER, None], ids=["another user", "unknown"])
@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"authorization": "Bearer default"},
        {"x-api-key": "default"},
        {"authorization": "Bearer "},
    ],
)
def test_without_a_key_other_users_of_the_machine_are_refused(
    sent: dict[str, str], user: int | None, control: bool
):
    assert not passes({**LOCAL, **sent}, user=user, control=control)
    assert passes({**LOCAL, **sent}, control=control)
    assert passes({**LOCAL, **KEY}, user=user, control=control, api_key="k")
    # With a key, the user does not matter.
    assert not passes({**LOCAL, **sent}, control=control, api_key="k")


def test_root_may_use_a_server_of_any_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [passes(LOCAL, user=user) for user in (1000, 0, 1001, None)] == [
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [passes(LOCAL, user=user) for user in (0, 1000, None)] == [True, False, False]


def test_the_refusal_of_another_user_says_who_is_accepted_and_how_to_change_that(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)

    def refusal(user: int | None, **settings: Any) -> str:
        with pytest.raises(Unauthorized) as refused:
            check(Settings(**settings), "/register", LOCAL, caller("127.0.0.1", user), control=True)
        return str(refused.value)

    other = refusal(4_000_000_002)
    assert "has no key, so it accepts only processes of uid 4000000001" in other
    assert "this request is from a process of uid 4000000002" in other
    assert "--api-key KEY (or $HONE_API_KEY)" in other and "--trust-network 127.0.0.1/32" in other
    assert "it cannot tell whose process sent this request" in refusal(None)
    assert "--trust-network ::1/128" in refusal(None, host="::1")


def test_a_trusted_loopback_network_makes_other_users_peers():
    trusted = Settings(trust_network=(ip_network("127.0.0.1/32"),))
    other = caller("127.0.0.1", OTHER)
    assert check(trusted, "/register", LOCAL, other, control=True) == "peer"
    assert check(trusted, "/register", LOCAL, OWN, control=True) == "operator"
    assert check(trusted, "/v1/models", LOCAL, other, control=False) == "inference"
    assert not passes({**LOCAL, "x-real-ip": "127.0.0.1"}, user=OTHER, **trusted.model_dump())
    assert not passes(LOCAL, client="127.0.0.2", user=OTHER, **trusted.model_dump())


@pytest.mark.parametrize("path", ["/health", "/healthcheck"])
def test_without_a_key_anyone_on_the_machine_may_check_the_health(path: str):
    for control in (True, False):
        who = caller("127.0.0.1", OTHER)
        assert check(Settings(), path, LOCAL, who, control=control) == "anyone"


PROXY_HEADERS = [
    "forwarded",
    "via",
    "x-forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-forwarded-client-cert",
    "x-real-ip",
    "cf-connecting-ip",
    "cf-connecting-ipv6",
    "fastly-client-ip",
    "fly-client-ip",
    "true-client-ip",
    "x-azure-clientip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-original-forwarded-for",
    "x-originating-ip",
    "x-remote-addr",
    "x-remote-ip",
]


@pytest.mark.parametrize("header", PROXY_HEADERS)
def test_a_forwarded_request_never_reaches_a_server_without_a_key(prose: Prose, header: str):
    forwarded = {**LOCAL, header: "10.0.0.9"}
    assert not passes(forwarded)
    assert not passes(forwarded, forwarded_allow_ips=(ip_network("127.0.0.1"),))
    assert passes({**forwarded, **KEY}, api_key="k")
    with pytest.raises(Forbidden) as caught:
        check(Settings(), "/health", forwarded, OWN, control=True)
    prose(caught)


def test_requests_through_a_proxy_in_a_trusted_network_are_not_trusted():
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.1.0.0/16"),)}
    forwarded = {**LOCAL, "x-forwarded-for": "10.1.2.3"}
    assert not passes(forwarded, client="10.1.0.5", **trusted)


PROXY = "10.1.0.5"
PROXIES: dict[str, Any] = {
    "api_key": "k",
    "trust_network": (ip_network("10.1.0.0/16"),),
    "forwarded_allow_ips": (ip_network(PROXY), ip_network("10.1.0.6")),
}


def by_proxy(
    headers: dict[str, str], *, client: str, address: str = PROXY, claims: tuple[str, ...] = ()
) -> bool:
    """Whether a request is let in as a peer's; `client`: what X-Forwarded-For gave."""
    who = Caller(address, client, claims=claims)
    try:
        headers = {"host": "10.1.0.1", **headers}
        return check(Settings(**PROXIES), "/register", headers, who, control=True) == "peer"
    except Unauthorized:
        return False


@pytest.mark.parametrize(
    ("headers", "client", "claims", "peer"),
    [
        ({"x-forwarded-for": "10.1.2.3"}, "10.1.2.3", (), True),
        ({"x-forwarded-for": "10.1.2.3", "via": "1.1 p"}, "10.1.2.3", (), True),
        ({"x-forwarded-for": "10.1.2.3", "x-forwarded-proto": "https"}, "10.1.2.3", (), True),
        ({"x-forwarded-for": "192.0.2.1"}, "192.0.2.1", (), False),
        # The proxy names its client elsewhere, or not at all.
        ({}, PROXY, (), False),
        ({"x-real-ip": "10.1.2.3"}, PROXY, ("10.1.2.3",), False),
        ({"x-real-ip": "192.0.2.1"}, PROXY, ("192.0.2.1",), False),
        ({"forwarded": "for=192.0.2.1"}, PROXY, (), False),
        ({"forwarded": "for=10.1.2.3"}, PROXY, (), False),
        ({"via": "1.1 p"}, PROXY, (), False),
        ({"x-forwarded-proto": "https"}, PROXY, (), False),
        ({"x-forwarded-for": ""}, PROXY, (), False),
        ({"x-forwarded-for": "unknown"}, "unknown", (), False),
        # X-Forwarded-For is what the client itself sent.
        (
            {"x-forwarded-for": "10.1.2.3", "x-real-ip": "192.0.2.1"},
            "10.1.2.3",
            ("192.0.2.1",),
            False,
        ),
        (
            {"x-forwarded-for": "10.1.2.3", "x-real-ip": "10.1.2.3"},
            "10.1.2.3",
            ("10.1.2.3", "192.0.2.1"),
            False,
        ),
        ({"x-forwarded-for": "10.1.2.3", "true-client-ip": "x"}, "10.1.2.3", ("x",), False),
        ({"x-forwarded-for": "10.1.2.3", "forwarded": "for=192.0.2.1"}, "10.1.2.3", (), False),
        # Both agree, as with nginx; behind a second proxy X-Real-IP is the first one.
        ({"x-forwarded-for": "10.1.2.3", "x-real-ip": "10.1.2.3"}, "10.1.2.3", ("10.1.2.3",), True),
        ({"x-forwarded-for": "10.1.2.3", "x-real-ip": "10.1.0.6"}, "10.1.2.3", ("10.1.0.6",), True),
        # A proxy is not a client.
        ({"x-forwarded-for": "10.1.0.6"}, "10.1.0.6", (), False),
    ],
)
def test_a_listed_proxy_must_name_its_client_in_x_forwarded_for(
    headers: dict[str, str], client: str, claims: tuple[str, ...], peer: bool
):
    assert by_proxy(headers, client=client, claims=claims) is peer
    # The same on an IPv6 socket, which uvicorn's list of proxies does not match.
    assert not by_proxy(headers, client=f"::ffff:{PROXY}", address=f"::ffff:{PROXY}", claims=claims)


def test_a_client_that_is_no_proxy_is_identified_by_its_own_address():
    assert by_proxy({}, client="10.1.2.3", address="10.1.2.3")
    assert by_proxy({}, client="::ffff:10.1.2.3", address="::ffff:10.1.2.3")
    for header in PROXY_HEADERS:  # a proxy that the operator has not listed
        assert not by_proxy({header: "10.1.2.3"}, client="10.1.2.3", address="10.1.2.3"), header


def test_a_trusted_network_of_proxies_is_refused_at_the_start(prose: Prose):
    loopback = (ip_network("127.0.0.1/32"),)
    with pytest.raises(ConfigError) as caught:
        check_networks(
            Settings(trust_network=loopback, forwarded_allow_ips=(ip_network("127.0.0.0/8"),))
        )
    prose(caught)
    check_networks(Settings(**PROXIES))
    check_networks(
        Settings(
            trust_network=loopback,
            forwarded_allow_ips=(ip_network("::1"), ip_network("10.0.0.0/8")),
        )
    )


def test_what_each_caller_may_do():
    settings = Settings(api_key="k", trust_network=(ip_network("10.1.0.0/16"),))
    sent = {**LOCAL, "authorization": f"Bearer {inference_key(settings)}"}
    chat = "/v1/chat/completions"
    assert check(settings, chat, {**LOCAL, **KEY}, caller("10.9.0.1"), control=True) == "operator"
    assert check(settings, chat, {**LOCAL, **KEY}, caller("10.9.0.1"), control=False) == "inference"
    assert check(settings, "/register", LOCAL, caller("10.1.0.1"), control=True) == "peer"
    assert check(Settings(), "/register", LOCAL, OWN, control=True) == "operator"
    assert check(Settings(), chat, LOCAL, OWN, control=False) == "inference"
    for path in (chat, "/v1/models", "/rollout/r:1/v1/completions"):
        assert check(settings, path, sent, caller("10.9.0.1"), control=True) == "inference"
    for path in ("/register", "/v1/training/models", "/metrics", "/v1/rollouts/r", "/v1/models2"):
        with pytest.raises(Unauthorized):
            check(settings, path, sent, caller("10.9.0.1"), control=True)


def test_the_inference_key_is_not_the_key_and_stays_the_same():
    one, other = Settings(api_key="k"), Settings(api_key="l")
    assert inference_key(one) == inference_key(one) != inference_key(other)
    assert len(inference_key(one) or "") > 40 and inference_key(Settings()) is None


def test_health_is_answered_to_anyone():
    check(Settings(api_key="k"), "/health", {"host": "10.0.0.7"}, caller(None), control=True)


def test_a_key_is_created_once_for_an_open_address_and_is_private(tmp_path: Path):
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
def test_a_key_must_be_non_empty_and_sendable(key: str):
    with pytest.raises(ValidationError, match="at least one character"):
        Settings(api_key=key)


def test_no_key_is_created_for_loopback_or_beside_a_configured_key(tmp_path: Path):
    for settings in (Settings(root=tmp_path), Settings(root=tmp_path, host="0.0.0.0", api_key="k")):
        assert ensure_key(settings) == (settings, None)
    assert not (tmp_path / "api_key").exists()
