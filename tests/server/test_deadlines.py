"""Deadlines of rollouts while the server holds their calls: functions, programs, services, streams."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request
from openai import AsyncOpenAI, OpenAI
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server
from tests.workflow.rollouts import ASK, ran, why

from hone.backends.remote import RemoteBackend
from hone.config.build import Served, build
from hone.config.policy import Trained, address_of
from hone.config.schema import read
from hone.server.http import listen
from hone.workflow.llm import LLM
from hone.workflow.run import RolloutResult, run_rollout

TIMEOUT_S = 3.0
"""Much longer than a call takes, and shorter than a pause."""

PROGRAM = """
import http.client, json, os
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
link = http.client.HTTPConnection(url.hostname, url.port)
body = {"model": os.environ["HONE_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
link.request("POST", url.path + "/chat/completions", json.dumps(body))
print(json.loads(link.getresponse().read())["choices"][0]["message"]["content"])
"""


class Paused:
    """A server whose serving is paused until a rollout's deadline has passed `times` times."""

    def __init__(self, server: Server, model: str, *, times: int = 1) -> None:
        self.server, self.model = server, model
        self.backend = RemoteBackend(server.control_url)
        self.questions = 0
        self._times = times
        self._ready, self._go_on = threading.Event(), asyncio.Event()

    async def held_s(self, rollout: str, since: float) -> float:
        """As the backend's, and serving goes on."""
        self.questions += 1
        asking = asyncio.create_task(self.backend.held_s(rollout, since))
        if self.questions == self._times:
            self.server._loop.call_soon_threadsafe(self._go_on.set)
        return await asking

    async def __aenter__(self) -> "Paused":
        async def pause() -> None:
            async with self.server.state.serving.engines.paused():
                self._ready.set()
                await self._go_on.wait()

        self._pausing = asyncio.run_coroutine_threadsafe(pause(), self.server._loop)
        assert await asyncio.to_thread(self._ready.wait, PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server._loop.call_soon_threadsafe(self._go_on.set)
        await asyncio.wrap_future(self._pausing)


Pause = Callable[..., Paused]


@pytest.fixture
def pause(make_server: MakeServer, tiny_model: Path) -> Pause:
    server = make_server()
    # Loads the engine, and what openai's client imports at its first request: both take seconds.
    with OpenAI(base_url=server.openai_url, api_key="none", timeout=PATIENCE_S) as client:
        client.chat.completions.create(model=str(tiny_model), messages=ASK)
    return lambda **more: Paused(server, str(tiny_model), **more)


def agent_of(
    paused: Paused, then: Callable[[], Awaitable[object]] | None = None, *, stream: bool = False
) -> tuple[LLM, Callable[[str], Awaitable[str]]]:
    llm = LLM(base_url=paused.server.openai_url, model=paused.model, max_retries=0)

    async def agent(question: str) -> str:
        if stream:
            chunks = await llm.client.chat.completions.create(
                model=paused.model, messages=ASK, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in chunks])
        else:
            text = (await llm.chat(ASK)).choices[0].message.content or ""
        if then is not None:
            await then()
        return text

    return llm, agent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pause_does_not_count_towards_the_agents_timeout(pause: Pause, stream: bool):
    async with pause() as paused:
        llm, agent = agent_of(paused, stream=stream)
        result = await ran(agent, timeout_s=TIMEOUT_S, held_s=paused.held_s)
        await llm.close()
    assert (result.failure, result.output, paused.questions) == (None, "ok", 1)
    (call,) = result.calls
    (recorded,) = paused.server.state.calls.rollout(result.id)
    assert call.seconds >= call.held_s == recorded.held_s > 0


async def test_an_agent_that_is_too_slow_without_the_pause_times_out(prose: Prose, pause: Pause):
    async with pause() as paused:
        llm, agent = agent_of(paused, asyncio.Event().wait)
        result = await ran(agent, timeout_s=TIMEOUT_S, held_s=paused.held_s)
        await llm.close()
    assert why(result) == ("policy", "timeout") and paused.questions > 1
    (call,) = result.calls
    assert result.failure is not None
    prose(result.failure.failure.message, held_s=f"{call.held_s:.3g}")


async def test_without_the_question_the_pause_would_be_the_agents(pause: Pause):
    async with pause() as paused:
        llm, agent = agent_of(paused)
        result = await ran(agent, timeout_s=TIMEOUT_S)
        await llm.close()
    assert why(result) == ("infrastructure", "timeout")


async def test_a_server_that_is_gone_extends_nothing():
    async def agent(question: str) -> None:
        await asyncio.Event().wait()

    gone = RemoteBackend("http://127.0.0.1:9")  # nothing listens there
    assert why(await ran(agent, timeout_s=0.05, held_s=gone.held_s)) == (
        "infrastructure",
        "timeout",
    )


async def run_workflow(
    paused: Paused, directory: Path, workflow: dict[str, Any], **options: Any
) -> RolloutResult:
    url = paused.server.openai_url
    entry = {"_type": "openai", "model": paused.model, "base_url": url, "api_key": "default"}
    file = directory / "config.yml"
    file.write_text(yaml.safe_dump({"llms": {"m": entry}, "workflow": workflow}))
    async with build(read(file)) as builder:
        trained = Trained("mine", frozenset({"mine"}), "base", frozenset({address_of(url)}))
        recorded = paused.backend.calls
        builder.served = Served(
            *(url, "default", "mine", "localhost", trained, recorded), held_s=paused.held_s
        )
        arguments = builder.served.rollout_arguments | {"aliases": None}
        return await run_rollout(await builder.get_workflow(), "x", **arguments, **options)


async def test_a_pause_does_not_count_towards_a_programs_timeout(pause: Pause, tmp_path: Path):
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    async with pause(times=2) as paused:  # of the program, and of the rollout
        workflow = {"_type": "command", "command": command, "timeout_s": TIMEOUT_S}
        result = await run_workflow(paused, tmp_path, workflow, timeout_s=TIMEOUT_S)
    assert (result.failure, result.output) == (None, "ok")
    assert result.calls[0].held_s > 0


async def test_a_pause_does_not_count_towards_a_services_timeout(pause: Pause, tmp_path: Path):
    app = FastAPI()

    @app.post("/")
    async def answer(request: Request) -> str:
        base_url, model = request.headers["x-hone-base-url"], request.headers["x-hone-model"]
        async with AsyncOpenAI(base_url=base_url, api_key="-") as client:
            reply = await client.chat.completions.create(model=model, messages=ASK)
        return reply.choices[0].message.content or ""

    async with pause(times=2) as paused, listen.serving(app, grace_s=1) as url:
        workflow = {"_type": "http", "url": url, "output_path": "$", "timeout_s": TIMEOUT_S}
        result = await run_workflow(paused, tmp_path, workflow, timeout_s=TIMEOUT_S)
    assert (result.failure, result.output) == (None, "ok")
    assert result.calls[0].held_s > 0
