"""Access control: keys, trusted networks, host names, origins, proxies.

In:   settings; the address, path and headers of a request
Out:  the request's Access; an Unauthorized that says which key to send; a Forbidden that says which
      option to set

Host and Origin are checked with and without a key (wire/access.py). Without a key, only the
address of the connection tells a local client from others, so a request that a proxy forwarded is
refused.
"""

import os
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from hone.errors import ConfigError, Unauthorized, Unprocessable
from hone.models.find import canonical
from hone.server.settings import Settings
from hone.types import FieldError, ModelSpec
from hone.wire.access import (
    LOCAL,
    Names,
    check_host,
    check_not_forwarded,
    check_origin,
    derive_inference_key,
    forwarded,
    has_key,
    ip,
    is_key,
    key_problem,
)

Access = Literal["operator", "peer", "inference", "anyone"]
"""An operator may do everything. A peer (in a trusted network, without the key) may train, but not
name a path. An inference client may use only the inference APIs. Anyone may check the health."""

access: ContextVar[Access] = ContextVar("access", default="operator")
"""Access of the current request; outside any request, the operator's."""

OPEN = frozenset({"/health", "/healthcheck"})
"""Paths that need no key."""
_OPENAI = re.compile(
    r"/(version|tokenize|detokenize)?|(/rollout/[^/]+)?/v1/"
    r"(chat/completions|completions|responses(/.*)?|messages(/count_tokens)?|models(/.*)?)"
)
"""Paths for which the inference key is valid."""
_INFERENCE_ONLY = (
    "the request's API key is the inference key, which is valid for the inference APIs only"
)


def check(
    settings: Settings, path: str, headers: Mapping[str, str], client: str | None, *, control: bool
) -> Access:
    """The access of this request; raises Unauthorized or Forbidden unless it may pass."""
    check_host(_names(settings), headers, "--allowed-hosts and that name")
    how = "Start the server with --allowed-origins and that origin if they should."
    check_origin(headers, settings.allowed_origins, how)
    if settings.api_key is None:
        check_not_forwarded(headers, "--api-key")
    if settings.api_key is None or has_key(settings.api_key, headers):
        return "operator" if control else "inference"
    may_infer = has_key(inference_key(settings), headers)
    if may_infer and _OPENAI.fullmatch(path):
        return "inference"
    if control and _trusted(settings, headers, client):
        return "peer"
    if path in OPEN:
        return "anyone"
    problem = _INFERENCE_ONLY if may_infer else key_problem(headers)
    raise Unauthorized(f"{problem}; {_what_to_send(settings, control=control)}")


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


def inference_key(settings: Settings) -> str | None:
    """The key that is valid for the inference APIs only; None for a server without a key."""
    return None if settings.api_key is None else derive_inference_key(settings.api_key)


def _names(settings: Settings) -> Names:
    return Names(settings.host, settings.api_key is not None, settings.allowed_hosts)


def _trusted(settings: Settings, headers: Mapping[str, str], client: str | None) -> bool:
    """Whether the client's own address is in a trusted network."""
    if forwarded(headers) and not settings.forwarded_allow_ips:
        return False  # the address is the proxy's
    address = ip(client or "")
    return address is not None and any(address in network for network in settings.trust_network)


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
