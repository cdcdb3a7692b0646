"""Who may call: bearer keys, trusted networks, and nobody's browser by accident.

In:   settings; the address, path and headers of a request
Out:  None, or an Unauthorized that says what to send or which flag opens the door
Used: app.py, before anything else reads a request

On loopback no key is needed, and then two doors are shut that a web page could come through: a
foreign `Origin`, and a `Host` that is not this machine (a name that was made to point here).
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from ipaddress import ip_address

from hone.errors import Unauthorized
from hone.server.settings import Settings

OPEN = frozenset({"/health", "/healthcheck"})
"""Answered to anyone: without the key they say that the server lives, and nothing else."""
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
"""What this machine is called; ART's client dials 0.0.0.0 unless told otherwise."""


def check(
    settings: Settings, path: str, headers: Mapping[str, str], client: str | None, *, control: bool
) -> None:
    """Raise Unauthorized unless this request may pass."""
    if path in OPEN:
        return
    if settings.api_key is None:
        _check_local(headers)
    elif not (_has_key(settings.api_key, headers) or (control and _trusted(settings, client))):
        raise Unauthorized(_refusal(settings, control=control))


def settle_key(settings: Settings) -> tuple[Settings, str | None]:
    """Settings with the key they need; the key itself if it was made just now, to be shown once."""
    if settings.api_key is not None or settings.loopback:
        return settings, None
    file = settings.root / "api_key"
    if file.exists():
        return settings.model_copy(update={"api_key": file.read_text().strip()}), None
    key = "hone-" + secrets.token_urlsafe(24)
    settings.root.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(key + "\n")
    return settings.model_copy(update={"api_key": key}), key


def _check_local(headers: Mapping[str, str]) -> None:
    host = _hostname(headers.get("host", ""))
    if host not in _LOCAL:
        raise Unauthorized(
            f"Host is {host!r}, and without a key this server answers only to 127.0.0.1 and "
            "localhost. Ask for it by that name, or start it with --api-key."
        )
    origin = headers.get("origin")
    if origin is not None and _hostname(origin.partition("://")[2]) not in _LOCAL:
        raise Unauthorized(
            f"a page from {origin!r} may not call a server that has no key. Start it with --api-key."
        )


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _has_key(key: str, headers: Mapping[str, str]) -> bool:
    sent = headers.get("authorization", "")
    scheme, _, token = sent.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())


def _trusted(settings: Settings, client: str | None) -> bool:
    try:
        address = ip_address(client or "")
    except ValueError:
        return False
    return any(address in network for network in settings.trust_network)


def _refusal(settings: Settings, *, control: bool) -> str:
    said = "send the server's key: Authorization: Bearer KEY"
    if not control:
        return f"{said} (OPENAI_API_KEY for OpenAI clients)."
    return (
        f"{said}. ART's clients send none to the control plane: start the server with "
        "--trust-network CIDR for their network, or bring its port to them with "
        f"`ssh -L {settings.port}:127.0.0.1:{settings.port} HOST`."
    )
