"""Which user's process is at the other end of a connection: tables of sockets, and real sockets."""

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hone.wire import peers
from hone.wire.peers import (
    Address,
    Connection,
    find_user,
    is_own,
    own_users,
    user_by_netlink,
    user_by_process,
    user_by_table,
    user_in_table,
    user_name,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of sockets")
as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0,
    reason="gives a socket to another user: run it as root on Linux, e.g. in a container",
)
OTHER = 12345
"""A uid that needs no account."""

# ---- tables of sockets --------------------------------------------------------------------------

TITLE = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# A server of uid 0 on 127.0.0.1:34567 (0x8707). The lines have the form of Linux 6.18.
TCP = TITLE + (
    b"   0: 0100007F:8707 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 350817 1 000000008b1f37bb 100 0 0 10 0\n"
    # uid 1000 at port 40001 (0x9C41), and the server's end of it
    b"   1: 0100007F:9C41 0100007F:8707 01 00000000:00000000 00:00000000 00000000  1000        0 350818 1 00000000688061d4 20 0 0 10 -1\n"
    b"   2: 0100007F:8707 0100007F:9C41 01 00000000:00000000 00:00000000 00000000     0        0 350819 1 00000000127fedb1 20 4 30 10 -1\n"
    # closed by its process at 40002: FIN_WAIT2, uid 0, inode 0; and the same while data is unsent
    b"   3: 0100007F:9C42 0100007F:8707 05 00000000:00000000 03:00001756 00000000     0        0 0 3 00000000a2ee3f20\n"
    b"   4: 0100007F:9C43 0100007F:8707 01 00000000:00000000 03:00001756 00000000     0        0 0 3 00000000a2ee3f21\n"
    # half-closed at 40004; TIME_WAIT at 40005; connecting at 40006
    b"   5: 0100007F:9C44 0100007F:8707 05 00000000:00000000 00:00000000 00000000  1000        0 350820 1 00000000688061d5 20 0 0 10 -1\n"
    b"   6: 0100007F:9C45 0100007F:8707 06 00000000:00000000 03:00001756 00000000     0        0 0 3 00000000a2ee3f22\n"
    b"   7: 0100007F:9C46 0100007F:8707 02 00000001:00000000 01:00000064 00000000  1000        0 350821 2 00000000688061d6 400 0 0 1 7\n"
    # the same port to another server
    b"   8: 0100007F:9C47 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 350822 1 00000000688061d7 20 0 0 10 -1\n"
    b"   9: 0100007F:9C48 0100007F:8707 01 00000000:00000000 00:00000000 00000000     0        0 350823 1 00000000688061d8 20 0 0 10 -1"
)
LOOPBACK6 = b"00000000000000000000000001000000"
MAPPED = b"0000000000000000FFFF00000100007F"
TCP6 = TITLE + (
    b"   0: %b:9C51 %b:8707 01 00000000:00000000 00:00000000 00000000  1001        0 350901 1 00000000688061e1 20 0 0 10 -1\n"
    % (LOOPBACK6, LOOPBACK6)
    + b"   1: %b:9C52 %b:8707 01 00000000:00000000 00:00000000 00000000  1002        0 350902 1 00000000688061e2 20 0 0 10 -1\n"
    % (MAPPED, MAPPED)
)
BIG_ENDIAN = TITLE + (
    b"   1: 7F000001:9C41 7F000001:8707 01 00000000:00000000 00:00000000 00000000  1000        0 350818 1 00000000688061d4 20 0 0 10 -1\n"
)
SERVER = 34567


@pytest.mark.parametrize(
    ("port", "user"),
    [
        (40001, 1000),
        (SERVER, None),
        (40002, None),
        (40003, None),
        (40004, None),
        (40005, None),
        (40006, None),
        (40007, None),
        (40008, 0),
        (40009, None),
    ],
    ids=[
        "open",
        "listening",
        "closed",
        "closed, uid 0",
        "half-closed",
        "time-wait",
        "connecting",
        "to another server",
        "root, last line",
        "not there",
    ],
)
def test_only_an_open_socket_has_a_user(port: int, user: int | None):
    client, server = ("127.0.0.1", port), ("127.0.0.1", SERVER)
    assert user_in_table(TCP, client, server, "little") == user
    if port == 40001:  # the other way round it is the server's own end
        assert user_in_table(TCP, server, client, "little") == 0


