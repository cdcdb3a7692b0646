"""Error responses in the shape of the OpenAI API: written by the server, read by its clients.

In:   a HoneError, or a message and a status; the body of any error response
Out:  a status and {"error": {message, type, param, code}}; the message of a body in this or
      another shape

A message quotes what a client sent and what a part of the server printed, so it is written without
secrets. `type` is one of OpenAI's: clients of that API decide by it and by the status whether to retry.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hone import errors
from hone.errors import BadRequest, HoneError, did_you_mean
from hone.files.redact import redact

_STATUS = (
    (errors.NotFound, 404),
    (errors.ModelNotFound, 404),
    (errors.Unauthorized, 401),
    (errors.Forbidden, 403),
    (errors.Conflict, 409),
    (errors.Unprocessable, 422),
    (errors.NotInThisVersion, 501),
    (errors.ConfigError, 400),
    (errors.RolloutError, 400),
    (errors.SampleRefused, 422),
    (errors.Unavailable, 503),
    (HoneError, 500),
)


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 and status != 501 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_exceeded"
    if status == 401:
        code = code or "invalid_api_key"
    return {"error": {"message": redact(message), "type": kind, "param": param, "code": code}}


RETRY_HEADER = "x-should-retry"
"""Clients of OpenAI and Anthropic retry 408, 409, 429 and 5xx, unless this header is `false`."""


def is_final(error: Exception, status: int) -> bool:
    """Whether the same request would fail again; False where it may succeed later, or is unknown."""
    if isinstance(error, errors.Unavailable | errors.EngineError):
        return False
    return isinstance(error, HoneError) or (status < 500 and status not in (408, 429))


def status_of(error: HoneError) -> int:
    own = getattr(error, "status", None)
    return own or next(status for kind, status in _STATUS if isinstance(error, kind))


def error_response(error: Exception, log_file: Path) -> tuple[int, dict[str, Any]]:
    """The status and the body; `exception` names the class, which hone's own clients raise again."""
    if not isinstance(error, HoneError):
        return 500, error_body(f"this server has a defect; its trace is in {log_file}", 500)
    status = status_of(error)
    fields = error.fields if isinstance(error, errors.Unprocessable) else ()
    param = ".".join(map(str, fields[0].path)) if fields else getattr(error, "param", None)
    code = getattr(error, "code", None)
    body = error_body(str(error), status, param=param, code=code)
    body["exception"] = type(error).__name__
    body["detail"] = redact(str(error))
    if fields:
        body["detail"] = [
            {"loc": ["body", *f.path], "msg": redact(f.message), "type": "value_error"}
            for f in fields
        ]
    return status, body


def rename_key(body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """An error about a key of a chat completion, with the name that another dialect has for it.

    A key that the dialect refuses is one that the client sent, and keeps its name.
    """
    error = body["error"]
    own = names.get(error["param"])
    if own and error["code"] != "unsupported_parameter":
        message = own + error["message"].removeprefix(error["param"])
        body = {**body, "error": {**error, "param": own, "message": message}}
    return body


def error_message(body: dict[str, Any]) -> str | None:
    """The message of an error response, also in FastAPI's and other formats; None without one."""
    error = body.get("error") or body.get("detail") or body.get("message")
    if not error:
        return None
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def bad_request(error: ValidationError, kind: str, known: Iterable[str]) -> BadRequest:
    """The error for the first wrong key; `kind` names what has the keys, `known` their names."""
    where, message = first_problem(error)
    problem, code = error.errors(include_url=False)[0], "invalid_value"
    if problem["type"] == "missing":
        code = "missing_parameter"
        message = f"missing; {kind} needs it" if len(problem["loc"]) == 1 else "missing"
    elif problem["type"] == "extra_forbidden":
        return unknown_key(where, kind, known)
    return BadRequest(f"{where}: {message}" if where else message, param=where or None, code=code)


def invalid_value(where: str, message: str) -> BadRequest:
    return BadRequest(f"{where}: {message}", param=where, code="invalid_value")


def unknown_key(key: str, kind: str, known: Iterable[str]) -> BadRequest:
    name = key[:100]
    message = f"{name}: {kind} has no such key.{did_you_mean(name, known)}"
    return BadRequest(message, param=name, code="unknown_parameter")


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The path of the first value that does not validate, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if part not in _UNION_PARTS]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    message = first["msg"].removeprefix("Value error, ")
    whole = first["type"] == "value_error" and not path  # the error concerns several keys
    if not whole and "got " not in message:
        message += f", got {brief(first['input'])}"
    return where.removeprefix("."), message


_UNION_PARTS = ("str", "list[any]")
"""Not keys: pydantic names the member of a union that it tried."""


def brief(value: object) -> str:
    """A value for an error message: as Python writes it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
