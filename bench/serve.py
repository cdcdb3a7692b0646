"""The server: what it adds to a call, and what training and serving cost each other.

In:   Setting
Out:  Results in milliseconds, tokens/s and seconds

Four measurements, over real HTTP on loopback. Overhead: the time of a chat call of 16 tokens whose
engine answers at once, one at a time and 16 at a time. Large bodies: the slowest /health of a
`hone serve` process beside an 8 MB prompt, 64 MiB of ids and 30 chats, sent by another process.
Serving: tokens/s of 8 conversations while nothing else runs, and while a job trains. Training:
seconds of that job alone, and beside those conversations.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.process import THREADS, Contender, serve
from bench.report import Result, result
from bench.setting import Setting
from bench.workloads import TrainShape, groups

DEADLINE_S = 900.0
CHATS = "/v1/chat/completions"
CALLS = 200
TALKS = 8
"""Conversations at once while the job trains."""


def run(setting: Setting) -> Iterator[Result]:
    shape = TrainShape(prompt_tokens=48, completion_tokens=8) if setting.quick else TrainShape()
    settings = {"model": str(setting.model), "scratch": str(setting.scratch / "serve")}
    rounds: list[dict[str, Any]] = []
    with Contender.start("bench.serve", settings, name="hone serve") as ours:
        for number in range(-1, setting.repeats):  # the first round warms up and is forgotten
            overhead = ours.measure(
                "overhead", calls=20 if setting.quick else CALLS, deadline_s=DEADLINE_S
            )
            overhead |= ours.measure(
                "large", megabytes=1 if setting.quick else 8, deadline_s=DEADLINE_S
            )
            together = ours.measure(
                "together",
                groups=[g.model_dump() for g in groups(setting.encode, shape, seed=number)],
                jobs=1 if setting.quick else 4,
                deadline_s=DEADLINE_S,
            )
            shown = {k: round(v, 2) for k, v in (overhead | together).items()}
            setting.say(f"serve: round {number}: {shown}")
            if number >= 0:
                rounds.append(overhead | together)

    def all_of(key: str) -> list[float]:
        return [r[key] for r in rounds]

    for key in ("p50", "p99", "p50_of_16", "p99_of_16"):
        yield result(f"serve/overhead_{key}", all_of(key), "ms")
    yield result(
        "serve/health_beside_large_bodies",
        all_of("health_beside_ms"),
        "ms",
        peer="hone serve, idle",
        peer_runs=all_of("health_idle_ms"),
        smaller_is_better=True,
    )
    yield result(
        "serve/while_training",
        all_of("busy_tokens_per_s"),
        "tokens/s",
        peer="hone serve, not training",
        peer_runs=all_of("calm_tokens_per_s"),
    )
    yield result(
        "serve/training",
        all_of("busy_job_s"),
        "s",
        peer="the same job, nothing served",
        peer_runs=all_of("calm_job_s"),
        smaller_is_better=True,
    )


# ---- the process that is measured --------------------------------------------------------------


def start(settings: dict[str, Any]) -> Any:
    server = _Server(Path(settings["scratch"]), settings["model"])
    process = _ServerProcess(Path(settings["scratch"]) / "process", settings["model"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "overhead":
            return server.ask(server.overhead(request["calls"]))
        if request["do"] == "large":
            return process.large(request["megabytes"])
        return server.ask(server.together(request["groups"], request["jobs"]))

    return answer


class _Server:
    """Two servers on one event loop in a thread: one whose engine answers at once, one real."""

    def __init__(self, scratch: Path, model: str) -> None:
        self._model = model
        self._running = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._instant = self.ask(self._up(scratch / "instant", instant=True))
        self._real = self.ask(self._up(scratch / "real", instant=False))
        self.ask(self._register())

    def ask(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    async def _up(self, root: Path, *, instant: bool) -> tuple[Any, str]:
        from tests.fakes import ScriptedEngine

        from hone.inference.embedded.engine import EmbeddedEngine
        from hone.models.files import load_tokenizer
        from hone.models.find import find
        from hone.server.http.app import create_apps
        from hone.server.http.listen import serving
        from hone.server.run import without_gc_pauses
        from hone.server.settings import Settings
        from hone.server.state import State

        settings = Settings(root=root, learner_threads=THREADS, max_queued_jobs=1000)
        opener: Any = EmbeddedEngine.open
        if instant:
            tokenizer = load_tokenizer(find(self._model))
            answer = "one two three four five six seven eight nine ten eleven twelve ..."
            opener = lambda _: ScriptedEngine([answer], tokenizer=tokenizer)  # noqa: E731
        state = State(settings, open_engine=without_gc_pauses(opener))
        # Until the process ends.
        await self._running.enter_async_context(state.running())
        return state, await self._running.enter_async_context(serving(create_apps(state)[0]))

    async def overhead(self, calls: int) -> dict[str, float]:
        import httpx2

        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "Count, and say nothing else."}],
            "logprobs": True,
        }
        url = self._instant[1] + "/v1/chat/completions"
        async with httpx2.AsyncClient(timeout=60) as client:

            async def one() -> float:
                began = time.perf_counter()
                (await client.post(url, json=body)).raise_for_status()
                return (time.perf_counter() - began) * 1e3

            alone = [await one() for _ in range(calls)][calls // 10 :]
            crowd: list[float] = []
            for _ in range(calls // 16 + 1):
                crowd += await asyncio.gather(*(one() for _ in range(16)))
        return {
            "p50": median(alone),
            "p99": quantiles(alone, n=100)[98],
            "p50_of_16": median(crowd),
            "p99_of_16": quantiles(crowd, n=100)[98],
        }

    async def _register(self) -> None:
        from hone.types import ModelSpec

        state, _ = self._real
        record = state.models.register(ModelSpec(name="bench", base_model=self._model))
        await state.service.prepare(record)

    async def together(self, made: list[dict[str, Any]], jobs: int) -> dict[str, float]:
        calm_s = await self._train(made, jobs)
        calm = asyncio.create_task(self._talk())
        await asyncio.sleep(8)
        calm.cancel()
        calm_rate = await calm
        busy = asyncio.create_task(self._talk())
        busy_s = await self._train(made, jobs)
        busy.cancel()
        return {
            "calm_job_s": calm_s,
            "busy_job_s": busy_s,
            "calm_tokens_per_s": calm_rate,
            "busy_tokens_per_s": await busy,
        }

    async def _train(self, made: list[dict[str, Any]], jobs: int) -> float:
        """Seconds of the jobs, one after the other, from the first to the last published step."""
        import httpx2

        state, url = self._real
        # The same groups again and again, whatever step they are trained from.
        body = {"model": "bench", "groups": made, "config": {"max_staleness": None}}
        began = time.perf_counter()
        for _ in range(jobs):
            async with httpx2.AsyncClient(timeout=60) as client:
                accepted = await client.post(f"{url}/v1/training/jobs", json=body)
            job_id, after = accepted.raise_for_status().json()["id"], 0
            while (job := state.jobs.get(job_id)).state in ("queued", "running"):
                await state.jobs.wait_event(job_id, after, DEADLINE_S)
                after = max((e.id for e in state.jobs.events(job_id, after)), default=after)
            assert job.state == "done", job
        return time.perf_counter() - began

    async def _talk(self) -> float:
        """Answer until cancelled; tokens/s meanwhile."""
        from hone.inference.base import Sampling

        state, _ = self._real
        base = await state.serving.engines.base(self._model)
        tokens = 0

        async def one(seed: int) -> None:
            nonlocal tokens
            prompt = list(range(1000 + seed, 1064 + seed))
            async for delta in base.engine.generate(prompt, Sampling(max_tokens=4096, seed=seed)):
                tokens += len(delta.tokens)

        began = time.perf_counter()
        talks = [asyncio.create_task(one(i)) for i in range(TALKS)]
        try:
            await asyncio.gather(*talks)
        except asyncio.CancelledError:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
        return tokens / (time.perf_counter() - began)


class _ServerProcess:
    """`hone serve` in a process of its own, which ends with this one."""

    def __init__(self, root: Path, model: str) -> None:
        self._model = model
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "hone", "serve", "--root", str(root)]
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--inference-port", "-1"],
            stdin=subprocess.PIPE,  # its end ends the server
            stdout=subprocess.DEVNULL,
            pass_fds=[writing],
            env=os.environ | {"HONE_OWNED": "1", "HONE_READY_FD": str(writing)},
        )
        os.close(writing)
        with os.fdopen(reading) as ready:
            self._address = f"127.0.0.1:{json.loads(ready.readline())['port']}"
        assert self._post(CHATS, self._chat("hi")) == 200  # loads the model

    def _body(self, **fields: Any) -> bytes:
        return json.dumps({"model": self._model, **fields}).encode()

    def _chat(self, text: str) -> bytes:
        return self._body(messages=[{"role": "user", "content": text}], max_tokens=1)

    def _post(self, path: str, content: bytes) -> int:
        connection = HTTPConnection(self._address, timeout=DEADLINE_S)
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        return connection.getresponse().status

    def _health(self) -> float:
        connection, began = HTTPConnection(self._address, timeout=DEADLINE_S), time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        return (time.perf_counter() - began) * 1e3

    def large(self, megabytes: int) -> dict[str, float]:
        """The slowest /health while a long prompt, 30 chats and a body of ids come; and when idle."""
        idle = [self._health() for _ in range(20)]
        beside: list[float] = []
        # Written beforehand, so that this process only sends. An id takes 4 bytes.
        bodies = [(CHATS, self._chat("the weather " * (megabytes * 2**20 // 12)))]
        bodies += [("/v1/completions", self._body(prompt=[17] * (megabytes * 2**21 - 2**10)))]
        bodies += [(CHATS, self._chat("hi"))] * 30
        with ThreadPoolExecutor(33) as clients:
            sent = [clients.submit(self._post, path, content) for path, content in bodies]
            while not all(one.done() for one in sent):
                beside.append(self._health())
        assert [one.result() for one in sent] == [400, 400, *[200] * 30]
        return {"health_idle_ms": max(idle), "health_beside_ms": max(beside)}


if __name__ == "__main__":
    serve(start)
