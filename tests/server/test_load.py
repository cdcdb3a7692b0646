"""Load: hundreds of requests at once, none lost, every one recorded."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer

REQUESTS = 500


@pytest.mark.e2e
async def test_500_at_once_are_all_answered_and_recorded(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    """Half of them streamed; in 50 rollouts, 10 requests each at the same time."""

    def echo(prompt_ids: Any, sampling: Any, adapter: Any) -> str:
        text = tokenizer.decode(list(prompt_ids))
        return "you said " + text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]

    engine = ScriptedEngine(echo, tokenizer=tokenizer, delay_s=0.005)
    server = make_server(engine=engine)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as asking:

        async def one(i: int) -> tuple[str, str]:
            body = {
                "model": str(tiny_model),
                "messages": [{"role": "user", "content": f"number {i}"}],
                "stream": bool(i % 2),
            }
            url = f"{server.inference_url}/rollout/r{i % 50}/v1/chat/completions"
            answer = await asking.post(url, json=body)
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                choice = answer.json()["choices"][0]
                return choice["message"]["content"], choice["call_id"]
            assert answer.text.endswith("data: [DONE]\n\n")
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines()[:-2] if line]
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            return text, chunks[-1]["choices"][0]["call_id"]

        answers = await asyncio.gather(*(one(i) for i in range(REQUESTS)))

    assert [text for text, _ in answers] == [f"you said number {i}" for i in range(REQUESTS)]
    assert engine.most_running > 100, "they were not at once"
    assert engine.aborted == 0
    recorded = server.state.calls.get([call for _, call in answers])
    assert [call.reply["content"] for call in recorded] == [text for text, _ in answers]
    assert not any(call.abandoned for call in recorded)
    assert Counter(call.rollout for call in recorded) == {f"r{i}": 10 for i in range(50)}
    for i in range(50):
        rollout = server.state.calls.rollout(f"r{i}")
        assert [call.index for call in rollout] == list(range(10)), "every request its own place"
    seeds = {request.sampling.seed for request in engine.requests}
    assert len(seeds) == REQUESTS
    (sample,) = [
        s
        for metric in server.state.metrics.calls.collect()
        for s in metric.samples
        if s.name.endswith("_total")
    ]
    assert sample.value == REQUESTS


async def test_beyond_the_limit_requests_are_turned_away_and_none_is_lost(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer, delay_s=0.05)
    server = make_server(engine=engine, max_concurrent=10)
    body = {"model": str(tiny_model), "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as asking:
        url = f"{server.openai_url}/chat/completions"
        answers = await asyncio.gather(*(asking.post(url, json=body) for _ in range(60)))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert engine.most_running <= 10
    assert len(server.state.calls.rollout("")) == statuses[200]
