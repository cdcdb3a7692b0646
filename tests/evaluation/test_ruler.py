"""`_type: ruler`: the runs of one row are scored together."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.evaluation.made import call, item
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.evaluation.base import EvalOptions, score_group
from hone.evaluation.judge import VerdictCache, conversations
from hone.evaluation.ruler import Ruler, RulerConfig
from hone.evaluation.run import evaluate
from hone.workflow.llm import LLM

AGENT = """
import itertools
numbers = itertools.count(1)

async def answer(input):
    number = next(numbers)
    if number == 3:
        raise RuntimeError("the tool is broken")
    return f"{input} {number}"
"""


class Judge(Endpoint):
    """Scores the output n as n / 10."""

    def reply_to(self, body: dict[str, Any]) -> Reply:
        if self.replies:
            return self.replies.pop(0)
        text = body["messages"][1]["content"]
        outputs = re.findall(r'id="(\d+)">.*?"output", "content": "\w+ (\d)"', text, re.DOTALL)
        scores = {id: {"explanation": "e", "score": int(n) / 10} for id, n in outputs}
        return Reply(json.dumps({"scores": scores}))


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[tuple[Judge, LLM]]:
    endpoint = Judge()
    async with serving(endpoint) as url:
        llm = LLM(base_url=url, model="wise", name="j", max_retries=0)
        yield endpoint, llm
        await llm.close()


def ruler(llm: LLM, cache: Path | None = None, **fields: Any) -> Ruler:
    config = RulerConfig.model_validate({"llm": "j", **fields})
    verdicts = None if cache is None else VerdictCache(cache)
    return Ruler(config, llm, max_concurrency=4, cache=verdicts)


async def test_reps_of_a_row_are_compared(
    judge: tuple[Judge, LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    endpoint, llm = judge
    rows = [{"id": name, "question": name, "answer": ""} for name in ("a", "b")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "ranked_agent.py").write_text(AGENT)
    config = {
        "llms": {"j": {"_type": "openai", "base_url": llm.base_url, "model_name": "wise"}},
        "workflow": {"_type": "python", "target": "ranked_agent.py:answer"},
        "eval": {
            "general": {
                "max_concurrency": 1,
                "output_dir": str(tmp_path / "out"),
                "dataset": {"_type": "json", "file_path": "rows.json"},
            },
            "evaluators": {"ranked": {"_type": "ruler", "llm": "j", "rubric": "Be kind."}},
        },
    }
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(config))
    summary = await asyncio.to_thread(evaluate, EvalOptions(file, reps=2))
    # One at a time: a says 1 and fails as the third, b says 2 and 4.
    assert summary.failed_items == 1 and len(endpoint.bodies) == 2
    output = json.loads((tmp_path / "out" / "ranked_output.json").read_text())
    scores = {one["id"]: one["score"] for one in output["eval_output_items"]}
    assert scores == {"a_rep0": 0.1, "b_rep0": 0.2, "a_rep1": None, "b_rep1": 0.4}
    compared = {one["id"]: one["reasoning"] for one in output["eval_output_items"]}
    assert compared["b_rep0"] == {"judge": "wise", "compared": 2, "reasoning": "e"}
    assert "Be kind." in endpoint.bodies[0]["messages"][0]["content"]
    assert "each row runs only once" not in caplog.text
    await asyncio.to_thread(evaluate, EvalOptions(file))
    assert "an evaluator compares the runs of each row, but each row runs only once" in caplog.text


async def test_a_failure_of_the_judge_is_a_failure_of_each(prose: Prose, judge: tuple[Judge, LLM]):
    endpoint, llm = judge
    endpoint.replies = [Reply("fine")] * 2
    scores = await score_group(ruler(llm, attempts=2), [item("a 1"), item("a 2")])
    assert [one.value for one in scores] == [None, None]
    assert scores[0].failure is not None
    prose(scores[0].failure.message)
    endpoint.replies = [Reply(gate=asyncio.Event())]
    [late] = await score_group(ruler(llm, timeout_s=0.05), [item("a 1")])
    assert late.failure is not None
    prose(late.failure.message)
    endpoint.replies = [Reply(gate=asyncio.Event())]
    [late] = await score_group(ruler(llm), [item("a 1")], timeout_s=0.05)
    assert late.failure is not None
    prose(late.failure.message)


async def test_an_equal_group_is_judged_once(judge: tuple[Judge, LLM], tmp_path: Path):
    endpoint, llm = judge
    group = [item("a 1"), item("a 2")]
    first = await score_group(ruler(llm, tmp_path), group)
    assert [one.value for one in first] == [0.1, 0.2]
    assert await score_group(ruler(llm, tmp_path), group) == first and len(endpoint.bodies) == 1
    (entry,) = tmp_path.glob("*.json")
    entry.write_text("{}")
    assert await score_group(ruler(llm, tmp_path), group) == first and len(endpoint.bodies) == 2
    await score_group(ruler(llm, tmp_path, rubric="other"), group)
    assert len(endpoint.bodies) == 3


async def test_an_evaluator_that_returns_too_few_results(prose: Prose, judge: tuple[Judge, LLM]):
    class Short(Ruler):
        async def evaluate_group(self, items: Any) -> Any:
            return (await super().evaluate_group(items))[:1]

    config = RulerConfig.model_validate({"llm": "j"})
    short = Short(config, judge[1], max_concurrency=1)
    scores = await score_group(short, [item("a 1"), item("a 2")])
    assert scores[1].failure is not None
    prose(scores[1].failure.message)


def test_calls_that_continue_a_conversation_are_one():
    ask = [{"role": "user", "content": "q"}]
    more = [*ask, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    other = [{"role": "user", "content": "z"}]
    calls = [
        call("yes", messages=ask),
        call("of another", messages=other),
        call("done", messages=more),
        call(messages=other, choices=[]),
    ]
    assert conversations(calls) == [
        [*more, {"role": "assistant", "content": "done"}],
        [*other, {"role": "assistant", "content": "of another"}],
    ]
