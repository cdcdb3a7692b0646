"""ATIF: what is written is valid, and reads back as the same messages."""

import json
from typing import Any

import pytest
from tests.prose import Prose

from hone.errors import ConfigError
from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.integrations.interchange.atif import from_atif, is_atif, to_atif
from hone.integrations.interchange.base import Conversation, ExportedRollout
from hone.types import Call, RecordedCall

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": "Weather in Paris and Rome?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Two cities.",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "search", "arguments": '{"city": "Paris"}'},
            },
            # Not as json.dumps writes it, and no JSON at all.
            {
                "id": "b",
                "type": "function",
                "function": {"name": "search", "arguments": '{"city":"Rome"}'},
            },
            {"id": "c", "type": "function", "function": {"name": "search", "arguments": "Rome"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": "sun", "name": "search"},
    {"role": "tool", "tool_call_id": "lost", "content": "of an earlier call"},
    {"role": "assistant", "content": "Rain, sun."},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image_url", "x": 1}]},
]


def recorded(**fields: Any) -> RecordedCall:
    call = Call(prompt_ids=[1, 2, 3], completion_ids=[4, 5], logprobs=[-0.25, -1.5], step=7)
    known: dict[str, Any] = {
        "id": "c1",
        "rollout": "r:0.0.0.0~1",
        "index": 0,
        "model": "suite/agent",
        "requested_model": "agent",
        "base_model": "tiny",
        "adapter_sha256": None,
        "fingerprint": "f",
        "created_at": 1760000000.5,
        "messages": None,
        "reply": {},
        "finish": "stop",
        "call": call,
    }
    return RecordedCall(**known | fields)


def exported(*conversations: Conversation, **fields: Any) -> ExportedRollout:
    known: dict[str, Any] = {
        "epoch": 2,
        "split": "train",
        "example": "e",
        "generation": 1,
        "rollout": "r:0.0.0.0~1",
        "reward": 0.5,
        "scores": {"match": 0.5},
        "input": {"q": 1},
    }
    return ExportedRollout(RolloutRecord(**known | fields), list(conversations), "agent")


def validated(document: dict[str, Any]) -> Any:
    atif = pytest.importorskip("atif")
    return atif.Trajectory.model_validate(document)


def test_a_rollout_is_valid_and_reads_back():
    sub = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    main = Conversation(MESSAGES, [TOOL], {2: recorded(), 6: recorded(id="c2")})
    document = json.loads(json.dumps(to_atif(exported(main, sub))))
    assert is_atif(document)
    first, second = from_atif(document, "f")
    assert first.messages == MESSAGES and first.tools == [TOOL]
    assert (first.id, first.reward) == ("r:0.0.0.0~1", 0.5)
    assert second.messages == sub.messages and second.reward == 0.5
    agent = document["steps"][2]
    assert agent["metrics"]["prompt_token_ids"] == [1, 2, 3]
    assert agent["metrics"]["completion_token_ids"] == [4, 5]
    assert agent["metrics"]["logprobs"] == [-0.25, -1.5]
    assert agent["metrics"]["extra"]["policy_step"] == 7
    assert agent["timestamp"] == "2025-10-09T08:53:20.500000+00:00"
    assert [call["arguments"] for call in agent["tool_calls"]] == [
        {"city": "Paris"},
        {"city": "Rome"},
        {},
    ]
    assert [result["content"] for result in agent["observation"]["results"]] == ["rain", "sun"]
    totals = {"total_steps": 6, "total_prompt_tokens": 6, "total_completion_tokens": 4}
    assert document["final_metrics"] == {**totals, "extra": {"reward": 0.5}}
    assert document["extra"]["hone"]["scores"] == {"match": 0.5}
    trajectory = validated(document)
    assert trajectory.steps[2].tool_calls[0].function_name == "search"


def test_a_failed_rollout_says_why():
    failure = FailureRecord(kind="policy", reason="token_limit", message="too long")
    rollout = exported(Conversation(MESSAGES[:2]), reward=None, failure=failure)
    document = to_atif(rollout)
    assert document["extra"]["hone"]["failure"]["reason"] == "token_limit"
    assert "extra" not in document["final_metrics"]
    assert from_atif(document, "f")[0].reward is None
    validated(document)


def test_a_trajectory_of_another_agent(prose: Prose):
    document = {
        "schema_version": "ATIF-v1.4",
        "session_id": "s",
        "agent": {"name": "terminus", "version": "2", "tool_definitions": [TOOL]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {
                "step_id": 2,
                "source": "agent",
                "message": "Done before.",
                "is_copied_context": True,
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": [{"type": "text", "text": "ls"}],
                "observation": {"results": [{"content": "a.txt"}]},
            },
            {
                "step_id": 4,
                "source": "user",
                "message": [
                    {"type": "image", "source": {"media_type": "image/png", "path": "i.png"}}
                ],
            },
        ],
        "final_metrics": {"extra": {"reward": 1.0}},
    }
    validated(document)
    [conversation] = from_atif(document, "f")
    assert conversation.reward == 1.0 and conversation.id == "s" and conversation.tools == [TOOL]
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Done before.", "weight": 0},
        {"role": "assistant", "content": [{"type": "text", "text": "ls"}]},
        {"role": "user", "content": "a.txt"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "i.png"}}]},
    ]
    with pytest.raises(ConfigError) as caught:
        from_atif(document | {"steps": [{"source": "robot"}]}, "f")
    prose(caught)
