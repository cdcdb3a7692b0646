"""hone.rollout: which requests get the header, and that nothing stays patched."""

import asyncio
import contextlib
import contextvars
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI, Request
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.sdk.conftest import Serve

import hone
from hone.capture import scope
from hone.capture.base import current
from hone.errors import ConfigError
from hone.wire.rollout import FUNCTION_HEADER, ROLLOUT_HEADER

CLIENTS = (httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient)
SENDS = {kind: kind.__dict__["send"] for kind in CLIENTS}

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert {kind: kind.__dict__["send"] for kind in CLIENTS} == SENDS


def echo() -> FastAPI:
    """Answers with the two headers it saw."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def saw(request: Request) -> dict[str, str | None]:
        return {name: request.headers.get(name) for name in (ROLLOUT_HEADER, FUNCTION_HEADER)}

    return app


async def seen(client: Any, url: str, **options: Any) -> str | None:
    return (await client.post(url, **options)).json()[ROLLOUT_HEADER]


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_async_clients_carry_the_scope_they_are_used_in(serve: Serve, library: Any):
    url = await serve(echo()) + CHAT
    async with library.AsyncClient() as before:  # made outside, used inside and outside
        assert await seen(before, url) is None
        async with hone.rollout("game-1") as rollout:
            assert rollout.id == "game-1"
            assert await seen(before, url) == "game-1"
            async with library.AsyncClient() as inside:
                assert await seen(inside, url) == "game-1"
        assert await seen(before, url) is None


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_sync_clients_do_too_also_in_pools_of_threads(serve: Serve, library: Any):
    url = await serve(echo()) + CHAT

    def ask() -> str | None:
        with library.Client() as client:
            return client.post(url).json()[ROLLOUT_HEADER]

    with hone.rollout("game-2"):
        assert await asyncio.to_thread(ask) == "game-2"
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(pool, ask) == "game-2"
            context = contextvars.copy_context()
            assert await loop.run_in_executor(pool, context.run, ask) == "game-2"
    assert await asyncio.to_thread(ask) is None


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_rollouts_that_run_at_once_each_have_their_own(serve: Serve, library: Any):
    url = await serve(echo()) + CHAT
    everyone_is_in = asyncio.Barrier(20)

    async with library.AsyncClient() as shared:

        async def play(i: int) -> list[str | None]:
            async with hone.rollout(f"game-{i}"):
                await everyone_is_in.wait()
                first = await seen(shared, url)
                # Tasks started inside belong to the rollout.
                return [first, *await asyncio.gather(*(seen(shared, url) for _ in range(2)))]

        ids = await asyncio.gather(*(play(i) for i in range(20)))
        assert await seen(shared, url) is None
    assert ids == [[f"game-{i}"] * 3 for i in range(20)]


async def test_the_openai_clients_are_seen(serve: Serve):
    base = await serve(echo()) + "/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="k") as client:
        async with hone.rollout("talk"):
            raw = await client.chat.completions.with_raw_response.create(model="m", messages=[])
            answer = await client.responses.with_raw_response.create(model="m", input="hi")
        assert (raw.http_response.json()[ROLLOUT_HEADER]) == "talk"
        assert (answer.http_response.json()[ROLLOUT_HEADER]) == "talk"

    def ask() -> str | None:
        with openai.OpenAI(base_url=base, api_key="k") as client, hone.rollout("talk-2"):
            raw = client.completions.with_raw_response.create(model="m", prompt="hi")
            return raw.http_response.json()[ROLLOUT_HEADER]

    assert await asyncio.to_thread(ask) == "talk-2"


async def test_a_model_s_own_client_is_seen(serve: Serve):
    model = hone.Model(
        name="m", inference_base_url=await serve(echo()) + "/v1", inference_api_key="k"
    )
    client = model.openai_client()
    async with hone.rollout("own"):
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=[])
    assert raw.http_response.json()[ROLLOUT_HEADER] == "own"
    await model.close()


async def test_only_calls_that_look_like_the_openai_api_are_marked(serve: Serve):
    base = await serve(echo())
    async with httpx.AsyncClient() as client, hone.rollout("r"):
        for path in (CHAT, "/completions", "/rollout/x/v1/chat/completions/", "/v1/responses"):
            assert await seen(client, base + path) == "r", path
        for path in ("/v1/embeddings", "/v1/chat/completions/7", "/search", "/mycompletions"):
            assert await seen(client, base + path) is None, path
        assert (await client.get(base + CHAT)).json()[ROLLOUT_HEADER] is None


async def test_a_header_set_by_the_agent_takes_precedence(serve: Serve):
    url = await serve(echo()) + CHAT
    async with httpx.AsyncClient() as client, hone.rollout("r"):
        assert await seen(client, url, headers={ROLLOUT_HEADER: "mine"}) == "mine"


async def test_scopes_nest_and_the_outer_one_is_restored(serve: Serve):
    url = await serve(echo()) + CHAT
    async with httpx.AsyncClient() as client, hone.rollout("outer"):
        with hone.rollout("inner"):
            assert await seen(client, url) == "inner"
        assert await seen(client, url) == "outer"
    assert current() is None


async def test_functions_extend_the_path(serve: Serve):
    url = await serve(echo()) + CHAT

    async def where() -> str | None:
        return (await client.post(url)).json()[FUNCTION_HEADER]

    async with httpx2.AsyncClient() as client:
        async with hone.rollout("r"):
            assert await where() is None
            with scope.within("plan"):
                assert await where() == "plan"
                with scope.within("search"):
                    assert await where() == "plan.search"
                assert await where() == "plan"
        async with hone.rollout("r", function="judge"):
            assert await where() == "judge"
        with scope.within("nobody"):  # outside a rollout there is nothing to mark
            assert await where() is None


def test_a_path_that_is_too_long_for_a_header_keeps_its_innermost_functions():
    with contextlib.ExitStack() as stack:
        stack.enter_context(hone.rollout("r"))
        stack.enter_context(scope.within("<workflow>"))
        for _ in range(100):
            stack.enter_context(scope.within("solve"))
        stack.enter_context(scope.within("search"))
        here = current()
    assert here is not None
    # "...", then as many ".solve" as fit into 200 with ".search" at the end: 3 + 31 * 6 - 1 + 7
    assert here.function == "..." + "solve." * 31 + "search" and len(here.function) <= 200


async def test_a_scope_for_one_host_marks_no_other(serve: Serve):
    url = await serve(echo()) + CHAT
    here = hone.RemoteBackend("http://localhost:7623")
    there = "https://models.example:8443/v1"
    async with httpx.AsyncClient() as client:
        async with hone.rollout("r", backend=here):  # another port of this machine
            assert await seen(client, url) == "r"
        async with hone.rollout("r", base_url=there):
            assert await seen(client, url) is None


async def test_a_scope_closes_when_its_body_raises():
    with pytest.raises(ZeroDivisionError):
        async with hone.rollout():
            raise ZeroDivisionError
    assert current() is None


def test_scopes_in_many_threads_leave_nothing_patched():
    start = threading.Barrier(8)
    wrong: list[str] = []

    def play(i: int) -> None:
        start.wait()
        for k in range(200):
            with hone.rollout(f"r{i}-{k}"):
                here = current()
                if here is None or here.rollout != f"r{i}-{k}":
                    wrong.append(f"{i}-{k}: {here}")
                if httpx.Client.__dict__["send"] is SENDS[httpx.Client]:
                    wrong.append(f"{i}-{k}: not patched")

    threads = [threading.Thread(target=play, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


async def test_another_patch_over_ours_survives(serve: Serve):
    url = await serve(echo()) + CHAT
    counted = 0
    try:
        with hone.rollout("r"):
            ours = httpx.AsyncClient.send

            async def theirs(self: Any, request: Any, **options: Any) -> Any:
                nonlocal counted
                counted += 1
                return await ours(self, request, **options)

            httpx.AsyncClient.send = theirs
        async with httpx.AsyncClient() as client:
            assert await seen(client, url) is None
            with hone.rollout("again"):
                assert await seen(client, url) == "again"
        assert counted == 2
        assert httpx.AsyncClient.send is theirs
    finally:
        httpx.AsyncClient.send = SENDS[httpx.AsyncClient]


def test_ids_are_drawn_and_checked(prose: Prose):
    drawn = {hone.rollout().id for _ in range(100)}
    assert len(drawn) == 100
    assert hone.rollout("run-7:a~b.c_d").id == "run-7:a~b.c_d"
    for wrong in ("", "-x", "a b", "a/b", "x" * 201, "a\n"):
        with pytest.raises(ConfigError) as caught:
            hone.rollout(wrong)
        prose(caught)
    with pytest.raises(ConfigError) as caught:
        hone.rollout(function="two words")
    prose(caught)


def test_one_rollout_cannot_be_opened_twice_at_a_time(prose: Prose):
    rollout = hone.rollout("r")
    with rollout:
        with pytest.raises(ConfigError) as caught, rollout:
            pass
        prose(caught)
        assert current() is not None, "the refusal must not close it"
    with rollout:  # one after the other is the same rollout going on
        assert current() == rollout.scope


def test_a_trajectory_refers_to_its_rollout():
    trajectory = hone.rollout("r").trajectory(reward=0.5, metrics={"turns": 3})
    by_hand = hone.Trajectory(rollout="r", reward=0.5, metrics={"turns": 3})
    assert trajectory.model_dump() == by_hand.model_dump()


def test_httpx2_in_httpx_s_place_is_patched_once():
    code = (
        "import httpx2; from httpx2._alias import alias_httpx; alias_httpx()\n"
        "import httpx, hone; assert httpx.Client is httpx2.Client\n"
        "before = httpx.Client.send\n"
        "with hone.rollout('r'): assert httpx.Client.send is not before\n"
        "assert httpx.Client.send is before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_library_that_is_not_installed_is_not_needed():
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "import hone, httpx2\n"
        "with hone.rollout('r'): assert httpx2.Client.send.__wrapped__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
