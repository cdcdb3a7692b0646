"""intermediate_steps: their form, and the round trip through JSON."""

import json
from typing import Any

from tests.evaluation.made import call, step

from hone.evaluation.results import with_remote_steps
from hone.evaluation.steps import all_steps, calls_of, events_of, intermediate_steps, steps_of
from hone.workflow.run import RolloutResult


def test_the_form_of_a_call():
    tools = [{"type": "function", "function": {"name": "search"}}]
    one = call("yes", function="<workflow>.search", tools=tools)
    (entry,) = intermediate_steps([one], [])
    assert entry["parent_id"] == "<workflow>"
    assert entry["function_ancestry"] == {
        "function_id": "<workflow>.search",
        "function_name": "search",
        "parent_id": "<workflow>",
        "parent_name": "<workflow>",
    }
    payload = entry["payload"]
    assert set(payload) == {
        *("event_type", "event_timestamp", "span_event_timestamp", "framework", "name", "tags"),
        *("metadata", "data", "usage_info", "UUID"),
    }
    assert (payload["event_type"], payload["name"]) == ("LLM_END", "m")
    # It began at 100 and took half a second.
    assert (payload["span_event_timestamp"], payload["event_timestamp"]) == (100.0, 100.5)
    assert payload["data"]["input"] == [{"role": "user", "content": "q"}]
    assert payload["data"]["output"] == "yes"
    assert set(payload["data"]) == {"input", "output", "chunk", "payload"}
    assert payload["usage_info"]["token_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
    }


def test_outside_any_function_is_root():
    (entry,) = intermediate_steps([call(function="")], [])
    assert entry["function_ancestry"]["function_name"] == "root"


def test_calls_and_steps_are_in_the_order_they_happened():
    calls = [call("a", index=0), call("b", index=1)]
    steps = [step("before", calls=0), step("between", calls=1), step("after", calls=2)]
    entries = intermediate_steps(calls, steps)
    names = [
        e["payload"]["data"]["output"]
        if e["payload"]["event_type"] == "LLM_END"
        else e["payload"]["name"]
        for e in entries
    ]
    assert names == ["before", "a", "between", "b", "after"]
    assert len({e["payload"]["UUID"] for e in entries}) == 5


def test_only_the_selected_kinds():
    entries = intermediate_steps([call()], [step()], kinds=["LLM_END", "TOOL_END"])
    assert [e["payload"]["event_type"] for e in entries] == ["LLM_END"]


def test_calls_and_steps_survive_a_round_trip_through_json():
    failed = call(
        index=1,
        choices=[],
        messages=None,
        usage=None,
        id=None,
        policy_step=None,
        status=500,
        error="x",
    )
    asked_tool = call(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}],
        },
        index=2,
    )
    calls, steps = [call(), failed, asked_tool], [step(), step("end", value=None, calls=3)]
    entries = json.loads(json.dumps(intermediate_steps(calls, steps)))
    assert calls_of(entries) == calls
    assert steps_of(entries) == steps


def test_logprobs_and_ids_of_tokens_are_left_out():
    bulky = {"message": {"role": "assistant", "content": "a"}, "logprobs": {"content": []}}
    (entry,) = intermediate_steps([call(choices=[bulky | {"token_ids": [1]}])], [])
    assert entry["payload"]["data"]["payload"] == [
        {"message": {"role": "assistant", "content": "a"}}
    ]


def test_steps_of_another_program_are_read_as_far_as_possible():
    entry: dict[str, Any] = {
        "parent_id": "root",
        "payload": {
            "event_type": "LLM_END",
            "event_timestamp": 12.0,
            "span_event_timestamp": 10.0,
            "name": "meta/llama",
            "metadata": {"provided_metadata": None},
            "data": {"input": "2+2?", "output": "4", "payload": {"generations": []}},
            "usage_info": {"token_usage": {"total_tokens": 9}},
        },
    }
    (read,) = calls_of([{"payload": {"event_type": "TOOL_END"}}, entry, "nothing"])
    assert (read.model, read.seconds, read.usage) == ("meta/llama", 2.0, {"total_tokens": 9})
    assert read.messages == [{"role": "user", "content": "2+2?"}]
    assert read.reply == {"role": "assistant", "content": "4"}
    assert calls_of(None) == calls_of("text") == []
    assert steps_of([{"payload": {"event_type": "CUSTOM_END", "name": "theirs"}}]) == []


