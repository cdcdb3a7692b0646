"""The harness: what it adds to a model call.

In:   Setting
Out:  Results in milliseconds

A call with the OpenAI client alone, and the same call as the whole of a rollout: through
`Evaluation.run`, which opens the scope, marks and records the call, builds the item and scores it.
Both go to an endpoint in another process that answers at once; blocks of the two take turns, so
that what else the machine does falls on both. The overhead is the difference of the medians (of
the 99th percentiles for p99). NeMo Agent Toolkit's own evaluation loop is measured in the same way
(bench/peers/nat_eval.py) in an environment of its own.
"""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from bench.endpoint import AT_ONCE, MESSAGES, crowd, endpoint
from bench.peer_env import NAT
from bench.process import Contender, ContenderFailed, serve
from bench.report import Result, result
from bench.setting import Setting

DEADLINE_S = 300.0
CALLS = 400
BLOCK = 50
TURNS = 8
"""Calls of a longer rollout."""
GOAL_MS = 2.0


def run(setting: Setting) -> Iterator[Result]:
    calls = BLOCK if setting.quick else CALLS
    rounds: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with Contender.start("bench.harness", {}, name="hone's harness") as ours:
        for number in range(-1, setting.repeats):  # the first round warms up and is forgotten
            took = ours.measure("overhead", calls=calls, deadline_s=DEADLINE_S)
            setting.say(f"harness: round {number}: { {k: round(v, 3) for k, v in took.items()} }")
            if number >= 0:
                rounds.append(took)
    if "nat" not in setting.without:
        theirs = _nat(setting, calls)

    def all_of(key: str) -> list[float]:
        return [r[key] for r in rounds]

    yield result("harness/overhead_p50", all_of("p50"), "ms", goal=("value", "<=", GOAL_MS))
    yield result("harness/overhead_p99", all_of("p99"), "ms")
    yield result("harness/overhead_p50_of_8_calls", all_of("p50_of_turns"), "ms")
    yield result("harness/overhead_16_at_once", all_of("at_once"), "ms")
    yield result(
        "harness/nat",
        all_of("at_once"),
        "ms",
        peer=f"nvidia-nat {NAT.version}, its evaluation loop, 16 at once",
        peer_runs=[r["at_once"] for r in theirs],
        smaller_is_better=True,
    )


def _nat(setting: Setting, calls: int) -> list[dict[str, float]]:
    try:
        python = NAT.python(setting.say)
        with Contender.start(
            "bench.peers.nat_eval", {}, name="nat", python=python, deadline_s=DEADLINE_S
        ) as nat:
            nat.measure("overhead", calls=BLOCK, deadline_s=DEADLINE_S)
            return [
                nat.measure("overhead", calls=calls, deadline_s=DEADLINE_S)
                for _ in range(setting.repeats)
            ]
    except (ContenderFailed, OSError) as error:
        setting.say(f"harness: nat could not be measured: {error}")
        return []


def overheads(alone: list[float], through: list[float]) -> dict[str, float]:
    """Milliseconds added, at the median and at the 99th percentile, from seconds."""
    return {
        "p50": (median(through) - median(alone)) * 1e3,
        "p99": (quantiles(through, n=100)[98] - quantiles(alone, n=100)[98]) * 1e3,
    }


# ---- the process that is measured --------------------------------------------------------------


def start(settings: dict[str, Any]) -> Any:
    runner = asyncio.Runner()
    harness = _Harness()
    return lambda request: runner.run(harness.overhead(request["calls"]))


class _Harness:
    """One model, asked directly and by rollouts."""

    def __init__(self) -> None:
        from hone.workflow.llm import LLM

        self._endpoint = endpoint()  # until this process ends
        self._llm = LLM(base_url=self._endpoint.__enter__(), model="m")

    async def overhead(self, calls: int) -> dict[str, float]:
        alone: list[float] = []
        through: list[float] = []
        turns: list[float] = []
        for _ in range(calls // BLOCK):
            alone += [await self._timed() for _ in range(BLOCK)]
            through += await self._rollouts(BLOCK, turns=1)
            turns += await self._rollouts(BLOCK // TURNS, turns=TURNS)
        by_turn = [seconds / TURNS for seconds in turns]
        at_once = await crowd(self._ask, calls), await self._crowd(calls)
        return {
            **overheads(alone, through),
            "p50_of_turns": (median(by_turn) - median(alone)) * 1e3,
            "at_once": (at_once[1] - at_once[0]) * 1e3,
        }

    async def _ask(self) -> str | None:
        answer = await self._llm.client.chat.completions.create(model="m", messages=MESSAGES)
        return answer.choices[0].message.content

    async def _timed(self) -> float:
        began = time.perf_counter()
        await self._ask()
        return time.perf_counter() - began

    async def _rollouts(self, count: int, *, turns: int) -> list[float]:
        """Seconds of each of so many rollouts, one after the other."""
        ends = [time.perf_counter()]
        evaluation = self._evaluation(count, turns, 1)
        await evaluation.run(on_result=lambda _: ends.append(time.perf_counter()))
        return [later - earlier for earlier, later in pairwise(ends)]

    async def _crowd(self, count: int) -> float:
        """Seconds a call of rollouts, of which 16 run at a time."""
        began = time.perf_counter()
        done = await self._evaluation(count, 1, AT_ONCE).run()
        assert not done.workflow_interrupted, "a rollout failed"
        return (time.perf_counter() - began) / count

    def _evaluation(self, count: int, turns: int, at_once: int) -> Any:
        from hone.evaluation.base import BaseEvaluator, EvalInputItem, EvalOutputItem
        from hone.evaluation.run import Evaluation
        from hone.workflow.function import Function

        class Match(BaseEvaluator):
            async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
                return EvalOutputItem(id=item.id, score=float(bool(item.output_obj)))

        async def agent(input: str) -> str | None:
            answer = None
            for _ in range(turns):
                answer = await self._ask()
            return answer

        return Evaluation(
            workflow=Function.of("<workflow>", agent),
            items=[EvalInputItem(id=str(i), input_obj="q") for i in range(count)],
            evaluators={"match": Match()},
            max_concurrency=at_once,
            timeout_s=60.0,
            host="127.0.0.1",
        )


if __name__ == "__main__":
    serve(start)
