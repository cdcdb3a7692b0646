"""Errors and warnings about the failures of a round."""

import re

from tests.prose import Prose

from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.finetune.round_failures import infrastructure_error, none_collected, policy_warning


def record(kind: str | None = None, reason: str = "", **fields: object) -> RolloutRecord:
    failure = (
        None if kind is None else {"kind": kind, "reason": reason, "type": "E", "message": reason}
    )
    defaults = {"epoch": 0, "split": "train", "example": "a", "generation": 0, "rollout": "r"}
    reward = {"reward": 1.0 if failure is None else None}
    return RolloutRecord.model_validate({**defaults, **reward, "failure": failure, **fields})


def test_a_share_of_infrastructure_failures_is_allowed():
    good, bad = [record()] * 4, [record("infrastructure", "connection")]
    assert infrastructure_error(good + bad, where="epoch 1", allowed=0.2) is None
    error = infrastructure_error(good[:3] + bad * 2, where="epoch 1", allowed=0.2)
    assert error is not None and error.count("  E: connection") == 1
    assert re.match(r"epoch 1: 2 of 5 .*\(connection: 2\).*allows 20%", error)
    by_policy = [record("policy", "length")] * 5
    assert infrastructure_error(by_policy, where="epoch 1", allowed=0.0) is None
    assert infrastructure_error([], where="epoch 1", allowed=0.0) is None


def test_policy_failures_above_a_twentieth_are_a_warning_unless_they_have_a_reward(prose: Prose):
    good = [record()] * 19
    assert policy_warning([*good, record("policy", "length")], where="epoch 1") is None
    failed = [*good[:18], *[record("policy", "length")] * 2]
    message = policy_warning(failed, where="epoch 1")
    assert message is not None
    prose(message)
    assert "on_policy_failure" not in message
    dropped = policy_warning(failed, where="epoch 1", dropped=True)
    assert dropped is not None and "dropping them rewards failing" in dropped
    # what was raised: it may be a mistake of the agent's
    worth = record("policy", "length").model_copy(update={"reward": 0.0})
    assert policy_warning([worth] * 20, where="epoch 1") is None


def test_no_trajectories_says_what_was_left_out(prose: Prose):
    message = none_collected(4, {"no_logprobs": 3}, ["search"])
    prose(message)
    assert "['search']" in message
    assert "no rollout was run" in none_collected(0, {}, [])


def test_no_trajectories_names_the_first_cause(prose: Prose):
    broken = record("policy", "agent_error").model_copy(
        update={
            "failure": FailureRecord(
                kind="policy", reason="agent_error", type="KeyError", message="'x'", place="a.py:7"
            )
        }
    )
    later = record("infrastructure", "connection")
    counts = {"policy/agent_error": 1, "infrastructure/connection": 1}
    message = none_collected(
        0, counts, ["<workflow>"], [record(not_trained="greedy"), broken, later]
    )
    prose(message)
    assert "target_functions" not in message
    assert FailureRecord(kind="policy", reason="x").type == ""
