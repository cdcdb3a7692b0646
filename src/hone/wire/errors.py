"""Error responses in the shape of the OpenAI API: written by the server, read by its clients.

In:   a message and a status; the body of any error response
Out:  {"error": {message, type, param, code}}; the message of a body in this shape or another

`type` is one of OpenAI's: clients of that API decide by it and by the status whether to retry.
"""

from typing import Any


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 and status != 501 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_exceeded"
    if status == 401:
        code = code or "invalid_api_key"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_message(body: dict[str, Any]) -> str | None:
    """What an error response says, also in the shapes of FastAPI and others; None if nothing."""
    error = body.get("error") or body.get("detail") or body.get("message")
    if not error:
        return None
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def brief(value: object) -> str:
    """A value for an error message: as Python writes it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
