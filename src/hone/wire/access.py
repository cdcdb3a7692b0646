"""Checks of a request's headers: key, host name, origin, proxies.

In:   the headers of a request; the names and clients that the server accepts
Out:  nothing, or a Forbidden that says what to do

A web page can make a browser call this machine under a host name that was changed to point here
(DNS rebinding). So Host and Origin are checked, with and without a key.
"""

import base64
import hmac
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from hone.errors import Forbidden
from hone.files.redact import add_secrets

Network = IPv4Network | IPv6Network

LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
"""Names of this machine; ART's client connects to 0.0.0.0 by default."""
INFERENCE = "hone-inference-"
"""Prefix of an inference key."""
NO_KEY = "default"
"""What clients send if no key is set: OpenAI's clients must send one."""
FORWARDED_FOR = "x-forwarded-for"
"""The only header from which a client's address is taken, from proxies that the operator named."""
_ADDRESS_OF_CLIENT = frozenset(
    {
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
        "x-real-ip",
        "x-remote-addr",
        "x-remote-ip",
    }
)
"""Other headers in which proxies name the address of their client."""
_PROXIED = _ADDRESS_OF_CLIENT | {"forwarded", "via"}
"""Headers that proxies add, besides X-Forwarded-*."""
KEY_FORM = "expected at least one character, all of them printable ASCII without spaces"
"""What `is_key` requires."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a server answers to."""

    host: str
    """The address it listens on."""
    has_key: bool
    allowed: Collection[str] = ()
    """Further names; `.example.com` matches all names with that suffix, `*` every name."""

    def __contains__(self, host: str) -> bool:
        if host in LOCAL or host == self.host.lower():
            return True
        # Only a name can be rebound, an IP address cannot. Without a key the server listens on a
        # loopback address, and another address reaches it only through a proxy.
        if self.has_key and (ip(host) is not None or host in _own_names()):
            return True
        return self.allows(host)

    def allows(self, host: str) -> bool:
        """Whether the host is one of the additional names."""
        return any(
            allowed == "*"
            or host == allowed.lower()
            or (allowed.startswith(".") and host.endswith(allowed.lower()))
            for allowed in self.allowed
        )


def check_host(names: Names, headers: Mapping[str, str], otherwise: str) -> None:
    """Refuse a host name that is not the server's; `otherwise` says how to allow it."""
    host = hostname(headers.get("host", ""))
    if host not in names:
        raise Forbidden(
            f"Host is {host[:200]!r}, and this server does not answer to that name. Use localhost, "
            f"or start the server with {otherwise}.",
            code="host_not_allowed",
        )


def check_origin(headers: Mapping[str, str], allowed: Collection[str], otherwise: str = "") -> None:
    """Refuse a web page of another site; `otherwise` says how to allow it."""
    origin = headers.get("origin")
    if origin is None or not {origin, "*"}.isdisjoint(allowed):
        return
    # A page of this server or of the user's own machine. A host that is only allowed as a name of
    # this server, or by its address, may be any site.
    page = hostname(origin.partition("://")[2])
    if page not in LOCAL and page != hostname(headers.get("host", "")):
        raise Forbidden(
            f"Origin is {origin[:200]!r}, and web pages of that site may not call this server."
            f"{otherwise and ' '}{otherwise}",
            code="origin_not_allowed",
        )


def check_not_forwarded(headers: Mapping[str, str], key_option: str) -> None:
    """Refuse a forwarded request; for a server without a key, which trusts its own machine."""
    if name := forwarded(headers):
        raise Forbidden(
            f"the request was forwarded by a proxy (header {name!r}), and a server without a "
            f"key answers only clients on its own machine. Start it with {key_option}.",
            code="proxy_not_allowed",
        )


def forwarded(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a proxy forwarded the request."""
    return next((h for h in headers if h in _PROXIED or h.startswith("x-forwarded")), None)


def is_peer(
    address: str | None,
    client: str | None,
    headers: Mapping[str, str],
    *,
    claims: Sequence[str],
    networks: Sequence[Network],
    proxies: Sequence[Network],
) -> bool:
    """Whether a request comes from one of the networks, as far as its proxies can be believed.

    `address` is at the other end of the connection; `client` is what X-Forwarded-For makes of it if
    that is one of the proxies; `claims` are what `claimed_addresses` returns.

    A proxy is never a peer itself. It must name its client in X-Forwarded-For. If it writes another
    header only, X-Forwarded-For is what the client itself has sent; so both must agree.
    """
    if not is_in(address, proxies):
        return forwarded(headers) is None and is_in(address, networks)
    if FORWARDED_FOR not in headers or "forwarded" in headers:
        return False
    if is_in(client, proxies) or not is_in(client, networks):
        return False
    named = ip(client or "")
    return all(ip(one) == named or is_in(one, proxies) for one in claims)


def claimed_addresses(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """The addresses that proxies name in headers other than X-Forwarded-For and Forwarded."""
    return tuple(
        value.decode("latin-1").strip()
        for name, value in headers
        if name.decode("latin-1") in _ADDRESS_OF_CLIENT
    )


def is_in(address: str | None, networks: Sequence[Network]) -> bool:
    """Whether the text is an IP address in one of the networks."""
    parsed = ip(address or "")
    return parsed is not None and any(parsed in network for network in networks)


def is_key(text: str) -> bool:
    """Whether a client can send this text as a bearer token."""
    return bool(text) and all("!" <= letter <= "~" for letter in text)


def has_key(key: str | None, headers: Mapping[str, str]) -> bool:
    """Whether `Authorization: Bearer`, or the `x-api-key` of Anthropic's clients, has the key."""
    if not key:
        return False
    return any(hmac.compare_digest(one.encode(), key.encode()) for one in _keys(headers))


def key_problem(headers: Mapping[str, str]) -> str:
    """Why a request without the right key is refused: it has none, or a wrong one."""
    if any(key not in ("", NO_KEY) for key in _keys(headers)):
        return "the request's API key is wrong"
    return "the request has no API key"


def _keys(headers: Mapping[str, str]) -> tuple[str, str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")


def derive_inference_key(api_key: str) -> str:
    """The key that is valid for the inference APIs only; it does not reveal the API key."""
    digest = hmac.digest(api_key.encode(), b"hone: OpenAI API only", "sha256")
    key = INFERENCE + base64.urlsafe_b64encode(digest[:24]).decode()
    add_secrets((api_key, key))  # no text that this process writes may hold them
    return key


def hostname(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def ip(text: str) -> IPv4Address | IPv6Address | None:
    """The text as an IP address, IPv4 that IPv6 maps as IPv4; None if it is not one."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    """The machine's host name, long and short."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})
