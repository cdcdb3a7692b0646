"""Recorded and seen calls as episodes: targets, conversations, values of steps."""

from collections import Counter
from typing import Any

import pytest

from hone.capture.base import SeenCall, Step
from hone.capture.openai import LEFT
from hone.finetune.base import EpisodeItem, Trajectory
from hone.finetune.calls import (
    SampledCall,
    Targets,
    from_recorded,
    from_seen,
    shaped_rewards,
)
from hone.finetune.rerender import conversations, episode
from hone.types import Call, CallSummary, RecordedCall

ASK = [{"role": "user", "content": "hi"}]
LOGPROBS = {"content": [{"token": "4", "logprob": -0.5}]}


def recorded(id: str, index: int = 0, function: str = "<workflow>", **changes: Any) -> CallSummary:
    call = {
        "prompt_ids": [1],
        "completion_ids": [2],
        "logprobs": [-0.5],
        "function": function,
        **changes.pop("call", {}),
    }
    fields = {
        "id": id,
        "rollout": "r",
        "index": index,
        "model": "p/n",
        "requested_model": "n",
        "base_model": "base",
        "adapter_sha256": None,
        "fingerprint": "f",
        "created_at": 0.0,
        "messages": ASK,
        "reply": {"role": "assistant", "content": "4"},
        "finish": "stop",
        "call": Call(**call),
    }
    return CallSummary.of(RecordedCall(**fields | changes))


def seen(
    index: int, model: str, *call_ids: str, function: str = "<workflow>", **fields: Any
) -> SeenCall:
    choices = [{"message": {"role": "assistant", "content": "4"}, "call_id": i} for i in call_ids]
    values: dict[str, Any] = {
        "index": index, "function": function, "model": model, "host": "localhost",
        "messages": ASK, "tools": None, "choices": choices, "usage": None,
        "id": call_ids[0] if call_ids else None, "policy_step": 0, "started_at": 0.0,
        "seconds": 0.1, "status": 200, "error": None,
    }  # fmt: skip
    return SeenCall(**values | fields)


def ids(result: Any) -> list[str]:
    return [one.id for one in result.sampled]


@pytest.mark.parametrize(
    ("path", "targets", "expected"),
    [
        ("<workflow>.search", {"search"}, True),
        ("<workflow>.search.rank", {"search"}, False),
        ("<workflow>.search.rank", {"rank"}, True),
        ("<workflow>.search", {"<workflow>"}, True),
        ("<workflow>", {"search"}, False),
        ("research", {"search"}, False),
        ("<workflow>.research.model", {"model"}, True),
        ("<workflow>.research.model", {"research.model"}, True),
        ("<workflow>.writing.model", {"research.model"}, False),
        ("", {"<workflow>"}, True),
    ],
)
def test_the_innermost_function_counts(path: str, targets: set[str], expected: bool):
    assert Targets(frozenset(targets)).has_function(path) is expected


def test_why_a_recorded_call_is_not_trained():
    calls = [
        recorded("ok"),
        recorded("left", abandoned=True),
        recorded("frozen", model="base"),
        recorded("inner", function="<workflow>.search"),
        recorded("cold", call={"temperature": 0.0}),
        recorded("empty", call={"completion_ids": [], "logprobs": []}),
        recorded("blind", call={"logprobs": None}),
    ]
    result = from_recorded(calls, (), Targets(frozenset({"<workflow>"}), None, "p/n"))
    assert ids(result) == ["ok", "inner"]
    assert result.dropped == {"abandoned": 1, "other_model": 1, "greedy": 1, "no_logprobs": 2}
    result = from_recorded(calls, (), Targets(frozenset({"search"}), None, "p/n"))
    assert ids(result) == ["inner"]
    assert result.reason is None
    nothing = from_recorded(calls[1:2], (), Targets())
    assert nothing.reason == "abandoned"
    assert from_recorded([], (), Targets()).reason == "no_calls"


def test_a_target_model_is_the_one_that_was_requested():
    calls = [
        recorded("a", requested_model="actor-name"),
        recorded("b", 1, requested_model="critic-name"),
    ]
    result = from_recorded(calls, (), Targets(models=frozenset({"actor-name", "p/n"})))
    assert (ids(result), result.dropped) == (["a"], {"not_target_model": 1})


def test_calls_that_asked_for_a_fixed_step_are_not_trained():
    names = ["n", "n@0", "p/n@latest", "n@12", "n@best"]
    calls = [
        recorded(id, i, requested_model=name)
        for i, (id, name) in enumerate(zip("abcde", names, strict=True))
    ]
    result = from_recorded(calls, (), Targets(trained="p/n"))
    assert (ids(result), result.dropped) == (["a", "c"], {"frozen": 3})
    # What the server recorded as asked for needs nobody who saw the request.
    result = from_recorded(calls, (), Targets(models=frozenset({"n"})))
    assert (ids(result), result.dropped) == (["a"], {"frozen": 3, "not_target_model": 1})


