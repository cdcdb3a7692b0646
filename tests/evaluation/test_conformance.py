"""Every built-in evaluator keeps the promises of an evaluator."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fastapi import Request, Response
from tests.conformance.evaluator import Cases, EvaluatorConformance
from tests.evaluation.made import call, item
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.config import plugins, registry
from hone.evaluation.base import EvalInputItem, Evaluator
from hone.evaluation.calls import (
    AvgLlmLatency,
    AvgNumLlmCalls,
    AvgTokensPerLlmEnd,
    AvgWorkflowRuntime,
    ToolCallMatch,
)
from hone.evaluation.evaluators import F1, Contains, ExactMatch, JsonMatch, Numeric, Regex
from hone.evaluation.judge import Judge, LlmJudge, TrajectoryJudge
from hone.evaluation.python import PythonEvaluator
from hone.evaluation.rule import Rule, RuleEvaluator
from hone.evaluation.ruler import Ruler, RulerConfig
from hone.workflow.llm import LLM

TOOL = {"name": "search", "arguments": {"q": "x"}}
DONE = item("x", trajectory=[call()], seconds=2.0)

RULES: list[tuple[Rule, Cases]] = [
    (ExactMatch(), [(item("a", "a"), 1), (item("a", "b"), 0), (item("a"), None)]),
    (Contains(), [(item("xay", "a"), 1), (item("x", "a"), 0), (item("x", []), None)]),
    (Regex(pattern="a+"), [(item("caat"), 1), (item("dog"), 0)]),
    (Numeric(), [(item("about 4", 4), 1), (item("5", 4), 0), (item("5", "four"), None)]),
    (
        JsonMatch(),
        [(item({"a": 1}, {"a": 1}), 1), (item("x", {"a": 1}), 0), (item("1", "{"), None)],
    ),
    (F1(), [(item("red car", "car"), 2 / 3), (item("x", "y"), 0), (item("x"), None)]),
    (ToolCallMatch(), [(item([TOOL], TOOL), 1), (item("no", TOOL), 0), (item(TOOL, "no"), None)]),
    (AvgLlmLatency(), [(DONE, 0.5), (item("x"), None)]),
    (AvgTokensPerLlmEnd(), [(DONE, 5), (item("x"), None)]),
    (AvgNumLlmCalls(), [(DONE, 1), (item("x"), 0)]),
    (AvgWorkflowRuntime(), [(DONE, 2), (item("x"), None)]),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0].type_name)
class TestRules(EvaluatorConformance):
    @pytest.fixture
    def evaluator(self, rule: tuple[Rule, Cases]) -> Evaluator:
        return RuleEvaluator(rule[0])

    @pytest.fixture
    def cases(self, rule: tuple[Rule, Cases]) -> Cases:
        return rule[1]


class TestPython(EvaluatorConformance):
    @pytest.fixture
    def evaluator(self) -> Evaluator:
        def reward(item: EvalInputItem) -> float:
            if item.expected_output_obj is None:
                raise ValueError("nothing to compare with")
            return float(item.output_obj == item.expected_output_obj)

        return PythonEvaluator("m:reward", reward, {}, 4)

    @pytest.fixture
    def cases(self) -> Cases:
        return [(item("a", "a"), 1), (item("a", "b"), 0), (item("a"), None)]


class Opinion(Endpoint):
    """Says 10 of what holds `good`, nothing of what holds `odd`, and 0 of the rest."""

    async def _answer(self, request: Request, path: str) -> Response:
        body = str(await request.json())
        score = 10 if "good" in body.rpartition("utput")[2] else 0
        self.replies = [Reply("?" if "odd" in body else f'{{"score": {score}}}')]
        return await super()._answer(request, path)


@pytest.mark.parametrize("config", [LlmJudge, TrajectoryJudge])
class TestJudges(EvaluatorConformance):
    @pytest_asyncio.fixture
    async def evaluator(self, config: Any) -> AsyncIterator[Evaluator]:
        async with serving(Opinion()) as url:
            llm = LLM(base_url=url, model="wise", max_retries=0)
            read = config.model_validate({"llm": "wise", "attempts": 1, "rubric": "R"})
            yield Judge(read, llm, max_concurrency=4)
            await llm.close()

    @pytest.fixture
    def cases(self) -> Cases:
        return [
            (item("good", trajectory=[call()]), 1),
            (item("bad", trajectory=[call()]), 0),
            (item("odd", trajectory=[call()]), None),
        ]


class Ranking(Opinion):
    """Scores 1 what holds `good`."""

    def reply_to(self, body: dict[str, Any]) -> Reply:
        text = body["messages"][1]["content"]
        scores = {"1": {"explanation": "", "score": int("good" in text)}}
        return Reply("?" if "odd" in text else json.dumps({"scores": scores}))


class TestRuler(EvaluatorConformance):
    @pytest_asyncio.fixture
    async def evaluator(self) -> AsyncIterator[Evaluator]:
        async with serving(Ranking()) as url:
            llm = LLM(base_url=url, model="wise", max_retries=0)
            config = RulerConfig.model_validate({"llm": "wise", "attempts": 1})
            yield Ruler(config, llm, max_concurrency=4)
            await llm.close()

    @pytest.fixture
    def cases(self) -> Cases:
        return [
            (item("good", trajectory=[call()]), 1),
            (item("bad", trajectory=[call()]), 0),
            (item("odd", trajectory=[call()]), None),
        ]


def test_every_built_in_evaluator_is_tested():
    plugins.discover()
    ours = {r.name for r in registry.known("evaluator") if r.package == "hone"}
    assert ours == {rule.type_name for rule, _ in RULES} | {"python"} | {
        *("llm_judge", "trajectory", "ruler")
    }
