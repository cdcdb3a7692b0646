"""An answer in progress keeps the step that began it when another step is published."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer

from hone.inference.base import AdapterRef, Delta, Sampling
from hone.types import ModelSpec


class GatedEngine(ScriptedEngine):
    """Says one token and waits for the gate."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gate = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: AdapterRef | None = None,
        *,
        stream: bool = True,
    ) -> AsyncIterator[Delta]:
        async for delta in super().generate(prompt_ids, sampling, adapter, stream=stream):
            yield delta
            await self.gate.wait()


def fill(directory: Path) -> str:
    (directory / "adapter_model.safetensors").write_text("weights")
    return "a" * 64


def test_an_answer_in_progress_names_the_step_that_began_it(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    engine = GatedEngine(["the weather in the city"], tokenizer=tokenizer)
    server = make_server(engine=engine)
    record = server.state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    request = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}

    with httpx.stream("POST", url, json={**request, "stream": True}, timeout=PATIENCE_S) as answer:
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        stream = [json.loads(next(lines))]  # it has begun
        checkpoint = server.state.checkpoints.write(record.key, 1, fill)
        adapter = server.call(server.state.serving.publish(record, checkpoint))
        server.state.serving.promote(record, adapter, 1)
        server._loop.call_soon_threadsafe(engine.gate.set)
        stream += [json.loads(line) for line in lines]

    assert stream[-1]["policy_step"] == 0
    after = httpx.post(url, json=request, timeout=PATIENCE_S).json()
    assert after["policy_step"] == 1
    recorded = server.state.calls.rollout("r")
    assert [(c.call.step, c.adapter_sha256) for c in recorded] == [(0, None), (1, "a" * 64)]
    assert [a.adapter for a in engine.requests] == [None, adapter]
