"""How long the server held a call: while serving was paused, or its engine was not available."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer, Server

from hone.server.serve import holds as holds_module
from hone.server.serve.holds import Holds, covered_s
from hone.wire.rollout import HELD_HEADER

ASK = {"messages": [{"role": "user", "content": "hi"}]}


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(holds_module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# ---- counting ---------------------------------------------------------------------------------


def test_the_time_that_at_least_one_interval_covers() -> None:
    # From 8 on: 8 to 12 by the first two, 20 to 30 by the last: 4 + 10.
    assert covered_s([(20, 30), (0, 10), (5, 12)], since=8) == 14
    assert covered_s([(0, 10), (2, 3)], since=0) == 10
    assert covered_s([(0, 10)], since=10) == covered_s([], since=0) == 0


def test_calls_that_wait_at_the_same_time_count_once_for_their_rollout(clock: Clock) -> None:
    holds = Holds()
    with holds.request("r") as first, holds.request("r") as second, holds.request("s"):
        first.begin()  # 100
        clock.now = 103
        second.begin()
        clock.now = 105
        first.end()
        clock.now = 110
        assert (first.held_s, second.held_s) == (5, 7)
        # The second still waits: 100 to 110, and not 5 + 7.
        assert covered_s(holds.intervals("r"), since=0) == 10
        assert holds.is_held("r") and holds.open("r") == 2
        second.end()
        clock.now = 200
        assert holds.intervals("r") == [(100, 110)] and not holds.is_held("r")
        assert holds.intervals("s") == [] and holds.open("s") == 1
    assert holds.intervals("r") == [(100, 110)] and holds.open("r") == 0


def test_ended_holds_are_not_kept_in_memory(clock: Clock) -> None:
    holds = Holds(max_rollouts=2)
    with holds.request("never held"), holds.request(""):
        pass
    assert len(holds) == 0
    with holds.request("open") as waiting:
        waiting.begin()
        for name in ("a", "b", "c"):
            with holds.request(name) as hold:
                hold.begin()
                clock.now += 1
        # Of "open", which is not dropped, and the newest of the others.
        assert len(holds) == 2 and holds.intervals("c") and holds.open("open") == 1


async def test_a_block_that_does_not_wait_holds_nothing(clock: Clock) -> None:
    holds = Holds()
    with holds.request("r") as hold:
        with hold.waiting():
            clock.now += 5  # the machine is busy
        assert hold.held_s == 0 and holds.intervals("r") == []
        with hold.waiting():
            await asyncio.sleep(0)
            clock.now += 5
        assert hold.held_s == 5 and holds.intervals("r") == [(105, 110)]


async def test_a_caller_can_wait_until_a_hold_ends(clock: Clock) -> None:
    holds = Holds()
    with holds.request("r") as hold:
        await holds.released("r", PATIENCE_S)  # it is not held
        hold.begin()
        await holds.released("r", 0.01)
        assert holds.is_held("r")
        waiting = asyncio.create_task(holds.released("r", PATIENCE_S))
        await asyncio.sleep(0)
        clock.now += 1
        hold.end()
        await waiting


# ---- over HTTP --------------------------------------------------------------------------------


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Serving is paused while the block runs, as for a job that trains."""
    ready, go_on = threading.Event(), asyncio.Event()

    async def pause() -> None:
        async with server.state.serving.engines.paused():
            ready.set()
            await go_on.wait()

    pausing = asyncio.run_coroutine_threadsafe(pause(), server._loop)
    assert ready.wait(PATIENCE_S)
    try:
        yield
    finally:
        server._loop.call_soon_threadsafe(go_on.set)
        pausing.result(PATIENCE_S)


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    # Reading the certificates takes longer than the request.
    return httpx.post(url, json=body, timeout=PATIENCE_S, verify=False)


def asking(url: str, body: dict[str, Any]) -> "Future[httpx.Response]":
    """A request in a thread of its own."""
    return in_thread(post, url, body)


def in_thread(work: Callable[..., Any], *args: Any, **more: Any) -> "Future[Any]":
    pool = ThreadPoolExecutor(1)
    running = pool.submit(work, *args, **more)
    pool.shutdown(wait=False)
    return running


