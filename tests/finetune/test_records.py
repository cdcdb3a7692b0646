"""Records of rollouts survive a round trip through JSON, whatever the agent returned."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.made import call, item, step

from hone.evaluation.base import Score
from hone.evaluation.results import ItemResult
from hone.files.redact import HIDDEN
from hone.files.rollout_record import EpisodeItem, EpisodeItemRole, FailureRecord, RolloutRecord
from hone.finetune.records import (
    Place,
    append_line,
    record_of,
    score_of_reward,
    without_secrets,
)
from hone.loggers.base import LoggedRollout
from hone.types import Failure
from hone.workflow.failure import RolloutFailure
from hone.workflow.jsonable import plain
from hone.workflow.run import RolloutResult

HALF = "cut \ud83d"
"""What `json.loads` makes of a tool call whose emoji was cut in the middle."""


def recorded(output: Any, failure: RolloutFailure | None = None) -> RolloutRecord:
    ran = RolloutResult(
        id="r",
        output=output,
        calls=(call(HALF),),
        steps=(step(metadata={HALF: [HALF]}),),
        failure=failure,
        seconds=1.0,
    )
    scores = {} if failure else {"reward": Score(0.5)}
    return recorded_as(ItemResult(item(output), ran, scores), Place("train", 0))


def recorded_as(result: ItemResult, place: Place, **options: Any) -> RolloutRecord:
    """The record of a result whose reward is the score of `reward`."""
    score, why = score_of_reward(result, "reward")
    return record_of(result, place, reward=score and score.value, failure=why, **options)


@pytest.mark.parametrize("output", [HALF, {HALF: HALF}, [1, (HALF,)], object(), float("nan"), None])
def test_any_output_can_be_written_and_read(output: Any):
    record = recorded(output)
    assert RolloutRecord.model_validate_json(record.model_dump_json()) == record
    assert record.reward == 0.5 and record.messages[-1]["content"] == "cut ?"


def test_a_failure_that_quotes_the_model_can_be_written_too():
    failed = RolloutFailure("policy", "unparseable", Failure(type="E", message=HALF))
    record = recorded(None, failed)
    assert RolloutRecord.model_validate_json(record.model_dump_json()) == record
    assert record.failure is not None and record.failure.message == "cut ?"


def test_the_first_request_to_the_policy_is_kept_for_one_rollout_of_each_example():
    parameters = {"temperature": 0.7, "max_tokens": 5}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    calls = (
        call(model="agent@0", parameters={"max_tokens": 1}),  # a frozen helper
        call(model="agent", parameters={"max_output_tokens": 5}, is_chat=False),
        call(model="agent", parameters=parameters, tools=tools),
        call(model="agent", messages=[{"role": "user", "content": "later"}]),
    )
    ran = RolloutResult(id="r", output="", calls=calls, steps=(), failure=None, seconds=1.0)
    result = ItemResult(item(""), ran, {"reward": Score(0.5)})
    first = recorded_as(result, Place("val", 0, generation=0))
    assert first.request == {
        "messages": [{"role": "user", "content": "q"}],
        "tools": tools,
        **parameters,
    }
    assert recorded_as(result, Place("val", 0, generation=1)).request is None


def test_plain_values_stay_what_they_are():
    fields = {"text": "\u00e4 \U0001f642", "n": [1, 2.5, True, None]}
    assert plain(fields) == fields
    assert plain({"x": float("inf"), 3: {4}}) == {"x": "Infinity", "3": [4]}


def test_model_calls_keep_their_text_only_where_the_last_conversation_lacks_it():
    question, again = {"role": "user", "content": "q"}, {"role": "user", "content": HALF}
    answered = {"role": "assistant", "content": "yes"}
    calls = (
        call(id="c0"),
        call("aside", id="c1", messages=[{"role": "system", "content": "s"}]),
        call("done", id="c2", messages=[question, answered, again], temperature=0.5),
        call(id="c3", choices=[], error=HALF, status=None, messages=[question, answered]),
    )
    ran = RolloutResult(id="r", output="", calls=calls, steps=(), failure=None, seconds=1.0)
    result = ItemResult(item(""), ran, {"reward": Score(0.5)})
    assert recorded_as(result, Place("val", 0)).model_calls == []
    record = recorded_as(result, Place("val", 0), with_calls=True)
    assert RolloutRecord.model_validate_json(record.model_dump_json()) == record
    assert [c.messages is None for c in record.model_calls] == [True, False, True, False]
    sent = LoggedRollout.model_validate_json(record.model_dump_json())
    asked_again = {"role": "user", "content": "cut ?"}
    assert [(c.id, messages, reply) for c, messages, reply in sent.conversations()] == [
        ("c0", [question], answered),
        ("c1", [{"role": "system", "content": "s"}], {"role": "assistant", "content": "aside"}),
        ("c2", [question, answered, asked_again], {"role": "assistant", "content": "done"}),
        ("c3", [question, answered], None),
    ]
    assert (sent.model_calls[2].temperature, sent.model_calls[2].completion_tokens) == (0.5, 2)
    assert (sent.model_calls[3].error, sent.model_calls[3].finish) == ("cut ?", None)
    # A logger may run in an environment with an older hone than the run.
    newer = json.loads(record.model_dump_json()) | {"unknown": 1}
    newer["model_calls"][0] |= {"unknown": 2}
    assert LoggedRollout.model_validate(newer) == sent


def test_what_is_trained_stays_and_all_other_text_loses_its_secrets(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AGENT_TOKEN", "value-of-the-agent")
    leak = "value-of-the-agent"
    episode = [EpisodeItem(role=EpisodeItemRole.USER, content=leak)]
    tools = [{"description": leak}]
    failure = FailureRecord(kind="policy", reason="agent_error", message=leak, traceback=leak)
    record = recorded({"text": leak}).model_copy(
        update={
            "example": leak,
            "failure": failure,
            "retries": [failure],
            "messages": [{"role": "user", "content": leak}],
            "request": {"messages": [{"content": leak}]},
            "trained_calls": ["call-1"],
            "episode": episode,
            "metadata": {"reasoning": leak, "tools": tools},
        }
    )
    written = without_secrets(record)
    assert (written.example, written.episode, written.trained_calls) == (leak, episode, ["call-1"])
    assert written.metadata == {"reasoning": HIDDEN, "tools": tools}
    kept = {"example", "episode", "metadata"}
    assert leak not in written.model_dump_json(exclude=kept)
    assert written.output == {"text": HIDDEN}
    same = {"reward", "scores", "seconds", "calls", "tokens", "generation", "rollout", "split"}
    assert written.model_dump(include=same) == record.model_dump(include=same)
    assert without_secrets(written) == written
    assert RolloutRecord.model_validate_json(written.model_dump_json()) == written


def test_the_own_log_of_a_component_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_TOKEN", "value-of-the-agent")
    append_line(tmp_path, "log.jsonl", {"why": "value-of-the-agent", "step": 1})
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert (line["why"], line["step"]) == (HIDDEN, 1)
