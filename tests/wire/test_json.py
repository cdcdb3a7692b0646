"""JSON objects: what is parsed can be written again."""

import json

import pytest

from hone.wire.json import MAX_DEPTH, load_object, object_or_empty, write_json


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_an_object_is_read_and_written():
    value = {"a": [1, 2.5, None, True, "caf\u00e9 \U0001f600"]}
    assert load_object(json.dumps(value)) == load_object(write_json(value)) == value
    assert load_object(nested(MAX_DEPTH))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e999}', "a number too large for JSON"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": "\ud800"}', "surrogates not allowed"),
        (nested(MAX_DEPTH + 1), "nested deeper than 100"),
        ("[" * 100_000, "nested deeper than 100"),
    ],
)
def test_what_could_not_be_written_again_is_refused(text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        load_object(text)


def test_other_bodies_are_empty_objects():
    assert object_or_empty(b'{"a": 1}') == {"a": 1}
    assert [object_or_empty(body) for body in (b"", b"[1]", b"\xff", b"{")] == [{}] * 4
