"""The user whose process is at the other end of a connection on this machine.

In:   an accepted TCP connection
Out:  Connection: the address at its other end, and the uid of the process there; None if that
      cannot be told

A server without a key gives its own user's rights to whoever it answers, so an unknown user is
another user. Three sources, the first that works:

Linux, sock_diag: the kernel's answer for one socket, in 20 us. Linux, /proc/net/tcp: the same data
as text, where netlink is not available; it lists all sockets of the machine, in milliseconds.
Elsewhere, psutil: the processes of this user, searched for the one that has the connection.

A socket that its process has closed has inode 0 and, in both Linux sources, uid 0. It is not
root's.
"""

import asyncio
import os
import pwd
import socket
import struct
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

Address = tuple[str, int]
"""An IP address and a port."""

CONNECTION = "hone.connection"
"""Key of the Connection in the `state` of an ASGI scope."""

_ESTABLISHED = 1  # TCP_ESTABLISHED in Linux's tcp_states.h
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_SOCKET = struct.Struct("=4s16s16s4s8s")  # inet_diag_sockid: ports, addresses, interface, cookie
_REPLY = struct.Struct("=BBBB48sIIIII")  # inet_diag_msg: state is the 2nd; uid, inode the last two
_TABLE_READS = 3
"""How often /proc/net/tcp is read: while sockets open and close, a reading can miss some."""
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


class Connection:
    """An accepted connection; its user is looked up once."""

    def __init__(self, accepted: socket.socket) -> None:
        """`accepted` may be asyncio's view of a socket."""
        self._accepted = accepted
        self._looked_up = False
        self._user: int | None = None
        try:
            self.client: Address | None = _address(accepted.getpeername())
            self.server: Address | None = _address(accepted.getsockname())
        except OSError:  # it is closed already
            self.client = self.server = None

    @property
    def address(self) -> str | None:
        """The IP address at the other end: the client's, or that of a proxy."""
        return self.client and self.client[0]

    async def user(self) -> int | None:
        """The uid of the process at the other end."""
        if not self._looked_up:
            self._user = await self._find_user()
            self._looked_up = True
        return self._user

    async def _find_user(self) -> int | None:
        if self.client is None or self.server is None or not self._is_open():
            return None
        user = await find_user(self.client, self.server)
        # As long as this end is open, no other process can get the client's port for a connection
        # to here. After a reset it can, and the user found may be that of the next connection.
        return user if self._is_open() else None

    def _is_open(self) -> bool:
        try:
            self._accepted.getpeername()
        except OSError:
            return False
        return True


async def find_user(client: Address, server: Address) -> int | None:
    """The uid of the process whose socket at `client` is connected to `server`."""
    if sys.platform != "linux":
        return await asyncio.to_thread(user_by_process, client, server)
    try:
        user = user_by_netlink(client, server)
    except LookupError:
        user = await asyncio.to_thread(user_by_table, client, server)
    # How a user namespace shows every user outside it.
    return None if user == _overflow_uid() else user


def is_own(user: int | None) -> bool:
    """Whether a process of this user may act as the user of this process."""
    return user is not None and user in (os.geteuid(), 0)


def own_users() -> str:
    """Who may use a server without a key, for messages."""
    own = os.geteuid()
    others = "" if own == 0 or sys.platform != "linux" else " and root"
    return f"processes of {user_name(own)}{others}"


def user_name(uid: int) -> str:
    """The name of an account for messages, or its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def user_by_netlink(client: Address, server: Address) -> int | None:
    """The uid by Linux's sock_diag; None if the socket is not open.

    Raises LookupError if the kernel knows no such socket, or does not answer such questions.
    """
    if sys.platform != "linux":
        raise LookupError("sock_diag is Linux's")
    one, other = ip_address(client[0]), ip_address(server[0])
    family = socket.AF_INET if one.version == 4 else socket.AF_INET6
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + _SOCKET.pack(
        struct.pack("!HH", client[1], server[1]), one.packed, other.packed, bytes(4), b"\xff" * 8
    )
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.setblocking(False)  # the kernel answers before `send` returns
            netlink.send(header + request)
            reply = netlink.recv(8192)
    except OSError as error:  # not in this kernel or sandbox, or not permitted
        raise LookupError(str(error)) from None
    if len(reply) < _HEADER.size + _REPLY.size or (
        _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY
    ):
        raise LookupError(f"no socket at {client}")
    _, state, *_, uid, inode = _REPLY.unpack_from(reply, _HEADER.size)
    # Without such a connection, the kernel returns the socket that listens there.
    return uid if state == _ESTABLISHED and inode else None


def user_by_table(
    client: Address, server: Address, directory: Path = Path("/proc/net")
) -> int | None:
    """The uid by Linux's list of TCP sockets; None if it has no open socket there."""
    for _ in range(_TABLE_READS):
        for name in ("tcp", "tcp6"):
            try:
                table = (directory / name).read_bytes()
            except OSError:  # no IPv6, or no /proc
                continue
            user = user_in_table(table, client, server)
            if user is not None:
                return user
    return None


def user_in_table(
    table: bytes, client: Address, server: Address, byteorder: str = sys.byteorder
) -> int | None:
    """The uid in the line of /proc/net/tcp or tcp6 that has this open connection."""
    for local, remote in zip(_texts(client, byteorder), _texts(server, byteorder), strict=False):
        start = table.find(f": {local} {remote} {_ESTABLISHED:02X} ".encode())
        if start < 0:
            continue
        end = table.find(b"\n", start)
        fields = table[start : end if end >= 0 else None].split()
        # ":", local, remote, state, queues, timer, retransmits, uid, timeout, inode
        if int(fields[9]) != 0:
            return int(fields[7])
    return None


def user_by_process(client: Address, server: Address) -> int | None:
    """This user's uid if one of this user's processes has the connection."""
    import psutil  # imported here: Linux does not need it

    own, ends = os.geteuid(), (_plain(client), _plain(server))
    for process in reversed(list(psutil.process_iter())):  # agents are among the newest
        try:
            if process.uids().effective != own:
                continue
            connections = process.net_connections("tcp")
        except (psutil.Error, OSError):  # it has ended, or may not be looked into
            continue
        for one in connections:
            if one.status != psutil.CONN_ESTABLISHED or not one.raddr:
                continue
            if (_address(one.laddr), _address(one.raddr)) == ends:
                return own
    return None


def _address(name: object) -> Address | None:
    """The address of a TCP socket, an IPv4 address that IPv6 maps as IPv4; None for others."""
    if not isinstance(name, tuple):
        return None
    return _plain((str(name[0]), int(name[1])))


def _plain(address: Address) -> Address:
    parsed = ip_address(address[0].partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed), address[1]


def _texts(address: Address, byteorder: str) -> Iterator[str]:
    """How /proc/net/tcp and tcp6 write an address: words of 32 bits in the machine's byte order.

    An IPv4 address has two forms: a socket for IPv6 can be connected to it.
    """
    packed = ip_address(_plain(address)[0]).packed
    forms = [packed] if len(packed) == 16 else [packed, bytes(10) + b"\xff\xff" + packed]
    order = "little" if byteorder == "little" else "big"
    for form in forms:
        words = [int.from_bytes(form[at : at + 4], order) for at in range(0, len(form), 4)]
        yield "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _overflow_uid() -> int:
    try:
        return int(OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return 65534
