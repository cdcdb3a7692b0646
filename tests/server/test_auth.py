"""Who may call: keys, trusted networks, and what a web page on the same machine may not do."""

import stat
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from hone.errors import Unauthorized
from hone.server.auth import check, settle_key
from hone.server.settings import Settings

LOCAL = {"host": "127.0.0.1:7623"}


def passes(
    headers: dict[str, str], *, client: str = "127.0.0.1", control: bool = True, **settings: Any
) -> bool:
    try:
        check(Settings(**settings), "/v1/models", headers, client, control=control)
    except Unauthorized:
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
    assert passes({"host": "x", "authorization": "Bearer k"}, api_key="k")
    for wrong in ("Bearer K", "Bearer k ", "Basic k", "k", "Bearer ", ""):
        assert not passes({"host": "127.0.0.1", "authorization": wrong}, api_key="k"), wrong


def test_a_trusted_network_reaches_the_control_plane_only():
    trusted: dict[str, Any] = {"api_key": "k", "trust_network": (ip_network("10.1.0.0/16"),)}
    assert passes({"host": "x"}, client="10.1.2.3", **trusted)
    assert not passes({"host": "x"}, client="10.2.2.3", **trusted)
    assert not passes({"host": "x"}, client="10.1.2.3", control=False, **trusted)
    assert not passes({"host": "x"}, client="not an address", **trusted)


def test_the_refusal_names_the_flag_and_the_tunnel():
    with pytest.raises(Unauthorized, match=r"--trust-network CIDR.*ssh -L 7623:127.0.0.1:7623"):
        check(Settings(api_key="k"), "/register", {"host": "x"}, "10.0.0.1", control=True)


def test_health_is_answered_to_anyone():
    check(Settings(api_key="k"), "/health", {"host": "x"}, None, control=True)


def test_a_key_is_made_once_for_an_open_address_and_kept_from_others(tmp_path: Path):
    settings = Settings(root=tmp_path, host="0.0.0.0")
    settled, fresh = settle_key(settings)
    assert fresh is not None and settled.api_key == fresh and len(fresh) > 30
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600
    again, shown = settle_key(settings)
    assert shown is None and again.api_key == fresh


def test_loopback_and_a_given_key_need_none(tmp_path: Path):
    for settings in (Settings(root=tmp_path), Settings(root=tmp_path, host="0.0.0.0", api_key="k")):
        assert settle_key(settings) == (settings, None)
    assert not (tmp_path / "api_key").exists()
