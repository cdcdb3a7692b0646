"""Trajectory and TrajectoryGroup as the user builds them: choices survive the wire, copies, logs."""

import asyncio
import copy
import json
from datetime import datetime, timedelta, tzinfo

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from hone import History, Trajectory, TrajectoryGroup
from hone import trajectory as trajectory_module
from hone.trajectory import JobRequest

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "agent",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call-1",
                        "type": "function",
                        "function": {"name": "move", "arguments": '{"to": "b2"}'},
                    }
                ],
            },
            "logprobs": {
                "content": [
                    {"token": "token_id:5", "bytes": [], "logprob": -0.25, "top_logprobs": []},
                    {"token": "token_id:2", "bytes": [], "logprob": -1e-9, "top_logprobs": []},
                ]
            },
            "token_ids": [5, 2],
            "prompt_token_ids": [1, 7, 9],
            "policy_step": 3,
        }
    ],
}
"""As a hone server answers: the last three fields are not OpenAI's."""


def answered() -> Choice:
    # `construct`, not validation, is how the client builds what it returns.
    return ChatCompletion.construct(**copy.deepcopy(ANSWER)).choices[0]


def test_a_choice_crosses_the_wire_with_logprobs_and_token_ids():
    user = {"role": "user", "content": "play"}
    sent = Trajectory(
        messages_and_choices=[user, answered()],
        additional_histories=[History(messages_and_choices=[user, answered()])],
    )
    text = JobRequest(model="p/agent", groups=[TrajectoryGroup([sent])]).model_dump_json()
    (got,) = JobRequest.model_validate_json(text).groups[0].trajectories
    for history in (got, got.additional_histories[0]):
        question, choice = history.messages_and_choices
        assert question == user
        assert choice["token_ids"] == [5, 2]
        assert choice["prompt_token_ids"] == [1, 7, 9]
        assert choice["policy_step"] == 3
        assert [t["logprob"] for t in choice["logprobs"]["content"]] == [-0.25, -1e-9]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"to": "b2"}'
    # And once more: what was read is what is written.
    assert json.loads(got.model_dump_json()) == json.loads(sent.model_dump_json())


def test_a_field_of_a_type_the_client_does_not_expect_is_no_warning():
    odd = copy.deepcopy(ANSWER)
    odd["choices"][0]["finish_reason"] = 7
    choice = ChatCompletion.construct(**odd).choices[0]
    text = Trajectory(messages_and_choices=[choice]).model_dump_json()  # warnings are errors here
    assert json.loads(text)["messages_and_choices"][0]["finish_reason"] == 7


def test_messages_are_plain():
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "move", "arguments": '{"to": "b2"}'},
    }
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    by_hand = {"role": "assistant", "tool_calls": answered().message.tool_calls}
    trajectory = Trajectory(
        messages_and_choices=[
            {"role": "user", "content": None},
            answered(),
            by_hand,
            {"role": "tool", "content": "ok", "tool_call_id": "call-1"},
            ChatCompletionMessage(role="assistant", content="done"),
        ]
    )
    assert trajectory.messages() == [
        {"role": "user", "content": ""},
        assistant,
        assistant,
        {"role": "tool", "content": "ok", "tool_call_id": "call-1"},
        {"role": "assistant", "content": "done"},
    ]
    json.dumps(trajectory.messages())


def test_for_logging_says_what_is_trained_and_holds_no_tokens():
    tools = [{"type": "function", "function": {"name": "move"}}]
    recorded = {"message": {"role": "assistant", "content": "so"}, "call_id": "call-1"}
    trajectory = Trajectory(
        messages_and_choices=[{"role": "user", "content": "play"}, answered(), recorded],
        tools=tools,
        reward=0.5,
        rollout="r",
        metrics={"turns": 1},
        metadata={"board": "x"},
    )
    trajectory.log("won")
    logged = trajectory.for_logging()
    assert [message.pop("trainable") for message in logged["messages"]] == [False, True, True]
    assert logged["messages"] == trajectory.messages()
    assert {key: logged[key] for key in logged if key != "messages"} == {
        "reward": 0.5,
        "rollout": "r",
        "metrics": {"turns": 1},
        "metadata": {"board": "x"},
        "tools": tools,
        "logs": ["won"],
    }
    assert "token_ids" not in json.dumps(logged)


def test_its_text_is_what_one_looks_for():
    trajectory = Trajectory(reward=0.5, metrics={"turns": 1}, metadata={"board": "x"})
    assert (
        str(trajectory) == "Trajectory(reward=0.5, metrics={'turns': 1}, metadata={'board': 'x'})"
    )


def test_a_duration_does_not_follow_a_clock_that_is_set_back(monkeypatch: pytest.MonkeyPatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
            return datetime.now(tz) - timedelta(hours=1)

    trajectory = Trajectory()
    monkeypatch.setattr(trajectory_module, "datetime", Later)
    assert 0 <= trajectory.finish().metrics["duration"] < 60


async def test_durations_are_measured_and_add_up():
    trajectory = Trajectory()
    for _ in range(2):
        async with trajectory.track_duration("think"):
            await asyncio.sleep(0.02)
    assert trajectory.finish() is trajectory
    think, whole = trajectory.metrics["think_duration"], trajectory.metrics["duration"]
    assert 0.04 <= think <= whole < 1


def test_groups_copy():
    group = TrajectoryGroup([Trajectory(reward=1)], metadata={"i": 1}, example="e")
    deep, shallow = copy.deepcopy(group), copy.copy(group)
    group.trajectories[0].reward = 2
    assert [t.reward for t in shallow] == [2]
    assert [t.reward for t in deep] == [1]
    assert (deep.example, deep.metadata, deep.unfinished) == ("e", {"i": 1}, 0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_reward_is_a_number(wrong: float):
    with pytest.raises(ValueError, match="finite"):
        Trajectory(reward=wrong)
