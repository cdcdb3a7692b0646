"""A model as the judge, over real HTTP: its requests, its answers, its cache."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError
from tests.evaluation.made import call, item
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.evaluation.base import Score, score
from hone.evaluation.judge import (
    Judge,
    LlmJudge,
    TrajectoryJudge,
    VerdictCache,
    transcript,
    verdict_in,
)
from hone.workflow.llm import LLM


@pytest_asyncio.fixture
async def endpoint() -> Endpoint:
    return Endpoint()


@pytest_asyncio.fixture
async def llm(endpoint: Endpoint) -> AsyncIterator[LLM]:
    async with serving(endpoint) as url:
        llm = LLM(base_url=url, model="wise", name="judge_llm", max_retries=0)
        yield llm
        await llm.close()


def judge(llm: LLM, cache: Path | None = None, **fields: Any) -> Judge:
    config = LlmJudge.model_validate({"llm": "judge_llm", **fields})
    verdicts = None if cache is None else VerdictCache(cache)
    return Judge(config, llm, max_concurrency=4, cache=verdicts)


def says(score: Any, reasoning: str = "because") -> Reply:
    return Reply(json.dumps({"reasoning": reasoning, "score": score}))


async def test_the_score_is_between_0_and_1(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [says(7), says(2)]
    got = await score(judge(llm), item("Paris", "Paris", input_obj="Capital?"))
    assert got == Score(0.7, {"judge": "wise", "raw_score": 7.0, "reasoning": "because"})
    # From 1 to 5: (2 - 1) / (5 - 1).
    other = await score(judge(llm, min_score=1, max_score=5), item("x"))
    assert other.value == 0.25


async def test_the_request_to_the_judge(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [says(1), says(1)]
    strict = judge(llm, rubric="Be strict.", max_score=1)
    await score(strict, item({"city": "Paris"}, "Paris", input_obj="Capital?"))
    (system, user) = endpoint.bodies[0]["messages"]
    assert "between 0 (worst) and 1 (best)" in system["content"]
    assert user["content"] == (
        "## Rubric\nBe strict.\n\n## Question\nCapital?\n\n## Expected answer\nParis\n\n"
        '## Output\n{"city": "Paris"}'
    )
    await score(strict, item("x"))
    assert "Expected answer" not in endpoint.bodies[1]["messages"][1]["content"]


async def test_a_custom_prompt_is_filled_once(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [Reply("I would say\nScore: **8**")]
    own = judge(llm, prompt="{question} -> {output}? Not {nothing}. {low} to {high}", rubric="R")
    got = await score(own, item("the {rubric}", input_obj="q"))
    assert got.value == 0.8
    assert endpoint.bodies[0]["messages"] == [
        {"role": "user", "content": "q -> the {rubric}? Not {nothing}. 0 to 10"}
    ]


async def test_an_answer_without_a_score_is_retried_and_then_a_failure(
    prose: Prose, endpoint: Endpoint, llm: LLM, tmp_path: Path
):
    endpoint.replies = [Reply("fine"), says(11), says(5)]
    assert (await score(judge(llm), item("x"))).value == 0.5
    endpoint.replies = [Reply("fine"), Reply('{"score": tr', finish="length")]
    got = await score(judge(llm, tmp_path, attempts=2), item("x"))
    assert got.value is None and got.failure is not None
    prose(got.failure.message)
    assert not list(tmp_path.iterdir())
    assert len(endpoint.requests) == 5


async def test_a_judge_that_is_down_is_a_failure(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [Reply(status=503)]
    got = await score(judge(llm), item("x"))
    assert got.value is None and got.failure is not None
    assert got.failure.type == "InternalServerError"
    assert len(endpoint.requests) == 1  # the client retries, not the judge


async def test_failed_requests_are_retried_by_the_client(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [Reply(status=503), says(3)]
    patient = LLM(base_url=llm.base_url, model="wise", max_retries=2)
    assert (await score(judge(patient), item("x"))).value == 0.3
    assert len(endpoint.requests) == 2
    await patient.close()


async def test_a_judge_that_does_not_answer_in_time_is_a_failure(
    prose: Prose, endpoint: Endpoint, llm: LLM
):
    gate = asyncio.Event()
    endpoint.replies = [Reply(gate=gate)]
    got = await score(judge(llm, timeout_s=0.05), item("x"))
    gate.set()
    assert got.failure is not None
    prose(got.failure.message)


async def test_verdicts_are_cached(endpoint: Endpoint, llm: LLM, tmp_path: Path):
    endpoint.replies = [says(7)]
    cache = tmp_path / "kept"
    first = await score(judge(llm, cache), item("x"))
    # A new judge object, as in the next run; ids do not matter.
    assert await score(judge(llm, cache), item("x", id="other")) == first
    assert len(endpoint.requests) == 1
    endpoint.replies = [says(1), says(2)]
    assert (await score(judge(llm, cache), item("y"))).value == 0.1
    assert (await score(judge(llm, cache, rubric="Else"), item("x"))).value == 0.2
    assert len(endpoint.requests) == 3


async def test_concurrent_equal_outputs_are_judged_once(
    endpoint: Endpoint, llm: LLM, tmp_path: Path
):
    endpoint.replies = [says(7)]
    one = judge(llm, tmp_path)
    got = await asyncio.gather(*(score(one, item("x", id=str(n))) for n in range(8)))
    assert [s.value for s in got] == [0.7] * 8
    assert len(endpoint.requests) == 1


async def test_another_model_has_its_own_cache_entries(
    endpoint: Endpoint, llm: LLM, tmp_path: Path
):
    endpoint.replies = [says(7), says(1)]
    await score(judge(llm, tmp_path), item("x"))
    other = LLM(base_url=llm.base_url, model="wiser", max_retries=0)
    assert (await score(judge(other, tmp_path), item("x"))).value == 0.1
    await other.close()


async def test_a_damaged_cache_entry_is_judged_again(
    endpoint: Endpoint, llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    endpoint.replies = [says(7), says(6)]
    await score(judge(llm, tmp_path), item("x"))
    (entry,) = tmp_path.glob("*.json")
    entry.write_text('{"sco')
    with caplog.at_level(logging.WARNING):
        assert (await score(judge(llm, tmp_path), item("x"))).value == 0.6
    assert "a damaged entry of the judge's cache; asking again" in caplog.text
    assert json.loads(entry.read_text())["score"] == 6


async def test_max_concurrency_is_not_exceeded(endpoint: Endpoint, llm: LLM):
    gate = asyncio.Event()
    endpoint.replies = [Reply('{"score": 1}', gate=gate) for _ in range(6)]
    one = judge(llm)
    tasks = [asyncio.create_task(score(one, item(str(n)))) for n in range(6)]
    async with asyncio.timeout(PATIENCE_S):
        while len(endpoint.requests) < 4:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert len(endpoint.requests) == 4
    gate.set()
    assert [s.value for s in await asyncio.gather(*tasks)] == [0.1] * 6


async def test_the_trajectory_evaluator_shows_the_conversation(endpoint: Endpoint, llm: LLM):
    endpoint.replies = [says(10)]
    config = TrajectoryJudge.model_validate({"llm_name": "judge_llm"})
    whole = Judge(config, llm, max_concurrency=1)
    tool = {"id": "t", "function": {"name": "search", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [tool]}
    later = [
        {"role": "user", "content": "q"},
        # As agents send it back: without empty keys, and with further keys of answers.
        {"role": "assistant", "tool_calls": [tool], "refusal": None},
        {"role": "tool", "tool_call_id": "t", "content": "found"},
    ]
    calls = [call(reply), call("done", index=1, messages=later)]
    assert (await score(whole, item("done", "done", trajectory=calls))).value == 1.0
    system, user = endpoint.bodies[0]["messages"]
    assert "the course an agent took" in system["content"]
    assert (
        "## Conversation\n--- conversation of <workflow> ---\nuser: q\n"
        'assistant: tool calls: [{"function": {"arguments": "{}", "name": "search"}, "id": "t"}]\n'
        "tool: found\nassistant: done\n\n## Final output\ndone"
    ) in user["content"]


def test_a_new_conversation_gets_a_heading():
    other = [{"role": "user", "content": "z"}]
    failed = call(index=2, messages=other, choices=[], error="500")
    assert transcript([call("a"), call("b", messages=other, function="sub"), failed]) == (
        "--- conversation of <workflow> ---\nuser: q\nassistant: a\n"
        "--- conversation of sub ---\nuser: z\nassistant: b\n"
        "--- conversation of <workflow> ---\nuser: z\n(no answer: 500)"
    )


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"reasoning": "r", "score": 3}', ("r", 3.0)),
        ('```json\n{"reasoning": "r", "score": "3.5"}\n```', ("r", 3.5)),
        ('Draft {"score": 1}, then {"score": 2, "reasoning": "x"}', ("x", 2.0)),
        ('{not json} {"score": 4}', ("", 4.0)),
        ("Score: 6", ("Score: 6", 6.0)),
        ("score = 2, no, **Score**: 5", ("score = 2, no, **Score**: 5", 5.0)),
    ],
)
def test_the_score_in_an_answer(answer: str, verdict: tuple[str, float]):
    assert verdict_in(answer) == verdict


@pytest.mark.parametrize("answer", ["", "7", '{"score": true}', '{"score": null}', '{"points": 3}'])
def test_no_score_in_an_answer(answer: str):
    with pytest.raises(ValueError, match="score"):
        verdict_in(answer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_score": 5, "max_score": 5}, r"min_score \(5\) is not below max_score \(5\)"),
        (
            {"prompt": "What of {question}?"},
            r"prompt contains neither \{output\} nor \{transcript\}",
        ),
        ({"rubrik": "x"}, "rubrik"),
        ({"llm": None}, "set llm to the entry of `llms` that judges"),
        ({"llm_name": "k"}, "set llm to the entry of `llms` that judges"),
    ],
)
def test_an_invalid_judge(fields: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        LlmJudge.model_validate({"llm": "j", **fields})
