"""A running server without sockets, and a client of its control plane.

In:   a root, a tiny model, a scripted engine
Out:  Api: asks, registers, submits, follows jobs to their end; jobs as clients send them
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.small_server import LearnerHere
from tests.server.worlds import by_tokens

from hone.server.http.app import create_apps
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import JobInfo, ModelInfo

AGENT = "/v1/training/models/default/agent"
JOBS = "/v1/training/jobs"


@dataclass
class Api:
    """A running server's parts, and a client of its control plane."""

    state: State
    client: httpx.AsyncClient
    base_model: str

    async def ask(self, method: str, path: str, *, status: int = 200, **more: Any) -> Any:
        answer = await self.client.request(method, path, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def register(self, *, status: int = 201, **fields: Any) -> ModelInfo:
        spec = {"name": "agent", "base_model": self.base_model, "rank": 4} | fields
        body = await self.ask("POST", "/v1/training/models", json=spec, status=status)
        return ModelInfo.model_validate(body)

    async def submit(self, **fields: Any) -> JobInfo:
        body = job() | fields
        return JobInfo.model_validate(await self.ask("POST", JOBS, json=body, status=202))

    async def refused(self, status: int = 422, **fields: Any) -> dict[str, Any]:
        return await self.ask("POST", JOBS, json=job() | fields, status=status)

    async def started(self, job: JobInfo) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.state.jobs.get(job.id).state == "queued":
                await asyncio.sleep(0.01)

    async def ended(self, job: JobInfo, *, state: str = "done") -> JobInfo:
        seen = 0
        async with asyncio.timeout(PATIENCE_S):
            while (now := self.state.jobs.get(job.id)).ended_at is None:
                await self.state.jobs.wait_event(job.id, seen, PATIENCE_S)
                seen = self.state.jobs.events(job.id, limit=-1)[-1].id
        assert now.state == state, now
        return now

    async def events(self, job: JobInfo, **more: Any) -> list[dict[str, str]]:
        """The event stream, whole."""
        answer = await self.client.get(f"{JOBS}/{job.id}/events", **more)
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in answer.text.split("\n\n") if block]
        return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


def group(*rewards: float, **fields: Any) -> dict[str, Any]:
    """Trajectories of two tokens each."""
    made = [
        {"calls": [call.model_dump() for call in by_tokens(completion_ids=[4, 5 + i]).calls]}
        | {"reward": reward}
        for i, reward in enumerate(rewards)
    ]
    return {"trajectories": made} | fields


def job(**fields: Any) -> dict[str, Any]:
    return {"model": "agent", "groups": [group(1.0, 0.0)]} | fields


Open = Callable[..., Awaitable[Api]]


@asynccontextmanager
async def opening(root: Path, tokenizer: Any, base_model: Path) -> AsyncIterator[Open]:
    """`await open(held=False, **settings)`; `held`: the learner does not start before the end."""
    go_on = threading.Event()
    async with AsyncExitStack() as stack:

        async def make(*, held: bool = False, **settings: Any) -> Api:
            def start(*spec: Any, **more: Any) -> LearnerHere:
                assert not held or go_on.wait(PATIENCE_S)
                return LearnerHere(*spec, **more)

            engine = ScriptedEngine(tokenizer=tokenizer)
            given = {"root": root, "device": "cpu", "learner_threads": 1, **settings}
            state = State(Settings(**given), open_engine=lambda name: engine, start_learner=start)
            await stack.enter_async_context(state.running())
            client = httpx.AsyncClient(
                transport=httpx.ASGITransport(create_apps(state)[0]),
                base_url="http://localhost:7623",
                headers={"Content-Type": "application/json"},
            )
            await stack.enter_async_context(client)
            return Api(state, client, str(base_model))

        yield make
        go_on.set()
