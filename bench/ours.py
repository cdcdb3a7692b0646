"""hone as a contender: its engine, its learner, and plain packing in the learner's process.

In:   what to load ("engine" or "learner"), then requests
Out:  seconds, tokens, bytes

Plain packing, which the trie is compared with, runs in the learner's own process with the same decoder
and adapter, in turn: the difference is smaller than that between two processes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.process import THREADS, serve
from bench.rss import peak_bytes, reset_peak, resident_bytes

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def start(settings: dict[str, Any]) -> Answer:
    import torch

    torch.set_num_threads(THREADS)
    return {"engine": _engine, "learner": _learner}[settings["kind"]](settings)


def _engine(settings: dict[str, Any]) -> Answer:
    from hone.inference.base import AdapterRef, Sampling, complete
    from hone.inference.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine.open(settings["model"], kv_budget_bytes=2 << 30)
    adapter = AdapterRef("bench", 1, settings["sha256"])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.publish(adapter, Path(settings["adapter"])))

    async def all_of(prompts: list[list[int]], sampling: Sampling) -> int:
        answers = await asyncio.gather(*(complete(engine, p, sampling, adapter) for p in prompts))
        return sum(len(completion.ids) for answer in answers for completion in answer)

    def rollout(request: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(n=request["n"], max_tokens=request["new_tokens"])
        started = perf_counter()
        tokens = loop.run_until_complete(all_of(request["prompts"], sampling))
        return {"seconds": perf_counter() - started, "tokens": tokens}

    return rollout


def _learner(settings: dict[str, Any]) -> Answer:
    import torch

    from bench.peers.packing import packed_step
    from hone.learner.body import DecoderBody, load_body
    from hone.learner.learner import Learner
    from hone.models.lora import Lora
    from hone.trajectory import TrajectoryGroup
    from hone.types import TrainConfig

    # As in the learner's own process.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    body = load_body(Path(settings["model"]), device="cpu", dtype=torch.float32)
    lora = Lora.load(Path(settings["adapter"]), body.layout)
    learner = Learner(body, lora, base_model="bench")
    # Memory-mapped weights are resident once they were read.
    for weight in _weights(body.decoder) if isinstance(body, DecoderBody) else ():
        weight.sum()
    loaded = resident_bytes()

    def train(request: dict[str, Any]) -> dict[str, Any]:
        groups = [TrajectoryGroup(**group) for group in request["groups"]]
        config = TrainConfig(**request["config"])
        reset_peak()
        started = perf_counter()
        if request["do"] == "packed":
            tokens = packed_step(learner, groups, config)
        else:
            # Without the probe, which belongs to publishing.
            metrics = learner.train(groups, config, probe=False).metrics
            tokens = metrics["learn/logical_tokens"]
        seconds = perf_counter() - started
        return {"seconds": seconds, "tokens": tokens, "loaded": loaded, "peak": peak_bytes()}

    return train


def _weights(decoder: Any) -> list[Any]:
    projections = [
        p for layer in decoder.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    return [decoder.embedding, decoder.head, *(p.weight for p in projections)]


if __name__ == "__main__":
    serve(start)