def test_addresses_of_ipv6_and_ipv4_mapped_ones_are_found_in_either_form():
    server = ("::1", SERVER)
    assert user_in_table(TCP6, ("::1", 40017), server, "little") == 1001
    for at in ("127.0.0.1", "::ffff:127.0.0.1", "::ffff:7f00:1"):
        assert user_in_table(TCP6, (at, 40018), (at, SERVER), "little") == 1002
        assert user_in_table(TCP, (at, 40001), (at, SERVER), "little") == 1000
    assert user_in_table(TCP6, ("::1", 40018), server, "little") is None
    assert user_in_table(TCP6, ("127.0.0.1", 40017), ("127.0.0.1", SERVER), "little") is None


def test_the_machines_byte_order_counts():
    client, server = ("127.0.0.1", 40001), ("127.0.0.1", SERVER)
    assert user_in_table(BIG_ENDIAN, client, server, "big") == 1000
    assert user_in_table(BIG_ENDIAN, client, server, "little") is None
    assert user_in_table(TCP, client, server, "big") is None


def test_a_machine_may_lack_a_table(tmp_path: Path):
    client, server = ("127.0.0.1", 40018), ("127.0.0.1", SERVER)
    assert user_by_table(client, server, tmp_path) is None
    (tmp_path / "tcp6").write_bytes(TCP6)
    expected = 1002 if sys.byteorder == "little" else None
    assert user_by_table(client, server, tmp_path) == expected


# ---- real sockets -------------------------------------------------------------------------------


