"""Assistant messages as content blocks, whole and streamed, and back."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jiter
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hone.wire.anthropic import blocks as anthropic_blocks
from hone.wire.anthropic.blocks import INVALID_JSON, BlockWriter, chat_messages, message_blocks
from hone.wire.anthropic.response import chat_completion
from hone.wire.json import MAX_DEPTH, load_object
from hone.wire.stream import join_message

Delta = dict[str, Any]


def stream(*deltas: Delta, hidden: bool = False) -> list[dict[str, Any]]:
    """The content of a streamed message, as the official client puts it together."""
    writer = BlockWriter(signature="signed", hidden=hidden)
    events: list[Any] = [event for delta in deltas for event in writer.add(delta)]
    events += writer.close()
    buffers: dict[int, bytes] = {}
    for event in events:
        delta = event.get("delta", {})
        if delta.get("type") == "input_json_delta":
            buffer = buffers.get(event["index"], b"") + delta["partial_json"].encode()
            jiter.from_json(buffer, partial_mode=True)  # raises in the client where it raises here
            buffers[event["index"]] = buffer
    return join_message([{"type": "message_start", "message": {}}, *events])["content"]


def begin(index: int, name: str, id: str) -> Delta:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}


def more(index: int, arguments: str) -> Delta:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def test_whole_and_partial_calls_become_the_same_blocks():
    used = [
        {"type": "thinking", "thinking": "hm", "signature": "signed"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "look", "input": {"word": "x"}},
        {"type": "tool_use", "id": "b", "name": "go", "input": {}},
        {"type": "text", "text": "\nDone."},
    ]
    begun: list[Delta] = [
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "I "},
        {"content": "look."},
    ]
    partial = [begin(0, "look", "a"), more(0, '{"wor'), more(0, 'd": "x"}'), begin(1, "go", "b")]
    assert stream(*begun, *partial, more(1, "{}"), {"content": "\nDone."}) == used
    look = {"name": "look", "arguments": '{"word": "x"}'}
    go = {"name": "go", "arguments": "{}"}
    whole = [
        {"tool_calls": [{"index": 0, "id": "a", "function": look}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": go}]},
    ]
    assert stream(*begun, *whole, {"content": "\nDone."}) == used
    # All of it in one message, as agents send it back and as a whole response has it.
    (message,) = chat_messages(None, [{"role": "assistant", "content": used}])
    assert message["content"] == "I look.\nDone." and message["reasoning_content"] == "hm"
    assert message_blocks(message, signature="signed") == [
        used[0],
        {"type": "text", "text": "I look.\nDone."},
        *used[2:4],
    ]


def test_hidden_thinking_is_an_empty_signed_block():
    empty = {"type": "thinking", "thinking": "", "signature": "signed"}
    text = {"type": "text", "text": "x"}
    assert stream({"reasoning_content": "h"}, {"content": "x"}, hidden=True) == [empty, text]
    message = {"content": "x", "reasoning_content": "h"}
    assert message_blocks(message, signature="signed", hidden=True) == [empty, text]


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
CUTS = st.lists(st.integers(0, 80), max_size=6)


@given(
    value=OBJECTS,
    ascii=st.booleans(),
    keep=st.none() | st.integers(0, 60),
    garbage=st.sampled_from(["", "}", "]", "x", '"', "\n", "\\", ",", "NaN", "\\ud83d", "1e999"]),
    cuts=CUTS,
)
@example(value={"a": True}, ascii=True, keep=11, garbage="x", cuts=[11])  # a word is sent whole
def test_every_streamed_call_is_json_and_goes_back_as_it_was_sampled(
    value: dict[str, Any], ascii: bool, keep: int | None, garbage: str, cuts: list[int]
):
    """Whole, cut off anywhere, or broken by a character that does not fit."""
    text = json.dumps(value, ensure_ascii=ascii)
    text = text if keep is None else text[: max(keep, 1)] + garbage
    (block,) = stream(begin(0, "f", "a"), *(more(0, piece) for piece in pieces(text, cuts)))
    try:
        assert block["input"] == load_object(text)
    except ValueError:
        assert block["input"][INVALID_JSON] == text
    (message,) = chat_messages(None, [{"role": "assistant", "content": [block]}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    if INVALID_JSON in block["input"]:
        assert arguments == text
        call = {"id": "a", "function": {"name": "f", "arguments": text}}
        (whole,) = message_blocks({"tool_calls": [call]}, signature="")
        assert whole["input"] == {INVALID_JSON: text}
    else:
        assert json.loads(arguments) == json.loads(text)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are parsed."""
    lengths: list[int] = []

    def counted(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return read(text, **options)

    read = anthropic_blocks.from_json
    monkeypatch.setattr(anthropic_blocks, "from_json", counted)
    return lengths


@pytest.mark.parametrize("depth", [MAX_DEPTH - 5, MAX_DEPTH - 4, MAX_DEPTH, 20_000])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_deeply_nested_call_can_be_sent_back(depth: int, is_closed: bool, parsed: list[int]):
    text = '{"a":' * depth + "1" + "}" * depth * is_closed
    streamed = (more(0, text[i : i + 50]) for i in range(0, len(text), 50))
    call = {"id": "a", "function": {"name": "f", "arguments": text}}
    for block in (
        *stream(begin(0, "f", "a"), *streamed),
        *message_blocks({"tool_calls": [call]}, signature=""),
    ):
        turn = {"role": "assistant", "content": [block]}
        body = load_object(json.dumps({"messages": [turn]}))
        assert (INVALID_JSON in block["input"]) is (depth > MAX_DEPTH - 5 or not is_closed)
        (message,) = chat_messages(None, body["messages"])
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert arguments.replace(" ", "") == text
    # While it grows, what was sent; at the end, both: up to eight ways to close it are tried.
    assert sum(parsed) < 100 * 600 + 8 * len(json.dumps(text)) + 8 * 600


def test_a_long_call_is_checked_in_linear_time(parsed: list[int]):
    value = {"a": list(range(4000)), "b": "x"}
    text = json.dumps(value)
    (block,) = stream(
        begin(0, "f", "a"), *(more(0, p) for p in pieces(text, range(len(text))[::4]))
    )
    assert block["input"] == value
    assert sum(parsed) < 100 * len(text)


def test_text_in_a_call_is_sent_as_it_comes():
    writer = BlockWriter(signature="", hidden=False)
    writer.add(begin(0, "f", "a"))
    writer.add(more(0, '{"text": "'))
    assert all(len(writer.add(more(0, "x"))) == 1 for _ in range(200))


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "refusal"),
        (None, None),
    ],
)
def test_a_message_reads_as_a_chat_completion(reason: str | None, finish: str | None):
    message = {
        "id": "msg_1",
        "type": "message",
        "model": "claude",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"n": 1}},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        ],
        "stop_reason": reason,
        "usage": {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 4},
    }
    called = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    reply = {"role": "assistant", "content": "a", "tool_calls": [called], "reasoning_content": "hm"}
    assert chat_completion(message) == {
        "id": "msg_1",
        "model": "claude",
        "choices": [{"index": 0, "message": reply, "finish_reason": finish}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }
