"""Error bodies: what a server writes is what a client reads, in any of the usual shapes."""

import pytest
from starlette.exceptions import HTTPException

from hone import errors
from hone.wire.errors import brief, error_body, error_message, is_final


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "invalid_request_error", "invalid_api_key"),
        (429, "rate_limit_exceeded", None),
        (500, "server_error", None),
        (501, "invalid_request_error", None),
    ],
)
def test_type_and_code_follow_the_status(status: int, kind: str, code: str | None):
    body = error_body("no", status, param="n")
    assert body == {"error": {"message": "no", "type": kind, "param": "n", "code": code}}
    assert error_message(body) == "no"


@pytest.mark.parametrize(
    ("error", "status", "final"),
    [
        (errors.Conflict("the name is in use"), 409, True),
        (errors.NotInThisVersion("later"), 501, True),
        (errors.StateError("another version wrote it"), 500, True),
        (errors.EngineError("a step failed"), 500, False),
        (errors.OutOfMemory("too long"), 500, True),
        (errors.EngineFailed("crashed"), 503, False),
        (errors.Unavailable("loading"), 503, False),
        (errors.DiskFull("no space"), 503, False),
        (errors.Busy("full"), 429, False),
        (ZeroDivisionError("a defect"), 500, False),
        (HTTPException(413), 413, True),
        (HTTPException(408), 408, False),
        (HTTPException(429), 429, False),
    ],
)
def test_which_errors_are_final(error: Exception, status: int, final: bool):
    assert is_final(error, status) is final


def test_messages_in_the_shapes_of_others():
    assert error_message({"detail": "gone"}) == "gone"
    assert error_message({"message": "m"}) == "m"
    assert error_message({"error": "text"}) == "text"
    assert error_message({"error": {"why": 1}}) == "{'why': 1}"
    assert error_message({}) is None


def test_long_values_are_cut():
    assert brief("a" * 200) == "'" + "a" * 76 + "..."
    assert brief([1]) == "[1]"