@contextmanager
def connected(kind: str = "v4") -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection on this machine: the client's, and the accepted one."""
    listens, connects, address = {
        "v4": (socket.AF_INET, socket.AF_INET, "127.0.0.1"),
        "v4 from a v6 socket": (socket.AF_INET, socket.AF_INET6, "::ffff:127.0.0.1"),
        "v6": (socket.AF_INET6, socket.AF_INET6, "::1"),
        "v4 to a v6 server": (socket.AF_INET6, socket.AF_INET, "127.0.0.1"),
        "any address": (socket.AF_INET, socket.AF_INET, "0.0.0.0"),
    }[kind]
    with socket.socket(listens) as listener, socket.socket(connects) as client:
        if listens == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("127.0.0.1" if listens == socket.AF_INET else "::", 0))
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
        listener.listen()
        client.connect((address, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


KINDS = ["v4", "v4 from a v6 socket", "v6", "v4 to a v6 server", "any address"]


def ends(accepted: socket.socket) -> tuple[Address, Address]:
    connection = Connection(accepted)
    assert connection.client and connection.server
    return connection.client, connection.server


def has_netlink() -> bool:
    with connected() as (_, accepted):
        return by_netlink(*ends(accepted)) is not None


def by_netlink(client: Address, server: Address) -> int | None:
    try:
        return user_by_netlink(client, server)
    except LookupError:
        return None


SOURCES: list[Callable[[Address, Address], int | None]] = [user_by_process]
if sys.platform == "linux":
    SOURCES += [user_by_table, *([by_netlink] if has_netlink() else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_finds_the_user_of_a_real_connection(
    kind: str, source: Callable[[Address, Address], int | None]
):
    with connected(kind) as (client, accepted):
        at = ends(accepted)
        assert at[0][0] == ("::1" if kind == "v6" else "127.0.0.1")
        assert source(*at) == os.geteuid()
        assert source((at[0][0], 1), at[1]) is None
        client.close()
        assert source(*at) is None


@pytest.mark.parametrize("source", SOURCES)
def test_a_half_closed_socket_has_no_user(source: Callable[[Address, Address], int | None]):
    with connected() as (client, accepted):
        at = ends(accepted)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert accepted.recv(4096) and accepted.recv(4096) == b""
        assert source(*at) is None


async def test_the_processes_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch):
    with connected() as (_, accepted):
        at = ends(accepted)
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        assert user_by_process(*at) is None
    # A process that ends or may not be looked into meanwhile is not there.
    monkeypatch.undo()

    def denied(*_: object) -> None:
        raise psutil.AccessDenied(1)

    one = SimpleNamespace(uids=denied)
    monkeypatch.setattr(psutil, "process_iter", lambda: [one])
    assert user_by_process(*at) is None


async def test_outside_linux_the_own_processes_decide(monkeypatch: pytest.MonkeyPatch):
    with connected() as (client, accepted):
        at = ends(accepted)
        monkeypatch.setattr(sys, "platform", "darwin")
        assert await find_user(*at) == os.geteuid()
        client.close()
        assert await find_user(*at) is None


@linux
async def test_without_netlink_the_table_answers(monkeypatch: pytest.MonkeyPatch):
    with connected() as (_, accepted):
        at = ends(accepted)
        monkeypatch.setattr(peers, "_NETLINK_SOCK_DIAG", 31)  # a protocol that no kernel has
        with pytest.raises(LookupError):
            user_by_netlink(*at)
        assert await find_user(*at) == os.geteuid()


@linux
async def test_a_user_outside_the_user_namespace_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with connected() as (_, accepted):
        assert await Connection(accepted).user() == os.geteuid()
        overflow = tmp_path / "overflowuid"
        overflow.write_text(f"{os.geteuid()}\n")
        monkeypatch.setattr(peers, "OVERFLOW_UID", overflow)
        assert await Connection(accepted).user() is None


async def test_a_connection_is_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    lookups: list[tuple[Address, Address]] = []

    async def unknown(client: Address, server: Address) -> None:
        lookups.append((client, server))

    monkeypatch.setattr(peers, "find_user", unknown)
    with connected() as (_, accepted):
        connection = Connection(accepted)
        assert [await connection.user() for _ in range(3)] == [None] * 3
        assert lookups == [ends(accepted)]


async def test_after_a_reset_the_answer_is_of_another_connection(monkeypatch: pytest.MonkeyPatch):
    """The client's port is free again: a process of our own may have it when we look."""

    async def own(client: Address, server: Address) -> int:
        return os.geteuid()

    with connected() as (client, accepted):
        connection = Connection(accepted)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert accepted.recv(4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # sends a reset
        monkeypatch.setattr(peers, "find_user", own)
        assert await connection.user() is None
        assert await Connection(accepted).user() is None and Connection(accepted).address is None


@as_root
async def test_the_user_is_that_of_the_socket_not_of_its_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = 0
        for owner in (OTHER, 0, OTHER + 1):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.fchown(client.fileno(), owner, -1)
                client.bind(("127.0.0.1", port))
                client.connect(listener.getsockname())
                port = client.getsockname()[1]
                accepted, _ = listener.accept()
                with accepted:
                    assert user_by_table(*ends(accepted)) == owner
                    assert await Connection(accepted).user() == owner


@as_root
async def test_a_closed_socket_of_another_user_is_not_roots():
    with connected() as (client, accepted):
        os.fchown(client.fileno(), OTHER, -1)
        at = ends(accepted)
        assert await find_user(*at) == OTHER
        client.sendall(b"x" * 10_000)
        client.close()
        assert await find_user(*at) is None and user_by_table(*at) is None


@pytest.mark.parametrize(
    ("user", "server_user", "own"),
    [
        (1000, 1000, True),
        (0, 1000, True),
        (0, 0, True),
        (1001, 1000, False),
        (1000, 0, False),
        (None, 1000, False),
        (None, 0, False),
    ],
)
def test_own_are_the_same_user_and_root(
    user: int | None, server_user: int, own: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: server_user)
    assert is_own(user) is own


def test_messages_name_root_where_it_can_be_recognized(monkeypatch: pytest.MonkeyPatch):
    for platform, user, text in (
        ("linux", 4_000_000_001, "processes of uid 4000000001 and root"),
        ("darwin", 4_000_000_001, "processes of uid 4000000001"),
        ("linux", 0, "processes of root"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert own_users() == text


def test_an_account_without_a_name_has_its_number():
    assert user_name(0) == "root"
    assert user_name(4_000_000_001) == "uid 4000000001"