def held(server: Server, rollout: str = "r", **query: Any) -> dict[str, Any]:
    url = f"{server.inference_url}/v1/rollouts/{rollout}/held"
    answer = httpx.get(url, params=query, timeout=PATIENCE_S, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(server: Server, condition: Callable[[], bool]) -> None:
    """Let the server's event loop run until the condition holds."""

    async def watch() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    server.call(watch())


@pytest.fixture
def warm(make_server: MakeServer, tiny_model: Path) -> Server:
    """A server whose engine is loaded."""
    server = make_server()
    answer = post(f"{server.openai_url}/chat/completions", {"model": str(tiny_model), **ASK})
    assert answer.status_code == 200 and HELD_HEADER in answer.headers  # it was being loaded
    return server


DIALECTS = {
    "chat/completions": ASK,
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {**ASK, "max_tokens": 5},
}


def test_a_call_says_how_long_it_was_held(warm: Server, tiny_model: Path) -> None:
    for path, asked in DIALECTS.items():
        for stream in (False, True):
            rollout = f"{path.replace('/', '-')}-{stream}"
            url = f"{warm.inference_url}/rollout/{rollout}/v1/{path}"
            _check_held(warm, rollout, url, {"model": str(tiny_model), **asked, "stream": stream})


def _check_held(server: Server, rollout: str, url: str, body: dict[str, Any]) -> None:
    free = post(url, body)
    assert free.status_code == 200 and HELD_HEADER not in free.headers
    with paused(server):
        answer = asking(url, body)
        until(server, lambda: server.state.holds.is_held(rollout))
        during = held(server, rollout, wait_s=0.05)
        assert (during["open"], during["holding"]) == (1, True) and during["held_s"] >= 0.05
        assert not answer.done()
    response = answer.result(PATIENCE_S)
    assert response.status_code == 200
    seconds = float(response.headers[HELD_HEADER])
    first, second = server.state.calls.rollout(rollout)
    assert (first.held_s, second.held_s) == (0.0, seconds)
    after = held(server, rollout)
    assert (after["open"], after["holding"]) == (0, False)
    assert after["held_s"] == pytest.approx(seconds, abs=0.002) and seconds >= during["held_s"]
    assert held(server, "another")["held_s"] == 0


def test_the_answer_waits_until_no_call_is_held(warm: Server, tiny_model: Path) -> None:
    url = f"{warm.inference_url}/rollout/r/v1/chat/completions"
    with paused(warm):
        answer = asking(url, {"model": str(tiny_model), **ASK})
        until(warm, lambda: warm.state.holds.is_held("r"))
        question = in_thread(held, warm, wait_s=60)
        assert not wait_for([question], 0.05).done
    assert question.result(PATIENCE_S)["holding"] is False
    assert answer.result(PATIENCE_S).status_code == 200


def test_a_call_that_waits_in_a_sleeping_engine_is_held(
    make_server: MakeServer, tokenizer: Any, tiny_model: Path
) -> None:
    """It was admitted just before the pause, and the engine had not begun with it."""
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    server = make_server(engine=engine)
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    body = {"model": str(tiny_model), **ASK}
    assert post(url, body).status_code == 200
    loaded_s = held(server)["held_s"]
    server._loop.call_soon_threadsafe(engine._awake.clear)
    answer = asking(url, body)
    until(server, lambda: any(u.sampling for u in server.state.serving.engines._usage.values()))
    assert held(server) == {"rollout": "r", "held_s": loaded_s, "open": 1, "holding": False}
    with paused(server):
        assert held(server)["holding"]
        waited = held(server, wait_s=0.05)["held_s"] - loaded_s
        assert waited >= 0.05
    response = answer.result(PATIENCE_S)
    assert float(response.headers[HELD_HEADER]) >= waited
    assert server.state.calls.rollout("r")[1].held_s >= waited
    # The next one finds the engine awake.
    assert HELD_HEADER not in post(url, body).headers


def test_the_load_of_an_engine_holds_its_requests(
    make_server: MakeServer, tokenizer: Any, tiny_model: Path
) -> None:
    go_on, engine = threading.Event(), ScriptedEngine(["ok"], tokenizer=tokenizer)

    def open_engine(name: str) -> Any:
        assert go_on.wait(PATIENCE_S)
        return engine

    server = make_server(engine=engine, open_engine=open_engine)
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    answer = asking(url, {"model": str(tiny_model), **ASK})
    until(server, lambda: server.state.holds.is_held("r"))
    waited = held(server, wait_s=0.05)["held_s"]
    go_on.set()
    assert float(answer.result(PATIENCE_S).headers[HELD_HEADER]) >= waited >= 0.05


def test_closing_a_sleeping_engine_leaves_no_hold(warm: Server, tiny_model: Path) -> None:
    with paused(warm):
        warm.call(warm.state.serving.engines.close_idle(-1))
    warm.engine.closed = False
    warm.call(warm.engine.wake())
    url = f"{warm.inference_url}/rollout/r/v1/chat/completions"
    body = {"model": str(tiny_model), **ASK}
    assert post(url, body).status_code == 200  # opens another engine
    assert HELD_HEADER not in post(url, body).headers


def test_a_call_that_is_refused_after_its_hold_counts(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(hold_s=0.1)
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    body = {"model": str(tiny_model), **ASK}
    while post(url, body).status_code != 200:  # until the engine is loaded
        pass
    before = held(server)["held_s"]
    with paused(server):
        response = post(url, body)
    assert response.status_code == 503 and float(response.headers[HELD_HEADER]) >= 0.1
    assert held(server)["held_s"] >= before + 0.099  # both are rounded
    assert len(server.state.calls.rollout("r")) == 1


def test_a_server_that_was_started_again_knows_what_was_recorded(
    warm: Server, make_server: MakeServer, tiny_model: Path
) -> None:
    url = f"{warm.inference_url}/rollout/r/v1/chat/completions"
    with paused(warm):
        answer = asking(url, {"model": str(tiny_model), **ASK, "n": 2})
        until(warm, lambda: warm.state.holds.is_held("r"))
        held(warm, wait_s=0.05)
    seconds = float(answer.result(PATIENCE_S).headers[HELD_HEADER])
    warm.stop()
    after = held(make_server())
    # Two choices of one request were held once.
    assert (after["held_s"], after["open"]) == (pytest.approx(seconds, abs=0.002), 0)