def test_an_answer_of_a_hone_server_that_is_not_recorded_here_is_counted():
    result = from_recorded(
        [recorded("a")], [seen(0, "m", "a"), seen(1, "m", "elsewhere")], Targets()
    )
    assert (ids(result), result.dropped) == (["a"], {"unrecorded": 1})


def test_of_a_foreign_endpoint_only_answers_with_logprobs():
    message = {"role": "assistant", "content": "4"}
    with_them = {"message": message, "logprobs": LOGPROBS, "finish_reason": "length"}
    calls = [
        seen(0, "m", choices=[with_them, {"message": message, "logprobs": None}], id="x"),
        seen(1, "other", choices=[with_them]),
        seen(2, "m", choices=[{"text": "4"}], messages=None),
        seen(3, "m", choices=[with_them], function="<workflow>.search"),
        seen(4, "m", choices=[], status=500, error="broken"),
        seen(5, "m", choices=[with_them], temperature=0.0),
    ]
    result = from_seen(calls, Targets(frozenset({"<workflow>"}), frozenset({"m"})))
    assert ids(result) == ["x.0", "3.0"]
    assert (result.sampled[0].logprobs, result.sampled[0].finish) == (LOGPROBS, "length")
    assert result.dropped == Counter(no_logprobs=1, not_target_model=1, not_chat=1, greedy=1)
    assert result.foreign and not from_recorded([], [], Targets()).foreign
    only = from_seen(calls[3:4], Targets(frozenset({"rank"})))
    assert only.reason == "not_target_function"


# ---- values of steps ------------------------------------------------------------------------------


def step(value: float | None, calls: int) -> Step:
    return Step("move", value, {}, "<workflow>", calls, tuple(reversed(range(calls))))


def sampled(
    place: int, messages: list[dict[str, Any]] | None = None, reply: Any = "4"
) -> SampledCall:
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    return SampledCall(f"call-{place}", place, messages or ASK, message, "stop", {})


def test_values_go_to_the_last_trained_call_before_them():
    trained = [sampled(0), sampled(2)]  # call 1 was another model's
    steps = [
        step(9.0, 0),  # before any call
        step(1.0, 1),  # after call 0
        step(2.0, 2),  # after call 1, which is not trained: still call 0's
        step(None, 3),
        step(4.0, 3),  # after call 2
        step(-1.0, 3),
    ]
    assert shaped_rewards(steps, trained) == [3.0, 3.0]
    assert shaped_rewards([step(None, 1)], trained) is None
    assert shaped_rewards([], trained) is None


# ---- episodes -----------------------------------------------------------------------------------


def talks(*calls: SampledCall) -> list[list[tuple[str, str]]]:
    whole = Trajectory(episode=episode(calls), reward=0.0)
    return [[(i.role.value, i.content) for i in talk] for talk in conversations(whole)]


def test_turns_retries_and_rewritten_contexts():
    first = sampled(0, ASK, "one")
    longer = [*ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    second = sampled(1, longer, "two")
    again = sampled(2, ASK, "uno")  # the same question once more: a conversation of its own
    rewritten = [{"role": "user", "content": "summary"}]
    assert talks(first, second, again, sampled(3, rewritten, "three")) == [
        [("user", "hi"), ("assistant", "one"), ("user", "more"), ("assistant", "two")],
        [("user", "hi"), ("assistant", "uno")],
        [("user", "summary"), ("assistant", "three")],
    ]


def test_tool_calls_and_parts_and_roles():
    called = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None}
    sent_back = {"role": "assistant", "content": "", "tool_calls": [called]}
    result = {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "t1"}
    picture = {"role": "developer", "content": [{"type": "image_url", "image_url": "x"}]}
    first = sampled(0, [picture, *ASK], answer)
    second = sampled(1, [picture, *ASK, sent_back, result], "done")
    items = episode([first, second])
    # The answer and what the agent sent back of it are one message, spelt in two ways.
    roles = [item.role.value for item in items]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert items[0].content == '[{"type": "image_url", "image_url": "x"}]'
    assert items[3].content == "4"
    assert items[2].metadata == {
        "tool_calls": [called], "conversation": 0, "call": "call-0", "finish_reason": "stop",
    }  # fmt: skip
    assert items[3].metadata == {"tool_call_id": "t1", "conversation": 0}
    assert all(isinstance(item, EpisodeItem) for item in items)
    assert [item.logprobs for item in items] == [None, None, {}, None, {}]


def test_a_stream_that_the_agent_left_is_named_before_the_server_has_noticed():
    every = Targets(frozenset({"<workflow>"}), None, "p/n")
    left = [seen(0, "base", error=LEFT), seen(1, "base")]
    assert from_recorded([], left, every).reason == "abandoned"
    assert from_recorded([], left[1:], every).reason == "no_calls"
    # Once it is recorded it counts once.
    both = [recorded("c0", abandoned=True)]
    assert from_recorded(both, left, every).dropped == {"abandoned": 1}