def test_steps_of_the_toolkit_get_the_calls_that_its_profiler_did_not_record():
    def event(kind: str, at: float) -> dict[str, Any]:
        return {"payload": {"event_type": kind, "event_timestamp": at, "metadata": None}}

    began, ended, noted = event("FUNCTION_START", 99.0), event("FUNCTION_END", 101.0), [call("yes")]
    steps = all_steps(noted, [], [began, ended])
    # The call ended at 100.5.
    kinds = [step["payload"]["event_type"] for step in steps]
    assert kinds == ["FUNCTION_START", "LLM_END", "FUNCTION_END"]
    complete = [began, event("LLM_END", 100.0), ended]
    # The toolkit's entry stays, with hone's fields.
    began_again, merged, ended_again = all_steps(noted, [], complete)
    assert (began_again, ended_again) == (began, ended)
    assert merged["payload"]["event_timestamp"] == 100.0
    assert merged["payload"]["metadata"]["hone"]["id"] == "c0"
    assert all_steps(noted, [], complete, kinds=["LLM_END"]) == [merged]
    assert all_steps(noted, [], []) == intermediate_steps(noted, [])
    # Read again, hone's own are calls and steps, and the toolkit's stay as they are.
    assert events_of(intermediate_steps(noted, [])) == [] and events_of(complete) == complete


def toolkit_event(kind: str, at: float, name: str = "m", **more: Any) -> dict[str, Any]:
    payload = {"event_type": kind, "event_timestamp": at, "name": name, "metadata": None}
    return {"payload": payload | more}


def test_calls_and_steps_that_the_toolkit_did_not_record_are_merged_with_those_it_did():
    plan, draft = call("plan", index=0, id="a"), call("draft", index=1, id="b", started_at=102.0)
    planned = step("planned", value=1.0, calls=1, about=(0,), at=101.0)
    moved = step("move", value=0.5, calls=2, about=(1, 0), at=103.5)
    events = [
        toolkit_event("FUNCTION_START", 101.5),
        toolkit_event("LLM_END", 103.0, span_event_timestamp=101.8, data={"output": "draft"}),
        toolkit_event("CUSTOM_END", 103.4, "move", metadata={"value": 0.5}),
    ]
    merged = all_steps([plan, draft], [planned, moved], events)
    shown = [(e["payload"]["event_type"], e["payload"]["name"]) for e in merged]
    assert shown == [
        *(("LLM_END", "m"), ("CUSTOM_END", "planned"), ("FUNCTION_START", "m")),
        *(("LLM_END", "m"), ("CUSTOM_END", "move")),
    ]
    # From the file, nothing is lost and nothing is there twice.
    again = json.loads(json.dumps(merged))
    assert [(c.id, c.reply and c.reply["content"]) for c in calls_of(again)] == [
        ("a", "plan"),
        ("b", "draft"),
    ]
    assert steps_of(again) == [planned, moved]
    read = all_steps(calls_of(again), steps_of(again), events_of(again))
    assert json.loads(json.dumps(read)) == again


def test_steps_of_a_remote_service_have_the_indices_of_the_recorded_calls():
    # A retriever's model is called elsewhere too; the server records the policy's calls alone.
    hosts = ("other", "localhost", "other", "localhost")
    sent = [call(index=i, id=f"c{i}", host=h, started_at=100.0 + i) for i, h in enumerate(hosts)]
    steps = [
        step("good", value=1.0, calls=2, about=(1, 0)),
        step("bad", value=-1.0, calls=4, about=(3, 2, 1, 0)),
    ]
    here = (call(index=0, id="c1"), call(index=1, id="c3"))
    for noted in ([], [toolkit_event("FUNCTION_START", 99.0)]):
        events = tuple(json.loads(json.dumps(all_steps(sent, steps, noted))))
        result = with_remote_steps(RolloutResult("r", "out", here, (), None, 1.0, events))
        assert [(s.calls, s.about) for s in result.steps] == [(1, (0,)), (2, (1, 0))]
        assert result.calls == here and len(result.events) == (7 if noted else 0)
        # Without a training server, the calls are those that the service saw.
        alone = with_remote_steps(RolloutResult("r", "out", (), (), None, 1.0, events))
        assert (list(alone.calls), list(alone.steps)) == (sent, steps)
