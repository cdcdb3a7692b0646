"""Checks of a request that need nothing but its headers: key, host name, origin, proxies.

In:   the headers of a request; what the server is called and whom it answers
Out:  nothing, or an Unauthorized that says what to do

A web page can make a browser call this machine under a name that was made to point here (DNS
rebinding); so Host and Origin are checked, with and without a key.
"""

import base64
import hmac
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from hone.errors import Unauthorized

LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
"""Names of this machine; ART's client connects to 0.0.0.0 by default."""
INFERENCE = "hone-inference-"
"""How an inference key begins."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a server answers to."""

    host: str
    """The address it listens on."""
    has_key: bool
    allowed: Collection[str] = ()
    """Further names; `.example.com` stands for all names below it, `*` for every name."""

    def __contains__(self, host: str) -> bool:
        if host in LOCAL or host == self.host.lower():
            return True
        # Only a name can be made to point here; an address is what it is. Without a key the server
        # listens on a loopback address, and no other one leads to it but through somebody's proxy.
        if self.has_key and (ip(host) is not None or host in _own_names()):
            return True
        return self.allows(host)

    def allows(self, host: str) -> bool:
        """Whether the host is one of the further names."""
        return any(
            allowed == "*"
            or host == allowed.lower()
            or (allowed.startswith(".") and host.endswith(allowed.lower()))
            for allowed in self.allowed
        )


def check_host(names: Names, headers: Mapping[str, str], otherwise: str) -> None:
    """Refuse a name that is not the server's; `otherwise` says how it can be allowed."""
    host = hostname(headers.get("host", ""))
    if host not in names:
        raise Unauthorized(
            f"Host is {host[:200]!r}, and this server does not answer to that name. Use localhost, "
            f"or start the server with {otherwise}."
        )


def check_origin(headers: Mapping[str, str], allowed: Collection[str], otherwise: str = "") -> None:
    """Refuse a page of another site; `otherwise` says how it can be allowed."""
    origin = headers.get("origin")
    if origin is None or not {origin, "*"}.isdisjoint(allowed):
        return
    # A page of this very server, or of the user's own machine; a host that is allowed as a name of
    # this server, or an address, may be anybody's site.
    page = hostname(origin.partition("://")[2])
    if page not in LOCAL and page != hostname(headers.get("host", "")):
        raise Unauthorized(
            f"a web page from {origin[:200]!r} may not call this server.{otherwise and ' '}{otherwise}"
        )


def check_not_forwarded(headers: Mapping[str, str], key_option: str) -> None:
    """Refuse a request of a proxy: for a server without a key, which trusts its own machine."""
    if name := forwarded(headers):
        raise Unauthorized(
            f"the request was forwarded by a proxy (header {name!r}), and a server without a "
            f"key answers to clients of its own machine only. Start it with {key_option}."
        )


def forwarded(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a proxy forwarded the request."""
    known = ("forwarded", "via", "x-real-ip")
    return next((h for h in headers if h in known or h.startswith("x-forwarded-")), None)


def has_key(key: str | None, headers: Mapping[str, str]) -> bool:
    """Whether `Authorization: Bearer` or `x-api-key` of Anthropic's clients holds the key."""
    if not key:
        return False
    scheme, _, token = headers.get("authorization", "").partition(" ")
    sent = (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return any(hmac.compare_digest(one.encode(), key.encode()) for one in sent)


def derive_inference_key(api_key: str) -> str:
    """The key that opens the inference APIs alone; it does not reveal the API key."""
    digest = hmac.digest(api_key.encode(), b"hone: OpenAI API only", "sha256")
    return INFERENCE + base64.urlsafe_b64encode(digest[:24]).decode()


def hostname(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def ip(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a text is; None if it is none."""
    try:
        return ip_address(text)
    except ValueError:
        return None


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    """The machine's host name, long and short."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})
