"""Rollouts of a function, as the tests of workflow/run.py and workflow/failure.py make them."""

from typing import Any

from hone.workflow.function import Function
from hone.workflow.llm import LLM
from hone.workflow.run import RolloutResult, run_rollout

ASK: Any = [{"role": "user", "content": "hi"}]


def model(url: str) -> LLM:
    return LLM(base_url=url, model="m", max_retries=0)


async def ran(fn: Any, input: Any = "x", **options: Any) -> RolloutResult:
    return await run_rollout(Function.of("<workflow>", fn), input, **options)


def why(result: RolloutResult) -> tuple[str, str]:
    assert result.failure is not None and result.output is None, result
    return result.failure.kind, result.failure.reason
