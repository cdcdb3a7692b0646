"""One notion of a conversation: judge, export, harness, SDK and server give the same answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evaluation.made import call

from hone.capture.histories import add_call
from hone.chat.messages import check_messages
from hone.errors import TemplateError
from hone.evaluation.judge import conversations, transcript
from hone.finetune.calls import SampledCall
from hone.finetune.rerender import episode
from hone.integrations.interchange.rollouts import _conversations as exported  # pyright: ignore[reportPrivateUsage]
from hone.trajectory import Trajectory
from hone.types import Call, RecordedCall
from hone.wire.conversation import Continuations, common_prefix, continued, meaning

RECORDED = Path(__file__).with_name("echoes.json")
"""What each framework of the capture suite sent back for the replies that it got."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Echo:
    """A reply, the message by which an agent sends it back, and whether they are the same."""

    name: str
    returned: Message
    sent: Message
    same: bool = True


def said(content: Any = "It is 12.", **keys: Any) -> Message:
    return {"role": "assistant", "content": content, **keys}


def calling(arguments: Any = '{"city": "Paris"}', *, id: str = "c1", **keys: Any) -> Message:
    function = {"name": "weather", "arguments": arguments}
    made = {"id": id, "type": "function", "function": function, **keys}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def _two_calls(*names: str) -> Message:
    made = [
        {"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in names
    ]
    return said(None, tool_calls=made)


PARIS = '{"city": "Paris"}'
ECHOES = [
    Echo("unchanged", said(), said()),
    Echo("null keys", said(), said(refusal=None, audio=None, tool_calls=None, function_call=None)),
    Echo("keys of the framework", said(), said(name="agent", annotations=[], _kind="ai", id="m1")),
    Echo("content in one part", said(), said([{"type": "text", "text": "It is 12."}])),
    Echo(
        "parts with a cache mark",
        said(),
        said([{"type": "text", "text": "It is 12.", "cache_control": {"type": "ephemeral"}}]),
    ),
    Echo(
        "content in two parts, a line each",
        said("It is\n12."),
        said([{"type": "text", "text": "It is"}, {"type": "text", "text": "12."}]),
    ),
    Echo("no content instead of an empty one", said(""), said(None)),
    Echo("an empty list of parts", said(""), said([])),
    Echo("a refusal as a part", said("No."), said([{"type": "refusal", "refusal": "No."}])),
    Echo("an empty list of calls", said(), said(tool_calls=[])),
    Echo("reasoning left out", said(reasoning_content="12 or 13?"), said()),
    Echo("reasoning under another name", said(reasoning_content="h"), said(reasoning="h")),
    Echo("an index in the call", calling(), calling(index=0)),
    Echo("a call without its type", calling(), calling(type=None)),
    Echo("another id", calling(), calling(id="call_0")),
    Echo("no id", calling(), calling(id="")),
    Echo("arguments without blanks", calling(), calling('{"city":"Paris"}')),
    Echo("arguments as an object", calling(), calling({"city": "Paris"})),
    Echo("arguments escaped", calling('{"city": "Köln"}'), calling('{"city": "K\\u00f6ln"}')),
    Echo("keys in another order", calling('{"a": 1, "b": 2}'), calling('{"b": 2, "a": 1}')),
    Echo("1.0 for 1", calling('{"n": [1, {"m": 2}]}'), calling('{"n": [1.0, {"m": 2.0}]}')),
    Echo("no arguments instead of {}", calling("{}"), calling("")),
    Echo("null arguments instead of {}", calling("{}"), calling(None)),
    Echo("an empty object for {}", calling("{}"), calling({})),
    Echo("empty content beside a call", calling(), calling() | {"content": ""}),
    Echo("arguments cut in the middle", calling('{"city": "Par'), calling('{"city": "Par')),
    Echo("another text", said(), said("It is 13."), same=False),
    Echo("a stripped text", said("It is 12.\n"), said(), same=False),
    Echo("another role", said(), {"role": "user", "content": "It is 12."}, same=False),
    Echo("other arguments", calling(), calling('{"city": "Rome"}'), same=False),
    Echo("a string for a number", calling('{"n": 1}'), calling('{"n": "1"}'), same=False),
    Echo("true for 1", calling('{"n": 1}'), calling('{"n": true}'), same=False),
    Echo("an argument more", calling(), calling('{"city": "Paris", "unit": "C"}'), same=False),
    Echo("no call", calling(), said(None), same=False),
    Echo("a call as text", calling(), said(f"Calling weather with {PARIS}"), same=False),
    Echo("calls in another order", _two_calls("a", "b"), _two_calls("b", "a"), same=False),
    Echo("one call of two", _two_calls("a", "b"), _two_calls("a"), same=False),
    Echo("text beside a call left out", calling() | {"content": "Wait."}, calling(), same=False),
    Echo("cut arguments, cut elsewhere", calling('{"city": "Par'), calling('{"ci'), same=False),
]
ASKED = [
    {"role": "system", "content": "You report the weather."},
    {"role": "user", "content": "How warm is it in Paris?"},
]
NEXT = {"role": "user", "content": "And in Rome?"}


def recorded() -> list[Echo]:
    found = json.loads(RECORDED.read_text())
    return [
        Echo(f"{framework}: {one['name']}", one["returned"], one["sent"], one["same"])
        for framework, echoes in found.items()
        for one in echoes
    ]


ALL = [pytest.param(echo, id=echo.name) for echo in (*ECHOES, *recorded())]


@pytest.mark.parametrize("echo", ALL)
def test_every_side_gives_the_same_answer(echo: Echo):
    requests = [(ASKED, echo.returned), ([*ASKED, echo.sent, NEXT], said("21."))]
    num_conversations = 1 if echo.same else 2
    assert (meaning(echo.returned) == meaning(echo.sent)) == echo.same
    # judge
    calls = [call(reply, messages=messages) for messages, reply in requests]
    assert len(conversations(calls)) == num_conversations
    assert transcript(calls).count("--- conversation of") == num_conversations
    # export
    assert len(exported([of_server(i, *one) for i, one in enumerate(requests)])) == (
        num_conversations
    )
    # harness
    sampled = [
        SampledCall(str(i), i, [*messages], reply, "stop", {})
        for i, (messages, reply) in enumerate(requests)
    ]
    numbers = {(item.metadata or {})["conversation"] for item in episode(sampled)}
    assert len(numbers) == num_conversations
    # SDK
    trajectory = Trajectory()
    for messages, reply in requests:
        add_call(trajectory, messages, None, {"index": 0, "message": reply})
    assert 1 + len(trajectory.additional_histories) == num_conversations
    # server
    try:
        (ours,), (theirs,) = check_messages([echo.returned]), check_messages([echo.sent])
    except TemplateError:
        return  # it refuses this request
    assert (ours.meaning == theirs.meaning) == echo.same


def of_server(index: int, messages: list[Message], reply: Message) -> RecordedCall:
    return RecordedCall(
        id=f"call-{index}",
        rollout="r",
        index=index,
        model="default/m",
        requested_model="m",
        base_model="b",
        adapter_sha256=None,
        fingerprint="f",
        created_at=0.0,
        messages=messages,
        reply=reply,
        finish="stop",
        call=Call(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0]),
    )


