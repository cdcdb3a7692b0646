"""Access control: keys, trusted networks, host names, origins, proxies.

In:   settings; the address, path and headers of a request
Out:  the request's Access, or an Unauthorized that says what to send or which option to set

Host and Origin are checked with and without a key: a web page can make a browser call this machine
under a name that was made to point here (DNS rebinding). Without a key, the address a connection
comes from is all that keeps strangers out, so a request that a proxy forwarded is refused.
"""

import hmac
import os
import re
import secrets
import socket
from collections.abc import Mapping
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from hone.errors import ConfigError, Unauthorized, Unprocessable
from hone.models.find import canonical
from hone.server.settings import Settings, is_key
from hone.types import FieldError, ModelSpec
from hone.wire.keys import derive_inference_key

Access = Literal["operator", "peer", "inference", "anyone"]
"""An operator may do everything; a peer (in a trusted network, without the key) may train, but not
name a path; an inference client may use the OpenAI API alone; anyone may ask whether it works."""

access: ContextVar[Access] = ContextVar("access", default="operator")
"""Access of the current request; outside any request, the operator's."""

OPEN = frozenset({"/health", "/healthcheck"})
"""Paths that need no key."""
_OPENAI = re.compile(
    r"/(version|tokenize|detokenize)?|(/rollout/[^/]+)?/v1/"
    r"(chat/completions|completions|responses(/.*)?|messages(/count_tokens)?|models(/.*)?)"
)
"""Paths that the inference key opens."""
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0"})
"""Names of this machine; ART's client connects to 0.0.0.0 by default."""


def check(
    settings: Settings, path: str, headers: Mapping[str, str], client: str | None, *, control: bool
) -> Access:
    """The access of this request; raises Unauthorized unless it may pass."""
    _check_host(settings, headers)
    _check_origin(settings, headers)
    if settings.api_key is None:
        if name := _forwarded(headers):
            raise Unauthorized(
                f"the request was forwarded by a proxy (header {name!r}), and a server without a "
                "key answers to clients of its own machine only. Start it with --api-key."
            )
        return "operator" if control else "inference"
    if _has_key(settings.api_key, headers):
        return "operator" if control else "inference"
    if _has_key(inference_key(settings), headers) and _OPENAI.fullmatch(path):
        return "inference"
    if control and _trusted(settings, headers, client):
        return "peer"
    if path in OPEN:
        return "anyone"
    raise Unauthorized(_refusal(settings, control=control))


def may_load(settings: Settings, base_model: str) -> bool:
    """Whether the current request may load a base model, given by its canonical name."""
    if access.get() == "operator":
        return True
    if access.get() == "peer":
        return not is_path(base_model)
    allowed = settings.allow_base_models
    if allowed is None:
        allowed = () if settings.api_key else ("*",)
    if "*" in allowed and not is_path(base_model):
        return True
    return base_model in {canonical(name) for name in allowed}


def check_path(spec: ModelSpec) -> None:
    """Refuse a base model that is a path, unless the request came with the server's key."""
    base_model = canonical(spec.base_model)
    if access.get() == "peer" and is_path(base_model):
        message = (
            f"{base_model!r} is a path, and a path is taken only from a client with the "
            "server's key. Name a model by its name, or send the key."
        )
        raise Unprocessable([FieldError(("base_model",), message)])


def is_path(base_model: str) -> bool:
    """Whether a canonical name is a path of this machine."""
    return Path(base_model).is_absolute()


