"""Harness trajectories as the SDK's: references where the server recorded, text where it did not."""

from typing import Any

import pytest
from tests.finetune.worlds import message
from tests.prose import Prose

from hone.errors import ConfigError
from hone.finetune.base import DPOItem, Trajectory, TrajectoryCollection
from hone.finetune.rerender import conversations, sdk_groups

LOGPROBS = {"content": [{"token": "4", "logprob": -0.5, "bytes": [52], "top_logprobs": []}]}


def collection(*groups: list[Trajectory]) -> TrajectoryCollection:
    return TrajectoryCollection(trajectories=list(groups), run_id="r")


def trajectory(*items: Any, reward: float = 1.0, **metadata: Any) -> Trajectory:
    return Trajectory(episode=list(items), reward=reward, metadata=metadata or None)


def test_a_recorded_rollout_is_sent_by_reference():
    recorded = trajectory(
        message("user", "hi"),
        message("assistant", "4", {}),
        reward=0.25,
        id="e7",
        generation=0,
        reasoning={"not": "a scalar"},
    ).model_copy(
        update={
            "rollout": "run:0.0.0.0~1",
            "trained_calls": ["call-1"],
            "shaped_rewards": [0.5],
        }
    )
    [group], dropped = sdk_groups(collection([recorded]))
    [sent] = group
    assert (group.example, dropped) == ("e7", {})
    assert (sent.rollout, sent.trained_calls) == ("run:0.0.0.0~1", ["call-1"])
    assert (sent.reward, sent.shaped_rewards) == (0.25, [0.5])
    assert sent.messages_and_choices == []
    assert sent.metadata == {"id": "e7", "generation": 0}


def test_the_message_order_of_a_recorded_rollout_is_not_checked():
    odd = trajectory(message("assistant", "a", {})).model_copy(
        update={"rollout": "r:1", "trained_calls": ["call-1"]}
    )
    [group], dropped = sdk_groups(collection([odd]))
    assert (len(group), dropped) == (1, {})


def test_text_with_logprobs():
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    spoken = trajectory(
        message("system", "be brief"),
        message("user", "2 + 2?"),
        message("assistant", "", {}, tool_calls=[call]),
        message("tool", "4", tool_call_id="t1"),
        message("assistant", "4", LOGPROBS, finish_reason="length", token_ids=[52]),
        message("environment", "well done"),
        message("assistant", "5", LOGPROBS),
        tools=[{"type": "function"}],
    )
    [group], _ = sdk_groups(collection([spoken]))
    [sent] = group
    assert sent.messages_and_choices == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "t1"},
        {
            "index": 0,
            "finish_reason": "length",
            "logprobs": LOGPROBS,
            "message": {"role": "assistant", "content": "4"},
            "token_ids": [52],
        },
        {"role": "user", "content": "well done"},
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": LOGPROBS,
            "message": {"role": "assistant", "content": "5"},
        },
    ]
    assert sent.tools == [{"type": "function"}]
    assert (sent.rollout, sent.trained_calls) == ("", None)


def test_several_conversations_are_several_histories():
    two = trajectory(
        message("user", "a", conversation=0),
        message("assistant", "1", LOGPROBS, conversation=0),
        message("user", "b", conversation=1),
        message("assistant", "2", LOGPROBS, conversation=1),
    )
    [group], _ = sdk_groups(collection([two]))
    [sent] = group
    assert [item["content"] for item in sent.messages()] == ["a", "1"]
    [other] = sent.additional_histories
    assert [item["content"] for item in other.messages()] == ["b", "2"]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ((), "Trajectory episode is empty."),
        (
            (message("assistant", "a", {}),),
            "the first message is of role 'assistant'; expected 'user'",
        ),
        ((message("tool", "a"),), "the first message is of role 'tool'"),
        (
            (message("user", "u"), message("assistant", "a", {}), message("assistant", "b", {})),
            "Consecutive assistant messages at positions 1 and 2",
        ),
    ],
)
def test_an_order_that_no_template_expresses(items: Any, says: str, caplog: Any):
    wrong = trajectory(*items, id="e1")
    right = trajectory(message("user", "u"), message("assistant", "a", LOGPROBS))
    groups, dropped = sdk_groups(collection([wrong, right], [wrong]))
    # One trajectory is dropped, not the submission; a group of which nothing is left goes too.
    assert [len(group) for group in groups] == [1]
    assert dropped == {"message_order": 2, "empty_group": 1}
    warnings = [r.getMessage() for r in caplog.records]
    assert sum(w.startswith("Dropped a trajectory: example 'e1': ") for w in warnings) == 2
    assert says in warnings[0]


def test_a_trajectory_of_pairs_and_messages_is_refused(prose: Prose):
    pair = DPOItem(prompt="p", chosen_response="a", rejected_response="b")
    mixed = Trajectory.model_construct(episode=[message("user", "u"), pair], reward=1.0)
    with pytest.raises(ConfigError) as caught:
        conversations(mixed)
    prose(caught)
