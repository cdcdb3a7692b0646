"""Server-sent events: joined, they are the response that would have come in one piece."""

import json
from typing import Any

from hone.wire.stream import join_events, read_events, write_event

LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def chunks(*choices: dict[str, Any], **rest: Any) -> bytes:
    return b"".join(write_event({"id": "x", "choices": [c], **rest}) for c in choices)


def test_events_are_read_as_they_were_written():
    sent = [{"text": "caf\u00e9\n"}, {"n": 1}]
    body = b"".join(map(write_event, sent)) + write_event("[DONE]")
    assert body.endswith(b"data: [DONE]\n\n")
    assert list(read_events(body)) == sent
    assert list(read_events(body.replace(b"\n\n", b"\r\n\r\n"))) == sent
    assert list(read_events(b": comment\n\n" + body[:-3])) == sent


def test_text_tool_calls_logprobs_and_ids_of_two_choices_are_joined():
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":'}}
    last = {"index": 0, "function": {"arguments": " 1}"}}
    body = chunks(
        {"index": 1, "delta": {"role": "assistant", "content": ""}},
        {"index": 0, "delta": {"content": "he"}, "logprobs": {"content": [LOGPROB]}},
        {"index": 0, "delta": {"content": "llo"}, "logprobs": {"content": [LOGPROB]}},
        {"index": 1, "delta": {"tool_calls": [call]}},
        {"index": 1, "delta": {"tool_calls": [more]}},
        {"index": 1, "delta": {"tool_calls": [last]}, "finish_reason": "tool_calls"},
        {
            "index": 0,
            "delta": {},
            "finish_reason": "stop",
            "token_ids": [1, 2],
            "call_id": "call-1",
        },
    )
    whole = join_events(body + write_event({"id": "x", "choices": [], "usage": {"n": 3}}))
    first, second = whole["choices"]
    assert (whole["id"], whole["usage"]) == ("x", {"n": 3})
    assert first["message"] == {"role": "assistant", "content": "hello"}
    assert first["logprobs"] == {"content": [LOGPROB, LOGPROB]}
    assert (first["token_ids"], first["call_id"], first["finish_reason"]) == (
        [1, 2],
        "call-1",
        "stop",
    )
    (made,) = second["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 1}
    assert (made["id"], made["function"]["name"], second["finish_reason"]) == (
        "c1",
        "f",
        "tool_calls",
    )


def test_an_error_event_is_all_that_is_left():
    body = chunks({"index": 0, "text": "a"}) + write_event({"error": {"message": "broke"}})
    assert join_events(body) == {"error": {"message": "broke"}}


def test_a_chunk_may_say_that_there_is_no_tool_call_yet():
    call = {"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    deltas = [{"role": "assistant", "content": "", "tool_calls": None}, {"tool_calls": [call]}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    (choice,) = join_events(b"".join(map(write_event, events)))["choices"]
    assert choice["message"]["tool_calls"] == [{k: v for k, v in call.items() if k != "index"}]


def test_what_a_choice_has_beside_its_answer_comes_whole_in_every_chunk():
    # Azure repeats the verdicts of its filters, OpenRouter and SGLang why the answer ended.
    safe = {"hate": {"filtered": False, "severity": "safe"}}
    ended = {"finish_reason": "stop", "native_finish_reason": "eos", "matched_stop": "END"}
    part = {"index": 0, "delta": {"content": "a"}, "content_filter_results": safe, **ended}
    (choice,) = join_events(chunks(part, part | {"delta": None}))["choices"]
    message = {"role": "assistant", "content": "a"}
    assert choice == {"index": 0, "message": message, "content_filter_results": safe, **ended}


def test_text_may_follow_parts_as_mistral_sends_it_after_its_reasoning():
    parts = [{"type": "thinking", "thinking": []}]
    chosen = [{"index": 0, "delta": {"content": content}} for content in (parts, "b", "c")]
    (choice,) = join_events(chunks(*chosen))["choices"]
    assert choice["message"]["content"] == "bc"


def test_a_block_has_the_text_of_its_deltas_only():
    cited = {"type": "citations_delta", "citation": {"cited_text": "a"}}
    deltas = [
        cited,
        {"type": "text_delta", "text": "b"},
        cited,
        {"type": "text_delta", "text": "c"},
    ]
    body = write_event({"type": "message_start", "message": {"type": "message"}}) + b"".join(
        write_event({"type": "content_block_delta", "index": 0, "delta": delta}) for delta in deltas
    )
    assert join_events(body)["content"] == [{"text": "bc"}]
