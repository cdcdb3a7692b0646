"""A run of many steps: unloaded adapters leave no memory behind, and the last step answers."""

import asyncio
import gc
from pathlib import Path

import torch
from tests.conformance.engine import PROMPT, Served, assert_agree
from tests.inference.embedded.test_engine import write_adapter
from tests.patience import PATIENCE_S

from hone.inference.base import AdapterRef, Completion, Sampling, complete
from hone.inference.embedded.engine import EmbeddedEngine
from hone.models.decoder import Decoder
from hone.models.lora import Lora

STEPS = 12


def alive() -> tuple[int, int]:
    """Adapters, and tensors of any kind, that something still holds."""
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    return kinds.count(Lora), sum(issubclass(kind, torch.Tensor) for kind in kinds)


async def test_steps_that_were_unloaded_leave_nothing_behind(tiny_llama_dir: Path, tmp_path: Path):
    decoder = Decoder.load(tiny_llama_dir)
    engine = EmbeddedEngine(decoder, kv_budget_bytes=512 * 200)  # room for the KV of one request
    lora = tensors = 0
    refs: list[AdapterRef] = []
    answers: list[Completion] = []
    for step in range(1, STEPS + 1):
        directory = tmp_path / str(step)
        refs.append(write_adapter(directory, decoder, step=step))
        await engine.publish(refs[-1], directory)
        answers += await complete(engine, PROMPT, Sampling(max_tokens=8, seed=step), refs[-1])
        if step > 1:
            await engine.unload(refs[-2])
        if step == 2:  # the first that replaced one
            lora, tensors = alive()
    async with asyncio.timeout(PATIENCE_S):  # the engine's thread may hold its last batch
        while (now := alive())[0] > lora or now[1] > tensors:
            await asyncio.sleep(0.01)
    assert engine.stats().adapters == (refs[-1].sha256,)
    await engine.close()
    served = Served(engine, tiny_llama_dir, {refs[-1]: tmp_path / str(STEPS)})
    assert_agree(answers[-1].logprobs, served.expected(PROMPT, answers[-1], refs[-1]))
