"""Responses: what is streamed adds up to the whole, and items come back as the message they were."""

import sys
import tracemalloc
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hone.wire.openai.dialect import Answer, AnswerHead
from hone.wire.openai.response_client import read_response
from hone.wire.openai.response_events import RESPONSES
from hone.wire.openai.response_items import ItemIds, output_items, read_input
from hone.wire.stream import join_response

HEAD = AnswerHead(
    id="0",
    call_id="call-ab",
    created_at=1.0,
    model="m",
    fingerprint="f",
    policy_step=3,
    prompt_ids=[1],
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant message as a chat completion returns it."""
    names = draw(st.lists(TEXT, max_size=2))
    content = draw(st.one_of(st.just(""), TEXT))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if names:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": f"c{i}",
                "type": "function",
                "function": {"name": n, "arguments": f'{{"{i}":1}}'},
            }
            for i, n in enumerate(names)
        ]
    if draw(st.booleans()):
        message["reasoning_content"] = draw(st.one_of(st.just(""), TEXT))
    return message


def without_empty_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if v or k != "reasoning_content"}


@st.composite
def pieces(draw: st.DrawFn, message: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The deltas of the message: text cut anywhere, each call whole or in parts."""
    deltas: list[dict[str, Any]] = []
    for key in ("reasoning_content", "content"):
        text = message.get(key) or ""
        while text:
            size = draw(st.integers(1, len(text)))
            deltas.append({key: text[:size]})
            text = text[size:]
    for index, call in enumerate(message.get("tool_calls", ())):
        if draw(st.booleans()):
            deltas.append({"tool_calls": [{"index": index, **call}]})
            continue
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        deltas.append({"tool_calls": [{"index": index, **begun}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": letter}}]}
            for letter in call["function"]["arguments"]
        ]
    cuts = [[]] if not deltas else []
    while deltas:
        size = draw(st.integers(1, len(deltas)))
        cuts += [[], deltas[:size]]
        deltas = deltas[size:]
    return cuts


def entries(text: str) -> list[dict[str, Any]]:
    """One token for each byte."""
    return [
        {"token": str(byte), "logprob": -float(i), "bytes": [byte], "top_logprobs": []}
        for i, byte in enumerate(text.encode())
    ]


@given(messages())
def test_items_come_back_as_the_message_they_were(message: dict[str, Any]) -> None:
    items = output_items(message, ItemIds("call-ab"), encrypted=True)
    message = without_empty_reasoning(message)
    question, answer = read_input([{"role": "user", "content": "?"}, *items])
    assert question == {"role": "user", "content": "?"}
    assert answer == message
    # Also by a client that keeps only the encrypted reasoning.
    for item in items:
        if item["type"] == "reasoning":
            item["content"] = []
    assert read_input(items) == [message]
    read = read_response({"output": output_items(message, ItemIds("call-ab"))})
    assert read["choices"][0]["message"] == message


def test_calls_of_one_answer_are_one_message_also_between_their_outputs() -> None:
    def call(item_id: str | None, number: int) -> list[dict[str, Any]]:
        called = {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": f"c{number}", "output": "x"}
        return [called | {"id": item_id}, output]

    def calls(items: list[dict[str, Any]]) -> list[list[str]]:
        """The ids of the calls of each assistant message."""
        answers = [m for m in read_input(items) if m["role"] == "assistant"]
        return [[c["id"] for c in message["tool_calls"]] for message in answers]

    ids = ItemIds("call-ab")
    first, second = call(ids.function_call(0), 0), call(ids.function_call(1), 1)
    assert calls([*first, *second]) == [["c0", "c1"]]
    roles = [message["role"] for message in read_input([*first, *second])]
    assert roles == ["assistant", "tool", "tool"]
    # Not of another answer, not after another message, and not without ids.
    assert calls([*first, *call("fc_cd_0", 1)]) == [["c0"], ["c1"]]
    assert calls([*first, {"role": "user", "content": "?"}, *second]) == [["c0"], ["c1"]]
    assert calls([*call(None, 0), *call(None, 1)]) == [["c0"], ["c1"]]


def test_reading_takes_the_same_work_for_every_call() -> None:
    def work(calls: int) -> int:
        """How many functions run while a call and its output are read, so many times."""
        call = {"type": "function_call", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "output": "x"}
        items: list[Any] = []
        for i in range(calls):
            name = {"call_id": f"c{i}"}
            items += [call | name | {"id": f"fc_1_{i}"}, output | name]
        events: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, arg: events.update([event]))
        try:
            messages = read_input(items)
        finally:
            sys.setprofile(None)
        assert len(messages[0]["tool_calls"]) == calls
        return events.total()

    assert work(400) < 2.1 * work(200)


@given(st.data())
def test_a_stream_ends_with_the_response_that_would_have_come_whole(data: st.DataObject) -> None:
    message = data.draw(messages())
    text = (message.get("reasoning_content") or "") + "\n" + (message["content"] or "")
    finish = data.draw(st.sampled_from(["stop", "length"]))
    answer = Answer(index=0, call_id="call-ab", message=message, finish=finish, token_ids=[4])
    request = RESPONSES.parse({"model": "m", "input": "?"})
    writer = RESPONSES.writer(request, HEAD)
    events: list[Any] = []
    sampled = entries(text)
    for deltas in data.draw(pieces(message)):
        events += writer.delta(0, deltas, sampled)
        sampled = []
    events += writer.end([answer])
    whole = Answer(**{**_fields(answer), "logprobs": entries(text)})
    expected = RESPONSES.writer(request, HEAD).whole([whole])
    assert events[-1]["response"] == expected
    assert events[-1]["type"] == f"response.{expected['status']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    # Cut off before its end, a stream says as much.
    *cut, _ = events
    read = read_response(join_response(cut))["choices"][0]["message"]
    assert read == without_empty_reasoning(message)


def test_log_probabilities_of_a_stream_are_not_copied_for_every_token() -> None:
    writer = RESPONSES.writer(RESPONSES.parse({"model": "m", "input": "?"}), HEAD)
    (entry,) = entries("x")
    writer.delta(0, [], [entry] * 100_000)
    allocated: list[int] = []
    tracemalloc.start()
    for _ in range(8):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        writer.delta(0, [], [entry])
        allocated.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert min(allocated) < 100_000  # a list of 100,000 has 800,000 bytes


def _fields(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answer.__dataclass_fields__}
