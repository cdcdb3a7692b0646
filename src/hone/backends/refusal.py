"""An error response of a server -> the exception it stands for.

In:   a response that is not a success
Out:  the HoneError the server raised, by its name if this side knows it, else by its status
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx2

from hone import errors
from hone.errors import ConfigError, HoneError, ServerError, Unavailable
from hone.types import FieldError

_BY_STATUS: dict[int, type[HoneError]] = {
    400: ConfigError,
    401: errors.Unauthorized,
    403: errors.Unauthorized,
    404: errors.NotFound,
    409: errors.Conflict,
    413: ConfigError,
    429: Unavailable,
    501: errors.NotInThisVersion,
    503: Unavailable,
}


def refusal(response: httpx2.Response, log_place: str) -> HoneError:
    """What the server raised; a failure of its own also says where its log is."""
    url = response.request.url
    try:
        body = response.json()
        fields = body.get("detail")
        if isinstance(fields, list):
            return errors.Unprocessable([_field(item) for item in fields])
        message, kind = str(body["error"]["message"]), str(body.get("exception"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _by_status(response)(
            f"{response.request.method} {url} was answered {response.status_code} "
            f"{response.text[:200]!r}. Is it a hone server of this version?"
        )
    named = getattr(errors, kind, None)
    if not (isinstance(named, type) and issubclass(named, HoneError)):
        named = _by_status(response)
    if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        message += f"\nIts log: {log_place}"
    return named(message)


def retry_after_s(response: httpx2.Response) -> float:
    """How long the server asks to be left alone."""
    said = response.headers.get("retry-after", "")
    return min(float(said), 60.0) if said.isdigit() else 0.0


def _by_status(response: httpx2.Response) -> type[HoneError]:
    return _BY_STATUS.get(response.status_code, ServerError)


def _field(item: Mapping[str, Any]) -> FieldError:
    path = tuple(item.get("loc", ()))
    return FieldError(path[1:] if path[:1] == ("body",) else path, str(item.get("msg", "")))
