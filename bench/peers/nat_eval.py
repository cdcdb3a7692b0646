"""NeMo Agent Toolkit's own evaluation loop over an agent that asks once.

In:   how many calls
Out:  milliseconds that it adds to a call, 16 at a time

It rebuilds workflow, dataset and evaluators for every evaluation. That is not counted here: two
evaluations of different size are timed, and the difference is divided by the difference in items.
"""
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false
# nat is installed in the environment this runs in, not in hone's.

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.endpoint import AT_ONCE, MESSAGES, crowd, endpoint
from bench.process import serve

FEW = 16


def start(settings: dict[str, Any]) -> Any:
    logging.disable(logging.WARNING)
    runner = asyncio.Runner()
    peer = _Nat()
    return lambda request: runner.run(peer.overhead(request["calls"]))


class _Nat:
    def __init__(self) -> None:
        import openai

        self._endpoint = endpoint()  # until this process ends
        self._client = openai.AsyncOpenAI(base_url=self._endpoint.__enter__(), api_key="k")
        self._scratch = TemporaryDirectory(prefix="hone-bench-nat-")
        self._register()

    def _register(self) -> None:
        from nat.builder.evaluator import EvaluatorInfo
        from nat.builder.function_info import FunctionInfo
        from nat.cli.register_workflow import register_evaluator, register_function
        from nat.data_models.evaluator import EvaluatorBaseConfig
        from nat.data_models.function import FunctionBaseConfig
        from nat.plugins.eval import register as _built_in  # noqa: F401  # the dataset loaders
        from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
        from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

        class AgentConfig(FunctionBaseConfig, name="bench_agent"):
            pass

        class MatchConfig(EvaluatorBaseConfig, name="bench_match"):
            pass

        async def agent(input_message: str) -> str:
            return await self._ask()

        @register_function(config_type=AgentConfig)
        async def _agent(config: AgentConfig, builder: Any) -> AsyncIterator[Any]:
            yield FunctionInfo.from_fn(agent, description="asks once")

        class Match(BaseEvaluator):
            async def evaluate_item(self, item: Any) -> Any:
                return EvalOutputItem(id=item.id, score=float(bool(item.output_obj)), reasoning="")

        @register_evaluator(config_type=MatchConfig)
        async def _match(config: MatchConfig, builder: Any) -> AsyncIterator[Any]:
            yield EvaluatorInfo(config=config, evaluate_fn=Match().evaluate, description="match")

    async def overhead(self, calls: int) -> dict[str, float]:
        through = await self._evaluated(calls + FEW) - await self._evaluated(FEW)
        alone = await crowd(self._ask, calls)
        return {"at_once": (through / calls - alone) * 1e3}

    async def _ask(self) -> str:
        answer = await self._client.chat.completions.create(model="m", messages=MESSAGES)
        return answer.choices[0].message.content or ""

    async def _evaluated(self, count: int) -> float:
        from nat.plugins.eval.runtime.evaluate import EvaluationRun, EvaluationRunConfig

        where = Path(self._scratch.name)
        rows = [{"id": str(i), "question": "q", "answer": "a"} for i in range(count)]
        (where / "rows.json").write_text(json.dumps(rows))
        config = {
            "workflow": {"_type": "bench_agent"},
            "eval": {
                "general": {
                    "max_concurrency": AT_ONCE,
                    "output_dir": str(where / "out"),
                    "dataset": {"_type": "json", "file_path": str(where / "rows.json")},
                },
                "evaluators": {"match": {"_type": "bench_match"}},
            },
        }
        (where / "config.yml").write_text(json.dumps(config))
        began = time.perf_counter()
        done = await EvaluationRun(
            EvaluationRunConfig(config_file=where / "config.yml", write_output=False)
        ).run_and_evaluate()
        took = time.perf_counter() - began
        assert not done.workflow_interrupted, "an item failed"
        assert len(done.eval_input.eval_input_items) == count, "items were lost"
        return took


if __name__ == "__main__":
    serve(start)