def test_answers_are_exported_and_trained_as_the_model_gave_them():
    given = calling('{"city":  "Paris"}') | {"reasoning_content": "Hm."}
    requests = [(ASKED, given), ([*ASKED, calling(PARIS), NEXT], said("21."))]
    (one,) = exported([of_server(i, *request) for i, request in enumerate(requests)])
    assert one.messages == [*ASKED, given, NEXT, said("21.")]
    assert sorted(one.sampled) == [2, 4]
    (other,) = conversations([call(reply, messages=messages) for messages, reply in requests])
    assert other == one.messages


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": None, "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": {"text": "x"}},
        {"role": "assistant", "tool_calls": "weather"},
        {"role": "assistant", "tool_calls": [None, "x", {"function": None}]},
        {"role": "assistant", "tool_calls": [{"custom": {"name": "sql", "input": "select"}}]},
        {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "assistant", "content": object()},
    ],
)
def test_no_message_is_too_odd_to_be_compared(message: Message):
    assert meaning(message) == meaning(dict(message)) != meaning(said("no such text"))


def test_the_old_form_of_a_call_is_a_call():
    old = {"role": "assistant", "function_call": {"name": "weather", "arguments": PARIS}}
    assert meaning(old) == meaning(calling())


def test_a_developer_is_the_system():
    assert meaning({"role": "developer", "content": "x"}) == meaning(
        {"role": "system", "content": "x"}
    )


def test_the_longest_conversation_is_continued_and_the_newest_of_equal_ones():
    assert continued(["u", "a", "u2"], [["u", "a"], ["u"], ["u", "a"], ["x"]]) == 2
    assert continued(["u"], [["u", "a"], ["x"]]) is None
    assert continued(["u"], [["x"], []]) == 1
    assert continued([], []) is None


def test_a_request_that_goes_back_begins_another_conversation():
    continuations = Continuations()
    assert continuations.add(ASKED, said("a")) == (0, 0)
    assert continuations.add([*ASKED, said("a"), NEXT], said("b")) == (0, 3)
    assert continuations.add([*ASKED, said("a"), said("other")], said("c")) == (1, 0)
    assert continuations.add([*ASKED, said("a"), NEXT, said("b"), NEXT], said("d")) == (0, 5)


def test_a_request_without_an_answer_is_continued_by_its_retry():
    continuations = Continuations()
    assert continuations.add(ASKED, None) == (0, 0)
    assert continuations.add(ASKED, said()) == (0, 2)


def test_a_judge_sees_turns_that_alternate_with_those_of_another_agent_once():
    other = [{"role": "user", "content": "z"}]
    calls = [
        call("a", messages=ASKED, function="main"),
        call("b", messages=other, function="sub"),
        call("c", messages=[*ASKED, said("a", name="main"), NEXT], function="main"),
    ]
    assert transcript(calls).split("\n") == [
        "--- conversation of main ---",
        "system: You report the weather.",
        "user: How warm is it in Paris?",
        "assistant: a",
        "--- conversation of sub ---",
        "user: z",
        "assistant: b",
        "--- conversation of main, continued ---",
        "user: And in Rome?",
        "assistant: c",
    ]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.integers(0, 20))
def test_the_common_prefix(one: list[int], other: list[int], shared: int):
    other = one[:shared] + other
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix(one, other) == common_prefix(other, one) == expected
    arrays = [np.array(ids, dtype=np.int64) for ids in (one, other)]
    assert common_prefix(arrays[0].data, arrays[1].data) == expected
