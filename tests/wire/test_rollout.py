"""The rollout of a request: what a client writes is what the server reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prose import Prose

from hone.errors import BadRequest
from hone.wire.rollout import RolloutScope

SCOPES = st.builds(
    RolloutScope,
    rollout=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._~:-]{0,20}\Z"),
    function=st.sampled_from(["", "agent.plan"]),
    temperature=st.none() | st.sampled_from([0.0, 0.25, 1.0, 100.0]),
    step=st.none() | st.integers(0, 999_999_999),
    aliases=st.sampled_from([(), (("gpt-4o", "mine"),), (("openai/o1:x", "a/b"), ("c", "d"))]),
)


@given(SCOPES)
def test_headers_are_read_back(scope: RolloutScope):
    assert RolloutScope.parse(scope.headers, None) == scope


@given(SCOPES)
def test_a_url_is_read_back(scope: RolloutScope):
    url = scope.url("http://127.0.0.1:8000/v1/")
    before, _, rest = url.partition("/rollout/")
    assert before == "http://127.0.0.1:8000"
    read = RolloutScope.parse({}, rest.removesuffix("/v1"))
    assert read == scope
    assert RolloutScope.parse(scope.headers, rest.removesuffix("/v1")) == scope


def test_the_function_of_the_code_that_calls_replaces_that_of_the_url():
    scope = RolloutScope("r", "<workflow>.search.a b.c")
    assert scope.url("http://h/v1") == "http://h/rollout/r,function=search.c/v1"
    assert RolloutScope("r", "<workflow>").url("http://h/v1") == "http://h/rollout/r/v1"
    read = RolloutScope.parse({"X-Hone-Function": "own"}, "r,function=search.c")
    assert read.function == "own"


def test_outside_a_rollout_there_is_nothing_to_read():
    assert RolloutScope.parse({}, None) == RolloutScope()
    assert RolloutScope.parse({"X-Hone-Rollout": ""}, None) == RolloutScope()
    assert RolloutScope.parse({"X-Hone-Function": "f"}, None) == RolloutScope(function="f")


@pytest.mark.parametrize(
    ("headers", "segment"),
    [
        ({"X-Hone-Rollout": "a"}, "b"),
        ({"X-Hone-Rollout": "a b"}, None),
        ({"X-Hone-Step": "1"}, None),
        ({"X-Hone-Step": "1"}, "r,step=2"),
        ({}, "r,temperature=1e9"),
        ({}, "r,step=1.5"),
        ({}, "r,function=a..b"),
        ({}, "r,alias=gpt-4o"),
        ({}, "r,rollout=s"),
        ({"X-Hone-Function": "f" * 513}, "r"),
    ],
)
def test_what_cannot_be_read_is_refused(prose: Prose, headers: dict[str, str], segment: str | None):
    with pytest.raises(BadRequest) as raised:
        RolloutScope.parse(headers, segment)
    prose(raised)
