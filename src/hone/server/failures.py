"""The HTTP status and body of every HoneError.

In:   a HoneError
Out:  its status; an error body of the OpenAI API, for hone's clients with the exception's name
"""

from typing import Any

from hone import errors
from hone.errors import HoneError
from hone.wire.errors import error_body

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


def error_response(error: HoneError) -> dict[str, Any]:
    """`exception` is the error's class, which hone's own clients raise again."""
    fields = error.fields if isinstance(error, errors.Unprocessable) else ()
    param = ".".join(map(str, fields[0].path)) if fields else getattr(error, "param", None)
    code = getattr(error, "code", None)
    body = error_body(str(error), status_of(error), param=param, code=code)
    body["exception"] = type(error).__name__
    body["detail"] = str(error)
    if fields:
        body["detail"] = [
            {"loc": ["body", *f.path], "msg": f.message, "type": "value_error"} for f in fields
        ]
    return body
