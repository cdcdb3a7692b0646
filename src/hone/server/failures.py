"""Turn an error into an HTTP status and a body in the shape of the OpenAI API.

In:   a HoneError, or a message and a status
Out:  {"error": {message, type, param, code}}; for hone's own clients also the name of the exception

`type` is one of OpenAI's: clients of that API decide by it and by the status whether to try again.
"""

from typing import Any

from hone import errors
from hone.errors import HoneError

_STATUS = (
    (errors.NotFound, 404),
    (errors.ModelNotFound, 404),
    (errors.Unauthorized, 401),
    (errors.Conflict, 409),
    (errors.Unprocessable, 422),
    (errors.NotInThisVersion, 501),
    (errors.ConfigError, 400),
    (errors.RolloutError, 400),
    (errors.SampleRefused, 422),
    (errors.Unavailable, 503),
    (HoneError, 500),
)


def status_of(error: HoneError) -> int:
    """The HTTP status of an error."""
    own = getattr(error, "status", None)
    return own or next(status for kind, status in _STATUS if isinstance(error, kind))


def openai_error(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 and status != 501 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_exceeded"
    if status == 401:
        code = code or "invalid_api_key"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: HoneError) -> dict[str, Any]:
    """A HoneError in OpenAI's shape; `exception` is its class, which hone's own clients raise again."""
    fields = error.fields if isinstance(error, errors.Unprocessable) else ()
    param = ".".join(map(str, fields[0].path)) if fields else getattr(error, "param", None)
    code = getattr(error, "code", None)
    body = openai_error(str(error), status_of(error), param=param, code=code)
    body["exception"] = type(error).__name__
    body["detail"] = str(error)
    if fields:
        body["detail"] = [
            {"loc": ["body", *f.path], "msg": f.message, "type": "value_error"} for f in fields
        ]
    return body
