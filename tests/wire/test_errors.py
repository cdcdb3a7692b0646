"""Error bodies: what a server writes is what a client reads, in any of the usual shapes."""

import pytest

from hone.wire.errors import brief, error_body, error_message


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


def test_messages_in_the_shapes_of_others():
    assert error_message({"detail": "gone"}) == "gone"
    assert error_message({"message": "m"}) == "m"
    assert error_message({"error": "text"}) == "text"
    assert error_message({"error": {"why": 1}}) == "{'why': 1}"
    assert error_message({}) is None


def test_long_values_are_cut():
    assert brief("a" * 200) == "'" + "a" * 76 + "..."
    assert brief([1]) == "[1]"
