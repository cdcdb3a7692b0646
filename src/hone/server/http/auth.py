"""Access control: keys, users of this machine, trusted networks, host names, origins, proxies.

In:   settings; the caller, path and headers of a request
Out:  the request's Access; an Unauthorized that says which key to send; a Forbidden that says which
      option to set

Host and Origin are checked with and without a key (wire/access.py). A server without a key accepts
the processes of its own user and of root (wire/peers.py). A proxy on this machine can be such a
process, so a request that a proxy forwarded is refused.
"""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from hone.errors import ConfigError, Unauthorized
from hone.server.access import Access
from hone.server.settings import Settings
from hone.wire.access import (
    LOCAL,
    Names,
    check_host,
    check_not_forwarded,
    check_origin,
    derive_inference_key,
    has_key,
    is_key,
    is_peer,
    key_problem,
)
from hone.wire.peers import is_own, own_users, user_name

OPEN = frozenset({"/", "/docs", "/health", "/healthcheck"})
"""Paths that need no key."""
_OPENAI = re.compile(
    r"/(version|tokenize|detokenize)?|(/rollout/[^/]+)?/v1/"
    r"(chat/completions|completions|responses(/.*)?|messages(/count_tokens)?|models(/.*)?)"
)
"""Paths for which the inference key is valid."""
_INFERENCE_ONLY = (
    "the request's API key is the inference key, which is valid for the inference APIs only"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, as far as the connection tells."""

    address: str | None
    """IP address at the other end of the connection."""
    client: str | None
    """IP address of the client: `address`, or what a proxy in `forwarded_allow_ips` says."""
    user: int | None = None
    """uid of the process at the other end; None if it cannot be told, or is not needed."""
    claims: tuple[str, ...] = ()
    """Addresses of the client in other headers of proxies (`claimed_addresses`)."""


def check(
    settings: Settings, path: str, headers: Mapping[str, str], caller: Caller, *, control: bool
) -> Access:
    """The access of this request; raises Unauthorized or Forbidden unless it may pass."""
    check_host(_names(settings), headers, "--allowed-hosts and that name")
    how = "Start the server with --allowed-origins and that origin if they should."
    check_origin(headers, settings.allowed_origins, how)
    if settings.api_key is None:
        return _check_user(settings, path, headers, caller, control=control)
    if has_key(settings.api_key, headers):
        return "operator" if control else "inference"
    may_infer = has_key(inference_key(settings), headers)
    if may_infer and _OPENAI.fullmatch(path):
        return "inference"
    if control and _trusted(settings, headers, caller):
        return "peer"
    if path in OPEN:
        return "anyone"
    problem = _INFERENCE_ONLY if may_infer else key_problem(headers)
    raise Unauthorized(f"{problem}; {_what_to_send(settings, control=control)}")


def _check_user(
    settings: Settings, path: str, headers: Mapping[str, str], caller: Caller, *, control: bool
) -> Access:
    """The access of a request to a server without a key; any key that it sends means nothing."""
    check_not_forwarded(headers, "--api-key")
    if is_own(caller.user):
        return "operator" if control else "inference"
    if _trusted(settings, headers, caller):
        return "peer" if control else "inference"
    if path in OPEN:
        return "anyone"
    if caller.user is None:
        whose = (
            "it cannot tell whose process sent this request (the connection is closed, does not "
            "begin on this machine, or is of a user outside the server's user namespace)"
        )
    else:
        whose = f"this request is from a process of {user_name(caller.user)}"
    network = "::1/128" if ":" in settings.host else "127.0.0.1/32"
    raise Unauthorized(
        f"the server has no key, so it accepts only {own_users()}, and {whose}. Start the server "
        "with --api-key KEY (or $HONE_API_KEY) and send that key, or with "
        f"--trust-network {network} for all users of the machine."
    )


def ensure_key(settings: Settings) -> tuple[Settings, str | None]:
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
    names = _names(settings)
    if host in LOCAL or names.allows(host):
        return
    where = f"--advertise-url {settings.advertise_url}"
    if settings.loopback:
        raise ConfigError(
            f"{where}: the server listens on {settings.host} only, which agents elsewhere cannot "
            f"reach. Add --host 0.0.0.0; behind a proxy or a tunnel, add --allowed-hosts {host}."
        )
    if host not in names:
        raise ConfigError(
            f"{where}: the server does not answer to the name {host!r}. Add --allowed-hosts {host}."
        )


def check_networks(settings: Settings) -> None:
    """Raise ConfigError for a trusted network that consists of proxies."""
    proxies = settings.forwarded_allow_ips
    for network in settings.trust_network:
        for proxy in proxies:
            if network.version == proxy.version and network.subnet_of(proxy):  # pyright: ignore[reportArgumentType] - of one version
                raise ConfigError(
                    f"--trust-network {network}: --forwarded-allow-ips {proxy} names all of it as "
                    "proxies, and a proxy is not trusted as a client. Name the addresses of the "
                    "proxies alone, or leave one of the two options out."
                )


def inference_key(settings: Settings) -> str | None:
    """The key that is valid for the inference APIs only; None for a server without a key."""
    return None if settings.api_key is None else derive_inference_key(settings.api_key)


def _names(settings: Settings) -> Names:
    return Names(settings.host, settings.api_key is not None, settings.allowed_hosts)


def _trusted(settings: Settings, headers: Mapping[str, str], caller: Caller) -> bool:
    """Whether the client's own address is in a trusted network."""
    return is_peer(
        caller.address,
        caller.client,
        headers,
        claims=caller.claims,
        networks=settings.trust_network,
        proxies=settings.forwarded_allow_ips,
    )


def _what_to_send(settings: Settings, *, control: bool) -> str:
    message = "send the server's key: Authorization: Bearer KEY"
    if not control:
        return f"{message} (OPENAI_API_KEY for OpenAI clients)."
    return (
        f"{message} ($HONE_API_KEY for hone's commands and its SDK, or `api_key` under `backend` in a "
        "YAML). ART's clients send none to the control plane: start the server with "
        "--trust-network CIDR for their network, or bring its port to them with "
        f"`ssh -L {settings.port}:127.0.0.1:{settings.port} HOST`."
    )