def settle_key(settings: Settings) -> tuple[Settings, str | None]:
    """Settings with the key they need; the key itself if it is new, to be shown once."""
    if settings.api_key is not None or settings.loopback:
        return settings, None
    file = settings.root / "api_key"
    key = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if is_key(key):
        return settings.model_copy(update={"api_key": key}), None
    key = "hone-" + secrets.token_urlsafe(24)
    partial = file.with_name(f".api_key.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(key + "\n")
    partial.replace(file)
    return settings.model_copy(update={"api_key": key}), key


def check_advertised(settings: Settings) -> None:
    """Raise ConfigError if agents could not use the advertised address."""
    if settings.advertise_url is None:
        return
    host = urlsplit(settings.advertise_url).hostname or ""
    if host in _LOCAL or _is_allowed(settings, host):
        return
    where = f"--advertise-url {settings.advertise_url}"
    if settings.loopback:
        raise ConfigError(
            f"{where}: the server listens on {settings.host} only, which agents elsewhere cannot "
            f"reach. Add --host 0.0.0.0; behind a proxy or a tunnel, add --allowed-hosts {host}."
        )
    if not _is_own_name(settings, host):
        raise ConfigError(
            f"{where}: the server does not answer to the name {host!r}. Add --allowed-hosts {host}."
        )


def inference_key(settings: Settings) -> str | None:
    """The key that opens the inference APIs alone; None for a server without a key."""
    return None if settings.api_key is None else derive_inference_key(settings.api_key)


def _has_key(key: str | None, headers: Mapping[str, str]) -> bool:
    """Whether `Authorization: Bearer` or `x-api-key` of Anthropic's clients holds the key."""
    if not key:
        return False
    scheme, _, token = headers.get("authorization", "").partition(" ")
    sent = (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return any(hmac.compare_digest(one.encode(), key.encode()) for one in sent)


def _check_host(settings: Settings, headers: Mapping[str, str]) -> None:
    host = _hostname(headers.get("host", ""))
    if not _is_own_name(settings, host):
        raise Unauthorized(
            f"Host is {host[:200]!r}, and this server does not answer to that name. Use localhost, "
            "or start the server with --allowed-hosts and that name."
        )


def _check_origin(settings: Settings, headers: Mapping[str, str]) -> None:
    origin = headers.get("origin")
    if origin is None or not {origin, "*"}.isdisjoint(settings.allowed_origins):
        return
    # A page of this very server, or of the user's own machine; a host that is allowed as a name of
    # this server, or an address, may be anybody's site.
    page = _hostname(origin.partition("://")[2])
    if page not in _LOCAL and page != _hostname(headers.get("host", "")):
        raise Unauthorized(
            f"a web page from {origin[:200]!r} may not call this server. Start the server with "
            "--allowed-origins and that origin if it should."
        )


def _forwarded(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a proxy forwarded the request."""
    known = ("forwarded", "via", "x-real-ip")
    return next((h for h in headers if h in known or h.startswith("x-forwarded-")), None)


def _is_own_name(settings: Settings, host: str) -> bool:
    """Whether a host name means this server."""
    if host in _LOCAL or host == settings.host.lower():
        return True
    # Only a name can be made to point here; an address is what it is. Without a key the server
    # listens on a loopback address, and no other one leads to it but through somebody's proxy.
    if settings.api_key is not None and (_address(host) is not None or host in _own_names()):
        return True
    return _is_allowed(settings, host)


def _is_allowed(settings: Settings, host: str) -> bool:
    return any(
        allowed == "*"
        or host == allowed.lower()
        or (allowed.startswith(".") and host.endswith(allowed.lower()))
        for allowed in settings.allowed_hosts
    )


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    """The machine's host name, long and short."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _trusted(settings: Settings, headers: Mapping[str, str], client: str | None) -> bool:
    """Whether the client's own address is in a trusted network."""
    if _forwarded(headers) and not settings.forwarded_allow_ips:
        return False  # the address is the proxy's
    address = _address(client or "")
    return address is not None and any(address in network for network in settings.trust_network)


def _refusal(settings: Settings, *, control: bool) -> str:
    message = "send the server's key: Authorization: Bearer KEY"
    if not control:
        return f"{message} (OPENAI_API_KEY for OpenAI clients)."
    return (
        f"{message} ($HONE_API_KEY for hone's commands and its SDK, or `api_key` under `backend` in a "
        "YAML). ART's clients send none to the control plane: start the server with "
        "--trust-network CIDR for their network, or bring its port to them with "
        f"`ssh -L {settings.port}:127.0.0.1:{settings.port} HOST`."
    )
