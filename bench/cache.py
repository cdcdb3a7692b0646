"""The engine's speed as its prefix cache fills: the last 1,000 distinct prompts beside the first.

In:   Setting
Out:  Results: a ratio of times, and the KV memory reserved and cached as a share of its budget

The model is tiny and random, so that almost all of the time is the engine's own bookkeeping. Half of
the prompts fit into the budget: the cache first grows, then evicts a prompt for every new one.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.process import Contender, serve
from bench.report import Result, result
from bench.setting import Setting

DEADLINE_S = 1800.0
PROMPT_TOKENS, ANSWER_TOKENS = 48, 4
CONCURRENT = 16
MAX_SLOWDOWN = 1.2


def run(setting: Setting) -> Iterator[Result]:
    calls, compared = (400, 100) if setting.quick else (20_000, 1_000)
    settings = {"scratch": str(setting.scratch / "cache"), "calls": calls}
    with Contender.start("bench.cache", settings, name="hone") as ours:
        measured = ours.measure("calls", calls=calls, compared=compared, deadline_s=DEADLINE_S)
    setting.say(f"cache: {measured}")
    yield result(
        "cache/last_beside_first",
        [measured["last_s"] / measured["first_s"]],
        "x",
        goal=("value", "<=", MAX_SLOWDOWN),
    )
    yield result(
        "cache/memory_beside_budget",
        [measured["most"] / measured["budget"]],
        "x",
        goal=("value", "<=", 1),
    )


# ---- the process that is measured --------------------------------------------------------------


def start(settings: dict[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hone.inference.embedded.engine import EmbeddedEngine
    from hone.models.decoder import Decoder

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    directory = Path(settings["scratch"])
    LlamaForCausalLM(config).save_pretrained(directory)
    decoder = Decoder.load(directory)
    half = settings["calls"] * PROMPT_TOKENS * decoder.config.kv_bytes_per_token // 2
    engine = EmbeddedEngine(decoder, kv_budget_bytes=half)
    loop = asyncio.new_event_loop()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return loop.run_until_complete(_calls(engine, request["calls"], request["compared"]))

    return answer


async def _calls(engine: Any, calls: int, compared: int) -> dict[str, float]:
    """Seconds of the first `compared` calls after as many to warm up, and of the last ones."""
    from hone.inference.base import Sampling, complete

    most, numbers = 0, iter(range(calls + compared))

    async def ask() -> None:
        nonlocal most
        for number in numbers:
            prompt = [number >> 9, number & 511, *[7] * (PROMPT_TOKENS - 2)]
            await complete(engine, prompt, Sampling(max_tokens=ANSWER_TOKENS, seed=number))
            times.append(perf_counter())
            stats = engine.stats()
            most = max(most, stats.kv_reserved_bytes + stats.kv_cached_bytes)

    times: list[float] = []
    await asyncio.gather(*(ask() for _ in range(CONCURRENT)))
    return {
        "first_s": times[2 * compared - 1] - times[compared - 1],
        "last_s": times[-1] - times[-1 - compared],
        "most": most,
        "budget": engine.stats().kv_budget_bytes,
    }


if __name__ == "__main__":
    serve(start)
