"""Edges of the bridge to NeMo Agent Toolkit, run by `run.py` in the toolkit's environment.

In:   how many seconds to wait for what must happen; writes to the working directory
Out:  a line of JSON with what was seen, by name
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.function import FunctionBaseConfig

import hone.composition  # noqa: F401  # hone is on the path, not installed
from hone.config.build import Builder, Served, build
from hone.config.policy import Trained, address_of
from hone.config.schema import read
from hone.errors import ConfigError
from hone.evaluation.base import EvalInputItem
from hone.integrations.nat.evaluator import ToolkitEvaluator
from hone.integrations.nat.toolkit import Toolkit

URL = "http://127.0.0.1:9/v1"
YAML = f"""
llms:
  theirs: {{_type: nim, model_name: m, base_url: "{URL}", api_key: secret, temperature: 0.0, max_tokens: 5}}
workflow: {{_type: cancelled}}
"""


class CancelledConfig(FunctionBaseConfig, name="cancelled"):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
    """Fails as a client of MCP does whose connection is refused."""


@register_function(config_type=CancelledConfig)
async def cancelled(config: CancelledConfig, builder: Any) -> AsyncIterator[FunctionInfo]:
    async def run(text: str) -> str:
        return text

    if isinstance(config, CancelledConfig):
        raise asyncio.CancelledError("Cancelled via cancel scope")
    yield FunctionInfo.from_fn(run, description="never")


async def main(patience_s: float) -> None:
    file = Path("edges.yml")
    file.write_text(YAML)
    async with build(read(file)) as builder:
        trained = Trained("m", frozenset({"m"}), "base", frozenset({address_of(URL)}))
        builder.served = Served(URL, "secret", "m", "localhost", trained)
        seen = {
            "llm": await llm(builder),
            "cancelled": await build_failure(builder, patience_s),
            "sessions": await sessions(),
            "errors": [await error_of(**one) for one in RESULTS],
        }
    sys.stdout.write(json.dumps(seen) + "\n")


async def llm(builder: Builder) -> list[Any]:
    made = await builder.get_llm("theirs")
    return [made.params, made.rollout_key.partition("-")[0]]


async def build_failure(builder: Builder, patience_s: float) -> str:
    try:
        async with asyncio.timeout(patience_s):
            await builder.get_workflow()
    except ConfigError as error:
        return str(error)
    return "built"


class Sessions:
    """Workflows for each user, as the toolkit's SessionManager has them."""

    is_workflow_per_user = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.building, self.built = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def session(self, user_id: str) -> AsyncIterator[Any]:
        self.building.set()
        await self.built.wait()
        self.log.append("open")
        try:
            yield SimpleNamespace(workflow=user_id)
        finally:
            self.log.append("closed")


async def sessions() -> list[str]:
    """A rollout that is cancelled while its workflow is built."""
    held: Any = Sessions()

    async def rollout() -> None:
        async with Toolkit(None)._session(held):
            await asyncio.Event().wait()

    task = asyncio.create_task(rollout())
    await held.building.wait()
    task.cancel()
    held.built.set()
    await asyncio.gather(task, return_exceptions=True)
    return held.log


RESULTS: tuple[dict[str, Any], ...] = (
    {"score": 0.75, "reasoning": {"error": 0.25}},
    {"score": 0.0, "reasoning": {"error": 1.0}},
    {"score": 0.5, "reasoning": {"error": "small"}},
    {"score": 0.0, "reasoning": {"error": "the judge is away"}},
    {"score": 0.0, "reasoning": {"error": ""}},
)


async def error_of(**result: Any) -> str | None:
    async def evaluate(items: Any) -> Any:
        return SimpleNamespace(eval_output_items=[SimpleNamespace(error=None, **result)])

    evaluator = ToolkitEvaluator(SimpleNamespace(evaluate_fn=evaluate))
    item = EvalInputItem(id="i", input_obj="q", expected_output_obj="a", output_obj="a")
    return (await evaluator.evaluate_item(item)).error


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
