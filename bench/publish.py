"""Publishing: how long requests are held, and how soon a trained step answers.

In:   Setting
Out:  Results in milliseconds

Two measurements. Under load: the longest gap between two tokens of a running sample while an
adapter is published, less its median gap at other times. When idle: optimizer step, checkpoint,
publish, first token of a 16-token prompt, through the processes that do it in production (engine
here, learner in its own).
"""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.process import THREADS, Contender, serve
from bench.report import Result, result
from bench.setting import Setting
from bench.workloads import TrainShape, groups, prompts, save_adapter

DEADLINE_S = 900.0
RUNNING = 8
"""Samples that run while an adapter is published."""
PUBLISHES = 3
"""In a row, under one load; the longest hold of them counts."""
BEFORE, AFTER = 12, 8
"""Tokens of every sample before the first publish, and after each."""
HELD_MS, TOGETHER_MS = 50.0, 1000.0


def run(setting: Setting) -> Iterator[Result]:
    small = {"prompt_tokens": 48, "completion_tokens": 8} if setting.quick else {}
    job = TrainShape(**small)
    settings = {
        "model": str(setting.model),
        "adapter": str(setting.adapter),
        "sha256": setting.adapter_sha256,
        "scratch": str(setting.scratch / "publish"),
    }
    held: list[float] = []
    locked: list[float] = []
    chains: list[dict[str, float]] = []
    with Contender.start("bench.publish", settings, name="hone") as ours:
        for number in range(-1, setting.repeats):  # the first round warms up and is forgotten
            load = prompts(setting.encode, RUNNING, 64, seed=number)
            hold = ours.measure("hold", prompts=load, deadline_s=DEADLINE_S)
            chain = ours.measure(
                "chain",
                groups=[g.model_dump() for g in groups(setting.encode, job, seed=number)],
                prompt=prompts(setting.encode, 1, 16, seed=number)[0],
                deadline_s=DEADLINE_S,
            )
            setting.say(f"publish: round {number}: {_shown(hold)}; {_shown(chain)}")
            if number >= 0:
                held.append(hold["held_ms"])
                locked.append(hold["locked_ms"])
                chains.append(chain)
    yield result("publish/held", held, "ms", goal=("value", "<=", HELD_MS))
    yield result("publish/locked", locked, "ms")
    for part in ("optimizer", "save", "publish", "first_token"):
        yield result(f"publish/{part}", [c[part] for c in chains], "ms")
    together = [sum(c[p] for p in ("optimizer", "save", "publish", "first_token")) for c in chains]
    yield result("publish/together", together, "ms", goal=("value", "<=", TOGETHER_MS))
    yield result("publish/wall", [c["wall"] for c in chains], "ms")


def _shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.1f}" for key, value in values.items())


# ---- the process that is measured --------------------------------------------------------------


def start(settings: dict[str, Any]) -> Any:
    import torch

    from hone.inference.base import AdapterRef
    from hone.inference.embedded.engine import EmbeddedEngine
    from hone.learner.process import LearnerProcess, LearnerSpec

    torch.set_num_threads(THREADS)
    model, adapter = Path(settings["model"]), Path(settings["adapter"])
    scratch = Path(settings["scratch"])
    engine = EmbeddedEngine.open(str(model), kv_budget_bytes=2 << 30)
    spec = LearnerSpec(model_dir=model, base_model="bench", threads=THREADS)
    learner = LearnerProcess.start(spec)
    served = AdapterRef("bench", 0, settings["sha256"])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.publish(served, adapter))
    other = AdapterRef("bench", 1, save_adapter(model, scratch / "other", seed=2))
    step = 1

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal step
        if request["do"] == "hold":
            new = (other, scratch / "other")
            return loop.run_until_complete(_hold(engine, served, new, request["prompts"]))
        step += 1
        directory = scratch / str(step)
        return loop.run_until_complete(_chain(engine, learner, step, directory, request))

    return answer


async def _hold(
    engine: Any, served: Any, new: tuple[Any, Path], load: list[list[int]]
) -> dict[str, Any]:
    """Publish another adapter than the one that answers, and forget it again afterwards."""
    from hone.inference.base import Sampling

    times: list[list[float]] = [[] for _ in load]
    spans: list[tuple[float, float]] = []

    async def answer(i: int) -> None:
        async for _ in engine.generate(load[i], Sampling(max_tokens=4096), served):
            times[i].append(perf_counter())

    async def reached(tokens: int) -> None:
        goals = [len(seen) + tokens for seen in times]
        while any(len(seen) < goal for seen, goal in zip(times, goals, strict=True)):
            await asyncio.sleep(0.01)

    running = [asyncio.create_task(answer(i)) for i in range(len(load))]
    async with asyncio.timeout(DEADLINE_S):
        await reached(BEFORE)
        for _ in range(PUBLISHES):
            began = perf_counter()
            await engine.publish(*new)
            spans.append((began, perf_counter()))
            await reached(AFTER)
    locked_s = engine.stats().held_s
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.unload(new[0])
    held_s = max(held(seen, spans) for seen in times)
    return {"held_ms": held_s * 1000, "locked_ms": locked_s * 1000}


def held(times: list[float], spans: list[tuple[float, float]]) -> float:
    """The longest gap that touches a span, less the median of those that touch none."""

    def touches(a: float, b: float) -> bool:
        return any(b > began and a < ended for began, ended in spans)

    gaps = list(pairwise(times))
    during = [b - a for a, b in gaps if touches(a, b)]
    # The first gaps are those in which the other prompts were read.
    calm = [b - a for a, b in gaps[len(gaps) // 8 :] if not touches(a, b)]
    return max(during) - median(calm)


async def _chain(
    engine: Any, learner: Any, step: int, directory: Path, request: dict[str, Any]
) -> dict[str, Any]:
    """Optimizer step -> saved -> published -> first token, in milliseconds, nothing else running."""
    from hone.inference.base import AdapterRef, Sampling
    from hone.learner.packed import pack_groups
    from hone.trajectory import TrajectoryGroup
    from hone.types import TrainConfig

    packed = pack_groups([TrajectoryGroup(**group) for group in request["groups"]])
    started = perf_counter()
    trained = learner.train(packed, TrainConfig(learning_rate=1e-5), silence_s=DEADLINE_S)
    learned = perf_counter()
    learner.save(directory, deadline_s=DEADLINE_S)
    saved = perf_counter()
    adapter = AdapterRef("bench", step, trained["sha256"])
    await engine.publish(adapter, directory)
    published = perf_counter()
    answer = engine.generate(request["prompt"], Sampling(max_tokens=1), adapter)
    await anext(answer)
    first = perf_counter()
    await answer.aclose()
    await engine.unload(adapter)
    metrics = trained["metrics"]
    # What stands between the gradients and the request to save: clipping and AdamW, the second of
    # two equal probe passes, the hash, and the way back from the learner's process.
    before = metrics["learn/step_s"] - metrics["learn/optimizer_s"] - metrics["learn/probe_s"] / 2
    return {
        "optimizer": metrics["learn/optimizer_s"] * 1000,
        "save": (saved - learned) * 1000,
        "publish": (published - saved) * 1000,
        "first_token": (first - published) * 1000,
        "wall": (first - started - before) * 1000,
    }


if __name__ == "__main__":
    serve(start)
